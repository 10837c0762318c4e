//! Opens and reads hostile images. Guards against panics, endless loops, memory in proportion to a
//! number in the file, and files that are opened against the caller's policy.
//!
//! Generated images, each damaged in a few places, and named cases. Each case may take two seconds
//! of processor time and 64 MiB.

use crate::hostile_vmdk;
use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::bounds::{alone, case, generated, queue};
use crate::common::repair_all;
use crate::hostile_images::{Rng, build, check, exercise, mutate};
use crate::sound::{
    CLUSTER, DATA, END, L1, L2, REFCOUNT_BLOCK, REFCOUNT_TABLE, header, memory, put, put32, sound,
    with_header,
};
use zebu::Result;
use zebu::block::{Device, OpenOptions, Policy, Vmdk};
use zebu::internal::OpenImage;
use zebu::internal::structures::{
    BITMAP_TYPE_DIRTY_TRACKING, BitmapsExtension, COMPRESSED, COPIED, Extension, Header,
    INCOMPATIBLE_DATA_FILE,
};
use zebu::names::Source;
use zebu::qcow2::{BitmapEntry, Snapshot};
use zebu::storage::{Iov, Memory, OpKind, Queue, Started, Storage, StorageExtent};

#[test]
fn generated_images() {
    generated(200, 64 << 20, |queue, rng| {
        let sound = rng.one_in(8);
        let mut bytes = build(rng, 256 << 10);
        if !sound {
            mutate(rng, &mut bytes);
        }
        exercise(queue, &bytes);
    });
}

#[test]
fn generated_vmdks() {
    let read = Cell::new(0);
    generated(200, 64 << 20, |queue, rng| {
        let sound = rng.one_in(8);
        let mut bytes = hostile_vmdk::build(rng, 256 << 10);
        if !sound {
            for _ in 0..1 + rng.below(6) {
                hostile_vmdk::mutate_once(rng, &mut bytes);
            }
        }
        exercise(queue, &bytes);
        let options = OpenOptions::default().no_backing(true);
        if let Ok(device) = Device::from_storage(queue, memory(&bytes), &options)
            && device.top().get::<Vmdk>().is_some()
        {
            let _ = queue.block_on(device.top().check(queue, &mut |_| {}));
            let first = device.read_blocking(queue, 0, &mut [0; 512]);
            read.set(read.get() + u32::from(first.is_ok()));
        }
    });
    let read = read.get();
    assert!(
        read >= 50 || !zebu_testkit::are_usual(),
        "{read} can be read"
    );
}

/// Most generated images must open, or the generator would test nothing.
#[test]
fn most_generated_images_open_and_can_be_read() {
    let _alone = alone();
    let queue = queue();
    let (mut opened, mut read) = (0, 0);
    for seed in 0..200 {
        let bytes = build(&mut Rng::new(seed), 256 << 10);
        let storage: Arc<dyn Storage> = Arc::new(Memory::new(bytes));
        let options = OpenOptions::default().no_backing(true);
        if let Ok(device) = Device::from_storage(&queue, storage, &options) {
            opened += 1;
            let mut first = vec![0; device.size().min(512) as usize];
            read += u32::from(device.read_blocking(&queue, 0, &mut first).is_ok());
        }
    }
    assert!(opened >= 160, "{opened} of 200 open");
    assert!(read >= 120, "{read} of 200 can be read");
}

fn open(bytes: &[u8]) -> Result<Device> {
    Device::from_storage(&queue(), memory(bytes), &OpenOptions::default())
}

/// Opening fails, and the message contains `words`.
#[track_caller]
fn refused(name: &str, bytes: &[u8], words: &str) {
    case(name, || exercise(&queue(), bytes));
    match open(bytes) {
        Ok(_) => panic!("{name} opens"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains(words), "{name}: {text}");
        }
    }
}

