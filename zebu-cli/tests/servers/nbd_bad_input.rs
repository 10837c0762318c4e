//! Invalid messages to the NBD server. The server must reply with the protocol's error or close that
//! connection, go on serving other clients, and use bounded memory.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use crate::common::server::{Raw, Server, wait_until};
use crate::common::{Lab, beyond_qemu};
use zebu::internal::nbd::{
    Command, ErrorCode, Go, Headers, MAX_PAYLOAD, OptionKind, OptionReplyKind, Request,
    StatusFilter, command,
};

const SIZE: u64 = 16 << 20;
const ALL: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];

fn served(lab: &Lab) -> Server {
    lab.make("create x.qcow2 16M; io x.qcow2: write -P 7 0 8M");
    Server::start(lab, &["-t", "-e", "0", "x.qcow2"])
}

fn request(command: Command, offset: u64, length: u64) -> Request {
    Request {
        command,
        flags: 0,
        cookie: 42,
        offset,
        length,
    }
}

/// Fails the test unless the server serves a new client.
#[track_caller]
fn assert_alive(server: &Server) {
    let mut raw = Raw::with_export(server, "", Headers::Simple);
    let got = raw.ask(&request(Command::Read, 0, 3), &[]);
    assert_eq!((got.error, got.pieces), (0, vec![(0, vec![7; 3])]));
}

#[test]
fn invalid_negotiations() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    let mut server = served(&lab);
    // Unknown flags.
    let mut raw = Raw::connect(&server);
    raw.take(18);
    raw.put(&[0xff; 4]);
    raw.assert_closed();
    // Not an option.
    let mut raw = Raw::new(&server);
    raw.put(&[0x11; 16]);
    raw.assert_closed();
    // A payload that is too long is skipped; a much longer one closes the connection.
    let mut raw = Raw::new(&server);
    let long = vec![0; 1 << 20];
    assert_eq!(
        raw.option(OptionKind::Go, &long).0,
        OptionReplyKind::ErrTooBig
    );
    let mut header = b"IHAVEOPT\0\0\0\x07".to_vec();
    header.extend([0xff; 4]);
    raw.put(&header);
    raw.assert_closed();
    // Options that are unknown or invalid at this point get a reply, and the connection goes on.
    let mut raw = Raw::new(&server);
    let unsup = OptionReplyKind::ErrUnsup;
    assert_eq!(raw.option(OptionKind::Other(99), b"abc").0, unsup);
    let invalid = OptionReplyKind::ErrInvalid;
    for (kind, payload) in [
        (OptionKind::Go, &b""[..]),
        (OptionKind::Go, b"\0\0\0\xffx\0\0"),
        (OptionKind::Info, b"\xff\xff\xff\xff\0\0"),
        (OptionKind::Go, b"\0\0\0\x01\xff\0\0"),
        (OptionKind::SetMetaContext, b"\0\0\0\0\0\0\0\0"),
        (OptionKind::List, b"x"),
        (OptionKind::StructuredReply, b"x"),
        (OptionKind::ExtendedHeaders, b"x"),
    ] {
        assert_eq!(raw.option(kind, payload).0, invalid, "{kind:?} {payload:?}");
    }
    assert_eq!(
        raw.option(OptionKind::StartTls, b"").0,
        OptionReplyKind::ErrPolicy
    );
    raw.option(OptionKind::StructuredReply, b"");
    for payload in [
        &b"\0\0\0\0\xff\xff\xff\xff"[..],
        b"\0\0\0\0\0\0\0\x01\0\0\0\x05base",
    ] {
        assert_eq!(raw.option(OptionKind::SetMetaContext, payload).0, invalid);
    }
    let missing = Go {
        name: "nothing".into(),
        wanted: vec![],
    };
    let unknown = OptionReplyKind::ErrUnknown;
    assert_eq!(raw.option(OptionKind::Go, &missing.encode()).0, unknown);
    assert_eq!(raw.option(OptionKind::List, b"").1.len(), 1);
    assert_eq!(raw.option(OptionKind::Abort, b"").0, OptionReplyKind::Ack);
    raw.assert_closed();
    // NBD_OPT_EXPORT_NAME has no error reply: a missing export closes the connection.
    let mut raw = Raw::new(&server);
    raw.put(&zebu::internal::nbd::encode_option(
        OptionKind::ExportName,
        b"nothing",
    ));
    raw.assert_closed();
    let mut raw = Raw::new(&server);
    raw.put(&zebu::internal::nbd::encode_option(
        OptionKind::ExportName,
        b"",
    ));
    assert_eq!(raw.take(8), SIZE.to_be_bytes());
    raw.take(2);
    let got = raw.ask(&request(Command::Read, 8 << 20, 1), &[]);
    assert_eq!(got.pieces, [(0, vec![0])]);
    assert_alive(&server);
    server.stop();
}

