//! The vhost-user-blk server: data of all requests, flushed data after SIGKILL, requests in flight
//! that the next server executes, read-only images, options.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::server::{assert_sleeps, wait_until};
use crate::common::vhost::*;
use crate::common::{Lab, Rng, TIME_LIMIT, beyond_qemu};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zebu_vhost::front_end::{Connection, Machine, Ring, Setup};

const MIB: usize = 1 << 20;
/// The size of a block of the disk.
const BLOCK: usize = 512;

/// The image's content as read by QEMU, which must find no errors.
#[track_caller]
fn content(lab: &Lab, image: &str) -> Vec<u8> {
    if image.ends_with("qcow2") {
        lab.qemu_img(&["check", image]).ok("check");
    }
    lab.qemu_img(&["convert", "-O", "raw", image, "content"])
        .ok("convert");
    fs::read(lab.path("content")).unwrap()
}

/// The mask of these features, which the front end does not accept.
fn without(numbers: &[u32]) -> u64 {
    numbers.iter().map(|number| 1 << number).sum()
}

#[test]
fn every_request_with_every_ring_feature() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let rings = [
        without(&[]),
        without(&[FEATURE_INDIRECT]),
        without(&[FEATURE_EVENT_INDEX]),
        without(&[FEATURE_INDIRECT, FEATURE_EVENT_INDEX]),
    ];
    let options: [&[&str]; 3] = [
        &["--aio=io_uring", "--poll-max-ns=1000000"],
        &["--aio=threads", "--cache=none", "--poll-max-ns=0"],
        &["--aio=native", "--cache=none"],
    ];
    for (number, without) in rings.into_iter().enumerate() {
        let lab = Lab::new();
        lab.make("create x.qcow2 64M");
        let mut args = options[number % options.len()].to_vec();
        args.extend([
            "--discard=unmap",
            "-x",
            "a-name-that-is-more-than-20-bytes",
            "x.qcow2",
        ]);
        let mut server = serve(&lab, &args);
        let mut disk = Disk::new(
            &lab,
            Setup {
                without,
                bytes: MIB as u64,
                ..Setup::default()
            },
        );
        let config = disk.connection.config(0, 60).unwrap();
        assert_eq!(config[..8], (64 * MIB as u64 / 512).to_le_bytes());
        assert_eq!(config[20..24], 512u32.to_le_bytes());
        // Discards are aligned to a cluster.
        assert_eq!(config[44..48], 128u32.to_le_bytes());
        assert_eq!(disk.connection.queues().unwrap(), 1);

        let noise: Vec<u8> = (0..MIB).map(|n| (n * 7 + n / 251) as u8).collect();
        let mut model = vec![0; 64 * MIB];
        for (sector, length) in [(0, MIB), (1, 512), (5000, 4096 + 512), (131_071, 512)] {
            assert_eq!(disk.give(WRITE, sector, &noise[..length]), OK);
            let at = sector as usize * 512;
            model[at..at + length].copy_from_slice(&noise[..length]);
        }
        assert_eq!(disk.give(FLUSH, 0, &[]), OK);
        for (sector, length) in [(0, MIB), (2047, 1024), (40_000, 4096), (131_064, 4096)] {
            let at = sector as usize * 512;
            let read = disk.take(READ, sector, length).unwrap();
            assert!(read == model[at..at + length], "{sector}");
        }
        let zeroes = [range(8, 8, 0), range(256, 512, 1)].concat();
        assert_eq!(disk.give(WRITE_ZEROES, 0, &zeroes), OK);
        model[8 * 512..16 * 512].fill(0);
        model[256 * 512..768 * 512].fill(0);
        // A whole cluster reads as zeroes; a part of one stays.
        let discards = [range(1024, 128, 0), range(5000, 1, 0)].concat();
        assert_eq!(disk.give(DISCARD, 0, &discards), OK);
        model[1024 * 512..1152 * 512].fill(0);
        assert!(disk.take(READ, 0, MIB).unwrap() == model[..MIB]);
        let id = disk.take(GET_ID, 0, 20).unwrap();
        assert_eq!(id, b"a-name-that-is-more-");

        // Invalid requests.
        assert_eq!(disk.take(READ, 131_072, 512), Err(ERROR));
        assert_eq!(disk.take(READ, 131_071, 1024), Err(ERROR));
        assert_eq!(disk.take(READ, u64::MAX, 512), Err(ERROR));
        assert_eq!(disk.take(READ, u64::MAX / 512, 512), Err(ERROR));
        assert_eq!(disk.take(READ, 0, 511), Err(ERROR));
        assert_eq!(disk.give(WRITE, 131_071, &noise[..1024]), ERROR);
        assert_eq!(disk.give(WRITE, 0, &noise[..100]), ERROR);
        assert_eq!(disk.give(DISCARD, 0, &range(0, 8, 1)), UNSUPPORTED);
        assert_eq!(disk.give(WRITE_ZEROES, 0, &range(0, 8, 2)), UNSUPPORTED);
        assert_eq!(disk.give(WRITE_ZEROES, 0, &range(131_071, 2, 0)), ERROR);
        assert_eq!(disk.give(WRITE_ZEROES, 0, &range(0, u32::MAX, 0)), ERROR);
        assert_eq!(disk.give(DISCARD, 0, &range(0, 8, 0)[..15]), ERROR);
        assert_eq!(disk.give(DISCARD, 0, &range(0, 8, 0).repeat(33)), ERROR);
        // One invalid range: nothing is executed.
        let half = [range(0, 8, 0), range(u64::MAX, 1, 0)].concat();
        assert_eq!(disk.give(WRITE_ZEROES, 0, &half), ERROR);
        assert_eq!(disk.give(77, 0, &[]), UNSUPPORTED);
        assert!(disk.take(READ, 0, MIB).unwrap() == model[..MIB]);

        assert_eq!(
            disk.connection.stop(&disk.ring).unwrap(),
            u32::from(disk.ring.used_index())
        );
        server.stop();
        assert!(content(&lab, "x.qcow2") == model);
    }
}

