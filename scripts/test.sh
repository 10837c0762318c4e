#!/bin/sh
# All tests, on a bare machine with Rust: installs what they need, then runs
# formatting, lints, and every test, the slow ones among them.
set -eu
cd "$(dirname "$0")/.."
# A clean checkout builds once, and panics tell their places without debug information.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0
# One build gives both the lints and the tests.
export RUSTC_WORKSPACE_WRAPPER="$PWD/scripts/rustc.sh"
# cargo builds anew what Clippy has compiled if this changes.
export CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
df -h . | tail -n 1
sh scripts/install-deps.sh cc
cargo fmt --all --check
mkdir -p target
cargo test --workspace --features zebu-cli/psk --no-run --message-format=json-render-diagnostics --quiet > target/build.json &
build=$!
sh scripts/install-deps.sh mke2fs mkfs.xfs mkfs.btrfs losetup qemu-img qemu-io \
    nbdinfo nbdcopy nbdkit qemu-nbd qemu-storage-daemon fio certtool psktool python3 \
    nginx sshd cryptsetup qemu-system-x86_64 busybox cpio flock xz python3-libnbd groff mandoc zsh fish
# Tests compare with the newest QEMU, where it can be had. The distribution's may be older and print
# less, which the tests allow.
if bin=$(sh scripts/get-qemu.sh target/peers/qemu); then
    export ZEBU_QEMU_IMG="$bin/qemu-img" ZEBU_QEMU_IO="$bin/qemu-io"
fi
"${ZEBU_QEMU_IMG:-qemu-img}" --version | head -n 1
# Its options are those that ours must take.
if img=$(sh scripts/get-qemu-newest.sh target/peers/qemu-newest); then
    export ZEBU_QEMU_NEWEST="$img"
fi

checks() {
    set -e
    crates=$(cargo tree -p zebu --no-default-features -e normal --prefix none | sed 's/ (\*)//' | sort -u | grep -c -v '^zebu')
    [ "$crates" -le 25 ] || { echo "zebu needs $crates crates without its features, not 25"; exit 1; }
    # With the doc tests.
    sh scripts/public-api.sh
    python3 scripts/sbom.py --check
    # The crates can be packed; building them from that is for releases.
    cargo package --workspace --exclude zebu-bench --exclude zebu-sim --exclude zebu-testkit --exclude zebu-public-api --no-verify --allow-dirty --quiet
    # The library alone.
    cargo check -p zebu --no-default-features --quiet
    # What threads share, in many interleavings, under a scheduler.
    cargo test -p zebu-core --no-default-features --features interleavings --lib --quiet interleavings
}

# Most tests wait for other programs, and the end of the build and the checks use what they leave of
# the processors. The long tests of the library, which have shorter forms beside them, are for
# `make reliability`.
python3 scripts/run-tests.py target/build.json --include-ignored --skip a_hundred_thousand_times \
    --skip each_operation_fails_in_turn --skip many_queues_for_long --skip breaks &
tests=$!
# Also if cargo was killed, the tests must learn of it.
wait $build || { echo '{"reason":"build-finished","success":false}' >> target/build.json; wait $tests; }
checks > target/checks.log 2>&1 &
checks=$!
status=0
wait $tests || status=1
wait $checks || status=1
cat target/checks.log
exit $status
