//! Sequential requests on one queue.

use std::ops::Range;

use zebu::block::{Device, OpenOptions, Zeroing};
use zebu::internal::broken::is_any_broken;
use zebu::jobs::{CreateQcow2, NewBacking, NewDataFile};
use zebu::qcow2::SnapshotName;
use zebu::storage::{Buffer, Queue};

use super::bitmaps::with_bitmaps;
use super::jobs::{filled, used_image};
use super::{Dice, History, made, noise, options, raw, writable};
use crate::bitmaps;
use crate::common::encryption;
use crate::disk::Time;
use crate::judge::{Change, DATA_FILE, Layout, Model, content};

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Write,
    Zero(Zeroing),
    Discard,
    Compress,
    Flush,
}

/// A distribution of requests.
#[derive(Clone, Copy)]
pub struct Mix {
    pub kinds: &'static [Kind],
    /// The number of requests.
    pub steps: usize,
    /// Bytes of a large request.
    pub most: usize,
    /// The part of the disk where most of them go, in clusters.
    pub hot: usize,
}

const ZERO: Kind = Kind::Zero(Zeroing::Keep);
const UNMAP: Kind = Kind::Zero(Zeroing::Unmap);
const WRITES: [Kind; 6] = [
    Kind::Write,
    Kind::Write,
    Kind::Write,
    Kind::Write,
    ZERO,
    Kind::Flush,
];
const CHURN: [Kind; 8] = [
    Kind::Write,
    Kind::Write,
    Kind::Write,
    UNMAP,
    Kind::Discard,
    Kind::Discard,
    Kind::Flush,
    Kind::Flush,
];

/// A device in use, and its expected content.
pub struct Use<'a> {
    pub queue: &'a Queue,
    pub history: History,
    pub active: Vec<u8>,
    pub cluster: usize,
    /// Whether the image may have bitmaps. They are stored after the data, so a flush or a close may
    /// fail that loses nothing else.
    pub has_bitmaps: bool,
}

