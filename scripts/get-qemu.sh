#!/bin/sh
# Unpacks the newest qemu-utils of Debian's backports into a directory, without
# installing it, and prints the path of its programs. The libraries that it
# needs come with Debian's own qemu-utils. Its modules (QEMU_MODULE_DIR), one of
# them for HTTP, are unpacked beside them.
#
# usage: get-qemu.sh DIRECTORY
set -eu
mkdir -p "$1"
# Absolute: tests run the programs from other folders.
dir=$(cd "$1" && pwd)
bin=$dir/root/usr/bin
if [ ! -x "$bin/qemu-img" ] || ! ls "$dir"/root/usr/lib/*/qemu/block-curl.so >/dev/null 2>&1; then
    mkdir -p "$dir/lists/partial" "$dir/archives/partial" "$dir/root"
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")-backports
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$dir/sources.list"
    apt() {
        apt-get -qq -o Dir::Etc::SourceList="$dir/sources.list" -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::State::Lists="$dir/lists" -o Dir::Cache="$dir" \
            -o APT::Sandbox::User=root "$@" >&2
    }
    apt update
    (cd "$dir" && apt download qemu-utils qemu-block-extra)
    dpkg-deb -x "$dir"/qemu-block-extra_*.deb "$dir/root"
    dpkg-deb -x "$dir"/qemu-utils_*.deb "$dir/root"
fi
"$bin/qemu-img" --version >/dev/null
echo "$bin"