/// The image opens, reading at `at` fails, and the message contains `words`.
#[track_caller]
fn unreadable(name: &str, bytes: &[u8], at: u64, words: &str) {
    case(name, || exercise(&queue(), bytes));
    let device = open(bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
    let error = device
        .read_blocking(&queue(), at, &mut [0; 100])
        .expect_err(name);
    let text = error.to_string();
    assert!(text.contains(words), "{name}: {text}");
}

/// A check finds an error.
#[track_caller]
fn corrupt(name: &str, bytes: &[u8]) {
    case(name, || exercise(&queue(), bytes));
    let report = check(&queue(), memory(bytes)).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(report.corruptions > 0, "{name}: {report:?}");
}

#[test]
fn the_image_is_sound_before_it_is_damaged() {
    let _alone = alone();
    let report = check(&queue(), memory(&sound())).expect("a check");
    assert_eq!((report.corruptions, report.leaks), (0, 0));
    let device = open(&sound()).expect("it opens");
    let mut bytes = [0; 8192];
    device.read_blocking(&queue(), 0, &mut bytes).expect("read");
    assert!(bytes[..4096].iter().all(|b| *b == 0x5a));
    assert!(bytes[4096..].iter().all(|b| *b == 0));
}

#[test]
fn l2_tables_that_overlap() {
    let _alone = alone();
    for (name, table) in [
        ("refcount table", REFCOUNT_TABLE),
        ("refcount block", REFCOUNT_BLOCK),
        ("L1 table", L1),
        ("another L2 table", L2),
        ("data", DATA),
    ] {
        let mut bytes = sound();
        put(&mut bytes, L1 + 8, table | COPIED);
        corrupt(&format!("L2 over {name}"), &bytes);
    }
    let mut bytes = sound();
    put(&mut bytes, 40, 0);
    corrupt("L1 over the header", &bytes);
    put(&mut bytes, 40, REFCOUNT_BLOCK);
    corrupt("L1 over the refcount block", &bytes);
    let mut bytes = sound();
    put(&mut bytes, REFCOUNT_TABLE, REFCOUNT_TABLE);
    corrupt("refcount block over its table", &bytes);
    let mut bytes = sound();
    put(&mut bytes, L2 + 8, L2 | COPIED);
    corrupt("data over an L2 table", &bytes);
}

#[test]
fn clusters_past_the_end() {
    let _alone = alone();
    for (offset, words) in [
        (END, "past the end"),
        (1 << 40, "past the end"),
        (1 << 55, "past the end"),
        (0x00ff_ffff_ffff_f000, "past the end"),
        (DATA + 512, "unaligned"),
    ] {
        let mut bytes = sound();
        put(&mut bytes, L2, offset | COPIED);
        unreadable(&format!("data at {offset:#x}"), &bytes, 0, words);
        let mut bytes = sound();
        put(&mut bytes, L1, offset | COPIED);
        unreadable(&format!("L2 table at {offset:#x}"), &bytes, 0, words);
    }
}

/// Regression (fuzzing): of adjacent clusters that are read by one operation, only the first was
/// compared with the end of the file, and the others read as zeroes.
#[test]
fn adjacent_clusters_past_the_end() {
    let _alone = alone();
    let mut bytes = sound();
    put(&mut bytes, L2 + 8, END | COPIED);
    put(&mut bytes, L2 + 16, (END + CLUSTER) | COPIED);
    case("adjacent clusters", || exercise(&queue(), &bytes));
    let device = open(&bytes).expect("it opens");
    for (at, length) in [(0, 3 * CLUSTER), (100, CLUSTER), (CLUSTER, 1)] {
        let mut out = vec![0; length as usize];
        let error = device.read_blocking(&queue(), at, &mut out);
        let text = error.expect_err("past the end").to_string();
        assert!(text.contains("offset 0x6000 is past the end"), "{text}");
        assert!(text.contains("(guest offset 0x1000)"), "{text}");
    }
    // The last cluster of the file may be partial: the rest reads as zeroes.
    bytes.resize((END + CLUSTER + 1) as usize, 7);
    let device = open(&bytes).expect("it opens");
    let mut out = vec![1; 3 * CLUSTER as usize];
    device
        .read_blocking(&queue(), 0, &mut out)
        .expect("no cluster is missing");
    assert_eq!(out[2 * CLUSTER as usize..][..2], [7, 0]);
}

#[test]
fn header_numbers() {
    let _alone = alone();
    type Case<'a> = (&'a str, usize, usize, u64, &'a str);
    let cases: &[Case<'_>] = &[
        ("L1 larger than the file", 36, 4, 1 << 20, "L1 table"),
        ("L1 larger than allowed", 36, 4, u32::MAX as u64, "L1 table"),
        ("L1 at 2^63", 40, 8, 1 << 63, "L1 table"),
        ("L1 at the end", 40, 8, END, "L1 table"),
        ("header_length", 100, 4, u32::MAX as u64, "header exceeds"),
        ("size 2^64-1", 24, 8, u64::MAX, "too big"),
        ("size 2^62", 24, 8, 1 << 62, ""),
        ("nb_snapshots 65536", 60, 4, 65536, "napshot table"),
        ("nb_snapshots 65537", 60, 4, 65537, "napshot table"),
        (
            "nb_snapshots 2^32-1",
            60,
            4,
            u32::MAX as u64,
            "napshot table",
        ),
        (
            "refcount table of 2^32-1",
            56,
            4,
            u32::MAX as u64,
            "eference count",
        ),
        ("refcount table at the end", 48, 8, END, "eference count"),
        ("backing name of 2^32-1", 8, 8, 512, ""),
    ];
    for (name, at, length, value, words) in cases {
        let mut bytes = sound();
        bytes[*at..at + length].copy_from_slice(&value.to_be_bytes()[8 - length..]);
        if *at == 8 {
            put32(&mut bytes, 16, u32::MAX);
        }
        refused(name, &bytes, words);
    }
}

#[test]
fn large_clusters_in_a_tiny_file() {
    let _alone = alone();
    let mut bytes = sound();
    put32(&mut bytes, 20, 21);
    refused("all in one cluster", &bytes, "");
    put(&mut bytes, 40, 0);
    put(&mut bytes, 48, 0);
    case("L1 is the header", || exercise(&queue(), &bytes));
}

#[test]
fn snapshot_entries_past_the_end() {
    let _alone = alone();
    let snapshot = Snapshot {
        l1_offset: L1,
        l1_size: 8,
        id: b"1".to_vec(),
        ..Snapshot::default()
    };
    let table = Snapshot::encode_table(&[snapshot]).expect("a table");
    let mut header = header();
    header.nb_snapshots = 1;
    header.snapshots_offset = END;
    let mut bytes = with_header(&header);
    bytes.extend_from_slice(&table);
    assert!(open(&bytes).is_ok());
    for (name, at, length, value) in [
        ("id", 12, 2, 0xffff),
        ("name", 14, 2, 0xffff),
        ("extra data", 36, 4, 1024),
        ("too much extra data", 36, 4, 1025),
        ("much too much", 36, 4, u64::MAX),
    ] {
        let mut bytes = bytes.clone();
        let at = END as usize + at;
        bytes[at..at + length].copy_from_slice(&value.to_be_bytes()[8 - length..]);
        refused(&format!("snapshot {name}"), &bytes, "napshot");
    }
    // Enough bytes for 65536 entries of the shortest length.
    put32(&mut bytes, 60, 65536);
    bytes.resize(bytes.len() + 65536 * 40, 0);
    case("65536 snapshots", || open(&bytes).map(drop)).expect("they are there");
    case("65536 snapshots", || exercise(&queue(), &bytes));
    let last = bytes.len() - 4 * 40;
    bytes.truncate(last);
    refused("65536 snapshots but 3", &bytes, "napshot table");
}

#[test]
fn compressed_clusters_anywhere() {
    let _alone = alone();
    // With clusters of 4 KiB: 58 bits of offset, 4 of sectors.
    let descriptor = |offset: u64, sectors: u64| COMPRESSED | (sectors << 58) | offset;
    for (name, entry) in [
        ("at the last byte", descriptor(END - 1, 0)),
        ("over the end", descriptor(END - 1, 15)),
        ("at the end", descriptor(END, 3)),
        ("at 2^40", descriptor(1 << 40, 15)),
        ("at the largest offset", descriptor((1 << 58) - 1, 15)),
        ("at 0", descriptor(0, 15)),
        ("on an L2 table", descriptor(L2, 7)),
    ] {
        let mut bytes = sound();
        // The stream is invalid, not only short.
        bytes[DATA as usize..].fill(0xff);
        put(&mut bytes, L2, entry);
        let name = format!("compressed {name}");
        unreadable(&name, &bytes, 0, "guest offset 0x0");
    }
}

/// Two entries have the same offset and different lengths. The result must not depend on which of
/// them was read first.
#[test]
fn compressed_clusters_of_one_offset_and_two_lengths() {
    let _alone = alone();
    let mut data = vec![0; CLUSTER as usize];
    Rng::new(1).fill(&mut data);
    // Half of the bits are noise.
    data.iter_mut().for_each(|byte| *byte &= 0xf);
    let mut stream = vec![0; CLUSTER as usize];
    let length = zebu::internal::codec::Compressor::new()
        .compress(
            zebu::internal::codec::Compression::Zlib,
            None,
            &data,
            &mut stream,
        )
        .expect("it compresses")
        .expect("it fits");
    assert!(length > 1024);
    let mut bytes = sound();
    bytes[DATA as usize..][..length].copy_from_slice(&stream[..length]);
    let sectors = length as u64 / 512;
    put(&mut bytes, L2, COMPRESSED | sectors << 58 | DATA);
    put(&mut bytes, L2 + 8, COMPRESSED | DATA);
    exercise(&queue(), &bytes);
    let (device, queue) = (open(&bytes).expect("it opens"), queue());
    let mut out = [0; 10];
    device.read_blocking(&queue, 5, &mut out).expect("whole");
    assert_eq!(out, data[5..15]);
    let short = device.read_blocking(&queue, CLUSTER + 5, &mut out);
    assert!(
        short.is_err(),
        "512 bytes of the stream are less than a cluster"
    );
}

/// Names that may only be opened if the policy allows it.
#[test]
fn names_that_the_policy_forbids() {
    let _alone = alone();
    let mut backed = header();
    backed.set_backing(Some(b"json:{\"file.driver\":\"nbd\"}"), None);
    let mut data = header();
    data.set_incompatible(INCOMPATIBLE_DATA_FILE, true);
    data.set_data_file_name(Some(b"/etc/passwd"));
    let directory = tempfile::tempdir().expect("a directory");
    for (name, header, words) in [
        ("backing file", &backed, "json:{\"file.driver\":\"nbd\"}"),
        ("data file", &data, "/etc/passwd"),
    ] {
        let bytes = with_header(header);
        let path = directory.path().join("x.qcow2");
        fs::write(&path, &bytes).expect("a file");
        let source = Source::Name(path.clone().into());
        let options = OpenOptions::default().policy(Policy::Nothing);
        let opened = case(name, || Device::open(&queue(), &source, &options));
        for (how, result) in [("file", opened), ("memory", open(&bytes))] {
            let text = result.err().unwrap_or_else(|| panic!("{name} opens"));
            let text = text.to_string();
            assert!(text.contains("may not open"), "{how}: {text}");
            assert!(text.contains(words), "{how}: {text}");
        }
        let options = options.no_backing(true);
        let opened = Device::open(&queue(), &source, &options);
        assert_eq!(opened.is_ok(), name == "backing file");
    }
    // If names are followed, one may be that of a server.
    let path = directory.path().join("x.qcow2");
    fs::write(&path, with_header(&backed)).expect("a file");
    let source = Source::Name(path.clone().into());
    let followed = Device::open(&queue(), &source, &OpenOptions::default());
    let text = followed.expect_err("no server is named").to_string();
    assert!(text.contains("NBD server address missing"), "{text}");
}

/// A chain of `count` images. The last one is backed by image number `then`.
fn chain(directory: &Path, count: usize, then: Option<usize>) -> Source {
    for n in 0..count {
        let next = if n + 1 < count { Some(n + 1) } else { then };
        let mut header = header();
        if let Some(next) = next {
            header.set_backing(Some(format!("{next}.qcow2").as_bytes()), Some(b"qcow2"));
        }
        let path = directory.join(format!("{n}.qcow2"));
        fs::write(path, with_header(&header)).expect("a file");
    }
    Source::Name(directory.join("0.qcow2").into())
}

#[test]
fn backing_loops_and_long_chains() {
    let _alone = alone();
    let directory = tempfile::tempdir().expect("a directory");
    for count in 1..=3 {
        let name = format!("a loop of {count}");
        let source = chain(directory.path(), count, Some(0));
        let result = case(&name, || {
            Device::open(&queue(), &source, &OpenOptions::default())
        });
        let text = result.expect_err(&name).to_string();
        assert!(text.contains("creates an infinite loop"), "{name}: {text}");
    }
    let source = chain(directory.path(), 100, None);
    let device = case("a chain of 100", || {
        Device::open(&queue(), &source, &OpenOptions::default())
    })
    .expect("it opens");
    assert_eq!(device.layers().len(), 100);
    drop(device);
    let source = chain(directory.path(), 300, None);
    let result = case("a chain of 300", || {
        Device::open(&queue(), &source, &OpenOptions::default())
    });
    let text = result.expect_err("too long").to_string();
    assert!(text.contains("chain is longer than"), "{text}");
    assert!(text.len() < 10_000, "a message of {} bytes", text.len());
}

#[test]
fn json_nested_deep() {
    let _alone = alone();
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        for depth in [100, 10_000, 1_000_000] {
            let (open, close) = (open.repeat(depth), close.repeat(depth));
            let name = format!("json:{{\"driver\":{open}1{close}}}");
            let result = case("json", || Source::Name(name.into()).resolve(None, None));
            assert!(result.is_err());
        }
    }
    let mut header = header();
    let name = format!("json:{}", "[".repeat(1000));
    header.set_backing(Some(name.as_bytes()), None);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("x.qcow2");
    fs::write(&path, with_header(&header)).expect("a file");
    let source = Source::Name(path.clone().into());
    let result = Device::open(&queue(), &source, &OpenOptions::default());
    assert!(result.is_err());
}