#[test]
fn invalid_requests() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    let mut server = served(&lab);
    let max = u64::from(MAX_PAYLOAD);
    for headers in ALL {
        let mut raw = Raw::with_export(&server, "", headers);
        let inval = ErrorCode::Inval as u32;
        let nospc = ErrorCode::NoSpc as u32;
        for (request, error) in [
            (request(Command::Read, 0, max + 1), inval),
            (request(Command::Read, SIZE, 1), inval),
            (request(Command::Read, SIZE - 1, 2), inval),
            (request(Command::Read, u64::MAX, 2), inval),
            (request(Command::WriteZeroes, SIZE - 1, 2), nospc),
            (request(Command::Trim, u64::MAX - 5, 10), inval),
            (request(Command::Cache, SIZE, 10), inval),
            (request(Command::BlockStatus, 0, SIZE + 1), inval),
            (request(Command::Other(77), 0, 10), inval),
            (request(Command::Resize, 0, SIZE), inval),
            (
                Request {
                    flags: 0x8000,
                    ..request(Command::Read, 0, 1)
                },
                inval,
            ),
            (
                Request {
                    flags: command::FAST_ZERO,
                    ..request(Command::Trim, 0, 1)
                },
                inval,
            ),
        ] {
            let got = raw.ask(&request, &[]);
            assert_eq!(got.error, error, "{headers:?} {request:?}");
            assert!(got.pieces.is_empty());
        }
        // Payloads of invalid writes are skipped.
        let write = request(Command::Write, SIZE - 1, 2);
        assert_eq!(raw.ask(&write, b"ab").error, nospc);
        let write = request(Command::Write, 0, max + 1);
        assert_eq!(raw.ask(&write, &vec![1; max as usize + 1]).error, inval);
        // Requests of no bytes are valid.
        assert_eq!(raw.ask(&request(Command::Read, SIZE, 0), &[]).error, 0);
        assert_eq!(raw.ask(&request(Command::Write, SIZE, 0), &[]).error, 0);
        let got = raw.ask(&request(Command::Read, 1, 2), &[]);
        assert_eq!((got.error, got.pieces.len()), (0, 1));
        // Not a request.
        raw.put(&[0; 64]);
        raw.assert_closed();
    }
    // Payloads that need extended headers.
    let mut raw = Raw::with_export(&server, "", Headers::Extended);
    let filter = |contexts: Vec<u32>| StatusFilter {
        length: 4096,
        contexts,
    };
    for (filter, error) in [
        (filter(vec![0]), 0),
        (filter(vec![9]), 22),
        (filter(vec![0, 0]), 22),
    ] {
        let payload = filter.encode();
        let status = Request {
            flags: command::PAYLOAD_LEN,
            ..request(Command::BlockStatus, 0, payload.len() as u64)
        };
        assert_eq!(raw.ask(&status, &payload).error, error, "{filter:?}");
    }
    let strange = Request {
        flags: command::PAYLOAD_LEN,
        ..request(Command::Trim, 0, 100)
    };
    assert_eq!(raw.ask(&strange, &[1; 100]).error, 22);
    raw.send(&Request {
        flags: command::PAYLOAD_LEN,
        ..request(Command::Write, 0, 1 << 50)
    });
    raw.assert_closed();
    assert_alive(&server);
    server.stop();
}

