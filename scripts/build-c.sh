#!/bin/sh
# Builds the C library and installs it: libzebu.a, libzebu.so with its symbol versions, zebu.h and
# zebu.pc for pkg-config.
#
#   scripts/build-c.sh [--static] [--profile NAME] [--features LIST] [--libdir DIR] PREFIX
#
# --static: no shared library. --profile: a profile of Cargo, release by default. --features: of the
# crate zebu-capi ("bzip2,nbd,xz" by default; "tls", "http", "object-store"). --libdir: "lib" by default, a
# path that is not absolute is below PREFIX. DESTDIR is put before PREFIX, as packagers expect it.
#
# The licences go to PREFIX/share/doc/zebu, with Python 3 those of the crates that are linked, too.
set -eu
profile=release shared=yes features= libdir=
while :; do
    case "${1:-}" in
        --static) shared=; shift ;;
        --profile) profile=$2; shift 2 ;;
        --features) features=$2; shift 2 ;;
        --libdir) libdir=$2; shift 2 ;;
        -*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
        *) break ;;
    esac
done
prefix=${1:?the prefix, /usr/local for example}
case "$prefix" in /*) ;; *) prefix=$PWD/$prefix ;; esac
libdir=${libdir:-lib}
case "$libdir" in /*) ;; *) libdir=$prefix/$libdir ;; esac
cd "$(dirname "$0")/.."
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
# Before 1.0 each minor version has its own interface.
so=libzebu.so.${version%.*}

set -- -p zebu-capi --lib --profile "$profile" --crate-type staticlib
[ -z "$features" ] || set -- "$@" --no-default-features --features "$features"
# Cargo says where the archive is, also if it is built already.
built=$(cargo rustc --locked "$@" --message-format=json-render-diagnostics)
archive=$(echo "$built" | sed -n 's/.*"filenames":\["\([^"]*libzebu_capi\.a\)"\].*/\1/p')
[ -n "$archive" ] || { echo "Cargo has built no archive" >&2; exit 1; }
# What Rust's standard library needs (--print native-static-libs).
needs="-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"

root=${DESTDIR:-}
mkdir -p "$root$libdir/pkgconfig" "$root$prefix/include"
install -m 644 zebu-capi/include/zebu.h "$root$prefix/include/zebu.h"
install -m 644 "$archive" "$root$libdir/libzebu.a"
strip --strip-debug "$root$libdir/libzebu.a"
if [ -n "$shared" ]; then
    # Cargo's own shared library has no symbol versions: rustc has a version script of its own.
    # shellcheck disable=SC2086
    ${CC:-cc} -shared -o "$root$libdir/libzebu.so.$version" -Wl,-soname,"$so" \
        -Wl,--version-script=zebu-capi/zebu.map -Wl,--gc-sections -Wl,-z,defs -Wl,-z,relro,-z,now \
        -Wl,--whole-archive "$root$libdir/libzebu.a" -Wl,--no-whole-archive $needs
    strip --strip-unneeded "$root$libdir/libzebu.so.$version"
    ln -sf "libzebu.so.$version" "$root$libdir/$so"
    ln -sf "$so" "$root$libdir/libzebu.so"
fi
doc=$root$prefix/share/doc/zebu
mkdir -p "$doc"
install -m 644 LICENSE-MIT LICENSE-APACHE "$doc"
if command -v python3 > /dev/null; then
    host=$(rustc -vV | sed -n 's/^host: //p')
    set -- "$doc" "$host" zebu-capi
    [ -z "$features" ] || set -- "$@" --no-default-features --features "$features"
    python3 scripts/sbom.py "$@"
fi
cat > "$root$libdir/pkgconfig/zebu.pc" <<EOF
prefix=$prefix
libdir=$libdir
includedir=\${prefix}/include

Name: zebu
Description: Disk images (qcow2, raw, VMDK, VHD, VHDX, VDI) as block devices
Version: $version
Libs: -L\${libdir} -lzebu
Libs.private: $needs
Cflags: -I\${includedir}
EOF
