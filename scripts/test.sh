#!/bin/sh
# All tests, on a bare machine with Rust: installs what they need, then runs
# formatting, lints, and every test, the slow ones among them.
set -eu
cd "$(dirname "$0")/.."
# What incremental builds keep is a third of the target directory, and a clean checkout builds once.
export CARGO_INCREMENTAL=0
df -h . | tail -n 1
sh scripts/install-deps.sh cc mke2fs mkfs.xfs mkfs.btrfs losetup qemu-img qemu-io \
    nbdinfo nbdcopy nbdkit qemu-nbd qemu-storage-daemon fio certtool psktool python3 \
    nginx qemu-system-x86_64 busybox cpio flock xz python3-libnbd
# The judge is the newest QEMU, where it can be had; the older one of the
# distribution says a little less, and the tests allow for that.
if bin=$(sh scripts/get-qemu.sh target/peers/qemu); then
    export ZEBU_QEMU_IMG="$bin/qemu-img" ZEBU_QEMU_IO="$bin/qemu-io"
fi
"${ZEBU_QEMU_IMG:-qemu-img}" --version | head -n 1
cargo fmt --all --check
cargo clippy --workspace --all-targets --quiet -- -D warnings
# The library alone, and with NBD but without TLS.
cargo clippy -p zebu --no-default-features --quiet -- -D warnings
cargo clippy -p zebu --no-default-features --features nbd --quiet -- -D warnings
crates=$(cargo tree -p zebu --no-default-features -e normal --prefix none | sed 's/ (\*)//' | sort -u | wc -l)
[ "$crates" -le 25 ] || { echo "zebu needs $crates crates without its features, not 25" >&2; exit 1; }
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
sh scripts/public-api.sh
# Half of the tests wait for other programs.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((2 * $(nproc)))}"
# The long tests of the library, which have shorter forms beside them, are for `make reliability`.
cargo test --workspace --no-fail-fast -- --include-ignored --skip a_hundred_thousand_times \
    --skip each_operation_fails_in_turn --skip many_queues_for_long
# The interleavings of what threads meet at, under a scheduler of its own. The features would only be
# built anew.
RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle \
    cargo test -p zebu --no-default-features --lib --quiet interleavings
# Each rule of the order on the disk is broken in turn, and noticed.
RUSTFLAGS="--cfg zebu_break" CARGO_TARGET_DIR=target/break \
    cargo test -p zebu --no-default-features --test crash --quiet breaks -- --nocapture