#[test]
fn clients_that_disconnect_within_a_message() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    let mut server = served(&lab);
    for headers in ALL {
        for bytes in [0, 1, 27, 28, 100, 70_000] {
            let mut raw = Raw::with_export(&server, "", headers);
            let mut sent = Vec::new();
            request(Command::Write, 9 << 20, 100_000).encode(headers, &mut sent);
            sent.extend([9; 100_000]);
            raw.put(&sent[..bytes]);
            let reads: Vec<_> = (0..50)
                .map(|n| request(Command::Read, n << 16, 1 << 16))
                .collect();
            if bytes == 0 {
                reads.iter().for_each(|read| raw.send(read));
            }
            drop(raw);
        }
        // A part of the greeting, and of an option.
        drop(Raw::connect(&server));
        let mut raw = Raw::new(&server);
        raw.put(b"IHAVE");
    }
    // A client that only shuts down its sending side gets its replies.
    let mut raw = Raw::with_export(&server, "", Headers::Simple);
    raw.send(&request(Command::Read, 0, 5));
    raw.stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(raw.answer(5).1.pieces[0].1, [7; 5]);
    raw.assert_closed();
    assert_alive(&server);
    // No incomplete write was executed.
    let mut raw = Raw::with_export(&server, "", Headers::Simple);
    let got = raw.ask(&request(Command::Read, 9 << 20, 100_000), &[]);
    assert!(got.pieces[0].1.iter().all(|byte| *byte == 0));
    server.stop();
}

#[test]
fn a_client_that_does_not_read_replies_does_not_block_others() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    let mut server = served(&lab);
    for headers in ALL {
        let mut raw = Raw::with_export(&server, "", headers);
        raw.stream.set_nonblocking(true).unwrap();
        // Requests for 16 GiB of replies.
        let mut sent = Vec::new();
        for cookie in 0..4096 {
            let read = Request {
                cookie,
                ..request(Command::Read, 0, 4 << 20)
            };
            read.encode(headers, &mut sent);
        }
        let _ = raw.stream.write(&sent);
        std::thread::sleep(Duration::from_millis(300));
        assert_alive(&server);
        let memory = server.peak_memory();
        assert!(memory < 400 << 20, "{} MiB", memory >> 20);
        // The client begins to read again.
        raw.stream.set_nonblocking(false).unwrap();
        let got = raw.answer(4 << 20).1;
        assert!(got.error == 0 && got.pieces[0].1.len() == 4 << 20);
    }
    server.stop();
}

#[test]
fn stalled_clients_leave_memory_for_others() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 64M; io x.qcow2: write -P 7 0 8M");
    let mut server = Server::start(&lab, &["-t", "-e", "64", "x.qcow2"]);
    // Each sends the header of the largest write and no payload: in sum as much memory as all
    // connections may have.
    let mut stalled: Vec<Raw> = (0..40)
        .map(|_| {
            let mut raw = Raw::with_export(&server, "", Headers::Simple);
            raw.send(&request(Command::Write, 0, MAX_PAYLOAD.into()));
            raw.put(&[7]);
            raw
        })
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    // Another client still gets 1/64 GiB, in one request or in many.
    let mut raw = Raw::with_export(&server, "", Headers::Simple);
    let write = request(Command::Write, 0, 16 << 20);
    assert_eq!(raw.ask(&write, &vec![7; 16 << 20]).error, 0);
    for _ in 0..32 {
        raw.send(&request(Command::Read, 1 << 20, 1 << 20));
    }
    for _ in 0..32 {
        let (_, got) = raw.answer(1 << 20);
        assert_eq!((got.error, got.pieces[0].1.len()), (0, 1 << 20));
    }
    // A stalled client can continue.
    let first = &mut stalled[0];
    first.put(&vec![7; MAX_PAYLOAD as usize - 1]);
    assert_eq!(first.answer(0).1.error, 0);
    drop(stalled);
    assert_alive(&server);
    server.stop();
}