/// A sparse file of `len` bytes, more than a file system allows. Only the first bytes are data.
#[derive(Debug)]
struct Vast {
    bytes: Memory,
    len: u64,
}

// SAFETY: reads and writes are done by `Memory`, which keeps the promises.
unsafe impl Storage for Vast {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        match (kind, memory) {
            (OpKind::SetLength, _) => Started::done(Err(io::ErrorKind::Unsupported.into())),
            (OpKind::Extent, Some(iov)) => {
                Started::done(Ok(StorageExtent::hole(self.len - offset).put(iov)))
            }
            // SAFETY: as the caller promised.
            _ => unsafe { self.bytes.start(queue, kind, offset, length, memory) },
        }
    }
    fn len(&self) -> io::Result<u64> {
        Ok(self.len)
    }
    fn allocated(&self) -> io::Result<u64> {
        self.bytes.len()
    }
}

fn vast(bytes: &[u8], len: u64) -> Arc<dyn Storage> {
    Arc::new(Vast {
        bytes: Memory::new(bytes.to_vec()),
        len,
    })
}

/// Regression: the search for preallocated metadata went on past the refcount table, to every block
/// that a file of this length may have.
#[test]
fn status_of_a_vast_sparse_file() {
    let _alone = alone();
    let mut header = Header::new(9, 1 << 20);
    header.refcount_order = 6;
    header.refcount_table_offset = 512;
    header.refcount_table_clusters = 1;
    header.l1_offset = 1024;
    header.l1_size = 32;
    let mut bytes = header.encode().expect("a header");
    bytes.resize(4096, 0);
    put(&mut bytes, 1024, 1536);
    put(&mut bytes, 1536, 2048);
    let (device, queue) = case("open", || {
        let queue = queue();
        let storage = vast(&bytes, 1 << 62);
        let device = Device::from_storage(&queue, storage, &OpenOptions::default());
        (device.expect("it opens"), queue)
    });
    let status = case("status", || queue.block_on(device.status(&queue, 0, 512)));
    assert!(status.expect("a status").data);
}

