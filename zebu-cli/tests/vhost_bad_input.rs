//! Guards against a vhost-user-blk server that a front end or a guest can
//! crash, hang, make read or write memory that is not the guest's, or make take
//! memory without bound; and against one that serves nobody else afterwards.

mod common;
#[path = "common/hostile_vhost.rs"]
mod hostile_vhost;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::server::{Server, wait_until};
use common::vhost::*;
use common::{Lab, PATIENCE, beyond_qemu};
use vm_memory::{Bytes, GuestAddress};
use zebu_vhost::front_end::{self, Disturb, INDIRECT, Machine, NEXT, Ring, Setup};

/// Memory of these tests' machines ends before this.
const NOWHERE: u64 = 1 << 40;

fn setup(without: u64) -> Setup {
    Setup {
        bytes: 1 << 20,
        slots: 16,
        without,
        ..Setup::default()
    }
}

/// What else there is must go on: another export, and the next front end.
#[track_caller]
fn still_serves(lab: &Lab, server: &Server) {
    let mut disk = Disk::new(lab, setup(0));
    assert_eq!(disk.give(WRITE, 8, &[9; 512]), OK, "{}", server.log());
    assert_eq!(disk.take(READ, 8, 512).unwrap(), [9; 512]);
    assert!(!server.log().contains("panicked"), "{}", server.log());
}

/// A descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);
/// The descriptor of a table at an address that has this number.
type Entry = fn(u64, u16) -> Descriptor;
/// Does something to a ring.
type Bad = fn(&mut Ring);

#[test]
fn chains_that_make_no_sense() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 64M");
    let mut server = serve(&lab, &["x.qcow2"]);
    for without in [0, 1 << FEATURE_INDIRECT] {
        let mut disk = Disk::new(&lab, setup(without));
        assert_eq!(disk.give(WRITE, 0, &[7; 4096]), OK);
        let (header, data, status) = {
            let ring = &disk.ring;
            (ring.header(0), ring.data(0), ring.status(0))
        };
        let write = front_end::WRITE;
        let first = (header, 16, NEXT, 1);
        let end = (status, 1, write, 0);
        // Descriptors from 0 on, what is asked for, and the status, if one can
        // be given: 0xff is what the guest has written there.
        let cases: &[(&str, &[Descriptor], u32, u8)] = &[
            (
                "it loops",
                &[first, (data, 512, write | NEXT, 1), end],
                READ,
                0xff,
            ),
            ("it loops to itself", &[(header, 16, NEXT, 0)], READ, 0xff),
            (
                "the next is outside",
                &[(header, 16, NEXT, 128)],
                READ,
                0xff,
            ),
            (
                "the next is far outside",
                &[(header, 16, NEXT, 0xffff)],
                READ,
                0xff,
            ),
            (
                "memory there is none",
                &[first, (NOWHERE, 512, write | NEXT, 2), end],
                READ,
                0xff,
            ),
            (
                "memory ends",
                &[first, (data, 1 << 30, write | NEXT, 2), end],
                READ,
                0xff,
            ),
            (
                "memory wraps",
                &[first, (u64::MAX - 100, 512, write | NEXT, 2), end],
                READ,
                0xff,
            ),
            (
                "the header is nowhere",
                &[(NOWHERE, 16, NEXT, 1), end],
                READ,
                0xff,
            ),
            (
                "the status is nowhere",
                &[first, (NOWHERE, 1, write, 0)],
                READ,
                0xff,
            ),
            ("no status", &[first, (data, 512, 0, 0)], WRITE, 0xff),
            ("nothing", &[(header, 0, 0, 0)], READ, 0xff),
            (
                "a status of no bytes",
                &[first, (status, 0, write, 0)],
                FLUSH,
                0xff,
            ),
            ("no header", &[end], READ, ERROR),
            ("half a header", &[(header, 15, NEXT, 1), end], READ, ERROR),
            ("an empty header", &[(header, 0, NEXT, 1), end], READ, ERROR),
            (
                "to read from behind",
                &[first, (status, 1, write | NEXT, 2), (data, 512, 0, 0)],
                WRITE,
                0xff,
            ),
            (
                "a table in no table",
                &[(NOWHERE, 32, INDIRECT, 0)],
                READ,
                0xff,
            ),
            (
                "a table of half a descriptor",
                &[(data, 24, INDIRECT, 0)],
                READ,
                0xff,
            ),
            ("an empty table", &[(data, 0, INDIRECT, 0)], READ, 0xff),
            (
                "a table and more",
                &[(data, 32, INDIRECT | NEXT, 1), end],
                READ,
                0xff,
            ),
            ("a huge table", &[(data, !15, INDIRECT, 0)], READ, 0xff),
            // Data of no bytes are no data; nothing is read then.
            (
                "no data",
                &[first, (data, 0, write | NEXT, 2), end],
                READ,
                OK,
            ),
            (
                "the header is written to",
                &[(header, 16, write | NEXT, 1), end],
                READ,
                ERROR,
            ),
        ];
        for (what, descriptors, kind, expected) in cases {
            disk.ring.set_header(0, *kind, 0);
            for (n, (address, length, flags, next)) in descriptors.iter().enumerate() {
                disk.ring
                    .set_descriptor(n as u16, *address, *length, *flags, *next);
            }
            disk.ring.offer(0);
            disk.ring.kick_anyway().unwrap();
            let written = disk.written(0);
            assert_eq!(disk.status(), *expected, "{what}");
            assert_eq!(written, u32::from(*expected != 0xff), "{what}");
            assert!(!disk.ring.is_broken(Duration::ZERO).unwrap(), "{what}");
            // The ring goes on.
            assert_eq!(disk.take(READ, 0, 4096).unwrap(), [7; 4096], "{what}");
        }
    }
    // Tables within tables, tables that loop, and more segments than there are.
    let mut disk = Disk::new(&lab, setup(0));
    let table = disk.ring.data(1);
    let length = 1 << 20;
    let tables: [(&str, Entry); 3] = [
        ("a table in a table", |table, _| (table, 32, INDIRECT, 0)),
        ("it loops", |table, n| {
            (table, 16, NEXT, n.wrapping_add(1) % 100)
        }),
        ("it is long", |table, n| (table, 1, NEXT, n.wrapping_add(1))),
    ];
    for (what, entry) in tables {
        for n in 0..length as u64 / 16 {
            let (address, length, flags, next) = entry(table, n as u16);
            disk.ring
                .put_descriptor(table + 16 * n, address, length, flags, next);
        }
        disk.ring.set_descriptor(0, table, length, INDIRECT, 0);
        disk.ring.offer(0);
        disk.ring.kick_anyway().unwrap();
        assert_eq!(disk.written(0), 0, "{what}");
        assert_eq!(disk.give(WRITE, 0, &[1; 512]), OK, "{what}");
    }
    drop(disk);
    still_serves(&lab, &server);
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
}

