//! Guards against data that are lost, or that a dropped write brings back, on a server that does
//! whatever it may: it executes the requests that it has in any order, answers reads in part, fails,
//! and breaks off, after which any of the changes that were not flushed may be missing.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::process::{ChildStdout, Command};
use std::sync::{Arc, Condvar, Mutex};
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::Ssh;
use super::connection::Connection;
use super::options::{HostKeyCheck, SshOptions, SshServer};
use super::program::Program;
use crate::storage::{Buffer, CacheMode, Queue, QueueOptions, Storage, set_len, write_slice};
use zebu_core::block::{Device, OpenOptions};
use zebu_core::jobs::{self, CreateQcow2};

use zebu_testkit::Rng;

/// A file of the server.
#[derive(Clone, Default)]
struct Disk {
    bytes: Vec<u8>,
    /// As it was at the last flush.
    durable: Vec<u8>,
    /// What was done since.
    changes: Vec<Change>,
}

#[derive(Clone)]
enum Change {
    Write(u64, Vec<u8>),
    Length(u64),
}

impl Change {
    fn make(&self, bytes: &mut Vec<u8>) {
        match self {
            Change::Write(offset, data) => {
                let (start, end) = (*offset as usize, *offset as usize + data.len());
                bytes.resize(bytes.len().max(end), 0);
                bytes[start..end].copy_from_slice(data);
            }
            Change::Length(length) => bytes.resize(*length as usize, 0),
        }
    }
}

impl Disk {
    fn change(&mut self, change: Change) {
        change.make(&mut self.bytes);
        self.changes.push(change);
    }

    fn flush(&mut self) {
        self.durable.clone_from(&self.bytes);
        self.changes.clear();
    }

    /// The server's machine has crashed.
    fn crash(&mut self, rng: &mut Rng) {
        self.bytes.clone_from(&self.durable);
        for change in std::mem::take(&mut self.changes) {
            if !rng.one_in(3) {
                change.make(&mut self.bytes);
            }
        }
        self.flush();
    }
}

/// What a server does besides its work.
#[derive(Clone, Copy, Debug)]
struct Faults {
    seed: u64,
    /// It breaks off after so many requests.
    cut: Option<u64>,
    /// One of so many writes fails, and has written a part.
    failing: Option<u64>,
    /// It waits until it has several requests.
    is_slow: bool,
    /// Where it would break off it does nothing more.
    hangs: bool,
}

/// The requests that a server has; None: there are no more.
type Pending = Arc<(Mutex<(VecDeque<Vec<u8>>, bool)>, Condvar)>;

struct Server {
    disk: Arc<Mutex<Disk>>,
    faults: Faults,
    rng: Rng,
    output: UnixStream,
}

/// Receives packets, without their lengths.
fn receive(mut input: UnixStream, pending: &Pending) {
    let mut next = || -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        input.read_exact(&mut length)?;
        let mut packet = vec![0; u32::from_be_bytes(length) as usize];
        input.read_exact(&mut packet)?;
        Ok(packet)
    };
    loop {
        let packet = next();
        let (state, condition) = &**pending;
        let mut state = state.lock().unwrap();
        match packet {
            Ok(packet) => state.0.push_back(packet),
            Err(_) => state.1 = true,
        }
        condition.notify_all();
        if state.1 {
            return;
        }
    }
}

/// Takes fields from the start of a packet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (field, rest) = self.0.split_at(count);
        self.0 = rest;
        field
    }

    fn number(&mut self) -> u32 {
        u32::from_be_bytes(*self.take(4).first_chunk().unwrap())
    }

    fn long(&mut self) -> u64 {
        u64::from_be_bytes(*self.take(8).first_chunk().unwrap())
    }

    fn string(&mut self) -> &'a [u8] {
        let length = self.number();
        self.take(length as usize)
    }
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text].concat()
}