/// Tables as large as allowed, in holes of a file.
#[test]
fn largest_tables_in_a_sparse_file() {
    let _alone = alone();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("x.qcow2");
    let mut header = header();
    header.l1_offset = 1 << 30;
    header.l1_size = 4 << 20;
    header.refcount_table_offset = 2 << 30;
    header.refcount_table_clusters = 2048;
    let file = File::create(&path).expect("a file");
    file.write_at(&header.encode().expect("a header"), 0)
        .expect("written");
    file.set_len(4 << 30).expect("a sparse file");
    let source = Source::Name(path.clone().into());
    let device = case("L1 table of 32 MiB", || {
        Device::open(&queue(), &source, &OpenOptions::default())
    })
    .expect("it opens");
    let mut bytes = [1; 512];
    device.read_blocking(&queue(), 0, &mut bytes).expect("read");
    assert_eq!(bytes, [0; 512]);
    drop(device);

    header.nb_snapshots = 65536;
    header.snapshots_offset = 3 << 30;
    file.write_at(&header.encode().expect("a header"), 0)
        .expect("written");
    case("and 65536 snapshots", || {
        Device::open(&queue(), &source, &OpenOptions::default()).map(drop)
    })
    .expect("it opens");
    // The second entry has too much extra data, so the others are not read.
    file.write_at(&1025u32.to_be_bytes(), (3 << 30) + 40 + 36)
        .expect("written");
    let text = case("and a broken snapshot", || {
        Device::open(&queue(), &source, &OpenOptions::default())
    })
    .expect_err("it is refused")
    .to_string();
    assert!(text.contains("entry 1"), "{text}");
}