#[test]
#[ignore = "takes a GiB of memory"]
fn memory_for_unread_replies_is_bounded() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    let mut server = served(&lab);
    server.most_memory = 3 << 30;
    // Requests for 2.5 GiB of replies, if each had the memory of a single client.
    let mut unread: Vec<Raw> = (0..40)
        .map(|_| {
            let mut raw = Raw::with_export(&server, "", Headers::Structured);
            for n in 0..16 {
                raw.send(&request(Command::Read, n % 2, 4 << 20));
            }
            raw
        })
        .collect();
    wait_until("memory is taken", || server.peak_memory() > 900 << 20);
    std::thread::sleep(Duration::from_millis(500));
    // Another client is served within its share, and gets ENOMEM above it.
    let mut raw = Raw::with_export(&server, "", Headers::Structured);
    let got = raw.ask(&request(Command::Read, 0, 1 << 20), &[]);
    assert_eq!((got.error, got.pieces[0].1.len()), (0, 1 << 20));
    let no_memory = ErrorCode::NoMem as u32;
    assert_eq!(
        raw.ask(&request(Command::Read, 0, 8 << 20), &[]).error,
        no_memory
    );
    let write = request(Command::Write, 0, 2 << 20);
    assert_eq!(raw.ask(&write, &vec![9; 2 << 20]).error, no_memory);
    assert_alive(&server);
    let memory = server.peak_memory();
    assert!(memory < 1400 << 20, "{} MiB", memory >> 20);
    // When some clients disconnect, memory is available again.
    unread.truncate(5);
    let got = raw.ask(&request(Command::Read, 0, 8 << 20), &[]);
    assert_eq!(got.error, 0);
    drop(unread);
    server.stop();
}

#[test]
fn ten_thousand_connections() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 16M; io x.qcow2: write -P 7 0 8M");
    let mut server = Server::start(&lab, &["-t", "-e", "0", "x.qcow2"]);
    let mut other = Raw::with_export(&server, "", Headers::Structured);
    let before = server.peak_memory();
    for n in 0..10_000 {
        match n % 100 {
            0 => drop(Raw::with_export(&server, "", Headers::Extended)),
            1..50 => drop(Raw::connect(&server)),
            _ => {
                let mut raw = Raw::connect(&server);
                let _ = raw.stream.read(&mut [0; 18]);
            }
        }
    }
    let got = other.ask(&request(Command::Read, 0, 1), &[]);
    assert_eq!(got.pieces, [(0, vec![7])]);
    let threads = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid()));
        tasks.unwrap().count()
    };
    wait_until("threads of ended connections end", || threads() < 10);
    let files = std::fs::read_dir(format!("/proc/{}/fd", server.pid()));
    assert!(files.unwrap().count() < 40);
    let grown = server.peak_memory() - before;
    assert!(grown < 200 << 20, "{} MiB", grown >> 20);
    drop(other);
    server.stop();
}

#[test]
fn silent_clients_are_disconnected() {
    if beyond_qemu("an NBD server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 16M; io x.qcow2: write -P 7 0 8M");
    let args = ["-t", "-e", "2", "--handshake-limit=1", "x.qcow2"];
    let mut server = Server::start(&lab, &args);
    // Two silent clients are all that the server accepts.
    let mut silent = [Raw::connect(&server), Raw::connect(&server)];
    for raw in &mut silent {
        raw.take(18);
        raw.assert_closed();
    }
    // After the negotiation a client may be silent for longer.
    let mut raw = Raw::with_export(&server, "", Headers::Simple);
    std::thread::sleep(Duration::from_millis(1500));
    let got = raw.ask(&request(Command::Read, 0, 1), &[]);
    assert_eq!(got.pieces, [(0, vec![7])]);
    drop(raw);
    server.stop();
}