#[test]
fn the_same_memory_many_times() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 4G");
    // Compressed clusters take memory to read.
    let mut server = serve(&lab, &["--cache=none", "x.qcow2"]);
    let mut disk = Disk::new(&lab, setup(0));
    // Requests of 240 MiB, made of one MiB: too much, and just not too much;
    // none is aligned, so each goes through memory of the server.
    for (segments, expected) in [(200u64, ERROR), (63, OK)] {
        for slot in 0..16 {
            let (table, data) = (disk.ring.header(slot) + 128, disk.ring.data(0));
            disk.ring.set_header(slot, READ, 1);
            let header = disk.ring.header(slot);
            disk.ring.put_descriptor(table, header, 16, NEXT, 1);
            let write = front_end::WRITE;
            for n in 1..=segments {
                let at = table + 16 * n;
                let length = (1 << 20) - 512;
                disk.ring
                    .put_descriptor(at, data + 1, length, write | NEXT, n as u16 + 1);
            }
            let at = table + 16 * (segments + 1);
            disk.ring
                .put_descriptor(at, disk.ring.status(slot), 1, write, 0);
            let bytes = 16 * (segments as u32 + 2);
            disk.ring.set_descriptor(slot, table, bytes, INDIRECT, 0);
            disk.ring.offer(slot);
        }
        disk.ring.kick_anyway().unwrap();
        for _ in 0..16 {
            assert!(disk.ring.wait(PATIENCE).unwrap());
            assert_eq!(disk.ring.slot_answer().unwrap().1, expected);
        }
    }
    // Two requests' worth, and what a server takes anyway.
    let peak = server.peak_memory();
    assert!(peak < 250 << 20, "{peak}");
    drop(disk);
    still_serves(&lab, &server);
    server.stop();
}

#[test]
fn rings_that_make_no_sense() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 64M");
    let mut server = serve(&lab, &["x.qcow2"]);
    let bad: [(&str, Bad); 3] = [
        ("a descriptor that it does not have", |ring| ring.offer(128)),
        ("a descriptor far away", |ring| ring.offer(0xffff)),
        ("more requests than descriptors", |ring| {
            ring.set_available_index(1000)
        }),
    ];
    for (what, bad) in bad {
        let mut disk = Disk::new(&lab, setup(0));
        assert_eq!(disk.give(WRITE, 8, &[1; 512]), OK);
        bad(&mut disk.ring);
        disk.ring.kick_anyway().unwrap();
        assert!(disk.ring.is_broken(PATIENCE).unwrap(), "{what}");
        // It is stopped and started again, as a guest does that resets it.
        disk.connection.stop(&disk.ring).unwrap();
        disk.ring.reset();
        disk.connection.start(&disk.ring).unwrap();
        assert_eq!(disk.take(READ, 8, 512).unwrap(), [1; 512], "{what}");
    }
    // The same request over and over: no more than there are descriptors are
    // in flight.
    let mut disk = Disk::new(&lab, setup(0));
    for n in 0..200u16 {
        let room = |ring: &Ring| n - ring.used_index() < 128;
        wait_until("answers", || room(&disk.ring));
        disk.ring.request(0, READ, 0, (1 << 20, true), &[]);
        disk.ring.kick_anyway().unwrap();
    }
    wait_until("answers", || disk.ring.used_index() == 200);
    assert!(!disk.ring.is_broken(Duration::ZERO).unwrap());
    drop(disk);
    still_serves(&lab, &server);
    server.stop();
    let peak = server.log();
    assert!(peak.contains("a virtqueue is broken"), "{peak}");
}