/// Each table is allowed; together they cover the file thousands of times.
#[test]
fn check_of_tables_that_cover_the_file_many_times() {
    let _alone = alone();
    let file_len: u64 = 128 << 20;
    let snapshots: Vec<Snapshot> = (0..60_000u32)
        .map(|n| Snapshot {
            l1_offset: 0,
            l1_size: 4 << 20,
            id: n.to_string().into_bytes(),
            ..Snapshot::default()
        })
        .collect();
    let mut small = Header::new(9, 0);
    small.l1_offset = 512;
    small.l1_size = 1;
    small.refcount_table_offset = 1024;
    small.refcount_table_clusters = 1;
    let mut header = small.clone();
    header.nb_snapshots = snapshots.len() as u32;
    header.snapshots_offset = 4096;
    let mut bytes = header.encode().expect("a header");
    bytes.resize(4096, 0);
    bytes.extend(Snapshot::encode_table(&snapshots).expect("a table"));
    case("snapshots", || {
        check(&queue(), vast(&bytes, file_len)).map(drop)
    })
    .expect("a check");

    let bitmaps: Vec<BitmapEntry> = (0..60_000)
        .map(|n| BitmapEntry {
            table_offset: 512,
            table_size: 1 << 23,
            flags: 1,
            kind: BITMAP_TYPE_DIRTY_TRACKING,
            granularity_bits: 16,
            extra_data: Vec::new(),
            name: n.to_string().into_bytes(),
        })
        .collect();
    let directory = BitmapEntry::encode_directory(&bitmaps).expect("a directory");
    let mut header = small;
    header.autoclear = 1;
    let extension = BitmapsExtension {
        count: bitmaps.len() as u32,
        reserved: 0,
        directory_size: directory.len() as u64,
        directory_offset: 4096,
    };
    header.extensions.set(Extension::Bitmaps(extension));
    let mut bytes = header.encode().expect("a header");
    bytes.resize(4096, 0);
    bytes.extend(directory);
    case("bitmaps", || {
        check(&queue(), vast(&bytes, file_len)).map(drop)
    })
    .expect("a check");
}