/// The guest's driver of one virtqueue, and a model of its data. Of `share` drivers, each uses its own
/// runs of 64 blocks.
struct Driver<'a> {
    ring: Ring,
    memory: &'a GuestMemoryMmap<()>,
    random: Rng,
    disk: usize,
    /// The number of this driver, and the number of drivers.
    share: (usize, usize),
    /// The content of the disk; only the own runs are right.
    model: Vec<u8>,
    /// The request in flight of each slot.
    slots: Vec<Option<InFlight>>,
    completed: usize,
}

#[derive(Clone, Debug)]
enum InFlight {
    Read(usize, usize),
    Write(usize, Vec<u8>),
    Zero(usize, usize),
    Flush,
}

impl InFlight {
    fn range(&self) -> (usize, usize) {
        match self {
            InFlight::Read(at, length) | InFlight::Zero(at, length) => (*at, *length),
            InFlight::Write(at, bytes) => (*at, bytes.len()),
            InFlight::Flush => (0, 0),
        }
    }
}

const RUN: usize = 64 * BLOCK;

impl<'a> Driver<'a> {
    fn new(machine: &'a Machine, index: u16, disk: &[u8], share: usize, slots: usize) -> Self {
        Driver {
            ring: machine.ring(index).unwrap(),
            memory: machine.memory(),
            random: Rng::new(u64::from(index) + 1),
            disk: disk.len(),
            share: (usize::from(index), share),
            model: disk.to_vec(),
            slots: vec![None; slots],
            completed: 0,
        }
    }

