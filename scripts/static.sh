#!/bin/sh
# Builds a static program of zebu, with musl, and puts it at target/dist/TARGET/zebu.
#
#   sh scripts/static.sh [TARGET]     x86_64-unknown-linux-musl (default) or aarch64-unknown-linux-musl
#   sh scripts/static.sh --features   prints the options of Cargo that choose its features
#
# It has all features but Ceph: a static program cannot load librbd.
# The C compiler is zig's, which has musl for every processor. It comes from PyPI, as cargo-zigbuild does.
# The standard library comes by rustup; where that cannot be had, ZEBU_RUST_SRC names the folder `library` of
# the compiler's own sources, and it is built too. Nothing else of the machine gets into the program:
# paths are replaced, and times are not recorded.
set -eu
cd "$(dirname "$0")/.."
features="--no-default-features --features http,object-store,psk,ssh"
if [ "${1:-}" = --features ]; then
    echo "$features"
    exit
fi
# The compiler names files by the physical path.
root=$(pwd -P)
target=${1:-x86_64-unknown-linux-musl}
zig=0.17.1 zigbuild=0.24.1
target_dir=${CARGO_TARGET_DIR:-target}

tools=$root/target/zig-$zig-$zigbuild
if ! [ -x "$tools/bin/cargo-zigbuild" ]; then
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet "ziglang==$zig" "cargo-zigbuild==$zigbuild"
fi
PATH=$tools/bin:$PATH
CARGO_ZIGBUILD_ZIG_PATH=$(ls -d "$tools"/lib/python3*/site-packages/ziglang/zig)
export PATH CARGO_ZIGBUILD_ZIG_PATH

# Position independent, so that its addresses are random; zig does not know the `-static-pie` of the compiler.
build_std="" link="-- -C link-arg=-pie"
cargo=${CARGO_HOME:-$HOME/.cargo}
mkdir -p "$target_dir"
# A later one wins: the target directory may be in the tree.
set -- "$cargo=/cargo" "$root=/zebu" "$(cd "$target_dir" && pwd -P)=/zebu/target"
if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] && ! rustup target add "$target"; then
    [ -n "${ZEBU_RUST_SRC:-}" ] || { echo "no standard library for $target: set ZEBU_RUST_SRC" >&2; exit 1; }
    # The compiler is told to take unstable options; it is the stable one.
    export RUSTC_BOOTSTRAP=1 __CARGO_TESTS_ONLY_SRC_ROOT="$ZEBU_RUST_SRC"
    build_std="-Zbuild-std=std,panic_abort"
    # The start files are zig's: those of the library that rustup brings are missing.
    link="$link -C link-self-contained=no"
    set -- "$@" "$ZEBU_RUST_SRC=/rust/library"
fi
RUSTFLAGS="" CFLAGS=""
for pair; do
    case $pair in *[[:space:]]*) echo "flags of compilers cannot have this path: '$pair'" >&2; exit 1 ;; esac
    RUSTFLAGS="$RUSTFLAGS --remap-path-prefix=$pair"
    CFLAGS="$CFLAGS -ffile-prefix-map=$pair"
done
export RUSTFLAGS CFLAGS
# Cargo would prefer it.
unset CARGO_ENCODED_RUSTFLAGS
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

# shellcheck disable=SC2086 # a list of words
cargo-zigbuild rustc --locked --profile dist -p zebu-cli --bin zebu $features --target "$target" $build_std \
    ${ZEBU_STATIC_FLAGS:-} $link
mkdir -p "target/dist/$target"
cp "$target_dir/$target/dist/zebu" "target/dist/$target/zebu"
ls -l "target/dist/$target/zebu"
