//! Invalid messages of front ends and invalid rings of guests. The vhost-user-blk server must not
//! panic, hang, access memory that is not the guest's, or take unbounded memory, and must go on
//! serving other front ends.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::common::hostile_vhost;
use crate::common::server::{Server, wait_until};
use crate::common::vhost::*;
use crate::common::{Lab, Rng, TIME_LIMIT, beyond_qemu, cases};
use vm_memory::{Bytes, GuestAddress};
use zebu_vhost::front_end::{self, Disturb, INDIRECT, Machine, NEXT, Ring, Setup};

/// An address past the end of the guest's memory.
const NOWHERE: u64 = 1 << 40;

fn setup(without: u64) -> Setup {
    Setup {
        bytes: 1 << 20,
        slots: 16,
        without,
        ..Setup::default()
    }
}

/// Fails the test unless the server serves the next front end.
#[track_caller]
fn assert_serves(lab: &Lab, server: &Server) {
    let mut disk = Disk::new(lab, setup(0));
    assert_eq!(disk.give(WRITE, 8, &[9; 512]), OK, "{}", server.log());
    assert_eq!(disk.take(READ, 8, 512).unwrap(), [9; 512]);
    assert!(!server.log().contains("panicked"), "{}", server.log());
}

/// A descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);
/// Makes descriptor number n of a table at an address.
type Entry = fn(u64, u16) -> Descriptor;
/// Makes a ring invalid.
type Bad = fn(&mut Ring);

#[test]
fn invalid_descriptor_chains() {
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
        // Name, descriptors from number 0 on, type of the request, and expected status: 0xff is the
        // guest's value, if the server cannot write a status.
        let cases: &[(&str, &[Descriptor], u32, u8)] = &[
            (
                "a loop",
                &[first, (data, 512, write | NEXT, 1), end],
                READ,
                0xff,
            ),
            (
                "a descriptor that is its own next",
                &[(header, 16, NEXT, 0)],
                READ,
                0xff,
            ),
            (
                "a next outside of the table",
                &[(header, 16, NEXT, 128)],
                READ,
                0xff,
            ),
            (
                "a next far outside of the table",
                &[(header, 16, NEXT, 0xffff)],
                READ,
                0xff,
            ),
            (
                "no memory at the address",
                &[first, (NOWHERE, 512, write | NEXT, 2), end],
                READ,
                0xff,
            ),
            (
                "a range past the end of memory",
                &[first, (data, 1 << 30, write | NEXT, 2), end],
                READ,
                0xff,
            ),
            (
                "a range that wraps around",
                &[first, (u64::MAX - 100, 512, write | NEXT, 2), end],
                READ,
                0xff,
            ),
            (
                "a header outside of memory",
                &[(NOWHERE, 16, NEXT, 1), end],
                READ,
                0xff,
            ),
            (
                "a status outside of memory",
                &[first, (NOWHERE, 1, write, 0)],
                READ,
                0xff,
            ),
            ("no status", &[first, (data, 512, 0, 0)], WRITE, 0xff),
            ("one empty descriptor", &[(header, 0, 0, 0)], READ, 0xff),
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
                "a readable descriptor after a writable one",
                &[first, (status, 1, write | NEXT, 2), (data, 512, 0, 0)],
                WRITE,
                0xff,
            ),
            (
                "a table outside of memory",
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
                "a table with a next descriptor",
                &[(data, 32, INDIRECT | NEXT, 1), end],
                READ,
                0xff,
            ),
            ("a huge table", &[(data, !15, INDIRECT, 0)], READ, 0xff),
            // A read of no bytes.
            (
                "no data",
                &[first, (data, 0, write | NEXT, 2), end],
                READ,
                OK,
            ),
            (
                "a writable header",
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
            // The ring still works.
            assert_eq!(disk.take(READ, 0, 4096).unwrap(), [7; 4096], "{what}");
        }
    }
    // Nested tables, tables with loops, and chains longer than allowed.
    let mut disk = Disk::new(&lab, setup(0));
    let table = disk.ring.data(1);
    let length = 1 << 20;
    let tables: [(&str, Entry); 3] = [
        ("a table in a table", |table, _| (table, 32, INDIRECT, 0)),
        ("a loop", |table, n| {
            (table, 16, NEXT, n.wrapping_add(1) % 100)
        }),
        ("a long chain", |table, n| {
            (table, 1, NEXT, n.wrapping_add(1))
        }),
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
    assert_serves(&lab, &server);
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
}

