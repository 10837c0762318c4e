//! Memory of the servers, as a quantity that is asserted: whatever the image, the requests, their
//! number and that of the clients, the process takes no more than docs/nbd.md and
//! docs/vhost-user-blk.md say. The requests are small and what they need below the device is large.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::thread;

use vm_memory::{Bytes, GuestAddress};
use zebu::internal::codec::{Compression, Compressor};
use zebu::internal::nbd::{Command, Headers, Request};
use zebu_vhost::front_end::{Machine, Setup};

use crate::common::rng::Rng;
use crate::common::server::{Raw, Server, wait_until};
use crate::common::{Lab, beyond_qemu, cases, vhost};

/// Bytes of each step of all requests (`Budget::SERVERS`).
const STEP: u64 = 64 << 20;
/// What the process has besides: idle buffers and stacks of a connection, and of all threads.
const CONNECTION: u64 = 12 << 20;
const OTHERS: u64 = 64 << 20;
/// Flags of descriptors.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// The bytes of the images, and those that are written.
const OLD: u8 = 0x5a;
const NEW: u8 = 0x77;

fn zlib(source: &[u8]) -> Vec<u8> {
    let adler = source.iter().fold((1u32, 0u32), |(a, b), byte| {
        let a = (a + u32::from(*byte)) % 65521;
        (a, (b + a) % 65521)
    });
    let mut all = vec![0x78, 0x9c];
    all.extend(pack(Compression::Zlib, source));
    all.extend((adler.1 << 16 | adler.0).to_be_bytes());
    all
}

fn pack(kind: Compression, source: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; source.len() - 1];
    let length = Compressor::new().compress(kind, None, source, &mut packed);
    packed.truncate(length.unwrap().unwrap());
    packed
}

/// A qcow2 image with `count` compressed clusters, whose descriptors say that the data are as long
/// as they can be.
fn compressed(lab: &Lab, name: &str, bits: u32, kind: Compression, count: u64) {
    let size = 1u64 << bits;
    let packed = pack(kind, &vec![OLD; size as usize]);
    let stride = (packed.len() as u64).next_multiple_of(512).max(512);
    let tables = count.div_ceil(size / 8);
    let l1 = 3 * size;
    let l2 = l1 + (tables * 8).next_multiple_of(size);
    let data = l2 + tables * size;
    let mut header = Vec::new();
    header.extend(b"QFI\xfb\0\0\0\x03");
    header.extend([0; 12]);
    header.extend(bits.to_be_bytes());
    header.extend((count * size).to_be_bytes());
    header.extend([0; 4]);
    header.extend((tables as u32).to_be_bytes());
    header.extend(l1.to_be_bytes());
    header.extend(size.to_be_bytes());
    header.extend([0, 0, 0, 1]);
    header.extend([0; 12]);
    let zstd = kind == Compression::Zstd;
    header.extend((if zstd { 8u64 } else { 0 }).to_be_bytes());
    header.extend([0; 16]);
    header.extend([0, 0, 0, 4, 0, 0, 0, 112, u8::from(zstd)]);
    header.extend([0; 15]);
    let mut file = fs::File::create(lab.path(name)).unwrap();
    let mut put = |at: u64, bytes: &[u8]| {
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(bytes).unwrap();
    };
    put(0, &header);
    put(size, &(2 * size).to_be_bytes());
    // One 0 bit for each sector: as long as it can be.
    let shift = 62 - (bits - 8);
    let sectors = (1u64 << (bits - 8)) - 1;
    for table in 0..tables {
        put(l1 + table * 8, &(l2 + table * size).to_be_bytes());
    }
    let entry = |nth: u64| 1 << 62 | sectors << shift | (data + nth * stride);
    let entries: Vec<u8> = (0..count)
        .flat_map(|nth| entry(nth).to_be_bytes())
        .collect();
    put(l2, &entries);
    for nth in 0..count {
        put(data + nth * stride, &packed);
    }
    put(data + count * stride + 2 * size, b"end");
}