impl Server {
    /// Serves a connection until it ends.
    fn run(mut self, pending: &Pending) {
        let mut count = 0;
        loop {
            if self.faults.is_slow {
                thread::sleep(Duration::from_micros(self.rng.below(300)));
            }
            let (state, condition) = &**pending;
            let mut state = state.lock().unwrap();
            while state.0.is_empty() && !state.1 {
                state = condition.wait(state).unwrap();
            }
            if state.0.is_empty() {
                return;
            }
            let nth = self.rng.index(state.0.len());
            let packet = state.0.remove(nth).unwrap();
            drop(state);
            let reply = self.reply(&packet);
            count += 1;
            if self.faults.cut.is_some_and(|cut| count > cut) {
                if self.faults.hangs {
                    let state = pending.0.lock().unwrap();
                    // Until the client gives up.
                    drop(condition.wait_while(state, |state| !state.1).unwrap());
                }
                break;
            }
            let length = (reply.len() as u32).to_be_bytes();
            // The client may be gone.
            let _ = self.output.write_all(&[&length[..], &reply].concat());
        }
        // What is on its way is executed or not.
        let rest = std::mem::take(&mut pending.0.lock().unwrap().0);
        for packet in rest {
            if self.rng.one_in(2) {
                self.reply(&packet);
            }
        }
        self.disk.lock().unwrap().crash(&mut self.rng);
        let _ = self.output.shutdown(Shutdown::Both);
    }

    fn reply(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut fields = Fields(&packet[1..]);
        let id = fields.number();
        if packet[0] == 1 {
            let extensions = ["fsync@openssh.com", "1", "limits@openssh.com", "1"];
            let extensions = extensions.map(|text| string(text.as_bytes())).concat();
            return [&[2, 0, 0, 0, 3][..], &extensions].concat();
        }
        let reply = |kind: u8, rest: &[u8]| [&[kind][..], &id.to_be_bytes(), rest].concat();
        let status = |code: u32| reply(101, &[&code.to_be_bytes()[..], &[0; 8]].concat());
        let mut disk = self.disk.lock().unwrap();
        match packet[0] {
            3 => reply(102, &string(b"h")),
            8 => {
                let flags = 1u32.to_be_bytes();
                let size = (disk.bytes.len() as u64).to_be_bytes();
                reply(105, &[&flags[..], &size].concat())
            }
            5 => {
                fields.string();
                let (offset, length) = (fields.long() as usize, fields.number() as usize);
                let rest = disk.bytes.get(offset..).unwrap_or_default();
                let mut length = length.min(rest.len());
                if length > 1 && self.rng.one_in(8) {
                    length = 1 + self.rng.index(length);
                }
                match length {
                    0 => status(1),
                    _ => reply(103, &string(&rest[..length])),
                }
            }
            6 => {
                fields.string();
                let (offset, data) = (fields.long(), fields.string());
                let fails = self.faults.failing.is_some_and(|n| self.rng.one_in(n));
                let length = match fails {
                    // Whole words.
                    true => self.rng.index(data.len()) & !3,
                    false => data.len(),
                };
                disk.change(Change::Write(offset, data[..length].to_vec()));
                status(if fails { 4 } else { 0 })
            }
            10 => {
                fields.string();
                fields.number();
                disk.change(Change::Length(fields.long()));
                status(0)
            }
            200 => match fields.string() {
                b"fsync@openssh.com" => {
                    disk.flush();
                    status(0)
                }
                _ => {
                    let limits = [1u64 << 18, 8 << 10, 8 << 10, 0].map(u64::to_be_bytes);
                    reply(201, &limits.concat())
                }
            },
            other => panic!("a request of type {other}"),
        }
    }
}

/// Opens the file over a connection to a server of its own, whose thread ends with it.
fn open(disk: &Arc<Mutex<Disk>>, faults: Faults) -> (Arc<Ssh>, JoinHandle<()>) {
    let (output, server_input) = UnixStream::pair().unwrap();
    let (input, server_output) = UnixStream::pair().unwrap();
    let server = Server {
        disk: disk.clone(),
        faults,
        rng: Rng::new(faults.seed),
        output: server_output,
    };
    let pending = Pending::default();
    let theirs = pending.clone();
    thread::spawn(move || receive(server_input, &theirs));
    let serving = thread::spawn(move || server.run(&pending));
    let options = SshOptions {
        server: SshServer {
            host: "h".into(),
            port: None,
            user: None,
        },
        path: "/x".into(),
        host_key: HostKeyCheck::Configured,
        name: "ssh://h/x".into(),
        write: true,
        create: false,
        cache: CacheMode::WriteBack,
        timeout: faults.hangs.then_some(Duration::from_millis(200)),
    };
    let input = ChildStdout::from(OwnedFd::from(input));
    let program = Program::silent(Command::new("true"));
    let connection = Connection::over(&options, program, output, input);
    let storage = Ssh::over(options, connection.unwrap()).unwrap();
    (Arc::new(storage), serving)
}