impl Use<'_> {
    /// One random request.
    pub fn step(&mut self, device: &Device, rng: &mut Dice, mix: &Mix) {
        let kind = rng.pick(mix.kinds);
        let size = self.active.len();
        let area = match rng.one_in(4) {
            true => size,
            false => (mix.hot * self.cluster).min(size),
        };
        let most = match rng.below(3) {
            0 => 1024,
            1 => self.cluster,
            _ => mix.most,
        };
        let start = rng.index(area);
        let mut range = start..(start + 1 + rng.index(most)).min(size);
        match kind {
            Kind::Discard | Kind::Compress => range = whole(range, self.cluster, size),
            // Mostly sectors, as guests write.
            _ if !rng.one_in(8) => range = whole(range, 512, size),
            _ => {}
        }
        self.request(device, rng, kind, range);
    }

    /// One request, within a window of the disk. Records and verifies its effect.
    pub fn request(&mut self, device: &Device, rng: &mut Dice, kind: Kind, range: Range<usize>) {
        let queue = self.queue;
        let began = self.history.disk.now();
        let mut bytes = vec![0; range.len()];
        let spread = self.history.layout.spread(self.active.len());
        let (offset, length) = (spread.place(range.start), range.len() as u64);
        // Whether only a part may have been written.
        let mut partly = false;
        let flush_failed = self.history.disk.flush_failed();
        let failed_before = self.history.disk.failed();
        let result = match kind {
            Kind::Write => {
                rng.fill(&mut bytes);
                device.write_blocking(queue, offset, &bytes)
            }
            Kind::Zero(zeroing) => {
                queue.block_on(device.write_zeroes(queue, offset, length, zeroing))
            }
            Kind::Discard => {
                partly = true;
                queue.block_on(device.discard(queue, offset, length))
            }
            Kind::Compress => {
                bytes.fill(rng.next() as u8);
                let head = bytes.len().min(64);
                rng.fill(&mut bytes[..head]);
                let mut buffer = Buffer::new(bytes.len());
                buffer.copy_from_slice(&bytes);
                // SAFETY: the buffer lives until the write has ended.
                let iov = unsafe { buffer.iov() };
                partly = true;
                let write = device.write_compressed(queue, offset, &iov);
                // Clusters that are allocated already are refused.
                let result = queue.block_on(write);
                let disk = &self.history.disk;
                let by_fault = disk.failed() && (!failed_before || disk.is_final());
                result.or_else(|e| if by_fault { Err(e) } else { Ok(()) })
            }
            Kind::Flush => queue.block_on(device.flush(queue)),
        };
        // (Zeroes over zeroes need no write, and in version 2 over a backing file nothing is
        // discarded.)
        let may_work = !flush_failed || matches!(kind, Kind::Zero(_) | Kind::Discard);
        assert!(may_work || result.is_err(), "{kind:?} after a failed flush");
        if let Err(e) = &result {
            self.history.allow(e);
            let disk = &self.history.disk;
            // An error is returned by the request that it belongs to, and by no other.
            assert!(
                !failed_before || disk.is_final(),
                "the error of an earlier request: {e}"
            );
            let by_reclaim = kind == Kind::Flush && disk.free_failed() && !self.has_bitmaps;
            assert!(!by_reclaim, "a flush that loses nothing fails: {e}");
        }
        if kind == Kind::Flush {
            if result.is_ok() {
                self.history.note(began, Change::Flush);
            }
            return;
        }
        if partly || result.is_err() {
            let wanted = std::mem::replace(&mut bytes, vec![0; range.len()]);
            self.read(device, offset, &mut bytes);
            let old = &self.active[range.clone()];
            let known = bytes.iter().zip(old.iter().zip(&wanted));
            let made_up = known
                .filter(|(b, (o, w))| b != o && b != w && **b != 0)
                .count();
            assert!(
                made_up == 0,
                "{made_up} bytes at {range:x?} are neither old nor new: {result:?}"
            );
        }
        self.active[range.clone()].copy_from_slice(&bytes);
        self.history.note(began, Change::Write(range.start, bytes));
    }

    /// Reads, and retries once.
    fn read(&self, device: &Device, offset: u64, bytes: &mut [u8]) {
        if let Err(e) = device.read_blocking(self.queue, offset, bytes) {
            self.history.allow(&e);
            let again = device.read_blocking(self.queue, offset, bytes);
            again.unwrap_or_else(|e| panic!("read again: {e}"));
        }
    }

    /// After a failed change of the whole image, returns whether the session can continue. The image
    /// must be unchanged then.
    pub fn go_on(&mut self, device: &Device, began: Time, before: &Model, after: &Model) -> bool {
        if let Err(e) = self.queue.block_on(device.flush(self.queue)) {
            assert!(
                self.history.disk.is_final(),
                "the error of an earlier request: {e}"
            );
            let what = Change::Becomes(after.clone());
            self.history.note_failure(began, what);
            return false;
        }
        let mut found = self.look(device);
        let sizes = [&found, before].map(|m| (m.active.len(), m.snapshots.len()));
        let mut pairs = found.active.iter().zip(&before.active);
        let differ = pairs.position(|(a, b)| a != b);
        assert!(
            found == *before,
            "after an error the sizes are {sizes:x?} (now, before); the content differs at {differ:x?}"
        );
        let bitmaps = bitmaps::look(self.queue, device).unwrap();
        let right = bitmaps::compare(&bitmaps, &found.active, &[before], false);
        right.unwrap_or_else(|why| panic!("after an error: {why}"));
        found.bitmaps.clone_from(&before.bitmaps);
        self.history.note(began, Change::Becomes(found));
        true
    }

    /// Reads the disk and its snapshots. No write is in flight or unflushed.
    fn look(&self, device: &Device) -> Model {
        let active = content(self.queue, device).unwrap();
        let mut snapshots = Vec::new();
        if let Some(image) = device.top().as_qcow2() {
            for snapshot in image.snapshots() {
                let name = String::from_utf8_lossy(&snapshot.name).into_owned();
                let options =
                    OpenOptions::default().snapshot(Some(SnapshotName::from(name.as_str())));
                let device = self.history.open(self.queue, &options);
                let bytes = content(self.queue, &device).unwrap();
                snapshots.push((name, bytes));
            }
        }
        Model {
            snapshots,
            ..Model::of(active)
        }
    }

    /// Drops the device after a failure.
    pub fn abandon(self, device: Device) -> History {
        let _ = self.queue.block_on(device.close(self.queue));
        self.history
    }

    pub fn close(mut self, device: Device) -> History {
        self.close_device(device);
        self.history
    }

    /// Returns whether it succeeded.
    pub fn close_device(&mut self, device: Device) -> bool {
        let began = self.history.disk.now();
        let failed_before = self.history.disk.failed();
        match self.queue.block_on(device.close(self.queue)) {
            Ok(()) => {
                assert!(!self.history.disk.flush_failed(), "after a failed flush");
                self.history.note(began, Change::Flush);
                self.note_store(began);
                true
            }
            Err(e) => {
                let disk = &self.history.disk;
                assert!(
                    !failed_before || disk.is_final(),
                    "the error of an earlier request: {e}"
                );
                self.history.allow(&e);
                let by_reclaim = disk.free_failed() && !self.has_bitmaps;
                assert!(!by_reclaim, "a close that loses nothing fails: {e}");
                false
            }
        }
    }

    /// Records that bitmaps were stored, unless a failure may have left one in use.
    pub fn note_store(&mut self, began: Time) {
        if !self.history.disk.failed() {
            self.history.note(began, Change::Store);
        }
    }
}

