#!/bin/sh
# Installs what the demo, the tests and the benchmarks use, where that can be
# done: as root on Debian and its like. Elsewhere says what is missing.
set -eu
missing=""
for program in "$@"; do
    case $program in
        # A module of Debian's Python, which is no program.
        python3-*) /usr/bin/python3 -c "import ${program#python3-lib}" >/dev/null 2>&1 ;;
        *.so.*) ldconfig -p | grep -q "$program" ;;
        # Not on the path of users.
        sshd) [ -x /usr/sbin/sshd ] ;;
        *) command -v "$program" >/dev/null 2>&1 ;;
    esac || missing="$missing $program"
done
[ -n "$missing" ] || exit 0
packages=""
for program in $missing; do
    case $program in
        qemu-img | qemu-io | qemu-nbd) packages="$packages qemu-utils" ;;
        # Which of the two has it depends on the release.
        qemu-storage-daemon) packages="$packages qemu-utils qemu-system-common" ;;
        mke2fs | mkfs.ext4 | fsck.ext4) packages="$packages e2fsprogs" ;;
        mkfs.xfs) packages="$packages xfsprogs" ;;
        mkfs.btrfs) packages="$packages btrfs-progs" ;;
        losetup) packages="$packages mount" ;;
        nbdinfo | nbdcopy) packages="$packages libnbd-bin" ;;
        certtool | psktool) packages="$packages gnutls-bin" ;;
        qemu-system-x86_64) packages="$packages qemu-system-x86" ;;
        busybox) packages="$packages busybox-static" ;;
        flock) packages="$packages util-linux" ;;
        cryptsetup) packages="$packages cryptsetup-bin" ;;
        nginx) packages="$packages nginx-light" ;;
        librbd.so.1) packages="$packages librbd1" ;;
        sshd) packages="$packages openssh-server" ;;
        xz) packages="$packages xz-utils" ;;
        cc) packages="$packages gcc libc6-dev" ;;
        *) packages="$packages $program" ;;
    esac
done
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "installing:$packages"
    apt-get update -qq
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
else
    echo "please install:$packages (for:$missing)" >&2
    exit 1
fi
