#!/bin/sh
# Builds zebu and lets it do its main job on real input: a file system made of
# this machine's own files becomes a compressed qcow2 image (by qemu-img), and
# zebu turns that into a raw disk, verified byte for byte.
#
# usage: demo.sh [TREE [SIZE]]     default: /usr/lib, 1G; ZEBU_DEMO_DIR: where
set -eu
cd "$(dirname "$0")/.."
tree=${1:-/usr/lib}
size=${2:-1G}
dir=${ZEBU_DEMO_DIR:-target/demo}
sh scripts/install-deps.sh cc mke2fs qemu-img
cargo build --release --quiet -p zebu-cli
zebu=${CARGO_TARGET_DIR:-target}/release/zebu
mkdir -p "$dir"

echo "== a file system of $tree, as much of it as $size holds"
rm -f "$dir"/disk.raw "$dir"/disk.qcow2 "$dir"/out.raw
truncate -s "$size" "$dir/disk.raw"
# A tree that is larger than the image fills it; what is there is real data.
mke2fs -q -t ext4 -d "$tree" "$dir/disk.raw" 2>/dev/null || true
echo "== compressed by qemu-img"
qemu-img convert -O qcow2 -c -m 8 -W "$dir/disk.raw" "$dir/disk.qcow2"
"$zebu" info "$dir/disk.qcow2"
cat "$dir/disk.qcow2" >/dev/null

echo "== to a raw disk by zebu"
start=$(date +%s%N)
"$zebu" convert -p -O raw "$dir/disk.qcow2" "$dir/out.raw"
end=$(date +%s%N)
bytes=$(stat -c %s "$dir/out.raw")
echo "$((bytes / 1048576)) MiB in $(((end - start) / 1000000)) ms: $((bytes * 1000 / 1048576 * 1000000 / (end - start))) MiB/s"

echo "== verified"
cmp "$dir/disk.raw" "$dir/out.raw" && echo "the same bytes"
"$zebu" compare "$dir/disk.qcow2" "$dir/out.raw"
