#!/bin/sh
# QEMU's own tests of qemu-img and qemu-io (tests/qemu-iotests), with zebu in their places: those that need
# no running QEMU and pass. The sources come from the Debian package, into target/peers; nothing of them is
# a part of zebu.
#
# usage: iotests.sh [TEST...]
set -eu
cd "$(dirname "$0")/.."
root=$PWD
zebu=${ZEBU_TEST_BIN:-${CARGO_TARGET_DIR:-$root/target}/debug/zebu}
[ -x "$zebu" ] || { echo "iotests.sh: $zebu is missing: cargo build -p zebu-cli" >&2; exit 1; }
dir=$root/target/peers/qemu-source
if ! ls "$dir"/qemu-*/tests/qemu-iotests/check >/dev/null 2>&1; then
    mkdir -p "$dir/lists/partial" "$dir/archives/partial"
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")-backports
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$dir/sources.list"
    apt() {
        apt-get -qq -o Dir::Etc::SourceList="$dir/sources.list" -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::State::Lists="$dir/lists" -o Dir::Cache="$dir" -o APT::Sandbox::User=root "$@" >&2
    }
    apt update
    (cd "$dir" && apt source --download-only --tar-only qemu)
    tar -C "$dir" -xJf "$dir"/qemu_*.orig.tar.xz --wildcards '*/tests/qemu-iotests/*' '*/python/*'
    rm "$dir"/qemu_*.orig.tar.xz
fi
mkdir -p "$dir/bin" "$dir/scratch"
for name in qemu-img qemu-io qemu-nbd; do
    ln -sf "$zebu" "$dir/bin/$name"
done
export QEMU_IMG_PROG="$dir/bin/qemu-img" QEMU_IO_PROG="$dir/bin/qemu-io" QEMU_NBD_PROG="$dir/bin/qemu-nbd"
# They are asked for their versions only.
export QEMU_PROG="${QEMU_PROG:-$(command -v qemu-system-x86_64)}" QSD_PROG="${QSD_PROG:-$(command -v qemu-storage-daemon)}"
export TEST_DIR="$dir/scratch"
[ $# -gt 0 ] || set -- 001 002 003 004 005 008 009 010 011 012 013 014 015 017 018 019 020 021 022 025 197 215
cd "$dir"/qemu-*/tests/qemu-iotests
exec python3 ./check -qcow2 "$@"
