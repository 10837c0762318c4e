#!/bin/sh
# Unpacks the newest programs of QEMU for images that Debian has for its stable release, with all the libraries that they need,
# into a directory, without installing anything, and prints the path of qemu-img. The programs run by the
# dynamic loader that is unpacked with them, so that the release of this machine does not matter.
#
# usage: get-qemu-newest.sh DIRECTORY
set -eu
mkdir -p "$1"
dir=$(cd "$1" && pwd)
if [ ! -x "$dir/bin/qemu-storage-daemon" ]; then
    rm -rf "$dir/root"
    mkdir -p "$dir/lists/partial" "$dir/archives/partial" "$dir/root" "$dir/bin"
    for suite in trixie-backports trixie; do
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main"
    done >"$dir/sources.list"
    apt() {
        apt-get -qq -o Dir::Etc::SourceList="$dir/sources.list" -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::State::Lists="$dir/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$dir" \
            -o APT::Sandbox::User=root -o Debug::NoLocking=1 "$@" >&2
    }
    apt update
    apt install -y -d -t trixie-backports --no-install-recommends qemu-utils qemu-system-common
    for package in "$dir"/archives/*.deb; do
        dpkg-deb -x "$package" "$dir/root"
    done
    rm -rf "$dir/archives" "$dir/lists"
    loader=$(find "$dir/root" -name 'ld-linux*' | head -n 1)
    libraries=$(dirname "$(find "$dir/root" -name 'libglib-2.0.so.0' | head -n 1)")
    for program in qemu-img qemu-io qemu-nbd qemu-storage-daemon; do
        # Found from where it is, so that the directory may be moved.
        printf '#!/bin/sh\nd=$(dirname "$0")/..\nexec "$d/%s" --argv0 "$0" --library-path "$d/%s" "$d/%s" "$@"\n' \
            "${loader#"$dir/"}" "${libraries#"$dir/"}" "root/usr/bin/$program" >"$dir/bin/$program"
        chmod +x "$dir/bin/$program"
    done
fi
"$dir/bin/qemu-img" --version >/dev/null
echo "$dir/bin/qemu-img"
