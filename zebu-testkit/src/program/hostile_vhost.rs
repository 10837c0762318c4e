//! A front end and a guest whose actions are decoded from bytes, with a vhost-user-blk server in this
//! process. `vhost_bad_input.rs` and a fuzz target use this file.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vm_memory::{Bytes, GuestAddress};
use zebu::block::{Device, OpenOptions};
use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::storage::{EngineKind, Memory, Queue, QueueOptions, Storage};
use zebu_vhost::front_end::{Machine, Ring, Setup};
use zebu_vhost::{Export, ExportOptions, Server};

/// The time limit of a reply.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// The most steps of one input.
const STEPS: usize = 64;
/// The size of the memory that messages share.
const SHARED: u64 = 1 << 20;
/// Numbers at limits.
const EDGES: [u64; 14] = [
    0x7f,
    0xff,
    0x100,
    0x3ff,
    0x400,
    0xffff,
    SHARED - 1,
    SHARED,
    SHARED + 0x1000,
    1 << 31,
    u32::MAX as u64,
    1 << 63,
    u64::MAX - 0xfff,
    u64::MAX,
];
/// Protocol features of the server: MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE,
/// CONFIGURE_MEM_SLOTS.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;

/// A message: code, sizes of its numbers in bytes, number of file descriptors.
type Message = (u32, &'static [usize], usize);

const REGION: &[usize] = &[8, 8, 8, 8, 8];
const MESSAGES: &[Message] = &[
    (1, &[], 0),
    (2, &[8], 0),
    (3, &[], 0),
    (4, &[], 0),
    // Memory.
    (5, &[4, 4, 8, 8, 8, 8], 1),
    (5, &[4, 4, 8, 8, 8, 8, 8, 8, 8, 8], 2),
    (36, &[], 0),
    (37, REGION, 1),
    (38, REGION, 0),
    // A ring.
    (8, &[4, 4], 0),
    (9, &[4, 4, 8, 8, 8, 8], 0),
    (10, &[4, 4], 0),
    (11, &[4, 4], 0),
    (12, &[8], 1),
    (12, &[8], 0),
    (13, &[8], 1),
    (14, &[8], 1),
    (18, &[4, 4], 0),
    // Others.
    (15, &[], 0),
    (16, &[8], 0),
    (17, &[], 0),
    (21, &[], 1),
    (24, &[4, 4, 4, 4], 0),
    (25, &[4, 4, 4, 1], 0),
    (31, &[8, 8, 2, 2], 0),
    (32, &[8, 8, 2, 2], 1),
    (34, &[], 0),
];

/// Reads numbers from an input, and zeroes after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let byte = self.0.first().copied().unwrap_or(0);
        self.0 = self.0.get(1..).unwrap_or_default();
        byte
    }

    fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n
    }

    /// A small number, a multiple of the page size, a limit, or any number.
    fn number(&mut self) -> u64 {
        let byte = self.byte();
        let high = u64::from(byte >> 2);
        match byte & 3 {
            0 => high,
            1 => high << 12,
            2 => EDGES[high as usize % EDGES.len()],
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }
}

/// A server, which must go on serving valid front ends.
pub struct Served {
    _server: Server,
    _folder: tempfile::TempDir,
    socket: PathBuf,
    memory: std::fs::File,
    features: u64,
}

/// One ring of up to four requests.
fn setup(without: u64) -> Setup {
    Setup {
        queues: 1,
        queue_size: 16,
        slots: 4,
        bytes: 4096,
        without,
    }
}

impl Served {
    /// Serves an image in memory.
    pub fn new() -> Served {
        let queue = QueueOptions::default()
            .engine(EngineKind::Threads)
            .inflate_inline(true);
        let opening = Queue::new(queue.clone()).expect("a queue");
        let storage: Arc<dyn Storage> = Arc::new(Memory::new(Vec::new()));
        let create = CreateQcow2::default().size(1 << 20).cluster_bits(12);
        opening
            .block_on(create_qcow2(&opening, &*storage, None, &create, |_| {}))
            .expect("a new image");
        let options = OpenOptions::default().write(true).discard(Some(true));
        let device = Device::from_storage(&opening, storage, &options).expect("it opens");
        let options = ExportOptions {
            name: "x".into(),
            queues: 2,
            block_size: 512,
        };
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let exports = vec![(Export::new(device, options), listener)];
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memory = rustix::fs::memfd_create("shared", flags).expect("memory");
        let memory = std::fs::File::from(memory);
        memory.set_len(SHARED).expect("memory");
        let mut served = Served {
            _server: Server::start(exports, &queue).expect("a server"),
            _folder: folder,
            socket,
            memory,
            features: 0,
        };
        served.assert_serves();
        served
    }

    /// Runs an input. The server must then serve a valid front end.
    pub fn exercise(&mut self, data: &[u8]) {
        let mut input = Input(data);
        match input.byte() % 2 {
            0 => self.messages(&mut input),
            _ => self.rings(&mut input),
        }
        self.assert_serves();
    }

    /// Fails the test unless a valid front end can write and read.
    fn assert_serves(&mut self) {
        let mut machine = Machine::new(setup(0)).expect("a machine");
        let mut connection = machine.connect(&self.socket).expect("it connects");
        self.features = machine.features();
        let mut ring = machine.ring(0).expect("a ring");
        connection.start(&ring).expect("it runs");
        let memory = machine.memory();
        let data = GuestAddress(ring.data(0));
        let mut ask = |kind, to_memory| {
            ring.request(0, kind, 9, (512, to_memory), &[]);
            ring.kick(1).expect("a kick");
            assert!(ring.wait(TIME_LIMIT).expect("a wait"), "no answer");
            assert_eq!(ring.slot_answer(), Some((0, 0)));
        };
        memory.write_slice(&[0x5a; 512], data).expect("ours");
        ask(1, false);
        memory.write_slice(&[0; 512], data).expect("ours");
        ask(0, true);
        let mut found = [0; 512];
        memory.read_slice(&mut found, data).expect("ours");
        assert_eq!(found, [0x5a; 512]);
    }

