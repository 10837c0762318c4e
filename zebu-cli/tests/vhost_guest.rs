//! Guards against a vhost-user-blk server that a real operating system cannot
//! live on: a file system that is damaged, or that lost what was flushed, and a
//! machine that does not go on when its server is replaced.

mod common;

use common::guest::{INSTALL, LIVE, WRITE, kernel, read};
use common::server::Server;
use common::vhost::{serve, socket, start};
use common::{Lab, beyond_qemu};

fn served(lab: &Lab, how: &str, image: &str) -> Server {
    serve(lab, &[how, "--num-queues=2", "--discard=unmap", image])
}

#[test]
#[ignore = "slow: machines are emulated"]
fn a_machine_boots_from_it() {
    if beyond_qemu("a vhost-user server") || kernel().is_none() {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 512M");
    let mut server = served(&lab, "--cache=none", "x.qcow2");
    start(&lab, "install", None, INSTALL).finish();
    // The next machine at the same server.
    start(&lab, "live", Some("/dev/vda"), LIVE).finish();
    assert!(
        server.log().contains("virtqueue 1 was started"),
        "{}",
        server.log()
    );
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    // Another engine, and an overlay on the installed image, which nobody may
    // write.
    let before = std::fs::read(lab.path("x.qcow2")).unwrap();
    lab.make("create -b x.qcow2 -F qcow2 top.qcow2");
    let mut server = served(&lab, "--aio=threads", "top.qcow2");
    start(&lab, "over", Some("/dev/vda"), LIVE).finish();
    server.stop();
    lab.qemu_img(&["check", "top.qcow2"]).ok("check");
    assert!(std::fs::read(lab.path("x.qcow2")).unwrap() == before);
}

#[test]
#[ignore = "slow: machines are emulated"]
fn a_machine_lives_through_kills_of_its_server() {
    if beyond_qemu("a vhost-user server") || kernel().is_none() {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 256M");
    let kill = |server: &mut Server| {
        server.kill(&lab, "x.qcow2");
        std::fs::remove_file(socket(&lab)).unwrap();
    };
    // A guest that lives on has not lost what it has not flushed yet: that is
    // only so if nothing waits for a flush.
    let mut server = served(&lab, "--cache=directsync", "x.qcow2");
    let mut guest = start(&lab, "write", None, WRITE);
    for files in [5, 15, 25] {
        guest.wait_for(&format!("durable {files}."));
        kill(&mut server);
        server = served(&lab, "--cache=directsync", "x.qcow2");
    }
    guest.wait_for("durable 35.");
    kill(&mut server);
    // Now both at once, and what was not flushed may be lost.
    server = served(&lab, "--cache=none", "x.qcow2");
    guest.wait_for("durable 50.");
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