/// An image whose enabled bitmaps have tables in holes of the file. The granularity is 512 bytes.
fn bitmaps_in_holes(size: u64, count: u64, table_size: u32) -> tempfile::NamedTempFile {
    const WIDE: u64 = 64 << 10;
    let clusters = (u64::from(table_size) * 8).div_ceil(WIDE);
    let bitmaps: Vec<BitmapEntry> = (0..count)
        .map(|n| BitmapEntry {
            table_offset: (5 + n * clusters) * WIDE,
            table_size,
            flags: 2,
            kind: BITMAP_TYPE_DIRTY_TRACKING,
            granularity_bits: 9,
            extra_data: Vec::new(),
            name: n.to_string().into_bytes(),
        })
        .collect();
    let directory = BitmapEntry::encode_directory(&bitmaps).expect("a directory");
    let mut header = Header::new(16, size);
    header.refcount_table_offset = WIDE;
    header.refcount_table_clusters = 1;
    header.l1_offset = 3 * WIDE;
    header.l1_size = 4096;
    header.autoclear = 1;
    header.extensions.set(Extension::Bitmaps(BitmapsExtension {
        count: count as u32,
        reserved: 0,
        directory_size: directory.len() as u64,
        directory_offset: 4 * WIDE,
    }));
    let mut bytes = header.encode().expect("a header");
    bytes.resize(4 * WIDE as usize, 0);
    put(&mut bytes, WIDE, 2 * WIDE);
    let end = 5 + count * clusters;
    for cluster in 0..end.min(WIDE / 2) {
        bytes[(2 * WIDE + 2 * cluster) as usize + 1] = 1;
    }
    bytes.extend(directory);
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().write_all_at(&bytes, 0).expect("a write");
    file.as_file().set_len(end * WIDE).expect("a length");
    file
}