#[test]
fn front_ends_that_make_no_sense() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 64M");
    let mut server = serve(&lab, &["x.qcow2"]);
    // Bytes at random, and half a message.
    for (n, length) in [1usize, 7, 12, 100, 5000].into_iter().enumerate() {
        let mut stream = UnixStream::connect(socket(&lab)).unwrap();
        let bytes: Vec<u8> = (0..length).map(|k| (k * 31 + n * 7) as u8).collect();
        let _ = stream.write_all(&bytes);
        drop(stream);
        still_serves(&lab, &server);
    }
    // What is wrong is refused, and ends the connection.
    let wrong: [(&str, Disturb); 10] = [
        ("a ring outside of memory", Disturb::RingAt(NOWHERE)),
        ("a ring at the end of memory", Disturb::RingAtEnd),
        ("a ring that is not aligned", Disturb::RingAt(0x1001)),
        ("a ring of no descriptors", Disturb::Size(0)),
        ("a ring of three descriptors", Disturb::Size(3)),
        ("a ring of many descriptors", Disturb::Size(32768)),
        ("a ring that there is not", Disturb::Index),
        ("features that there are not", Disturb::Features),
        (
            "memory behind the end of its file",
            Disturb::MemoryBehindEnd,
        ),
        ("memory twice", Disturb::MemoryTwice),
    ];
    for (what, disturb) in wrong {
        let mut machine = Machine::new(setup(0)).unwrap();
        assert!(machine.disturb(&socket(&lab), disturb).is_err(), "{what}");
        still_serves(&lab, &server);
    }
    // Memory for requests in flight that is too small.
    let mut machine = Machine::new(setup(0)).unwrap();
    assert!(machine.disturb(&socket(&lab), Disturb::Inflight).is_err());
    still_serves(&lab, &server);
    // Many that come and go, and one that goes in the middle of everything.
    for _ in 0..1000 {
        drop(UnixStream::connect(socket(&lab)).unwrap());
    }
    for _ in 0..20 {
        let mut disk = Disk::new(&lab, setup(0));
        for slot in 0..16 {
            disk.ring.request(slot, WRITE, 0, (1 << 20, false), &[]);
        }
        disk.ring.kick_anyway().unwrap();
    }
    still_serves(&lab, &server);
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
    let count = descriptors.count();
    assert!(count < 40, "{count} descriptors are open");
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    assert!(threads.count() < 40);
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
}

#[test]
fn kicks_that_are_no_events() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 64M");
    let mut server = serve(&lab, &["x.qcow2"]);
    let mut machine = Machine::new(setup(0)).unwrap();
    let mut connection = machine.connect(&socket(&lab)).unwrap();
    let ring = machine.ring(0).unwrap();
    connection.start(&ring).unwrap();
    // A socket whose other end is gone is readable for ever.
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    connection.kick_by(&ring, theirs.into()).unwrap();
    assert!(ring.is_broken(PATIENCE).unwrap());
    // A guest's own counter at its end does not hold the server up.
    drop(connection);
    let mut disk = Disk::new(&lab, setup(0));
    disk.ring.fill_call().unwrap();
    disk.ring.request(0, READ, 0, (512, true), &[]);
    disk.ring.kick_anyway().unwrap();
    wait_until("an answer", || disk.ring.used_index() == 1);
    let status: u8 = {
        let at = GuestAddress(disk.ring.status(0));
        disk.machine.memory().read_obj(at).unwrap()
    };
    assert_eq!(status, OK);
    drop(disk);
    still_serves(&lab, &server);
    server.stop();
}

#[test]
fn any_bytes_are_survived() {
    let runs = std::env::var("ZEBU_HOSTILE_RUNS").map_or(300, |n| n.parse().expect("a number"));
    let mut served = hostile_vhost::Served::new();
    let mut state = 1u64;
    let mut byte = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    for run in 0..runs {
        let length = 20 + 2 * usize::from(byte());
        let mut bytes: Vec<u8> = (0..length).map(|_| byte()).collect();
        bytes[0] = (run % 2) as u8;
        // Shown if this panics.
        println!("{run}");
        served.exercise(&bytes);
    }
    println!("cases: {runs} scripts of bytes");
}
