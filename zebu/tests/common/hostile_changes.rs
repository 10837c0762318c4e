//! What changes or copies an image, done to images as a stranger would make
//! them: shared by `hostile_changes.rs` and, by path, by the fuzz targets.
//!
//! Each function takes the bytes of an image, whatever they are, and panics if
//! one of the promises does not hold that are made of any image:
//!
//! - nothing panics or takes memory in proportion to a number in the file;
//! - what a guest writes never lands in the image's own tables;
//! - an image that was sound is sound afterwards, and reads as it should;
//! - what repair calls sound, check calls sound.
//!
//! What is done is chosen by the last bytes of the image, so that the same bytes
//! are treated alike.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use zebu::block::{Device, FileSpec, OpenOptions, Zeroing};
use zebu::internal::format::{Geometry, Header, L1Entry, RefcountTableEntry};
use zebu::jobs::{
    self, CheckReport, CompareOptions, Comparison, CompressOptions, ConvertOptions, CreateQcow2,
    RepairMode, Target,
};
use zebu::names::Source;
use zebu::qcow2::Snapshot;
use zebu::qcow2::SnapshotName;
use zebu::storage::{EngineKind, Iov, Memory, OpKind, Queue, Started, Storage};
use zebu::{Error, Result};

use crate::hostile_images::{self, Random};

/// Bytes that an image may grow to.
const MOST: u64 = 64 << 20;
/// Bytes at the start of the disk that are written and compared.
const WINDOW: u64 = 256 << 10;
/// Requests made of one image.
const REQUESTS: usize = 24;
/// What guests write, again and again.
const MAGIC: &[u8; 16] = b"<a guest's data>";
/// Disks up to this size are copied.
const COPIED: u64 = 2 << 20;
/// Tables of a kind that are looked at.
const TABLES: usize = 4096;

/// Memory that is full when it has so many bytes.
#[derive(Debug)]
pub struct Small(Memory);

impl Small {
    /// With this content.
    pub fn new(bytes: &[u8]) -> Arc<Small> {
        Arc::new(Small(Memory::new(bytes.to_vec())))
    }

    /// A copy of the content.
    pub fn to_vec(&self) -> Vec<u8> {
        self.0.to_vec()
    }
}

#[allow(unsafe_code)]
// SAFETY: all is passed on to `Memory`, which keeps no memory.
unsafe impl Storage for Small {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind != OpKind::Read && offset.saturating_add(length) > MOST {
            return Started::done(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        }
        // SAFETY: passed on.
        unsafe { self.0.start(queue, kind, offset, length, memory) }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&self.0)
    }
}

/// Numbers that go with the image.
fn random_of(bytes: &[u8]) -> Random {
    let tail = bytes.iter().rev().take(8);
    Random(tail.fold(bytes.len() as u64, |n, b| n << 8 ^ n >> 56 ^ u64::from(*b)))
}

/// Opens it for writing, without what it names.
pub fn open(queue: &Queue, storage: Arc<dyn Storage>) -> Option<Device> {
    let options = OpenOptions::default()
        .write(true)
        .discard(Some(true))
        .no_backing(true);
    Device::from_storage(queue, storage, &options).ok()
}

fn open_to_read(queue: &Queue, bytes: &[u8]) -> Option<Device> {
    let options = OpenOptions::default().no_backing(true);
    Device::from_storage(queue, Arc::new(Memory::new(bytes.to_vec())), &options).ok()
}

/// What a check finds; the error of what cannot be checked.
pub fn check(queue: &Queue, bytes: &[u8]) -> Result<CheckReport> {
    let options = OpenOptions::default().inspect(true).check(true);
    let storage = Arc::new(Memory::new(bytes.to_vec()));
    let device = Device::from_storage(queue, storage, &options)?;
    match device.top().as_qcow2() {
        Some(image) => queue.block_on(jobs::check(queue, image, &mut |_| {}, |_| {})),
        None => Err(Error::Refused("a raw image".into())),
    }
}

/// Whether it opens for writing, and a check finds no error.
pub fn is_sound(queue: &Queue, bytes: &[u8]) -> bool {
    open(queue, Arc::new(Memory::new(bytes.to_vec()))).is_some_and(|d| d.top().as_qcow2().is_some())
        && check(queue, bytes).is_ok_and(|r| r.corruptions == 0 && r.check_errors == 0)
}

