//! Start and end of the NBD server: requests in flight at SIGTERM, flushed data after SIGKILL, locks
//! against a second server, logs, statistics, daemon mode, and no CPU time while idle.

use std::process::{Command as Program, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::server::{Raw, Server, assert_sleeps, wait_until};
use crate::common::{Lab, beyond_qemu};
use zebu::internal::nbd::{Command, Headers, Request, command};

const BLOCK: u64 = 4096;

fn request(command: Command, cookie: u64, offset: u64, length: u64) -> Request {
    Request {
        command,
        flags: 0,
        cookie,
        offset,
        length,
    }
}

#[test]
fn flushed_data_survive_kill() {
    if beyond_qemu("an NBD server") {
        return;
    }
    for (round, aio) in ["--aio=threads", "--aio=io_uring"]
        .iter()
        .cycle()
        .take(6)
        .enumerate()
    {
        let lab = Lab::new();
        lab.make("create x.qcow2 64M");
        let mut server = Server::start(&lab, &["-t", "-e", "2", aio, "x.qcow2"]);
        // Block n has the number n + 1. Blocks before `durable` were flushed, by FUA or by flushes of
        // the other connection.
        let durable = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let (server, durable) = (&server, &durable);
            scope.spawn(move || {
                let mut writer = Raw::with_export(server, "", Headers::Structured);
                let mut flusher = Raw::with_export(server, "", Headers::Simple);
                let answered = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    for n in 0..64 << 8 {
                        let place = n * 37 % (64 << 8) * BLOCK;
                        let mut write = request(Command::Write, n, place, BLOCK);
                        if n % 7 == 0 {
                            write.flags = command::FUA;
                        }
                        let bytes = (n + 1).to_le_bytes().repeat(BLOCK as usize / 8);
                        if writer.ask(&write, &bytes).error != 0 {
                            panic!("a write failed");
                        }
                        if n % 7 == 0 {
                            // FUA makes this block durable, the flush all before it.
                            flusher.ask(&request(Command::Flush, 1, 0, 0), &[]);
                            durable.store(n + 1, Ordering::SeqCst);
                        }
                    }
                }));
                assert!(answered.is_err(), "the server must be killed first");
            });
            let enough = 20 + 60 * round as u64;
            wait_until("writes", || durable.load(Ordering::SeqCst) > enough);
            server.signal("KILL");
        });
        let durable = durable.load(Ordering::SeqCst);
        server.kill(&lab, "x.qcow2");
        std::fs::remove_file(&server.socket).unwrap();
        let mut server = Server::start(&lab, &["-t", "x.qcow2"]);
        let mut reader = Raw::with_export(&server, "", Headers::Simple);
        for n in 0..durable {
            let place = n * 37 % (64 << 8) * BLOCK;
            let got = reader.ask(&request(Command::Read, 0, place, BLOCK), &[]);
            let bytes = (n + 1).to_le_bytes().repeat(BLOCK as usize / 8);
            assert!(got.pieces[0].1 == bytes, "block {n} of {durable}");
        }
        drop(reader);
        server.stop();
    }
}

#[test]
fn sigterm_and_sigint_finish_requests() {
    if beyond_qemu("an NBD server") {
        return;
    }
    for signal in ["TERM", "INT"] {
        let lab = Lab::new();
        lab.make("create x.qcow2 64M");
        let mut server = Server::start(&lab, &["-t", "-e", "4", "x.qcow2"]);
        let mut raw = Raw::with_export(&server, "", Headers::Structured);
        let mut idle = Raw::with_export(&server, "", Headers::Simple);
        let mut silent = Raw::connect(&server);
        for n in 0..32 {
            raw.send(&request(Command::Write, n, n << 20, 1 << 20));
            raw.put(&vec![n as u8 + 1; 1 << 20]);
        }
        server.signal(signal);
        let mut answered = Vec::new();
        // Requests that the server has received get a reply; then the connection ends.
        let received = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            loop {
                let (cookie, got) = raw.answer(0);
                assert_eq!(got.error, 0);
                answered.push(cookie);
            }
        }));
        assert!(received.is_err());
        idle.assert_closed();
        silent.take(18);
        silent.assert_closed();
        assert_eq!(server.wait(), 0, "{}", server.log());
        assert!(!answered.is_empty());
        lab.qemu_img(&["check", "x.qcow2"]).ok("check");
        for n in answered {
            let read = format!("read -P {} {n}M 1M", n + 1);
            let answer = lab.qemu_io(&["-r", "-c", &read, "x.qcow2"]).ok("read");
            assert!(!answer.out.contains("failed"), "{n}: {answer:?}");
        }
    }
}

#[test]
fn a_second_server_of_an_image_is_refused() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 16M");
    let mut server = Server::start(&lab, &["-t", "x.qcow2"]);
    let other = lab.path("other.sock").display().to_string();
    let second = lab.zebu(&["nbd", "-k", &other, "x.qcow2"]);
    assert!(
        second.status == 1 && second.err.contains("lock"),
        "{second:?}"
    );
    assert!(!lab.path("other.sock").exists());
    let same = lab.zebu(&[
        "nbd",
        "-r",
        "-k",
        server.socket.to_str().unwrap(),
        "x.qcow2",
    ]);
    assert_eq!(same.status, 1);
    // The first server and its socket still work.
    drop(Raw::with_export(&server, "", Headers::Simple));
    server.stop();
    let mut again = Server::start(&lab, &["-t", "-r", "x.qcow2"]);
    let mut reader = Server::spawn(&lab, &["nbd", "-v", "-t", "-r", "-k", &other, "x.qcow2"]);
    wait_until("a second reader", || lab.path("other.sock").exists());
    reader.stop();
    again.stop();
}