#[test]
fn memory_of_large_requests_is_bounded() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 4G");
    // Compressed clusters take memory to read.
    let mut server = serve(&lab, &["--cache=none", "x.qcow2"]);
    let mut disk = Disk::new(&lab, setup(0));
    // Requests of about 200 MiB, above the limit, and of 63 MiB, below it, all to the same MiB of the
    // guest. They are not aligned, so the server needs bounce buffers.
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
            assert!(disk.ring.wait(TIME_LIMIT).unwrap());
            assert_eq!(disk.ring.slot_answer().unwrap().1, expected);
        }
    }
    // The memory of two requests, and of an idle server.
    let peak = server.peak_memory();
    assert!(peak < 250 << 20, "{peak}");
    drop(disk);
    assert_serves(&lab, &server);
    server.stop();
}

#[test]
fn invalid_rings() {
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
        assert!(disk.ring.is_broken(TIME_LIMIT).unwrap(), "{what}");
        // The ring is reset, stopped and started again.
        disk.connection.stop(&disk.ring).unwrap();
        disk.ring.reset();
        disk.connection.start(&disk.ring).unwrap();
        assert_eq!(disk.take(READ, 8, 512).unwrap(), [1; 512], "{what}");
    }
    // The same request many times, with at most as many in flight as there are descriptors.
    let mut disk = Disk::new(&lab, setup(0));
    for n in 0..200u16 {
        let has_free_slot = |ring: &Ring| n - ring.used_index() < 128;
        wait_until("answers", || has_free_slot(&disk.ring));
        disk.ring.request(0, READ, 0, (1 << 20, true), &[]);
        disk.ring.kick_anyway().unwrap();
    }
    wait_until("answers", || disk.ring.used_index() == 200);
    assert!(!disk.ring.is_broken(Duration::ZERO).unwrap());
    drop(disk);
    assert_serves(&lab, &server);
    server.stop();
    let log = server.log();
    assert!(log.contains("a virtqueue is broken"), "{log}");
}

#[test]
fn invalid_front_end_messages() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 64M");
    let mut server = serve(&lab, &["x.qcow2"]);
    // Arbitrary bytes, and incomplete messages.
    for (n, length) in [1usize, 7, 12, 100, 5000].into_iter().enumerate() {
        let mut stream = UnixStream::connect(socket(&lab)).unwrap();
        let bytes: Vec<u8> = (0..length).map(|k| (k * 31 + n * 7) as u8).collect();
        let _ = stream.write_all(&bytes);
        drop(stream);
        assert_serves(&lab, &server);
    }
    // Invalid requests end the connection.
    let wrong: [(&str, Disturb); 10] = [
        ("a ring outside of memory", Disturb::RingAt(NOWHERE)),
        ("a ring at the end of memory", Disturb::RingAtEnd),
        ("a ring that is not aligned", Disturb::RingAt(0x1001)),
        ("a ring of no descriptors", Disturb::Size(0)),
        ("a ring of three descriptors", Disturb::Size(3)),
        ("a ring of many descriptors", Disturb::Size(32768)),
        ("a ring with an invalid index", Disturb::Index),
        ("unknown features", Disturb::Features),
        ("memory past the end of its file", Disturb::MemoryBehindEnd),
        ("overlapping memory regions", Disturb::MemoryTwice),
    ];
    for (what, disturb) in wrong {
        let mut machine = Machine::new(setup(0)).unwrap();
        assert!(machine.disturb(&socket(&lab), disturb).is_err(), "{what}");
        assert_serves(&lab, &server);
    }
    // An inflight buffer that is too small.
    let mut machine = Machine::new(setup(0)).unwrap();
    assert!(machine.disturb(&socket(&lab), Disturb::Inflight).is_err());
    assert_serves(&lab, &server);
    // Many short connections, and some that end with requests in flight.
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
    assert_serves(&lab, &server);
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
    let count = descriptors.count();
    assert!(count < 40, "{count} descriptors are open");
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    assert!(threads.count() < 40);
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
}

#[test]
fn kick_descriptors_that_are_no_eventfds() {
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
    // A socket whose peer is closed is always readable.
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    connection.kick_by(&ring, theirs.into()).unwrap();
    assert!(ring.is_broken(TIME_LIMIT).unwrap());
    // A call eventfd at its maximum must not block the server.
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
    assert_serves(&lab, &server);
    server.stop();
}

#[test]
fn any_bytes_from_a_front_end_or_guest() {
    let mut served = hostile_vhost::Served::new();
    for run in cases(300, "scripts of bytes") {
        let mut rng = Rng::new(run);
        let mut byte = || rng.below(256) as u8;
        let length = 20 + 2 * usize::from(byte());
        let mut bytes: Vec<u8> = (0..length).map(|_| byte()).collect();
        bytes[0] = (run % 2) as u8;
        // Printed if this panics.
        println!("{run}");
        served.exercise(&bytes);
    }
}