const NO_FAULTS: Faults = Faults {
    seed: 1,
    cut: None,
    failing: None,
    is_slow: false,
    hangs: false,
};

async fn poll_once(mut future: Pin<&mut impl Future>) {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_ready())).await;
}

/// A dropped write takes effect before a later one to the same place, or not at all.
#[test]
fn dropped_writes_do_not_come_back() {
    let disk = Arc::new(Mutex::new(Disk::default()));
    let queue = Queue::new(QueueOptions::default()).unwrap();
    for seed in 0..100 {
        let faults = Faults {
            seed,
            is_slow: true,
            ..NO_FAULTS
        };
        let (storage, _) = open(&disk, faults);
        queue.block_on(async {
            // Pieces of several requests.
            write_slice(&*storage, &queue, 0, &[1; 40_000])
                .await
                .unwrap();
            for round in 2..6u8 {
                for _ in 0..3 {
                    let bytes = [100 + round; 30_000];
                    let mut write = Box::pin(write_slice(&*storage, &queue, 100, &bytes));
                    poll_once(write.as_mut()).await;
                }
                write_slice(&*storage, &queue, 5000, &[round; 20_000])
                    .await
                    .unwrap();
                let length = 25_000 + u64::from(round);
                set_len(&*storage, &queue, length).await.unwrap();
                let disk = disk.lock().unwrap();
                assert_eq!(disk.bytes.len() as u64, length, "seed {seed}");
                let found = &disk.bytes[5000..25_000];
                assert!(found.iter().all(|byte| *byte == round), "seed {seed}");
            }
        });
    }
}

/// A write that failed in part is not taken for a hole afterwards.
#[test]
fn a_failed_write_makes_the_file_longer() {
    let disk = Arc::new(Mutex::new(Disk::default()));
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let faults = Faults {
        failing: Some(1),
        ..NO_FAULTS
    };
    let (storage, _) = open(&disk, faults);
    let written = queue.block_on(write_slice(&*storage, &queue, 0, &[1; 8000]));
    assert!(written.is_err());
    let length = storage.len().unwrap();
    assert!(length >= disk.lock().unwrap().bytes.len() as u64);
}

/// Bytes of a unit, whose words are all the number of the write that it is of.
const UNIT: usize = 2048;
const UNITS: usize = 512;

/// What a unit may hold.
#[derive(Clone, Debug)]
struct Unit {
    allowed: Vec<u32>,
    /// It holds this, since a write of it has ended.
    sure: Option<u32>,
}

impl Unit {
    fn check(&self, bytes: &[u8]) -> bool {
        let words = bytes
            .chunks(4)
            .map(|word| u32::from_le_bytes(*word.first_chunk().unwrap()));
        words.into_iter().all(|word| match self.sure {
            Some(sure) => word == sure,
            None => self.allowed.contains(&word),
        })
    }
}

struct Model {
    units: Vec<Unit>,
    last: u32,
}

impl Model {
    fn flushed(&mut self) {
        for unit in &mut self.units {
            unit.allowed = unit
                .sure
                .map_or(std::mem::take(&mut unit.allowed), |sure| vec![sure]);
        }
    }

    /// Reads everything, and knows it from now on.
    fn check_all(&mut self, device: &Device, queue: &Queue, note: &str) {
        let mut bytes = vec![0; UNIT];
        for (nth, unit) in self.units.iter_mut().enumerate() {
            device
                .read_blocking(queue, (nth * UNIT) as u64, &mut bytes)
                .unwrap();
            assert!(
                unit.check(&bytes),
                "{note}: unit {nth}, {unit:?}: {:?}",
                &bytes[..8]
            );
            let first = u32::from_le_bytes(*bytes.first_chunk().unwrap());
            let is_whole = bytes.chunks(4).all(|word| word == first.to_le_bytes());
            if is_whole {
                *unit = Unit {
                    allowed: vec![first],
                    sure: Some(first),
                };
            }
        }
    }
}

