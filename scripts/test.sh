#!/bin/sh
# All tests, on a bare machine with Rust: installs what they need, then runs
# formatting, lints, and every test, the slow ones among them.
set -eu
cd "$(dirname "$0")/.."
# A clean checkout builds once, and panics tell their places without debug information.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0
df -h . | tail -n 1
sh scripts/install-deps.sh cc mke2fs mkfs.xfs mkfs.btrfs losetup qemu-img qemu-io \
    nbdinfo nbdcopy nbdkit qemu-nbd qemu-storage-daemon fio certtool psktool python3 \
    nginx sshd qemu-system-x86_64 busybox cpio flock xz python3-libnbd
# The judge is the newest QEMU, where it can be had; the older one of the
# distribution says a little less, and the tests allow for that.
if bin=$(sh scripts/get-qemu.sh target/peers/qemu); then
    export ZEBU_QEMU_IMG="$bin/qemu-img" ZEBU_QEMU_IO="$bin/qemu-io"
fi
"${ZEBU_QEMU_IMG:-qemu-img}" --version | head -n 1
cargo fmt --all --check

lints() {
    set -e
    cargo clippy --workspace --all-targets --quiet -- -D warnings
    # The library alone.
    cargo clippy -p zebu --no-default-features --quiet -- -D warnings
    crates=$(cargo tree -p zebu --no-default-features -e normal --prefix none | sed 's/ (\*)//' | sort -u | wc -l)
    [ "$crates" -le 25 ] || { echo "zebu needs $crates crates without its features, not 25"; exit 1; }
    sh scripts/public-api.sh
    # The interleavings of what threads meet at, under a scheduler.
    cargo test -p zebu --no-default-features --features interleavings --lib --quiet interleavings
}

# Most tests wait for other programs, and the lints use what they leave of the processors.
cargo test --workspace --no-run --quiet
lints > target/lints.log 2>&1 &
lints=$!
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((2 * $(nproc)))}"
status=0
# The long tests of the library, which have shorter forms beside them, are for `make reliability`.
python3 scripts/run-tests.py --include-ignored --skip a_hundred_thousand_times \
    --skip each_operation_fails_in_turn --skip many_queues_for_long --skip breaks || status=1
wait $lints || status=1
cat target/lints.log
cargo test --workspace --doc --quiet || status=1
# Each rule of the order on the disk is broken in turn, and noticed.
cargo test --workspace --test crash --quiet breaks -- --ignored --nocapture || status=1
exit $status
