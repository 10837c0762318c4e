#!/bin/sh
# Makes seeds in fuzz/corpus: images of the generator, small images of qemu-img
# where there is one, and lines of text. ZEBU_CORPUS, a directory of images, adds
# those of it that are small.
set -eu
cd "$(dirname "$0")"
corpus=corpus/open_map_read
mkdir -p "$corpus" corpus/format corpus/name corpus/io_language
cargo run --quiet --release --example seeds -- "$corpus" 150
cargo run --quiet --release --example seeds -- corpus/format 40
cargo run --quiet --release --example seeds -- corpus/tables 40 tables
n=0
seed() {
    n=$((n + 1))
    printf '%s\n' "$2" > "corpus/$1/text-$n"
}
seed name '{"driver":"qcow2","file":{"driver":"file","filename":"x"}}'
seed name '{"driver":"raw","offset":512,"size":"1M","file.filename":"x"}'
seed name 'driver=qcow2,file.filename=a,,b,backing.driver=raw,backing.file.filename=b'
seed name 'driver=qcow2,l2-cache-size=1M,overlap-check=all,data-file.filename=d,file.locking=off'
seed name 'file:d/x'
seed io_language 'write -P 0xff 0 64k
read -v 0 512
write -z -u 4k 8k
map'
seed io_language 'aio_write -q 64k 4k
aio_read -P 1 64k 4k
aio_flush
discard 0 1M
truncate 2M
info'
seed io_language 'writev 0 512 512 1k
readv -v 0 512 512
write -c 0 4k
alloc 0 1M
write -b -P 3 0 1k
read -b 0 1k'
qemu_img=${ZEBU_QEMU_IMG:-qemu-img}
if ! command -v "$qemu_img" > /dev/null; then
    echo "no qemu-img: only generated seeds" >&2
    qemu_img=false
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
"$qemu_img" snapshot -c one "$corpus/qemu-$n" || true
"$qemu_img" bitmap --add "$corpus/qemu-$n" b 2> /dev/null || true
if [ -n "${ZEBU_CORPUS:-}" ]; then
    find "$ZEBU_CORPUS" -type f -size -128k -exec cp -n {} "$corpus/" \;
fi
# The same images for all that takes images.
for target in write repair snapshots copy stream; do
    mkdir -p "corpus/$target"
    cp -n "$corpus"/* "corpus/$target/"
done
echo "$(ls "$corpus" | wc -l) seeds"
