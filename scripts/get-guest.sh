#!/bin/sh
# Makes a small Linux guest in a directory, without installing anything: the
# kernel of Debian's cloud images, and an initramfs with busybox, e2fsprogs and
# storm (guest/storm.c) that runs the file /job of a second archive behind it. The tests with
# guests (zebu-cli/tests/common/guest.rs) boot it.
#
# usage: get-guest.sh DIRECTORY
set -eu
source=$(cd "$(dirname "$0")" && pwd)/guest/storm.c
mkdir -p "$1"
cd "$1"
# Several tests may want it at once: the first makes it.
exec 9>lock
flock 9
if [ -e vmlinuz ] && [ -e initramfs ]; then
    exit 0
fi
busybox=$(command -v busybox)
package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1)
rm -rf deb root
mkdir deb root
(cd deb && apt-get -qq -o APT::Sandbox::User=root download "$package" >&2)
dpkg-deb --fsys-tarfile deb/*.deb | tar -x -C deb ./boot ./lib/modules
modules=$(echo deb/lib/modules/*)

# Modules. What is built in has none.
mkdir -p root/bin root/lib/modules root/proc root/sys root/dev root/tmp root/mnt root/new root/etc
touch root/modules
for name in crc16 mbcache jbd2 crc32c_generic crc32c-intel libcrc32c ext4 \
    virtio virtio_ring virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk; do
    file=$(find "$modules" -name "$name.ko*" | head -n 1)
    [ -n "$file" ] || continue
    case $file in
        *.xz) xz -dc "$file" >"root/lib/modules/$name.ko" ;;
        *) cp "$file" "root/lib/modules/$name.ko" ;;
    esac
    echo "$name" >>root/modules
done

# Programs with the libraries that they ask for.
cp "$busybox" root/bin/busybox
# Under names that busybox does not take for its own.
for program in mkfs.ext4 fsck.ext4; do
    path=$(PATH="$PATH:/usr/sbin:/sbin" command -v "$program")
    cp -L "$path" root/bin/
    ldd "$path" | sed -n 's/^.*[[:space:]]\(\/[^ ]*\) (.*$/\1/p' | while read -r library; do
        mkdir -p "root$(dirname "$library")"
        cp -L "$library" "root$library"
    done
done

cc -O2 -static -pthread -o root/bin/storm "$source"

cat >root/init <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
# Each round loads those whose needs are there.
for round in 1 2 3; do
    for module in $(cat /modules); do insmod "/lib/modules/$module.ko" 2>/dev/null; done
done
# On the second round the root is a disk: the job is told so.
root=$(sed -n 's/.*zebu\.root=\([^ ]*\).*/\1/p' /proc/cmdline)
if [ -n "$root" ] && [ ! -e /on-disk ]; then
    while [ ! -e "$root" ]; do sleep 0.1; done
    mount -t ext4 "$root" /new && cp /job /new/job && touch /new/on-disk
    umount /dev /sys /proc
    exec switch_root /new /init
fi
mkdir -p /tmp
echo "guest: begins"
sh -e /job </dev/null
echo "guest: ended $?"
sync
poweroff -f
INIT
chmod +x root/init
(cd root && find . | cpio --quiet -o -H newc -R 0:0) >initramfs.part
cp deb/boot/vmlinuz-* vmlinuz.part
mv vmlinuz.part vmlinuz
mv initramfs.part initramfs
rm -rf deb root