    /// Offers a random request. False if there is no free slot, or if it would overlap one in
    /// flight.
    fn offer(&mut self) -> bool {
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            return false;
        };
        let (index, share) = self.share;
        let runs = self.disk / RUN / share;
        let run = (self.random.below(runs as u64) as usize * share + index) * RUN;
        let first = self.random.below(64) as usize;
        let blocks = 1 + self.random.below(64 - first as u64) as usize;
        let (at, length) = (run + first * BLOCK, blocks * BLOCK);
        let overlaps = |request: &InFlight| {
            let (other, n) = request.range();
            other < at + length && at < other + n
        };
        if self.slots.iter().flatten().any(overlaps) {
            return false;
        }
        let piece = (1 + self.random.below(8) * 700).min(length as u64);
        let pieces = [piece, 4096, 512, 1];
        let slot = slot as u16;
        let data = GuestAddress(self.ring.data(slot));
        let sector = at as u64 / 512;
        let request = match self.random.below(20) {
            0..8 => {
                let all = (length as u64, true);
                self.ring.request(slot, READ, sector, all, &pieces);
                InFlight::Read(at, length)
            }
            8..17 => {
                let seed = self.random.below(255) as u8;
                let bytes: Vec<u8> = (0..length).map(|n| seed ^ (n / 3) as u8).collect();
                self.memory.write_slice(&bytes, data).unwrap();
                let all = (length as u64, false);
                self.ring.request(slot, WRITE, sector, all, &pieces);
                InFlight::Write(at, bytes)
            }
            17..19 => {
                let flags = self.random.below(2) as u32;
                let bytes = range(sector, blocks as u32, flags);
                self.memory.write_slice(&bytes, data).unwrap();
                self.ring.request(slot, WRITE_ZEROES, 0, (16, false), &[]);
                InFlight::Zero(at, length)
            }
            _ => {
                self.ring.request(slot, FLUSH, 0, (0, false), &[]);
                InFlight::Flush
            }
        };
        self.slots[usize::from(slot)] = Some(request);
        true
    }

    /// Takes all completed requests, and verifies reads.
    fn complete(&mut self) {
        while let Some((slot, status)) = self.ring.slot_answer() {
            let request = self.slots[usize::from(slot)].take().expect("in flight");
            assert_eq!(status, OK, "{request:?}");
            self.completed += 1;
            match request {
                InFlight::Flush => {}
                InFlight::Zero(at, length) => self.model[at..at + length].fill(0),
                InFlight::Write(at, bytes) => {
                    self.model[at..at + bytes.len()].copy_from_slice(&bytes)
                }
                InFlight::Read(at, length) => {
                    let mut bytes = vec![0; length];
                    let data = GuestAddress(self.ring.data(slot));
                    self.memory.read_slice(&mut bytes, data).unwrap();
                    assert!(bytes == self.model[at..at + length], "{at}+{length}");
                }
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Offers some requests, kicks the device, and takes completed requests.
    fn step(&mut self) {
        let wanted = 1 + self.random.below(8);
        let new = (0..wanted).filter(|_| self.offer()).count();
        if new > 0 {
            self.ring.kick(new as u16).unwrap();
        }
        if new == 0 || self.random.below(3) == 0 {
            assert!(self.in_flight() == 0 || self.ring.wait(TIME_LIMIT).unwrap());
        }
        self.complete();
    }

    /// Waits for all requests in flight.
    fn finish(&mut self) {
        while self.in_flight() > 0 {
            assert!(self.ring.wait(TIME_LIMIT).unwrap(), "no answer");
            self.complete();
        }
    }

    /// Copies the own runs of the model to `disk`.
    fn write_model(&self, disk: &mut [u8]) {
        let (index, share) = self.share;
        let runs = disk.chunks_mut(RUN).zip(self.model.chunks(RUN));
        for (run, model) in runs.skip(index).step_by(share) {
            run.copy_from_slice(model);
        }
    }
}

#[test]
fn several_queues_at_once() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let images = [
        ("create x.qcow2 24M", "x.qcow2", "--cache=none", "0"),
        (
            "create -o cluster_size=4k,extended_l2=off x.qcow2 24M",
            "x.qcow2",
            "--aio=threads",
            "20000",
        ),
        ("overlay", "x.qcow2", "--cache=none", "1000000"),
        ("raw", "x.img", "--cache=none", "5000"),
    ];
    for (recipe, image, how, poll) in images {
        let lab = Lab::new();
        let mut disk = vec![0; 24 * MIB];
        match recipe {
            "overlay" => {
                let noise = disk.iter_mut().enumerate();
                noise.for_each(|(n, byte)| *byte = (n / 1000) as u8);
                fs::write(lab.path("base"), &disk).unwrap();
                lab.qemu_img(&["convert", "-c", "-O", "qcow2", "base", "base.qcow2"])
                    .ok("convert");
                lab.qemu_img(&[
                    "create",
                    "-f",
                    "qcow2",
                    "-b",
                    "base.qcow2",
                    "-F",
                    "qcow2",
                    image,
                ])
                .ok("create");
            }
            "raw" => fs::write(lab.path(image), &disk).unwrap(),
            recipe => lab.make(recipe),
        }
        let format = if image == "x.img" { "raw" } else { "qcow2" };
        let args = [
            "-f",
            format,
            how,
            "--poll-max-ns",
            poll,
            "--num-queues=4",
            "--discard=unmap",
            "--stats",
            image,
        ];
        let mut server = serve(&lab, &args);
        let setup = Setup {
            queues: 4,
            slots: 32,
            bytes: RUN as u64,
            ..Setup::default()
        };
        let mut machine = Machine::new(setup).unwrap();
        let mut connection = machine.connect(&socket(&lab)).unwrap();
        assert_eq!(connection.queues().unwrap(), 4);
        let mut drivers: Vec<Driver> = (0..4)
            .map(|index| Driver::new(&machine, index, &disk, 4, 32))
            .collect();
        for driver in &drivers {
            connection.start(&driver.ring).unwrap();
        }
        std::thread::scope(|scope| {
            for driver in &mut drivers {
                scope.spawn(|| {
                    while driver.completed < 1500 {
                        driver.step();
                    }
                    driver.finish();
                });
            }
        });
        for driver in &drivers {
            driver.write_model(&mut disk);
        }
        drop(connection);
        server.stop();
        assert!(content(&lab, image) == disk, "{recipe}");
        let said = server.log();
        assert!(
            said.contains("connections: 1") && said.contains("write-zeroes: "),
            "{said}"
        );
    }
}

#[test]
fn no_kick_is_missed_while_polling_or_sleeping() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    // Microseconds between requests, near the time of polling, so that many requests are made when the
    // server goes to sleep.
    let pauses = [0, 2, 10, 40, 48, 50, 52, 60, 200];
    for without in [without(&[]), without(&[FEATURE_EVENT_INDEX])] {
        for aio in ["--aio=io_uring", "--aio=threads"] {
            let lab = Lab::new();
            lab.make("create x.qcow2 16M");
            let mut server = serve(&lab, &[aio, "--poll-max-ns=50000", "x.qcow2"]);
            let setup = Setup {
                without,
                ..Setup::default()
            };
            let mut disk = Disk::new(&lab, setup);
            for round in 0..3000u64 {
                let wait = Duration::from_micros(pauses[round as usize % pauses.len()]);
                let since = Instant::now();
                while since.elapsed() < wait {
                    std::hint::spin_loop();
                }
                assert!(disk.take(READ, round % 1000, 512).is_ok());
            }
            drop(disk);
            server.stop();
        }
    }
}