/// Where the tables of an image are, as far as they can be found: the header,
/// the tables that it names and the tables that these name. Its own reading of
/// them, not the library's.
fn tables(bytes: &[u8]) -> Vec<(&'static str, Range<u64>)> {
    let Ok(header) = Header::decode(&bytes[..bytes.len().min(2 << 20)]) else {
        return Vec::new();
    };
    let Ok(geometry) = Geometry::new(&header) else {
        return Vec::new();
    };
    let cluster = header.cluster_size();
    let mut all = vec![("header", 0..cluster)];
    let mut add = |what, at: u64, length: u64| {
        let end = at.saturating_add(length).min(bytes.len() as u64);
        all.push((what, at..end.max(at)));
    };
    let numbers = |at: u64, count: u64| {
        let end = at
            .saturating_add(count.saturating_mul(8))
            .min(bytes.len() as u64);
        let part = bytes.get(at as usize..end as usize).unwrap_or(&[]);
        let words = part.as_chunks::<8>().0.iter().take(TABLES);
        words.copied().collect::<Vec<_>>()
    };
    let l1_size = u64::from(header.l1_size);
    add("L1 table", header.l1_offset, l1_size * 8);
    for word in numbers(header.l1_offset, l1_size) {
        if let Ok(Some(at)) = L1Entry::from_be_bytes(word)
            .without_reserved()
            .l2_table(&geometry)
        {
            add("L2 table", at.0, cluster);
        }
    }
    let table_bytes = u64::from(header.refcount_table_clusters) * cluster;
    add("refcount table", header.refcount_table_offset, table_bytes);
    for word in numbers(header.refcount_table_offset, table_bytes / 8) {
        if let Ok(Some(at)) = RefcountTableEntry::from_be_bytes(word).block(&geometry) {
            add("refcount block", at.0, cluster);
        }
    }
    let start = header.snapshots_offset as usize;
    if let Some(rest) = bytes.get(start..)
        && let Ok(list) = Snapshot::decode_table(rest, header.nb_snapshots.min(100))
    {
        add(
            "snapshot table",
            header.snapshots_offset,
            40 * list.len() as u64,
        );
        for snapshot in list {
            add(
                "snapshot's L1 table",
                snapshot.l1_offset,
                u64::from(snapshot.l1_size) * 8,
            );
        }
    }
    all
}

/// Places in `within` where guests' data are.
fn magic_in(bytes: &[u8], within: &Range<u64>) -> Vec<u64> {
    let part = bytes.get(within.start as usize..within.end as usize);
    let found = part.unwrap_or(&[]).windows(MAGIC.len()).enumerate();
    let hits = found.filter(|(_, window)| *window == MAGIC);
    hits.map(|(at, _)| within.start + at as u64).collect()
}

/// Tables of `before` that are tables of `after` too have nothing of a guest
/// that they did not have.
fn tables_are_untouched(before: &[u8], after: &[u8]) {
    let still = tables(after);
    for (what, table) in tables(before) {
        if !still.contains(&(what, table.clone())) {
            continue;
        }
        let had = magic_in(before, &table);
        let new = magic_in(after, &table)
            .into_iter()
            .find(|at| !had.contains(at));
        assert_eq!(new, None, "a guest's data in the {what} at {table:#x?}");
    }
}

/// A range that somebody might ask for: at the start of the disk, or at its
/// end.
fn range(random: &mut Random, size: u64) -> (u64, usize) {
    let window = size.min(WINDOW);
    let lengths = [1, 32, 512, 513, 4096, 16 << 10, 64 << 10];
    let mut length = lengths[random.below(7) as usize].min(window);
    let mut offset = random.below(window - length + 1);
    if random.one_in(2) {
        (offset, length) = (offset & !511, length.next_multiple_of(512).min(window));
        offset = offset.min(window - length);
    }
    match random.one_in(8) {
        true => (size - length, length as usize),
        false => (offset, length as usize),
    }
}

