#!/bin/sh
# A Ceph of one monitor and one OSD on this machine, for the tests of images in Ceph: Debian's
# packages, unpacked into a directory without being installed, with a pool `rbd` in a sparse file of
# 4 GiB. Prints the path of its configuration; the program `rbd` is beside it. It needs Debian, Python
# and curl.
#
# usage: ceph.sh DIRECTORY start|stop
set -eu
mkdir -p "$1"
dir=$(cd "$1" && pwd)
root=$dir/root
run=$dir/run

stop() {
    for file in "$run"/*.pid; do
        [ -f "$file" ] || continue
        # A daemon removes the file when it ends.
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
    done
    rm -rf "$run"
}

unpack() {
    mkdir -p "$dir/packages" "$root"
    # For librbd, which zebu loads.
    sh "$(dirname "$0")/install-deps.sh" librbd.so.1 curl python3 >&2
    packages=$(apt-get install --print-uris -y --no-install-recommends ceph-mon ceph-osd ceph-common |
        sed -n "s/^'\([^']*\)'.*/\1/p")
    for package in $packages; do
        file=$dir/packages/$(basename "$package")
        [ -f "$file" ] || curl -sSf -o "$file" "$package" >&2
        dpkg-deb -x "$file" "$root"
    done
    touch "$dir/unpacked"
}

# Runs a program of the packages.
ours() {
    program=$1
    shift
    "$run/run" "$program" "$@" >>"$run/log" 2>&1
}

start() {
    mkdir -p "$run/mon" "$run/osd"
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    fsid=$(cat /proc/sys/kernel/random/uuid)
    modules=$(ls -d "$root"/usr/lib/*-linux-gnu)
    cat >"$run/run" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$(ls -d "$root"/lib/*-linux-gnu | head -n 1):$modules:$modules/ceph"
export PYTHONPATH="$root/usr/lib/python3/dist-packages" CEPH_CONF="$run/ceph.conf"
program=\$1
shift
exec "$root/usr/bin/\$program" "\$@"
END
    printf '#!/bin/sh\nexec "%s" rbd "$@"\n' "$run/run" >"$run/rbd"
    chmod +x "$run/run" "$run/rbd"
    cat >"$run/ceph.conf" <<END
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$port/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
run dir = $run
pid file = $run/\$name.pid
log file = $run/\$name.log
admin socket = $run/\$name.asok
crash dir = $run
erasure code dir = $modules/ceph/erasure-code
plugin dir = $modules/ceph
osd class dir = $modules/rados-classes
[client]
admin socket =
log file =
[mon]
mon data = $run/mon
mon cluster log file = $run/cluster.log
mon data avail crit = 1
mon data avail warn = 1
[osd]
osd data = $run/osd
osd objectstore = bluestore
bluestore block size = 4294967296
bluestore fsck on mount = false
osd memory target = 939524096
osd class update on start = true
END
    ours monmaptool --create --addv a "[v2:127.0.0.1:$port/0]" --fsid "$fsid" "$run/monmap"
    ours ceph-mon --mkfs -i a --monmap "$run/monmap"
    ours ceph-mon -i a
    uuid=$(cat /proc/sys/kernel/random/uuid)
    ours ceph osd new "$uuid"
    ours ceph-osd -i 0 --mkfs --osd-uuid "$uuid"
    ours ceph-osd -i 0
    ours ceph osd pool create rbd 8
    ours ceph osd pool application enable rbd rbd
}

case $2 in
    start)
        [ -f "$dir/unpacked" ] || unpack
        stop
        mkdir -p "$run"
        trap 'tail -n 20 "$run/log" >&2' EXIT
        start
        trap - EXIT
        echo "$run/ceph.conf"
        ;;
    stop) stop ;;
esac