/// A cloop image, with blocks of any size.
fn cloop(lab: &Lab, name: &str, block: u32, count: u32) {
    let packed = zlib(&vec![OLD; block as usize]);
    let mut all = vec![0; 128];
    all[..11].copy_from_slice(b"#!/bin/sh\n#");
    let head =
        b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n";
    all[..head.len()].copy_from_slice(head);
    all.extend(block.to_be_bytes());
    all.extend(count.to_be_bytes());
    let first = all.len() as u64 + 8 * (u64::from(count) + 1);
    for nth in 0..=u64::from(count) {
        all.extend((first + nth * packed.len() as u64).to_be_bytes());
    }
    for _ in 0..count {
        all.extend(&packed);
    }
    fs::write(lab.path(name), all).unwrap();
}

/// What is served.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Compressed(Compression),
    /// An overlay with subclusters or not: of a raw image, or of one with compressed clusters.
    Overlay {
        compressed: bool,
        subclusters: bool,
    },
    /// A raw image with direct I/O.
    Direct,
    Cloop,
    /// An image with compressed clusters that is stored in another one.
    Nested,
}

/// A case: an image, and the requests of its clients.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    bits: u32,
    clients: u64,
    requests: u64,
    /// Bytes of a request.
    length: u64,
    writes: bool,
}

impl Case {
    fn generated(rng: &mut Rng) -> Case {
        let kind = match rng.below(7) {
            0 => Kind::Compressed(Compression::Zlib),
            1 => Kind::Compressed(Compression::Zstd),
            2 | 3 => Kind::Overlay {
                compressed: rng.one_in(2),
                subclusters: rng.one_in(2),
            },
            4 => Kind::Direct,
            5 => Kind::Cloop,
            _ => Kind::Nested,
        };
        // What a request needs grows with them, so large ones are more frequent.
        let bits = match kind {
            _ if rng.one_in(2) => 20 + rng.below(2),
            Kind::Overlay {
                subclusters: true, ..
            } => 14 + rng.below(8),
            _ => 9 + rng.below(13),
        };
        let most = 6 - rng.below(6);
        let lengths = [512, 512, 512, 4096, 65536, 1 << 20];
        let length = lengths[rng.below(6) as usize];
        // A client sends all of its requests before it receives a reply.
        let requests = (16 + rng.below(113)).min((24 << 20) / length);
        let writes = matches!(kind, Kind::Overlay { .. } | Kind::Direct) && !rng.one_in(4);
        Case {
            kind,
            bits: bits as u32,
            clients: most,
            // What is copied goes to the disk.
            requests: match writes {
                true => requests.min((128 << 20 >> bits).max(1)).min(64),
                false => requests,
            },
            length,
            writes,
        }
    }

    fn clusters(&self) -> u64 {
        (256 << 20 >> self.bits).clamp(8, 1024)
    }