/// Extends a range to whole units.
fn whole(range: Range<usize>, unit: usize, size: usize) -> Range<usize> {
    range.start / unit * unit..range.end.next_multiple_of(unit).min(size)
}

/// Begins with an image that has these options and the content `active`, and sometimes bitmaps.
pub fn begin<'a>(
    queue: &'a Queue,
    rng: &mut Dice,
    options: &CreateQcow2,
    layout: Layout,
    active: Vec<u8>,
) -> Use<'a> {
    let has_bitmaps = has_bitmaps(rng, options);
    begin_with(queue, rng, options, layout, active, has_bitmaps)
}

/// Whether an image gets bitmaps. The runs in which broken rules are detected have none.
fn has_bitmaps(rng: &mut Dice, options: &CreateQcow2) -> bool {
    !is_any_broken() && options.version == 3 && rng.one_in(4)
}

/// The same, with bitmaps or without.
pub fn begin_with<'a>(
    queue: &'a Queue,
    rng: &mut Dice,
    options: &CreateQcow2,
    layout: Layout,
    active: Vec<u8>,
    has_bitmaps: bool,
) -> Use<'a> {
    let mut contents = vec![made(queue, options)];
    if layout.data.is_some() {
        contents.push(vec![0; options.size as usize]);
    }
    let cluster = 1 << options.cluster_bits;
    begin_on(queue, rng, (contents, active), cluster, layout, has_bitmaps)
}

/// The same, on files that are there, with the content of their disk.
pub fn begin_on<'a>(
    queue: &'a Queue,
    rng: &mut Dice,
    (mut contents, active): (Vec<Vec<u8>>, Vec<u8>),
    cluster: usize,
    layout: Layout,
    has_bitmaps: bool,
) -> Use<'a> {
    let mut before = Model::of(active.clone());
    if has_bitmaps {
        contents = with_bitmaps(queue, rng, &layout, contents, &mut before);
    }
    Use {
        queue,
        history: History::new(rng, layout, contents, before),
        active,
        cluster,
        has_bitmaps,
    }
}

/// Executes a mix of requests on an image without a backing file.
fn plain(queue: &Queue, rng: &mut Dice, options: &CreateQcow2, mix: &Mix) -> History {
    let zeroes = vec![0; options.size as usize];
    over(queue, rng, options, Layout::default(), zeroes, mix)
}

