//! Changes and copies of hostile images, for `hostile/changes.rs` and, by path, for the fuzz
//! targets.
//!
//! Each function takes any bytes as an image and panics unless:
//!
//! - nothing panics or takes memory in proportion to a number in the file;
//! - a guest's data are never written to the image's tables;
//! - an image that was sound is sound afterwards, and reads as it should;
//! - a check finds nothing after a repair that reported nothing left.
//!
//! The last bytes of the image determine what is done, so that the same bytes give the same result.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use zebu::block::{Device, FileSpec, OpenOptions, Policy, Zeroing};
use zebu::internal::structures::{Geometry, Header, L1Entry, RefcountTableEntry};
use zebu::jobs::{
    self, CheckReport, CompareOptions, Comparison, CompressOptions, ConvertOptions, CreateQcow2,
    ExportFormat, ImageStream, RepairMode, StreamOptions, Target,
};
use zebu::names::Source;
use zebu::qcow2::{Snapshot, SnapshotName};
use zebu::storage::{EngineKind, Iov, Memory, OpKind, Queue, Started, Storage};
use zebu::{Error, Result};

use super::hostile_images::{self, Rng};

/// Bytes that an image may grow to.
const MOST: u64 = 64 << 20;
/// Bytes at the start of the disk that are written and compared.
const WINDOW: u64 = 256 << 10;
/// Requests made of one image.
const REQUESTS: usize = 24;
/// The pattern that guests write.
const MAGIC: &[u8; 16] = b"<a guest's data>";
/// Disks up to this size are copied.
const COPIED: u64 = 2 << 20;
/// The number of tables of each kind that are verified.
const TABLES: usize = 4096;

/// Memory that is full when it has [`MOST`] bytes.
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

/// The generator of an image: the same bytes are always treated alike.
fn rng_of(bytes: &[u8]) -> Rng {
    let tail = bytes.iter().rev().take(8);
    Rng::new(tail.fold(bytes.len() as u64, |n, b| n << 8 ^ n >> 56 ^ u64::from(*b)))
}

/// Opens an image for writing, without its backing file.
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

/// What a check finds.
fn check(queue: &Queue, bytes: &[u8]) -> Result<CheckReport> {
    hostile_images::check(queue, Arc::new(Memory::new(bytes.to_vec())))
}

/// Whether an image opens for writing and a check finds no error.
pub fn is_sound(queue: &Queue, bytes: &[u8]) -> bool {
    open(queue, Arc::new(Memory::new(bytes.to_vec()))).is_some_and(|d| d.top().as_qcow2().is_some())
        && check(queue, bytes).is_ok_and(|r| r.corruptions == 0 && r.check_errors == 0)
}

/// The tables of an image that can be found: the header, the tables that it refers to, and those
/// that these refer to. Independent of the library's way to open an image.
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

/// The offsets in `within` of guests' data.
fn magic_in(bytes: &[u8], within: &Range<u64>) -> Vec<u64> {
    let part = bytes.get(within.start as usize..within.end as usize);
    let found = part.unwrap_or(&[]).windows(MAGIC.len()).enumerate();
    let hits = found.filter(|(_, window)| *window == MAGIC);
    hits.map(|(at, _)| within.start + at as u64).collect()
}

/// Fails if a table that is in both images has got data of a guest.
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

/// A random range near the start of the disk, or at its end.
fn range(rng: &mut Rng, size: u64) -> (u64, usize) {
    let window = size.min(WINDOW);
    let lengths = [1, 32, 512, 513, 4096, 16 << 10, 64 << 10];
    let mut length = rng.pick(&lengths).min(window);
    let mut offset = rng.below(window - length + 1);
    if rng.one_in(2) {
        (offset, length) = (offset & !511, length.next_multiple_of(512).min(window));
        offset = offset.min(window - length);
    }
    match rng.one_in(8) {
        true => (size - length, length as usize),
        false => (offset, length as usize),
    }
}