#[test]
fn connections_and_statistics_are_logged() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 16M");
    let mut server = Server::start(&lab, &["-t", "--stats", "x.qcow2"]);
    let mut raw = Raw::with_export(&server, "", Headers::Structured);
    for n in 0..10 {
        raw.ask(
            &request(Command::Write, n, n * BLOCK, BLOCK),
            &[3; BLOCK as usize],
        );
    }
    raw.ask(&request(Command::Read, 1, 1 << 30, BLOCK), &[]);
    let lines = [
        "write: 10 requests, 40960 bytes, 0 failed",
        "read: 1 requests, 4096 bytes, 1 failed",
    ];
    let logged = |server: &Server| lines.iter().all(|line| server.log().contains(line));
    assert!(!logged(&server));
    server.signal("USR1");
    wait_until("statistics", || logged(&server));
    raw.send(&request(Command::Disconnect, 0, 0, 0));
    raw.assert_closed();
    wait_until("the end", || {
        server.log().contains("ended: the client disconnected")
    });
    assert!(server.log().contains("a local client connected"));
    server.stop();
    assert_eq!(server.log().matches("write: 10 requests").count(), 2);
    assert!(server.log().contains("l2 cache:"));
}

/// Regression: the server ended with a panic when its log could not be written, and waited for a full
/// pipe with statistics.
#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let full = std::fs::File::options().write(true).open("/dev/full");
    let (unread, blocked) = std::io::pipe().unwrap();
    let (_, broken) = std::io::pipe().unwrap();
    for log in [full.unwrap().into(), blocked.into(), Stdio::from(broken)] {
        let lab = Lab::new();
        lab.make("create x.qcow2 16M");
        let args = ["-t", "-e", "4", "--stats", "x.qcow2"];
        let mut server = Server::start_logging(&lab, &args, log);
        // More than there is room for in a pipe.
        for _ in 0..1000 {
            server.signal("USR1");
        }
        for n in 0..4 {
            let mut raw = Raw::with_export(&server, "", Headers::Structured);
            let write = request(Command::Write, n, n * BLOCK, BLOCK);
            raw.ask(&write, &[3; BLOCK as usize]);
        }
        server.stop();
        lab.qemu_io(&["-r", "-c", "read -P 3 0 16k", "x.qcow2"])
            .ok("acknowledged writes");
    }
    drop(unread);
}

#[test]
fn fork_returns_when_the_server_listens() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 16M");
    let socket = lab.path("nbd.sock").display().to_string();
    let pid_file = lab.path("pid");
    let pid_path = pid_file.display().to_string();
    let args = [
        "nbd",
        "-k",
        &socket,
        "-t",
        "--fork",
        "--pid-file",
        &pid_path,
        "x.qcow2",
    ];
    lab.zebu(&args).ok("--fork");
    let info = lab.zebu(&["nbd", "-L", "-k", &socket]).ok("-L");
    assert!(info.out.contains("size:  16777216"));
    let pid = std::fs::read_to_string(&pid_file).unwrap();
    let refused = lab.zebu(&["nbd", "-k", &socket, "--fork", "x.qcow2"]);
    assert!(
        refused.status == 1 && refused.err.contains("lock"),
        "{refused:?}"
    );
    let ended = Program::new("kill").arg(pid.trim()).status().unwrap();
    assert!(ended.success());
    wait_until("the daemon ends", || {
        !pid_file.exists() && !lab.path("nbd.sock").exists()
    });
}

#[test]
fn systemd_socket_activation() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 16M");
    let script = r#"
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind("nbd.sock")
s.listen(5)
os.dup2(s.fileno(), 3)
os.set_inheritable(3, True)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = "1"
os.execv(sys.argv[1], sys.argv[1:])
"#;
    let program = crate::common::program().display().to_string();
    if !crate::common::server::have("python3") {
        return;
    }
    let child = Program::new("python3")
        .args(["-c", script, &program, "nbd", "x.qcow2"])
        .current_dir(lab.path(""))
        .spawn();
    let mut child = child.unwrap();
    let socket = lab.path("nbd.sock").display().to_string();
    wait_until("the socket", || lab.path("nbd.sock").exists());
    // A list does not use an export, so the server does not end.
    let mut listed = String::new();
    wait_until("an answer", || {
        let answer = lab.zebu(&["nbd", "-L", "-k", &socket]);
        listed = answer.out;
        answer.status == 0
    });
    assert!(listed.contains("size:  16777216"));
    Program::new("kill")
        .arg(child.id().to_string())
        .status()
        .unwrap();
    wait_until("the end", || child.try_wait().unwrap().is_some());
}

#[test]
fn an_idle_server_sleeps() {
    if beyond_qemu("an NBD server") {
        return;
    }
    for aio in ["--aio=threads", "--aio=io_uring"] {
        let lab = Lab::new();
        lab.make("create x.qcow2 16M");
        let mut server = Server::start(&lab, &["-t", "-e", "4", aio, "x.qcow2"]);
        let mut raw = Raw::with_export(&server, "", Headers::Simple);
        raw.ask(&request(Command::Read, 0, 0, 4096), &[]);
        assert_sleeps(&server);
        drop(raw);
        server.stop();
    }
}