fn over(
    queue: &Queue,
    rng: &mut Dice,
    options: &CreateQcow2,
    layout: Layout,
    active: Vec<u8>,
    mix: &Mix,
) -> History {
    let mut used = begin(queue, rng, options, layout, active);
    let device = used.history.open(queue, &writable(rng));
    for _ in 0..mix.steps {
        used.step(&device, rng, mix);
    }
    used.close(device)
}

pub fn allocating(queue: &Queue, rng: &mut Dice) -> History {
    let options = options(rng, 200);
    let mix = Mix {
        kinds: &WRITES,
        steps: 40,
        most: 4 << options.cluster_bits,
        hot: 30,
    };
    plain(queue, rng, &options, &mix)
}

/// Copy on write over a backing file, longer or shorter than the disk.
pub fn backing(queue: &Queue, rng: &mut Dice) -> History {
    let mut options = options(rng, 100);
    if rng.one_in(3) {
        options.version = 3;
        options.cluster_bits = 14;
        options.extended_l2 = true;
        options.size = 256 << 10;
    }
    options.backing = Some(NewBacking::new("base.raw").format(Some("raw".into())));
    let size = options.size as usize;
    let length = rng.pick(&[size, size / 2 / 512 * 512, size + 8192]);
    let base = noise(rng, length);
    let layout = Layout {
        backings: vec![raw("base.raw", &base)],
        ..Layout::default()
    };
    let mut active = base;
    active.resize(size, 0);
    let mix = Mix {
        kinds: if rng.one_in(2) { &WRITES } else { &CHURN },
        steps: 40,
        most: 3 << options.cluster_bits,
        hot: 16,
    };
    over(queue, rng, &options, layout, active, &mix)
}

/// What is read at each cut is old or new, sector by sector, and never what a wrong place decrypts to.
pub fn encrypted(queue: &Queue, rng: &mut Dice) -> History {
    let mut options = encryption::encrypted(options(rng, 100), "aes-128,encrypt.cipher-mode=cbc");
    if rng.one_in(3) {
        options.version = 3;
        options.cluster_bits = 14;
        options.extended_l2 = true;
        options.size = 256 << 10;
    }
    let kinds: &[_] = if rng.one_in(2) { &WRITES } else { &CHURN };
    let mix = Mix {
        kinds,
        steps: 40,
        most: 3 << options.cluster_bits,
        hot: 16,
    };
    if rng.one_in(2) {
        return plain(queue, rng, &options, &mix);
    }
    options.backing = Some(NewBacking::new("base.raw").format(Some("raw".into())));
    let base = noise(rng, options.size as usize);
    let layout = Layout {
        backings: vec![raw("base.raw", &base)],
        ..Layout::default()
    };
    over(queue, rng, &options, layout, base, &mix)
}

pub fn subclusters(queue: &Queue, rng: &mut Dice) -> History {
    let options = CreateQcow2::default()
        .size(256 << 10)
        .cluster_bits(14 + rng.below(2) as u32)
        .extended_l2(true)
        .refcount_order(rng.below(7) as u32);
    let mix = Mix {
        kinds: if rng.one_in(2) { &WRITES } else { &CHURN },
        steps: 50,
        most: 2 << options.cluster_bits,
        hot: 6,
    };
    plain(queue, rng, &options, &mix)
}

/// Clusters are freed and reused all the time. Half of the images were used before and have many
/// refcount blocks that are not loaded yet.
pub fn reuse(queue: &Queue, rng: &mut Dice) -> History {
    let mut options = options(rng, 100);
    let mix = Mix {
        kinds: &CHURN,
        steps: 70,
        most: 4 << options.cluster_bits,
        hot: 6,
    };
    if rng.one_in(2) {
        return plain(queue, rng, &options, &mix);
    }
    options.version = 3;
    options.cluster_bits = 9;
    options.refcount_order = 6;
    options.size = 128 << 10;
    let (image, active) = used_image(queue, rng, &options, Layout::default());
    let files = (vec![image], active);
    let mut used = begin_on(queue, rng, files, 512, Layout::default(), false);
    let device = used.history.open(queue, &writable(rng));
    for _ in 0..mix.steps {
        used.step(&device, rng, &Mix { hot: 250, ..mix });
    }
    used.close(device)
}