/// One random request. If it succeeds, `model` is changed, too.
fn request(queue: &Queue, device: &Device, rng: &mut Rng, model: &mut [u8]) -> Result<()> {
    let size = device.size();
    let (offset, length) = range(rng, size);
    let bytes: Vec<u8> = MAGIC.iter().copied().cycle().take(length).collect();
    let mut written = |bytes: &[u8]| {
        let start = (offset as usize).min(model.len());
        let end = (start + length).min(model.len());
        model[start..end].copy_from_slice(&bytes[..end - start]);
    };
    match rng.below(10) {
        0..=4 => {
            device.write_blocking(queue, offset, &bytes)?;
            written(&bytes);
        }
        5 | 6 => {
            let how = match rng.one_in(2) {
                true => Zeroing::Unmap,
                false => Zeroing::default(),
            };
            queue.block_on(device.write_zeroes(queue, offset, length as u64, how))?;
            written(&vec![0; length]);
        }
        7 => {
            queue.block_on(device.discard(queue, offset, length as u64))?;
            // Whole clusters read as zeroes, the rest of the range is unchanged.
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

/// Opens an image for writing, writes, zeroes, discards and flushes, and checks it.
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
    // In an image that is not sound, two guest clusters may share a host cluster.
    let mut exact = sound && device.read_blocking(queue, 0, &mut model).is_ok();
    let mut rng = rng_of(bytes);
    for _ in 0..REQUESTS {
        if let Err(error) = request(queue, &device, &mut rng, &mut model) {
            assert!(!error.to_string().is_empty());
            exact = false;
        }
    }
    let compare = |device: &Device| {
        let mut read = vec![0; model.len()];
        let result = device.read_blocking(queue, 0, &mut read);
        result.expect("a sound image reads");
        let differs = read.iter().zip(&model).position(|(a, b)| a != b);
        assert_eq!(differs, None, "the first byte that differs");
    };
    if exact {
        compare(&device);
    }
    let closed = queue.block_on(device.close(queue));
    let after = storage.to_vec();
    tables_are_untouched(bytes, &after);
    if sound {
        assert!(is_sound(queue, &after), "it was sound before");
    }
    if exact {
        closed.expect("a sound image closes");
        compare(&open_to_read(queue, &after).expect("a sound image opens"));
    }
}

/// Repairs an image. A check must agree with the report, and a sound image must read as before.
pub fn repair(queue: &Queue, bytes: &[u8]) {
    let sound = is_sound(queue, bytes);
    let mode = match rng_of(bytes).one_in(4) {
        true => RepairMode::Leaks,
        false => RepairMode::All,
    };
    let storage = Small::new(bytes);
    let mut messages = 0;
    let result = queue.block_on(jobs::repair(
        queue,
        storage.clone(),
        mode,
        &mut |message| {
            messages += 1;
            assert!(messages > 50 || !message.to_string().is_empty());
        },
        |_| {},
    ));
    let after = storage.to_vec();
    let Ok(report) = result else {
        return;
    };
    if report.corruptions == 0 && report.check_errors == 0 {
        let again = match check(queue, &after) {
            // The image has a data file and does not name it.
            Err(Error::Refused(_)) => return,
            again => again.expect("a repaired image can be checked"),
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

/// Creates, applies and deletes snapshots.
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
    let mut rng = rng_of(bytes);
    for _ in 0..4 {
        let id = &ids[rng.index(ids.len())];
        let name = SnapshotName::IdOrName(id.clone().into());
        let _ = match rng.below(4) {
            0 => queue.block_on(device.snapshot_create(queue, "new")),
            1 => queue.block_on(device.snapshot_apply(queue, &name)),
            2 => queue.block_on(device.snapshot_delete(queue, &name)),
            _ if device.size() > 0 => request(queue, &device, &mut rng, &mut []),
            _ => Ok(()),
        };
    }
    let _ = queue.block_on(device.close(queue));
    let after = storage.to_vec();
    // It may be marked as corrupt, and then opens for reading only.
    assert!(open_to_read(queue, &after).is_some());
    tables_are_untouched(bytes, &after);
    assert!(!sound || is_sound(queue, &after), "it was sound before");
}

/// Converts an image to raw and to qcow2. The copies must read as the image does.
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
        assert!(raw.to_vec() == whole, "the raw copy differs");
    }
    let create = CreateQcow2::default()
        .size(size.next_multiple_of(512))
        .cluster_bits(12);
    let storage = Small::new(&[]);
    queue
        .block_on(jobs::create_qcow2(queue, &*storage, None, &create, |_| {}))
        .expect("a new image");
    let target = open(queue, storage.clone()).expect("a new image opens");
    let compress = rng_of(bytes).one_in(2);
    let options = options.compress(compress.then(CompressOptions::default));
    let converted = jobs::convert(sources(), Target::Image(target), &options, |_| {});
    assert_eq!(converted.is_ok(), readable, "{converted:?}");
    let copy = storage.to_vec();
    assert!(is_sound(queue, &copy), "the copy is not sound");
    if readable {
        let copy = open_to_read(queue, &copy).expect("a copy opens");
        let pair = [source().expect("it opened before"), copy];
        let options = CompareOptions::default().engine(EngineKind::Threads);
        let compared = jobs::compare(pair, &options, |_| {}).expect("both can be read");
        assert_eq!(compared, Comparison::Identical);
    }
}

/// Converts an image from a stream and to streams. What a stream gives is what reading the image
/// gives. A stream may be refused that a file is not: if a cluster has two uses, or is cut off.
pub fn streams(queue: &Queue, bytes: &[u8]) -> bool {
    let source = || open_to_read(queue, bytes);
    let Some(device) = source().filter(|d| d.size() <= COPIED) else {
        return false;
    };
    let mut whole = vec![0; device.size() as usize];
    let is_readable = device.read_blocking(queue, 0, &mut whole).is_ok();
    drop(device);
    let options = ConvertOptions::default()
        .workers(Some(1))
        .engine(EngineKind::Threads)
        .zero_from(Some(0));
    let from_stream = |bytes: &[u8]| {
        let reader = Box::new(io::Cursor::new(bytes.to_vec()));
        let stream = ImageStream::open(queue, reader, None, &Policy::Nothing).ok()?;
        let raw = Arc::new(Memory::new(vec![0; whole.len()]));
        let target = Target::Raw(raw.clone());
        let how = StreamOptions::default();
        let converted = jobs::convert_stream(stream, target, how, &options, |_| {});
        converted.is_ok().then(|| raw.to_vec())
    };
    let got = from_stream(bytes);
    if let Some(got) = &got {
        assert!(
            is_readable && *got == whole,
            "the disk of the stream differs"
        );
    }
    let mut rng = rng_of(bytes);
    let image = CreateQcow2::default().cluster_bits(9 + rng.below(8) as u32);
    let format = ExportFormat::Qcow2 {
        image: Box::new(image),
        scan: rng.one_in(2),
    };
    let compress = rng.one_in(2).then(CompressOptions::default);
    let written = Written::default();
    let sources = || vec![source().expect("it opened before")];
    let how = options.clone().compress(compress);
    let measured = jobs::measure_stream(sources(), &format, &how, |_| {});
    let writer = Box::new(written.clone());
    let exported = jobs::convert_to_stream(sources(), writer, &format, &how, |_| {});
    if !is_readable {
        assert!(exported.is_err(), "what cannot be read is written");
        return got.is_some();
    }
    let written = written.0.lock().expect("no panic").clone();
    assert_eq!(exported.expect("it can be read"), written.len() as u64);
    assert_eq!(measured.expect("it can be read"), written.len() as u64);
    assert!(is_sound(queue, &written), "the written stream is not sound");
    let again = from_stream(&written).expect("its own stream is read");
    assert!(again == whole, "the written stream differs");
    got.is_some()
}

/// What is written to a stream.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Resolves a text as a name and as options, without opening anything.
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
