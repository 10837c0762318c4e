//! Images that grow while vhost-user-blk serves them: the guest must be notified and be able to use
//! the new capacity.

use std::io::Read;
use std::os::unix::net::UnixStream;

use crate::common::guest::kernel;
use crate::common::server::wait_until;
use crate::common::vhost::{Disk, ERROR, READ, WRITE, serve, socket, start};
use crate::common::{Lab, TIME_LIMIT, beyond_qemu};
use zebu_vhost::front_end::Setup;

const MIB: u64 = 1 << 20;

fn set_length(lab: &Lab, image: &str, length: u64) {
    let mut how = std::fs::File::options();
    let file = how.write(true).create(true).truncate(false);
    let file = file.open(lab.path(image)).unwrap();
    file.set_len(length).unwrap();
}

/// Waits for the message that the configuration has changed.
#[track_caller]
fn wait_for_change(mut channel: &UnixStream) {
    channel.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    let mut message = [0; 12];
    channel.read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

fn capacity(disk: &mut Disk) -> u64 {
    let bytes = disk.connection.config(0, 8).unwrap();
    u64::from_le_bytes(bytes.try_into().unwrap()) * 512
}

#[test]
fn sigusr2_updates_the_capacity() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    std::fs::write(lab.path("x.raw"), vec![7; MIB as usize]).unwrap();
    lab.make("create x.qcow2 1M");
    let more = "two=x.qcow2,socket=two.sock";
    let mut server = serve(&lab, &["-f", "raw", "x.raw", "--export", more]);
    let mut disk = Disk::new(&lab, Setup::default());
    let channel = disk.connection.channel().unwrap();
    assert_eq!(capacity(&mut disk), MIB);
    let last = (3 * MIB / 512) - 8;
    assert_eq!(disk.give(WRITE, last, &[9; 4096]), ERROR);

    // Before the signal the capacity is unchanged.
    set_length(&lab, "x.raw", 3 * MIB);
    assert_eq!(capacity(&mut disk), MIB);
    server.signal("USR2");
    wait_for_change(&channel);
    assert_eq!(capacity(&mut disk), 3 * MIB);
    assert_eq!(disk.take(READ, MIB / 512, 4096).unwrap(), [0; 4096]);
    assert_eq!(disk.give(WRITE, last, &[9; 4096]), 0);
    assert_eq!(disk.take(READ, 0, 4096).unwrap(), [7; 4096]);

    // Without the channel of the back end there is no notification.
    drop(channel);
    set_length(&lab, "x.raw", 5 * MIB);
    server.signal("USR2");
    wait_until("it has grown", || capacity(&mut disk) == 5 * MIB);
    assert_eq!(disk.take(READ, last, 4096).unwrap(), [9; 4096]);
    server.stop();
}

#[test]
#[ignore = "slow: machines are emulated"]
fn a_guest_sees_the_new_capacity() {
    if beyond_qemu("a vhost-user server") || kernel().is_none() {
        return;
    }
    const JOB: &str = r#"
        wait_for() {
            while [ "$(cat /sys/block/vda/size)" != $1 ]; do sleep 0.1; done
            dd if=/dev/urandom of=/tmp/end bs=4k count=1 2>/dev/null
            dd if=/tmp/end of=/dev/vda bs=4k seek=$(($1 / 8 - 1)) oflag=direct 2>/dev/null
            dd if=/dev/vda of=/tmp/found bs=4k skip=$(($1 / 8 - 1)) iflag=direct 2>/dev/null
            cmp /tmp/end /tmp/found
            echo "sectors: $1."
        }
        wait_for 65536
        wait_for 131072
        wait_for 196608
    "#;
    let lab = Lab::new();
    set_length(&lab, "x.raw", 32 * MIB);
    // The file grows, and the server gets SIGUSR2.
    let mut server = serve(&lab, &["--num-queues=2", "-f", "raw", "x.raw"]);
    let mut guest = start(&lab, "grow", None, JOB);
    guest.wait_for("sectors: 65536.");
    set_length(&lab, "x.raw", 64 * MIB);
    server.signal("USR2");
    guest.wait_for("sectors: 131072.");
    // The next server has an image of another size, while the guest goes on.
    server.stop();
    assert!(!socket(&lab).exists());
    lab.make("create y.qcow2 96M");
    let mut server = serve(&lab, &["--num-queues=2", "y.qcow2"]);
    guest.wait_for("sectors: 196608.");
    guest.finish();
    server.stop();
}