#[test]
fn an_idle_server_sleeps() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    for aio in ["--aio=threads", "--aio=io_uring"] {
        let lab = Lab::new();
        lab.make("create x.qcow2 16M");
        let mut server = serve(&lab, &[aio, "x.qcow2"]);
        let mut disk = Disk::new(&lab, Setup::default());
        assert!(disk.take(READ, 0, 512).is_ok());
        assert_sleeps(&server);
        // A kick wakes it.
        assert!(disk.take(READ, 0, 512).is_ok());
        drop(disk);
        server.stop();
    }
}

/// Connects again, as QEMU does when the server has ended or was replaced.
fn reconnect(machine: &mut Machine, lab: &Lab, rings: &[&Ring]) -> Connection {
    let mut connection = machine.connect(&socket(lab)).unwrap();
    for ring in rings {
        connection.start(ring).unwrap();
    }
    connection
}

#[test]
fn requests_in_flight_are_executed_by_the_next_server() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 24M");
    let mut disk = vec![0; 24 * MIB];
    // With directsync completed writes are durable, so all can be verified without flushes.
    let args = ["--cache=directsync", "x.qcow2"];
    let mut server = serve(&lab, &args);
    let setup = Setup {
        bytes: RUN as u64,
        ..Setup::default()
    };
    let mut machine = Machine::new(setup).unwrap();
    drop(machine.connect(&socket(&lab)).unwrap());
    // The driver borrows the machine. A twin with the same memory makes the connections.
    let mut twin = machine.twin().unwrap();
    let mut driver = Driver::new(&machine, 0, &disk, 1, 32);
    let mut executed_again = 0;
    for round in 0..12 {
        let connection = reconnect(&mut twin, &lab, &[&driver.ring]);
        let enough = driver.completed + 20 + 10 * round;
        while driver.completed < enough {
            driver.step();
        }
        while driver.offer() {}
        driver.ring.kick_anyway().unwrap();
        match round % 3 {
            // The front end disconnects, and connects again.
            0 => drop(connection),
            // The server stops, and completes the requests that it has taken.
            1 => {
                server.stop();
                drop(connection);
                server = serve(&lab, &args);
            }
            // The server is killed.
            _ => {
                server.kill(&lab, "x.qcow2");
                drop(connection);
                fs::remove_file(socket(&lab)).unwrap();
                server = serve(&lab, &args);
            }
        }
        let connection = reconnect(&mut twin, &lab, &[&driver.ring]);
        driver.finish();
        executed_again += server.log().matches("are executed again").count();
        drop(connection);
    }
    driver.write_model(&mut disk);
    server.stop();
    lab.qemu_img(&["check", "x.qcow2"]).ok("check");
    assert!(content(&lab, "x.qcow2") == disk);
    // Some request must have been in flight.
    assert!(executed_again > 0);
}