    /// Makes the image; returns the arguments for it.
    fn make(&self, lab: &Lab) -> Vec<String> {
        let (bits, count) = (self.bits, self.clusters());
        let args: &[&str] = match self.kind {
            Kind::Compressed(kind) => {
                compressed(lab, "x", bits, kind, count);
                &["-r", "-f", "qcow2", "x"]
            }
            Kind::Overlay {
                compressed: packed,
                subclusters,
            } => {
                let format = match packed {
                    true => {
                        compressed(lab, "base", bits, Compression::Zstd, count);
                        "qcow2"
                    }
                    false => {
                        raw(lab, "base", count << bits);
                        "raw"
                    }
                };
                let options = match subclusters {
                    true => format!("cluster_size={},extended_l2=on", 1u64 << bits),
                    false => format!("cluster_size={}", 1u64 << bits),
                };
                let args = ["create", "-q", "-f", "qcow2", "-o", &options];
                let args = [&args[..], &["-b", "base", "-F", format, "x"]].concat();
                lab.zebu(&args).ok("create");
                &["-f", "qcow2", "x"]
            }
            Kind::Direct => {
                raw(lab, "x", count << bits);
                &["-f", "raw", "--cache", "none", "x"]
            }
            Kind::Cloop => {
                cloop(lab, "x", 1 << bits, count.min(256) as u32);
                &["-r", "-f", "cloop", "x"]
            }
            Kind::Nested => {
                compressed(lab, "inner", bits, Compression::Zlib, count);
                let options = format!("cluster_size={}", 1u64 << bits);
                let args = ["convert", "-f", "raw", "-O", "qcow2", "-c", "-o", &options];
                lab.zebu(&[&args[..], &["inner", "outer"]].concat())
                    .ok("convert");
                &[
                    "-r",
                    r#"json:{"driver":"qcow2","file":{"driver":"qcow2","file":{"driver":"file","filename":"outer"}}}"#,
                ]
            }
        };
        args.iter().map(ToString::to_string).collect()
    }

    /// Bytes that the server may take for it, beside what it has before.
    fn bound(&self) -> u64 {
        // Those that requests of this image need.
        let steps = match self.kind {
            Kind::Nested
            | Kind::Overlay {
                compressed: true, ..
            } => 2,
            _ => 1,
        };
        let buffers = self.requests * self.length.next_power_of_two().max(4096);
        // One block of an image of another format is kept, and one is inflated at a time.
        steps * STEP + self.clients * (buffers + CONNECTION) + OTHERS + (4 << self.bits)
    }

    fn run(&self) {
        let lab = Lab::new();
        let image = self.make(&lab);
        let mut args = vec!["-t", "-e", "1000"];
        args.extend(image.iter().map(String::as_str));
        let mut server = Server::start(&lab, &args);
        drop(Raw::with_export(&server, "", Headers::Simple));
        let before = server.peak_memory();
        let size = match self.kind {
            Kind::Cloop => self.clusters().min(256) << self.bits,
            _ => self.clusters() << self.bits,
        };
        let clients: Vec<_> = (0..self.clients)
            .map(|_| Raw::with_export(&server, "", Headers::Simple))
            .collect();
        thread::scope(|scope| {
            for (client, raw) in clients.into_iter().enumerate() {
                scope.spawn(move || self.client(raw, client as u64, size));
            }
        });
        let taken = server.peak_memory() - before;
        assert!(
            taken <= self.bound(),
            "{self:?}: {} MiB of memory, at most {}",
            taken >> 20,
            self.bound() >> 20
        );
        server.signal("TERM");
        assert_eq!(server.wait(), 0, "{}", server.log());
    }

    fn client(&self, mut raw: Raw, client: u64, size: u64) {
        let cluster = 1 << self.bits;
        let length = self.length.min(size);
        for nth in 0..self.requests {
            // Each in a cluster of its own, as long as there are some.
            let at = (client * self.requests + nth) * cluster + cluster / 2 + 1;
            let offset = at % (size - length + 1);
            let request = Request {
                command: match self.writes {
                    true => Command::Write,
                    false => Command::Read,
                },
                flags: 0,
                cookie: nth,
                offset,
                length,
            };
            raw.send(&request);
            if self.writes {
                raw.put(&vec![NEW; length as usize]);
            }
        }
        for _ in 0..self.requests {
            let data = match self.writes {
                true => 0,
                false => length as usize,
            };
            let (_, got) = raw.answer(data);
            assert_eq!(got.error, 0, "{self:?}");
            for (_, bytes) in got.pieces {
                let wrong = bytes.iter().find(|b| ![OLD, NEW].contains(b));
                assert_eq!(wrong, None, "{self:?}");
            }
        }
    }
}