/// Writes several ranges at once, drops some of the writes, and perhaps flushes. False: the image
/// cannot be read or flushed any more.
fn round(device: &Device, queue: &Queue, model: &mut Model, rng: &mut Rng, note: &str) -> bool {
    let mut at = rng.index(32);
    let mut writes = Vec::new();
    while at < UNITS && writes.len() < 24 {
        let count = (1 + rng.index(8)).min(UNITS - at);
        model.last += 1;
        let mut buffer = Buffer::new(count * UNIT);
        let word = model.last.to_le_bytes();
        buffer
            .chunks_mut(4)
            .for_each(|place| place.copy_from_slice(&word[..place.len()]));
        for unit in &mut model.units[at..at + count] {
            unit.allowed.push(model.last);
            unit.sure = None;
        }
        let write = device.write_buffer(queue, (at * UNIT) as u64, buffer, count * UNIT);
        let write = Box::pin(async { write.await.1 });
        writes.push((
            at..at + count,
            model.last,
            Some(write),
            rng.one_in(4),
            rng.index(4),
        ));
        at += count + rng.index(40);
    }
    queue.block_on(poll_fn(|context| {
        let mut waits = false;
        for (range, stamp, write, is_dropped, polls) in &mut writes {
            let Some(future) = write else { continue };
            match future.as_mut().poll(context) {
                Poll::Ready(result) => {
                    *write = None;
                    for unit in &mut model.units[range.clone()] {
                        unit.sure = result.is_ok().then_some(*stamp);
                    }
                }
                Poll::Pending if *is_dropped && *polls == 0 => *write = None,
                Poll::Pending => {
                    *polls = polls.saturating_sub(1);
                    waits = true;
                }
            }
        }
        match waits {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }
    }));
    if rng.one_in(3) {
        let nth = rng.index(UNITS);
        let mut bytes = vec![0; UNIT];
        match device.read_blocking(queue, (nth * UNIT) as u64, &mut bytes) {
            Ok(()) => assert!(model.units[nth].check(&bytes), "{note}: unit {nth}"),
            Err(_) => return false,
        }
    }
    if rng.one_in(2) {
        match queue.block_on(device.flush(queue)) {
            Ok(()) => model.flushed(),
            Err(_) => return false,
        }
    }
    true
}

fn run(seed: u64) -> u64 {
    let rng = &mut Rng::new(seed);
    let queue = &Queue::new(QueueOptions::default()).unwrap();
    let disk = Arc::new(Mutex::new(Disk::default()));
    let options = OpenOptions::default().write(true);
    let image = CreateQcow2::default()
        .size((UNITS * UNIT) as u64)
        .cluster_bits(rng.pick(&[12, 13, 16]));
    let (storage, _) = open(&disk, NO_FAULTS);
    queue
        .block_on(jobs::create_qcow2(queue, &*storage, None, &image, |_| {}))
        .unwrap();
    disk.lock().unwrap().flush();
    let unit = Unit {
        allowed: vec![0],
        sure: Some(0),
    };
    let mut model = Model {
        units: vec![unit; UNITS],
        last: 0,
    };
    let mut lost = 0;
    for epoch in 0..6 {
        let cut = rng.one_in(2).then(|| 20 + rng.below(600));
        let faults = Faults {
            seed: rng.next(),
            cut,
            failing: (cut.is_none() && rng.one_in(2)).then(|| 10 + rng.below(200)),
            is_slow: rng.one_in(2),
            hangs: rng.one_in(4),
        };
        let note = format!("seed {seed}, epoch {epoch}, {faults:?}");
        let (storage, serving) = open(&disk, faults);
        match Device::from_storage(queue, storage, &options) {
            Ok(device) => {
                let goes_on = (0..30).all(|_| round(&device, queue, &mut model, rng, &note));
                match goes_on && queue.block_on(device.close(queue)).is_ok() {
                    true => model.flushed(),
                    false => lost += 1,
                }
            }
            Err(_) => lost += 1,
        }
        serving.join().unwrap();
        disk.lock().unwrap().flush();
        for unit in &mut model.units {
            // What was not flushed may be lost.
            unit.sure = None;
        }
        let device = Device::from_storage(queue, open(&disk, NO_FAULTS).0, &options);
        let device = device.unwrap_or_else(|e| panic!("{note}: {e}"));
        model.check_all(&device, queue, &note);
        let image = device.top().as_qcow2().unwrap();
        let mut say = |_| {};
        let report = jobs::check(queue, image, &mut say, |_| {});
        let report = queue.block_on(report).unwrap();
        assert_eq!(report.corruptions, 0, "{note}");
        queue.block_on(device.close(queue)).unwrap();
    }
    lost
}

#[test]
fn images_survive_their_server() {
    let mut seeds = zebu_testkit::cases(12, "images on a server of SSH");
    let lost: u64 = (&mut seeds).map(run).sum();
    let is_enough = lost > seeds.done() || !zebu_testkit::are_usual();
    assert!(is_enough, "connections that were lost: {lost}");
}
