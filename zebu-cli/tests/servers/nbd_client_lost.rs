//! NBD servers that disappear, do not reply, or fail a request. With `reconnect-delay` the job
//! continues; otherwise it fails with a message. It never hangs.

use std::thread;
use std::time::Duration;

use crate::common::other_server::{Hostile, Other, handshake, images, request, take};
use crate::common::server::{have, wait_until};
use crate::common::{Lab, beyond_qemu};

const MIB: u64 = 1 << 20;

/// Starts a rate-limited copy from the server to `out.raw`.
fn slow_copy(lab: &Lab, server: &Other, options: &str) -> std::process::Child {
    let source = format!(
        "driver=raw,file.driver=nbd,file.path={},file.connections=2{options}",
        server.socket.display()
    );
    std::process::Command::new(crate::common::program())
        .args([
            "convert",
            "--image-opts",
            "-r",
            "8M",
            "-O",
            "raw",
            &source,
            "out.raw",
        ])
        .current_dir(lab.path(""))
        .stderr(std::fs::File::create(lab.path("copy.log")).unwrap())
        .spawn()
        .unwrap()
}

#[test]
fn jobs_continue_after_a_reconnect() {
    if beyond_qemu("options of zebu's own") {
        return;
    }
    let lab = images();
    let mut server = Other::qemu_nbd(&lab, "s", &["-f", "raw", "-e", "9", "x.raw"]);
    let begun = || std::fs::metadata(lab.path("out.raw")).is_ok();
    let mut copy = slow_copy(&lab, &server, ",file.reconnect-delay=60");
    wait_until("the copy has begun", begun);
    for _ in 0..2 {
        thread::sleep(Duration::from_millis(300));
        server.kill();
        thread::sleep(Duration::from_millis(300));
        server.restart();
    }
    let status = copy.wait().unwrap();
    let log = std::fs::read_to_string(lab.path("copy.log")).unwrap();
    assert!(status.success(), "{log}");
    lab.assert_same_bytes("out.raw", "x.raw", "over three servers");
    std::fs::remove_file(lab.path("out.raw")).unwrap();
    // The server does not come back, or no delay is given.
    for options in ["", ",file.reconnect-delay=1"] {
        let mut copy = slow_copy(&lab, &server, options);
        wait_until("the copy has begun", begun);
        thread::sleep(Duration::from_millis(300));
        server.kill();
        let status = copy.wait().unwrap();
        let log = std::fs::read_to_string(lab.path("copy.log")).unwrap();
        assert!(status.code() == Some(1), "{status:?} {log}");
        assert!(
            log.lines().count() == 1 && log.contains("s.sock") && log.contains("lost"),
            "{log}"
        );
        server.restart();
        let _ = std::fs::remove_file(lab.path("out.raw"));
    }
}

#[test]
fn open_and_request_timeouts() {
    if beyond_qemu("one line of error") {
        return;
    }
    let lab = images();
    let mut server = Other::qemu_nbd(&lab, "s", &["-f", "raw", "x.raw"]);
    server.kill();
    let options = format!(
        "driver=nbd,path={},open-timeout=60",
        server.socket.display()
    );
    thread::scope(|scope| {
        let info = scope.spawn(|| lab.zebu(&["info", "--image-opts", &options]));
        thread::sleep(Duration::from_millis(500));
        server.restart();
        info.join().unwrap().ok("open-timeout");
    });
    // A server that accepts connections and sends nothing.
    let silent = Hostile::new(&lab, "silent", |mut stream, _| {
        take::<1>(&mut stream).map(drop)
    });
    let options = format!("driver=nbd,path={},open-timeout=1", silent.socket.display());
    let answer = lab.zebu(&["info", "--image-opts", &options]);
    answer.failed_with_one_line(1, "a silent server");
    // A server that does not reply to requests.
    let silent = Hostile::new(&lab, "late", |mut stream, _| {
        handshake(&mut stream, MIB, 1)?;
        loop {
            request(&mut stream)?;
        }
    });
    let options = format!(
        "driver=nbd,path={},request-timeout=1",
        silent.socket.display()
    );
    let answer = lab.zebu(&["convert", "--image-opts", &options, "out.raw"]);
    answer.failed_with_one_line(1, "a server that does not reply");
    assert!(answer.err.contains("did not answer in time"), "{answer:?}");
}

#[test]
fn errors_of_a_server_are_reported() {
    if beyond_qemu("it has other messages") || !have("nbdkit") {
        return;
    }
    let lab = images();
    for (args, words) in [
        (
            &["error-pread=EIO", "error-pread-rate=100%"][..],
            "Input/output error",
        ),
        (
            &["error-pread=ENOMEM", "error-pread-rate=100%"],
            "Cannot allocate memory",
        ),
    ] {
        let mut all = vec!["--filter=error", "file", "x.raw"];
        all.extend(args);
        let server = Other::nbdkit(&lab, "k", &all);
        let answer = lab.zebu(&[
            "convert",
            "-f",
            "raw",
            "-O",
            "raw",
            &server.uri(""),
            "out.raw",
        ]);
        answer.failed_with_one_line(1, words);
        assert!(
            answer.err.contains(words) && answer.err.contains("k.sock"),
            "{answer:?}"
        );
        // --salvage skips unreadable data.
        let args = [
            "convert",
            "--salvage",
            "-q",
            "-f",
            "raw",
            "-O",
            "raw",
            &server.uri(""),
            "s.raw",
        ];
        lab.zebu(&args).ok("--salvage");
    }
    let server = Other::nbdkit(
        &lab,
        "k",
        &[
            "--filter=error",
            "file",
            "e.raw",
            "error-pwrite=ENOSPC",
            "error-pwrite-rate=100%",
        ],
    );
    let answer = lab.zebu(&["convert", "-n", "-O", "raw", "x.raw", &server.uri("")]);
    answer.failed_with_one_line(1, "a server without space");
    assert!(answer.err.contains("No space left"), "{answer:?}");
}