/// The refcount table grows, and there are many L2 tables.
pub fn growth(queue: &Queue, rng: &mut Dice) -> History {
    let options = CreateQcow2::default()
        .size(2600 << 10)
        .cluster_bits(9)
        .refcount_order(6);
    let mix = Mix {
        kinds: &[Kind::Write, Kind::Write, Kind::Write, UNMAP],
        steps: 6,
        most: 300 << 10,
        hot: 5000,
    };
    // The table's cluster is for 2 MiB of the file. Nearly as much is there before.
    let first = (1750 << 10) + rng.below(200 << 10) as usize / 512 * 512;
    let (image, active) = filled(
        queue,
        rng,
        &options,
        Layout::default(),
        |used, device, rng| {
            used.request(device, rng, Kind::Write, 0..first);
        },
    );
    let files = (vec![image], active);
    let has_bitmaps = has_bitmaps(rng, &options);
    let mut used = begin_on(queue, rng, files, 512, Layout::default(), has_bitmaps);
    let device = used.history.open(queue, &writable(rng));
    for nth in 0..mix.steps {
        used.step(&device, rng, &mix);
        if nth % 3 == 2 {
            used.request(&device, rng, Kind::Flush, 0..0);
        }
    }
    used.close(device)
}

pub fn compressed(queue: &Queue, rng: &mut Dice) -> History {
    let options = options(rng, 100);
    let mix = Mix {
        kinds: &[
            Kind::Compress,
            Kind::Compress,
            Kind::Compress,
            Kind::Write,
            Kind::Discard,
            Kind::Flush,
        ],
        steps: 50,
        most: 3 << options.cluster_bits,
        hot: 20,
    };
    plain(queue, rng, &options, &mix)
}

pub fn lazy(queue: &Queue, rng: &mut Dice) -> History {
    let options = options(rng, 100).version(3).lazy_refcounts(true);
    let mix = Mix {
        kinds: if rng.one_in(2) { &WRITES } else { &CHURN },
        steps: 40,
        most: 3 << options.cluster_bits,
        hot: 20,
    };
    plain(queue, rng, &options, &mix)
}

/// An image with an external data file.
pub fn data_file(queue: &Queue, rng: &mut Dice) -> History {
    let options = options(rng, 100)
        .version(3)
        .data_file(Some(NewDataFile::new(DATA_FILE).raw(rng.one_in(2))));
    let layout = Layout {
        data: Some(1),
        ..Layout::default()
    };
    let mix = Mix {
        kinds: if rng.one_in(2) { &WRITES } else { &CHURN },
        steps: 50,
        most: 3 << options.cluster_bits,
        hot: 20,
    };
    let zeroes = vec![0; options.size as usize];
    over(queue, rng, &options, layout, zeroes, &mix)
}

/// More dirty tables than the limit, so that they are written between flushes.
pub fn small_cache(queue: &Queue, rng: &mut Dice) -> History {
    const SLICE: u64 = 64;
    let slices = 72;
    let options = CreateQcow2::default()
        .size(slices * SLICE * 512)
        .cluster_bits(9)
        .refcount_order(4);
    let zeroes = vec![0; options.size as usize];
    let mut used = begin(queue, rng, &options, Layout::default(), zeroes);
    let how = writable(rng).l2_cache_size(Some(1024));
    let device = used.history.open(queue, &how);
    for round in 0..2 {
        for nth in 0..slices {
            let sector = (nth * 29 % slices) * SLICE + rng.below(3);
            let start = sector as usize * 512;
            let kind = [Kind::Write, Kind::Write, Kind::Discard][rng.below(2 + round) as usize];
            used.request(&device, rng, kind, start..start + 512);
            if rng.one_in(60) {
                used.request(&device, rng, Kind::Flush, 0..0);
            }
        }
    }
    used.close(device)
}