#[test]
fn flushed_data_survive_kill() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    // With a cache that the guest flushes; with one that it has switched off; for a guest that
    // knows no flushes; the last two after a reset; and a cache that is off, with the next server.
    let none = without(&[FEATURE_FLUSH, FEATURE_WCE]);
    let modes = [0, 0, none, 0, none, 0];
    for (mode, without) in modes.into_iter().enumerate() {
        let lab = Lab::new();
        lab.make("create x.qcow2 64M");
        let mut server = serve(&lab, &["x.qcow2"]);
        let setup = Setup {
            without,
            ..Setup::default()
        };
        let mut disk = Disk::new(&lab, setup);
        if [1, 3, 5].contains(&mode) {
            disk.connection.set_config(32, &[0]).unwrap();
        }
        if mode == 5 {
            server.kill(&lab, "x.qcow2");
            fs::remove_file(socket(&lab)).unwrap();
            server = serve(&lab, &["x.qcow2"]);
            disk.connection = reconnect(&mut disk.machine, &lab, &[&disk.ring]);
        } else if mode >= 3 {
            // Another driver, perhaps, without several queues.
            let more = disk.machine.features() & !(u64::from(mode == 3) << 12);
            disk.connection.reset(more, &disk.ring).unwrap();
        }
        let cached = disk.connection.config(32, 1).unwrap()[0];
        assert_eq!(cached, u8::from(mode == 0));
        for n in 0..200u64 {
            let bytes = (n + 1).to_le_bytes().repeat(512);
            let place = n * 37 % (64 << 8) * 8;
            assert_eq!(disk.give(WRITE, place, &bytes), OK);
        }
        if mode == 0 {
            assert_eq!(disk.give(FLUSH, 0, &[]), OK);
        }
        server.kill(&lab, "x.qcow2");
        lab.qemu_img(&["convert", "-O", "raw", "x.qcow2", "content"])
            .ok("convert");
        let content = fs::read(lab.path("content")).unwrap();
        for n in 0..200u64 {
            let at = (n * 37 % (64 << 8) * 4096) as usize;
            assert!(
                content[at..at + 4096] == (n + 1).to_le_bytes().repeat(512),
                "{mode}: {n}"
            );
        }
    }
}

#[test]
fn read_only_images_and_several_exports() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    lab.make("create y.qcow2 2M");
    lab.make("create z,z.qcow2 4M");
    let before = fs::read(lab.path("x.qcow2")).unwrap();
    let mut server = serve(
        &lab,
        &[
            "--stats",
            "--pid-file=p",
            "--logical-block-size=4k",
            "--export=ro=x.qcow2,socket=ro.sock,writable=off,logical-block-size=512",
            "--export=z=z,,z.qcow2,socket=z.sock,num-queues=3",
            "y.qcow2",
        ],
    );
    let pid = format!("{}\n", server.pid());
    // It is written beside the first socket.
    wait_until("the number of the process is there", || {
        fs::read_to_string(lab.path("p")).is_ok_and(|found| found == pid)
    });
    let connect = |name: &str| {
        let mut machine = Machine::new(Setup::default()).unwrap();
        let connection = machine.connect(&lab.path(name)).unwrap();
        (machine, connection)
    };
    let (machine, mut connection) = connect("ro.sock");
    assert!(machine.features() & 1 << FEATURE_RO != 0);
    let mut ring = machine.ring(0).unwrap();
    connection.start(&ring).unwrap();
    for (kind, expected) in [(READ, OK), (WRITE, ERROR), (DISCARD, ERROR), (FLUSH, OK)] {
        ring.request(0, kind, 0, (512, kind == READ), &[]);
        ring.kick(1).unwrap();
        assert!(ring.wait(TIME_LIMIT).unwrap());
        assert_eq!(ring.slot_answer(), Some((0, expected)), "{kind}");
    }
    let (machine, mut z) = connect("z.sock");
    assert!(machine.features() & 1 << FEATURE_RO == 0);
    assert_eq!(z.queues().unwrap(), 3);
    assert_eq!(z.config(0, 8).unwrap(), 8192u64.to_le_bytes());
    assert_eq!(z.config(34, 2).unwrap(), 3u16.to_le_bytes());
    // Blocks of 4 KiB.
    let mut y = Disk::new(&lab, Setup::default());
    assert_eq!(y.connection.config(20, 4).unwrap(), 4096u32.to_le_bytes());
    assert_eq!(y.take(READ, 8, 4096).unwrap(), vec![0; 4096]);
    assert_eq!(y.take(READ, 1, 4096), Err(ERROR));
    assert_eq!(y.take(READ, 0, 512), Err(ERROR));
    // An image has one server.
    let second = lab.zebu(&["vhost-user-blk", "--socket-path=s", "y.qcow2"]);
    second.orderly("a second server");
    assert!(
        second.status == 1 && second.err.contains("lock"),
        "{second:?}"
    );
    server.signal("USR1");
    wait_until("statistics", || server.log().contains("export 'z'"));
    server.stop();
    assert!(!lab.path("p").exists() && !lab.path("ro.sock").exists());
    assert!(fs::read(lab.path("x.qcow2")).unwrap() == before);
    let said = server.log();
    assert!(
        said.contains("read: 1 requests, 512 bytes, 0 failed"),
        "{said}"
    );
    assert!(
        said.contains("discard: 1 requests, 0 bytes, 1 failed"),
        "{said}"
    );
}