/// One request of a guest; where it was carried out, `model` follows.
fn request(queue: &Queue, device: &Device, random: &mut Random, model: &mut [u8]) -> Result<()> {
    let size = device.size();
    let (offset, length) = range(random, size);
    let bytes: Vec<u8> = MAGIC.iter().copied().cycle().take(length).collect();
    let mut written = |bytes: &[u8]| {
        let start = (offset as usize).min(model.len());
        let end = (start + length).min(model.len());
        model[start..end].copy_from_slice(&bytes[..end - start]);
    };
    match random.below(10) {
        0..=4 => {
            device.write_blocking(queue, offset, &bytes)?;
            written(&bytes);
        }
        5 | 6 => {
            let how = match random.one_in(2) {
                true => Zeroing::Unmap,
                false => Zeroing::default(),
            };
            queue.block_on(device.write_zeroes(queue, offset, length as u64, how))?;
            written(&vec![0; length]);
        }
        7 => {
            queue.block_on(device.discard(queue, offset, length as u64))?;
            // Whole clusters read as zeroes, others are as they were.
            let start = (offset as usize).min(model.len());
            let end = (start + length).min(model.len());
            device.read_blocking(queue, start as u64, &mut model[start..end])?;
        }
        8 => queue.block_on(device.flush(queue))?,
        _ => {
            let mut read = vec![0; length];
            device.read_blocking(queue, offset, &mut read)?;
        }
    }
    Ok(())
}

/// Opens it for writing, writes, zeroes, discards and flushes, and checks.
pub fn write(queue: &Queue, bytes: &[u8]) {
    let sound = is_sound(queue, bytes);
    let storage = Small::new(bytes);
    let Some(device) = open(queue, storage.clone()) else {
        return;
    };
    if device.size() == 0 || device.top().as_raw().is_some() {
        return;
    }
    let mut model = vec![0; device.size().min(WINDOW) as usize];
    // In an image that is not sound, two clusters of the disk may be one.
    let mut exact = sound && device.read_blocking(queue, 0, &mut model).is_ok();
    let mut random = random_of(bytes);
    for _ in 0..REQUESTS {
        if let Err(error) = request(queue, &device, &mut random, &mut model) {
            assert!(!error.to_string().is_empty());
            exact = false;
        }
    }
    let compare = |device: &Device| {
        let mut read = vec![0; model.len()];
        let result = device.read_blocking(queue, 0, &mut read);
        result.expect("a sound image reads");
        let differs = read.iter().zip(&model).position(|(a, b)| a != b);
        assert_eq!(differs, None, "the first byte that is another one");
    };
    if exact {
        compare(&device);
    }
    let closed = queue.block_on(device.close(queue));
    let after = storage.to_vec();
    tables_are_untouched(bytes, &after);
    if sound {
        assert!(is_sound(queue, &after), "it was sound");
    }
    if exact {
        closed.expect("a sound image closes");
        compare(&open_to_read(queue, &after).expect("a sound image opens"));
    }
}

/// Repairs it. What is left is what the report says, and of a sound image
/// nothing changes that a guest sees.
pub fn repair(queue: &Queue, bytes: &[u8]) {
    let sound = is_sound(queue, bytes);
    let mode = match random_of(bytes).one_in(4) {
        true => RepairMode::Leaks,
        false => RepairMode::All,
    };
    let storage = Small::new(bytes);
    let mut told = 0;
    let result = queue.block_on(jobs::repair(
        queue,
        storage.clone(),
        mode,
        &mut |message| {
            told += 1;
            assert!(told > 50 || !message.to_string().is_empty());
        },
        |_| {},
    ));
    let after = storage.to_vec();
    let Ok(report) = result else {
        return;
    };
    if report.corruptions == 0 && report.check_errors == 0 {
        let again = match check(queue, &after) {
            // Of an image that says that it has a data file, and not which.
            Err(Error::Refused(_)) => return,
            again => again.expect("what was repaired can be checked"),
        };
        assert_eq!(
            (again.corruptions, again.check_errors),
            (0, 0),
            "{report:?}"
        );
        assert!(again.leaks <= report.leaks, "{report:?}, {again:?}");
    }
    if sound {
        let read = |bytes: &[u8]| {
            let device = open_to_read(queue, bytes).expect("a sound image opens");
            let mut read = vec![0; device.size().min(WINDOW) as usize];
            let result = device.read_blocking(queue, 0, &mut read);
            result.map(|()| read).map_err(|e| e.to_string())
        };
        assert_eq!(read(bytes), read(&after), "repair of a sound image");
    }
}