    /// Sends random messages.
    fn messages(&self, input: &mut Input<'_>) {
        let stream = UnixStream::connect(&self.socket).expect("it connects");
        stream.set_read_timeout(Some(TIME_LIMIT)).expect("a socket");
        let (kick, other) = UnixStream::pair().expect("a pair");
        (&other).write_all(&[1; 8]).expect("a write to a pair");
        let descriptors = [self.memory.as_fd(), kick.as_fd()];
        let setup = input.byte();
        if setup & 1 != 0 {
            for (code, value) in [(16, PROTOCOL_FEATURES), (2, self.features)] {
                send(&stream, [code, 1, 8], &value.to_le_bytes(), &[]);
            }
        }
        if setup & 2 != 0 {
            // One region at guest and user address 0.
            let numbers: [u64; 5] = [1, 0, SHARED, 0, 0];
            let body: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            send(&stream, [5, 1, 40], &body, &descriptors[..1]);
        }
        for _ in 0..STEPS {
            if input.0.is_empty() {
                break;
            }
            let (code, numbers, count) = MESSAGES[input.below(MESSAGES.len())];
            let mut body = Vec::new();
            for &bytes in numbers {
                body.extend(&input.number().to_le_bytes()[..bytes]);
            }
            let odd = input.byte();
            let flags = 1 | u32::from(odd & 1) << 3;
            let first = match code {
                12..=14 | 21 => 1,
                _ => usize::from(odd & 0x10 != 0),
            };
            let mut with = vec![descriptors[first]; count];
            let mut length = body.len();
            match odd >> 5 {
                1 => with.clear(),
                2 => with.push(descriptors[0]),
                3 => body.truncate(input.below(length + 1)),
                4 => body.push(7),
                5 => length = input.number() as usize,
                _ => {}
            }
            if odd >> 5 != 5 {
                length = body.len();
            }
            if !send(&stream, [code, flags, length as u32], &body, &with) {
                break;
            }
        }
        // The server replies to all, or closes the connection.
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let end = (&stream).read_to_end(&mut rest);
        let reset = |e: &std::io::Error| e.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(end.as_ref().map_or_else(reset, |_| true), "{end:?}");
    }

    /// Puts random descriptors on a ring.
    fn rings(&self, input: &mut Input<'_>) {
        let without = u64::from(input.byte() & 1) << 28 | u64::from(input.byte() & 1) << 29;
        let mut machine = Machine::new(setup(without)).expect("a machine");
        let mut connection = machine.connect(&self.socket).expect("it connects");
        let mut ring = machine.ring(0).expect("a ring");
        connection.start(&ring).expect("it runs");
        for _ in 0..STEPS {
            if input.0.is_empty() {
                break;
            }
            step(&machine, &mut ring, input);
            if input.byte() & 7 == 0 {
                let _ = connection.stop(&ring);
                let _ = connection.start(&ring);
            }
        }
        // Requests in flight must end.
        connection.stop(&ring).expect("it stops");
    }
}

/// One random action of a guest.
fn step(machine: &Machine, ring: &mut Ring, input: &mut Input<'_>) {
    let slot = input.below(4) as u16;
    let address = |ring: &Ring, input: &mut Input<'_>| match input.byte() & 3 {
        0 => ring.header(slot),
        1 => ring.status(slot),
        2 => ring.data(slot) + input.number() % 4096,
        _ => input.number(),
    };
    match input.below(6) {
        0 => {
            let (at, place) = (input.byte(), address(ring, input));
            let length = input.number() as u32;
            let (flags, next) = (u16::from(input.byte() & 7), u16::from(input.byte()));
            ring.set_descriptor(u16::from(at % 16), place, length, flags, next);
        }
        1 => {
            let at = ring.data(slot) + 16 * (u64::from(input.byte()) % 256);
            let place = address(ring, input);
            let length = input.number() as u32;
            let (flags, next) = (u16::from(input.byte() & 7), u16::from(input.byte()));
            ring.put_descriptor(at, place, length, flags, next);
        }
        2 => ring.set_header(slot, input.byte().into(), input.number()),
        3 => ring.offer(input.byte().into()),
        4 => ring.set_available_index(input.number() as u16),
        _ => {
            let (kind, sector) = (u32::from(input.byte() % 16), input.number());
            let (length, odd) = (input.number() % 4097, input.byte());
            let bytes: Vec<u8> = (0..usize::from(odd >> 2)).map(|_| input.byte()).collect();
            let data = GuestAddress(ring.data(slot));
            let _ = machine.memory().write_slice(&bytes, data);
            ring.request(slot, kind, sector, (length, odd & 1 != 0), &[512]);
        }
    }
    if input.byte() & 3 != 0 {
        ring.kick_anyway().expect("a kick");
    }
}

/// Sends a message with code, flags and length. False if the server has closed the connection.
fn send(
    stream: &UnixStream,
    header: [u32; 3],
    body: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> bool {
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let parts = [IoSlice::new(&bytes)];
    sendmsg(stream, &parts, &mut ancillary, SendFlags::NOSIGNAL).is_ok()
}
