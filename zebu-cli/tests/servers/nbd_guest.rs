//! A Linux guest on a disk of the NBD server: its file system must stay intact and keep what was
//! flushed. QEMU is the client, over a Unix socket.

use crate::common::guest::{Guest, INSTALL, LIVE, WRITE, kernel, read};
use crate::common::server::{Server, wait_until};
use crate::common::{Lab, all_cases, beyond_qemu, part};

/// QEMU's options for a disk with several queues, served over NBD.
fn disk(server: &Server, export: &str) -> Vec<String> {
    let uri = server.uri(export);
    vec![
        "-drive".into(),
        format!("if=none,id=d{export},format=raw,discard=unmap,cache=none,file={uri}"),
        "-device".into(),
        format!("virtio-blk-pci,drive=d{export},num-queues=2"),
    ]
}

fn start(lab: &Lab, name: &str, root: Option<&str>, job: &str, disks: &[Vec<String>]) -> Guest {
    let args: Vec<&str> = disks.iter().flatten().map(String::as_str).collect();
    Guest::start(lab, name, root, job, &args)
}

#[test]
#[ignore = "slow: machines are emulated"]
fn a_guest_boots() {
    if beyond_qemu("an NBD server") || kernel().is_none() {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 512M");
    let serve = ["-t", "-e", "4", "--discard=unmap", "x.qcow2"];
    let mut server = Server::start(&lab, &serve);
    start(&lab, "install", None, INSTALL, &[disk(&server, "")]).finish();
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    if !all_cases() {
        return;
    }
    // Another engine, and an overlay over the installed image, which must not be written.
    let before = std::fs::read(lab.path("x.qcow2")).unwrap();
    for aio in ["--aio=threads", "--aio=io_uring"] {
        lab.make("create -b x.qcow2 -F qcow2 top.qcow2");
        let serve = [
            "-t",
            "-e",
            "4",
            "--cache=none",
            "--discard=unmap",
            aio,
            "top.qcow2",
        ];
        let mut server = Server::start(&lab, &serve);
        start(&lab, "live", Some("/dev/vda"), LIVE, &[disk(&server, "")]).finish();
        server.stop();
        lab.qemu_img(&["check", "top.qcow2"]).ok("check");
    }
    assert!(std::fs::read(lab.path("x.qcow2")).unwrap() == before);
}

/// A guest is installed on an image of another format, boots from it, and from QEMU's own driver.
#[test]
#[ignore = "slow: machines are emulated"]
fn a_guest_boots_from_other_formats() {
    if !all_cases() || beyond_qemu("an NBD server") || kernel().is_none() {
        return;
    }
    for format in ["vhdx", "vdi"] {
        let lab = Lab::new();
        lab.zebu(&["create", "-q", "-f", format, "x", "512M"])
            .ok("create");
        let serve = ["-t", "-e", "4", "--discard=unmap", "-f", format, "x"];
        for (name, root, job) in [("install", None, INSTALL), ("live", Some("/dev/vda"), LIVE)] {
            let mut server = Server::start(&lab, &serve);
            start(&lab, name, root, job, &[disk(&server, "")]).finish();
            server.stop();
            lab.qemu_img(&["check", "-f", format, "x"]).ok("check");
            lab.zebu(&["check", "-f", format, "x"]).ok("check");
        }
        let drive = format!("if=virtio,format={format},file=x");
        let own = vec!["-drive".into(), drive];
        start(&lab, "own", Some("/dev/vda"), LIVE, &[own]).finish();
        lab.zebu(&["check", "-f", format, "x"]).ok("check");
    }
}

#[test]
#[ignore = "slow: machines are emulated"]
fn data_synced_by_a_guest_survives_kill() {
    if beyond_qemu("an NBD server") || kernel().is_none() {
        return;
    }
    for (aio, files) in part(2, [("--aio=io_uring", 15), ("--aio=threads", 10)]) {
        let lab = Lab::new();
        lab.make("create x.qcow2 256M");
        let mut server = Server::start(&lab, &["-t", "-e", "4", aio, "x.qcow2"]);
        let mut guest = start(&lab, "write", None, WRITE, &[disk(&server, "")]);
        guest.wait_for(&format!("durable {files}."));
        server.signal("KILL");
        // After the kill the guest can sync nothing more.
        let said = guest.console();
        drop(guest);
        let durable = said.matches("durable ").count();
        assert!(durable >= files, "{said}");
        server.kill(&lab, "x.qcow2");
        std::fs::remove_file(&server.socket).unwrap();
        let mut server = Server::start(&lab, &["-t", "-e", "4", aio, "x.qcow2"]);
        let read = read(durable);
        start(&lab, "read", None, &read, &[disk(&server, "")]).finish();
        server.stop();
        lab.qemu_img(&["check", "x.qcow2"]).ok("check");
        wait_until("the socket is removed", || !server.socket.exists());
    }
}