fn raw(lab: &Lab, name: &str, size: u64) {
    let piece = vec![OLD; 1 << 20];
    let mut file = fs::File::create(lab.path(name)).unwrap();
    for at in (0..size).step_by(piece.len()) {
        let count = (size - at).min(piece.len() as u64) as usize;
        file.write_all(&piece[..count]).unwrap();
    }
}

#[test]
fn generated_loads_stay_within_the_bound() {
    if beyond_qemu("an NBD server") {
        return;
    }
    for seed in cases(8, "loads of servers") {
        let case = Case::generated(&mut Rng::new(seed));
        println!("seed {seed}: {case:?}");
        case.run();
    }
}

#[test]
fn small_reads_of_large_compressed_clusters() {
    if beyond_qemu("an NBD server") {
        return;
    }
    for kind in [Compression::Zlib, Compression::Zstd] {
        let case = Case {
            kind: Kind::Compressed(kind),
            bits: 21,
            clients: 8,
            requests: 128,
            length: 512,
            writes: false,
        };
        case.run();
    }
}

#[test]
fn small_writes_to_overlays_of_large_clusters() {
    if beyond_qemu("an NBD server") {
        return;
    }
    for compressed in [false, true] {
        let case = Case {
            kind: Kind::Overlay {
                compressed,
                subclusters: false,
            },
            bits: 21,
            clients: 2,
            requests: 64,
            length: 512,
            writes: true,
        };
        case.run();
    }
}

/// A server that finds requests of the last one in the table begins them as it would take new ones.
#[test]
fn requests_that_a_killed_server_left() {
    if beyond_qemu("a vhost-user-blk server") {
        return;
    }
    const REQUESTS: u64 = 256;
    const DATA: u64 = 2 << 20;
    for (args, bytes) in [
        (&["-r", "-f", "qcow2", "x"][..], 512),
        (&["-f", "raw", "--cache", "none", "x"], DATA),
    ] {
        let lab = Lab::new();
        let distance = match bytes {
            DATA => {
                raw(&lab, "x", 2 * DATA);
                1
            }
            _ => {
                compressed(&lab, "x", 21, Compression::Zstd, REQUESTS);
                DATA / 512
            }
        };
        let mut server = vhost::serve(&lab, args);
        let setup = Setup {
            queue_size: REQUESTS as u16,
            slots: 1,
            bytes: DATA + 4096 + 64 * REQUESTS,
            ..Setup::default()
        };
        let mut machine = Machine::new(setup).unwrap();
        let mut connection = machine.connect(&vhost::socket(&lab)).unwrap();
        let before = server.peak_memory();
        let mut ring = machine.ring(0).unwrap();
        for head in 0..REQUESTS {
            // All read to one place, which is not aligned.
            let table = ring.data(0) + DATA + 4096 + 64 * head;
            let mut header = [0; 16];
            header[8..].copy_from_slice(&(head * distance).to_le_bytes());
            let at = GuestAddress(table + 48);
            machine.memory().write_slice(&header, at).unwrap();
            ring.put_descriptor(table, table + 48, 16, NEXT, 1);
            ring.put_descriptor(table + 16, ring.data(0) + 1, bytes as u32, WRITE | NEXT, 2);
            ring.put_descriptor(table + 32, ring.status(0), 1, WRITE, 0);
            ring.set_descriptor(head as u16, table, 48, INDIRECT, 0);
            ring.offer(head as u16);
            machine.leave_in_flight(0, head as u16).unwrap();
        }
        connection.start(&ring).unwrap();
        wait_until("all requests have ended", || {
            u64::from(ring.used_index()) == REQUESTS
        });
        let status: u8 = machine
            .memory()
            .read_obj(GuestAddress(ring.status(0)))
            .unwrap();
        assert_eq!(status, vhost::OK);
        let taken = server.peak_memory() - before;
        let bound = 3 * STEP + 2 * CONNECTION + OTHERS;
        assert!(taken <= bound, "{} MiB of memory", taken >> 20);
        drop(connection);
        server.stop();
    }
}
