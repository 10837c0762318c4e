//! A Linux guest on a disk of the vhost-user-blk server: its file system must stay intact and keep
//! what was flushed, and the guest must continue when the server is replaced.

use crate::common::guest::{INSTALL, LIVE, WRITE, kernel, read};
use crate::common::server::Server;
use crate::common::vhost::{serve, socket, start};
use crate::common::{Lab, all_cases, beyond_qemu};

fn served(lab: &Lab, how: &str, image: &str) -> Server {
    serve(lab, &[how, "--num-queues=2", "--discard=unmap", image])
}

/// Images of these formats are made by the program and have a guest's root.
const FORMATS: [(&str, &str, &[&str]); 8] = [
    ("zebu", "vmdk", &[]),
    ("zebu", "vmdk", &["-o", "subformat=streamOptimized"]),
    ("zebu", "vhdx", &[]),
    ("zebu", "vpc", &[]),
    ("zebu", "vdi", &[]),
    ("qemu-img", "qcow", &[]),
    ("qemu-img", "qed", &[]),
    ("qemu-img", "parallels", &[]),
];

/// The job of a guest whose root is an image of another format.
const BOOTED: &str = r#"
    grep -q '^/dev/vda / ext4' /proc/mounts
    storm verify /tmp/storm 12
    mount -o remount,ro /
    fsck.ext4 -fn /dev/vda
"#;

#[test]
#[ignore = "slow: machines are emulated"]
fn a_guest_boots_from_each_format() {
    if beyond_qemu("a vhost-user server") || kernel().is_none() {
        return;
    }
    let lab = Lab::new();
    // A multiple of a cylinder, to which disks of VHD are rounded.
    lab.make("create x.qcow2 516096k");
    let mut server = served(&lab, "--cache=none", "x.qcow2");
    start(&lab, "install", None, INSTALL).finish();
    // A second guest with the same server.
    start(&lab, "live", Some("/dev/vda"), LIVE).finish();
    assert!(
        server.log().contains("virtqueue 1 was started"),
        "{}",
        server.log()
    );
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    for (maker, format, options) in FORMATS.into_iter().filter(|_| all_cases()) {
        let make = match maker {
            "zebu" => Lab::zebu,
            _ => Lab::qemu_img,
        };
        let mut args = vec!["convert", "-O", format];
        args.extend(options);
        args.extend(["x.qcow2", "image"]);
        make(&lab, &args).ok(format);
        // The guest writes to an overlay, with another engine; the image must not be written.
        let before = std::fs::read(lab.path("image")).unwrap();
        lab.make(&format!("create -b image -F {format} top.qcow2"));
        let mut server = served(&lab, "--aio=threads", "top.qcow2");
        start(&lab, "booted", Some("/dev/vda"), BOOTED).finish();
        server.stop();
        lab.qemu_img(&["check", "top.qcow2"]).ok("check");
        assert!(std::fs::read(lab.path("image")).unwrap() == before);
        for file in ["image", "top.qcow2"] {
            std::fs::remove_file(lab.path(file)).unwrap();
        }
    }
}

#[test]
#[ignore = "slow: machines are emulated"]
fn a_guest_survives_kills_of_the_server() {
    if beyond_qemu("a vhost-user server") || kernel().is_none() {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 256M");
    let kill = |server: &mut Server| {
        server.kill(&lab, "x.qcow2");
        std::fs::remove_file(socket(&lab)).unwrap();
    };
    // The guest continues, and expects also data that it has not flushed: with directsync, completed
    // writes are durable.
    let mut server = served(&lab, "--cache=directsync", "x.qcow2");
    let mut guest = start(&lab, "write", None, WRITE);
    for files in [5, 10, 15] {
        guest.wait_for(&format!("durable {files}."));
        kill(&mut server);
        server = served(&lab, "--cache=directsync", "x.qcow2");
    }
    guest.wait_for("durable 20.");
    kill(&mut server);
    // Server and guest are killed: data that were not flushed may be lost.
    server = served(&lab, "--cache=none", "x.qcow2");
    guest.wait_for("durable 28.");
    server.signal("KILL");
    let said = guest.console();
    drop(guest);
    kill(&mut server);
    assert!(!said.contains("I/O error"), "{said}");
    let durable = said.matches("durable ").count();
    let mut server = served(&lab, "--cache=none", "x.qcow2");
    start(&lab, "read", None, &read(durable)).finish();
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
}