#[test]
fn invalid_options() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let wrong: [&[&str]; 11] = [
        &["x.qcow2"],
        &["--socket-path=s"],
        &["--socket-path=s", "--num-queues=0", "x.qcow2"],
        &["--socket-path=s", "--num-queues=257", "x.qcow2"],
        &["--socket-path=s", "--poll-max-ns=-1", "x.qcow2"],
        &["--socket-path=s", "--poll-max-ns=1000000001", "x.qcow2"],
        &["--socket-path=s", "--logical-block-size=513", "x.qcow2"],
        &["--export=x.qcow2,socket=s"],
        &["--export=x=x.qcow2"],
        &["--export=x=x.qcow2,socket=s,what=1"],
        &["--socket-path=/nowhere/s", "x.qcow2"],
    ];
    for args in wrong {
        let all: Vec<&str> = ["vhost-user-blk"].iter().chain(args).copied().collect();
        let answer = lab.zebu(&all);
        answer.orderly("wrong options");
        assert!(
            answer.status == 1 && !answer.err.is_empty(),
            "{args:?}: {answer:?}"
        );
    }
    let answer = lab
        .zebu(&["vhost-user-blk", "--print-capabilities"])
        .ok("capabilities");
    assert!(answer.out.contains("\"type\": \"block\""));
}

#[test]
fn fork_and_pid_file() {
    if beyond_qemu("a vhost-user server") {
        return;
    }
    let lab = Lab::new();
    lab.make("create x.qcow2 1M");
    let args = [
        "vhost-user-blk",
        "--fork",
        "--pid-file=p",
        "--socket-path=v.sock",
        "x.qcow2",
    ];
    lab.zebu(&args).ok("a server in the background");
    let pid = fs::read_to_string(lab.path("p")).unwrap();
    let mut disk = Disk::new(&lab, Setup::default());
    assert_eq!(disk.give(WRITE, 0, &[7; 512]), OK);
    let process = format!("/proc/{}", pid.trim());
    // An idle server takes no CPU time.
    let used = || {
        let stat = fs::read_to_string(format!("{process}/stat")).unwrap();
        let times = stat.rsplit(')').next().unwrap().split_whitespace();
        times
            .skip(11)
            .take(2)
            .map(|time| time.parse::<u64>().unwrap())
            .sum::<u64>()
    };
    std::thread::sleep(Duration::from_millis(200));
    let before = used();
    std::thread::sleep(Duration::from_secs(1));
    assert!(used() - before <= 1, "an idle server takes CPU time");
    let kill = std::process::Command::new("kill").arg(pid.trim()).status();
    assert!(kill.unwrap().success());
    wait_until("it ends", || !Path::new(&process).exists());
    assert!(!lab.path("v.sock").exists());
    assert_eq!(content(&lab, "x.qcow2")[..512], [7; 512]);
}