/// Reads, repairs and changes an image with this snapshot table or bitmap
/// directory ([`hostile_images::with_table`]).
pub fn table(queue: &Queue, data: &[u8]) {
    let image = hostile_images::with_table(data);
    hostile_images::exercise(queue, &image);
    repair(queue, &image);
    snapshots(queue, &image);
}

/// Takes, applies and deletes snapshots.
pub fn snapshots(queue: &Queue, bytes: &[u8]) {
    let sound = is_sound(queue, bytes);
    let storage = Small::new(bytes);
    let Some(mut device) = open(queue, storage.clone()) else {
        return;
    };
    let Some(image) = device.top().as_qcow2() else {
        return;
    };
    let ids = image.snapshots().iter().take(3).map(|s| s.id.clone());
    let mut ids: Vec<String> = ids.filter_map(|id| String::from_utf8(id).ok()).collect();
    ids.push("new".into());
    let mut random = random_of(bytes);
    for _ in 0..4 {
        let id = &ids[random.below(ids.len() as u64) as usize];
        let name = SnapshotName::IdOrName(id.clone().into());
        let _ = match random.below(4) {
            0 => queue.block_on(device.snapshot_create(queue, "new")),
            1 => queue.block_on(device.snapshot_apply(queue, &name)),
            2 => queue.block_on(device.snapshot_delete(queue, &name)),
            _ if device.size() > 0 => request(queue, &device, &mut random, &mut []),
            _ => Ok(()),
        };
    }
    let _ = queue.block_on(device.close(queue));
    let after = storage.to_vec();
    // It may be marked as corrupt, which forbids writing.
    assert!(open_to_read(queue, &after).is_some());
    tables_are_untouched(bytes, &after);
    assert!(!sound || is_sound(queue, &after), "it was sound");
}

/// Converts it to raw and to qcow2, which must have what reading it gives.
pub fn copies(queue: &Queue, bytes: &[u8]) {
    let source = || open_to_read(queue, bytes);
    let Some(device) = source().filter(|d| d.size() <= COPIED) else {
        return;
    };
    let size = device.size();
    let mut whole = vec![0; size as usize];
    let readable = device.read_blocking(queue, 0, &mut whole).is_ok();
    drop(device);
    let options = ConvertOptions::default()
        .workers(Some(1))
        .engine(EngineKind::Threads)
        .zero_from(Some(0));
    let sources = || vec![source().expect("it opened before")];
    let raw = Arc::new(Memory::new(vec![0; size as usize]));
    let converted = jobs::convert(sources(), Target::Raw(raw.clone()), &options, |_| {});
    assert_eq!(converted.is_ok(), readable, "{converted:?}");
    if readable {
        assert!(raw.to_vec() == whole, "the raw copy is another disk");
    }
    let create = CreateQcow2::default()
        .size(size.next_multiple_of(512))
        .cluster_bits(12);
    let storage = Small::new(&[]);
    queue
        .block_on(jobs::create_qcow2(queue, &*storage, None, &create, |_| {}))
        .expect("a new image");
    let target = open(queue, storage.clone()).expect("a new image opens");
    let compress = random_of(bytes).one_in(2);
    let options = options.compress(compress.then(CompressOptions::default));
    let converted = jobs::convert(sources(), Target::Image(target), &options, |_| {});
    assert_eq!(converted.is_ok(), readable, "{converted:?}");
    let copy = storage.to_vec();
    assert!(is_sound(queue, &copy), "a copy that is not sound");
    if readable {
        let copy = open_to_read(queue, &copy).expect("a copy opens");
        let pair = [source().expect("it opened before"), copy];
        let options = CompareOptions::default().engine(EngineKind::Threads);
        let compared = jobs::compare(pair, &options, |_| {}).expect("both can be read");
        assert_eq!(compared, Comparison::Identical);
    }
}

/// Resolves a text as a name and as options, which opens nothing.
pub fn name(text: &str) {
    for source in [
        Source::Name(text.into()),
        Source::Name(format!("json:{text}").into()),
        Source::Options(text.into()),
    ] {
        for relative_to in [None, Some(OsStr::new("directory/image"))] {
            match source.resolve(relative_to, None) {
                Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
                Ok(spec) => {
                    assert!(!spec.display_name().is_empty());
                    assert!(!spec.file.path.as_os_str().is_empty());
                }
            }
        }
    }
    let _ = FileSpec::resolve(OsStr::new(text), Some(OsStr::new("directory/image")));
}
