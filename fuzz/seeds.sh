#!/bin/sh
# Makes seeds in fuzz/corpus: images of the generator, and small images of
# qemu-img where there is one.
set -eu
cd "$(dirname "$0")"
corpus=corpus/open_map_read
mkdir -p "$corpus" corpus/format
cargo run --quiet --release --example seeds -- "$corpus" 150
cargo run --quiet --release --example seeds -- corpus/format 40
qemu_img=${ZEBU_QEMU_IMG:-qemu-img}
if ! command -v "$qemu_img" > /dev/null; then
    echo "no qemu-img: only generated seeds" >&2
    exit 0
fi
raw=$(mktemp)
trap 'rm -f "$raw"' EXIT
# Text, zeroes and noise, a little over the clusters.
{ seq 1 4000; head -c 30000 /dev/zero; head -c 9999 /dev/urandom; } > "$raw"
n=0
make() {
    n=$((n + 1))
    "$qemu_img" convert -q -f raw -O qcow2 "$@" "$raw" "$corpus/qemu-$n" || rm -f "$corpus/qemu-$n"
}
for size in 512 1k 4k 16k; do
    make -o cluster_size=$size
    make -c -o cluster_size=$size
    make -c -o cluster_size=$size,compression_type=zstd
    make -o cluster_size=$size,refcount_bits=1
    make -o cluster_size=$size,refcount_bits=64
    make -o cluster_size=$size,compat=0.10
    make -o cluster_size=$size,lazy_refcounts=on
    make -o cluster_size=$size,preallocation=metadata
done
make -o cluster_size=16k,extended_l2=on
make -c -o cluster_size=16k,extended_l2=on
make -o cluster_size=4k
"$qemu_img" snapshot -c one "$corpus/qemu-$n"
"$qemu_img" bitmap --add "$corpus/qemu-$n" b 2> /dev/null || true
echo "$(ls "$corpus" | wc -l) seeds"