#[test]
fn written_with_bitmaps_in_holes() {
    let _alone = alone();
    // A table of 2 GiB, and more than a thousand bitmaps of 512 MiB.
    for (name, size, count, table_size) in [
        ("a long table", 1 << 30, 1, 1 << 28),
        ("many bitmaps", 2 << 40, 1100, 8192),
    ] {
        let file = bitmaps_in_holes(size, count, table_size);
        case(name, || {
            let queue = queue();
            let source = Source::Name(file.path().into());
            let options = OpenOptions::default().write(true);
            let device = Device::open(&queue, &source, &options).expect("an image");
            device
                .write_blocking(&queue, 0, &[1; 512])
                .expect("a write");
            queue.block_on(device.close(&queue)).expect("closed");
        });
    }
}

/// The snapshot table is in a data cluster, and its entry is not plausible. It cannot be decided
/// which of the two the cluster is, so a repair must change nothing.
#[test]
fn repair_of_a_snapshot_table_in_a_data_cluster() {
    let _alone = alone();
    let mut header = header();
    header.snapshots_offset = DATA;
    header.nb_snapshots = 1;
    let mut bytes = with_header(&header);
    bytes[DATA as usize..][..64].fill(0);
    put(&mut bytes, L2, DATA);
    bytes[REFCOUNT_BLOCK as usize + 11] = 2;
    let storage = Arc::new(Memory::new(bytes.clone()));
    let report = case("repair", || repair_all(&queue(), storage.clone()));
    let report = report.expect("a repair");
    assert_eq!((report.check_errors, report.corruptions_fixed), (1, 0));
    assert!(storage.to_vec() == bytes);
}

/// A file of any length must not be read past its end.
#[test]
fn truncated_files() {
    let _alone = alone();
    let bytes = sound();
    for length in (0..600).chain((600..bytes.len()).step_by(97)) {
        case(&format!("{length} bytes"), || {
            exercise(&queue(), &bytes[..length]);
            let storage = memory(&bytes[..length]);
            let queue = queue();
            let _ = queue.block_on(OpenImage::new(&queue, storage));
        });
    }
}
