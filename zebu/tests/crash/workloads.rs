//! The workloads: one function each, with random details.

mod bitmaps;
mod jobs;
mod many;
mod requests;
mod written;

use std::fmt::Display;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use zebu::block::{Device, OpenOptions};
use zebu::internal::broken::is_any_broken;
use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::qcow2::Compression;
use zebu::storage::{Memory, Queue, Storage};

use crate::common::Rng;
use crate::disk::{Disk, Fault, File, Time};
use crate::judge::{Change, Event, Layout, Model, Under};

/// A workload.
#[derive(Clone, Copy)]
pub struct Workload {
    pub name: &'static str,
    /// Runs it on a recording disk.
    pub run: fn(&Queue, &mut Dice) -> History,
    /// The cost of a state, relative to other workloads.
    pub weight: usize,
}

/// The random numbers of a workload, and the operation that is to fail.
pub struct Dice {
    pub rng: Rng,
    pub fault: Option<Fault>,
}

impl Deref for Dice {
    type Target = Rng;
    fn deref(&self) -> &Rng {
        &self.rng
    }
}

impl DerefMut for Dice {
    fn deref_mut(&mut self) -> &mut Rng {
        &mut self.rng
    }
}

const fn light(name: &'static str, run: fn(&Queue, &mut Dice) -> History) -> Workload {
    Workload {
        name,
        run,
        weight: 1,
    }
}

const fn heavy(name: &'static str, run: fn(&Queue, &mut Dice) -> History) -> Workload {
    Workload {
        name,
        run,
        weight: 4,
    }
}

pub const ALL: [Workload; 27] = [
    light("allocating", requests::allocating),
    light("backing", requests::backing),
    heavy("subclusters", requests::subclusters),
    light("reuse", requests::reuse),
    heavy("growth", requests::growth),
    light("compressed", requests::compressed),
    light("lazy", requests::lazy),
    light("data-file", requests::data_file),
    heavy("encrypted", requests::encrypted),
    heavy("small-cache", requests::small_cache),
    light("in-flight", many::in_flight),
    light("queues", many::queues),
    light("in-flight-bitmaps", many::in_flight_bitmaps),
    light("queues-bitmaps", many::queues_bitmaps),
    light("snapshots", jobs::snapshots),
    light("resize", jobs::resize),
    heavy("bitmaps", bitmaps::bitmaps),
    light("commit", jobs::commit),
    light("rebase", jobs::rebase),
    light("amend", jobs::amend),
    light("repair", jobs::repair),
    light("convert", jobs::convert),
    light("convert-compressed", jobs::convert_compressed),
    heavy("written", written::sequential),
    heavy("written-in-flight", written::in_flight),
    heavy("written-queues", written::queues),
    heavy("written-tables", written::tables),
];

/// A workload that has run.
pub struct History {
    pub disk: Arc<Disk>,
    pub files: Vec<Arc<File>>,
    pub layout: Layout,
    pub before: Model,
    /// Requests and changes, in the order in which they began.
    pub events: Vec<Event>,
}

impl History {
    /// Files with these contents, before the first event.
    pub fn new(rng: &mut Dice, layout: Layout, contents: Vec<Vec<u8>>, before: Model) -> Self {
        let delays = rng.one_in(2).then(|| Rng::new(rng.next()));
        let disk = Disk::new(delays, rng.fault);
        History {
            files: disk.files(contents),
            disk,
            layout,
            before,
            events: Vec::new(),
        }
    }

    pub fn open(&self, queue: &Queue, options: &OpenOptions) -> Device {
        let open = || self.layout.open(queue, &self.files, options);
        let opened = open().or_else(|e| match self.disk.failed() {
            // One operation fails, so a second attempt succeeds. A flush that failed while a log was
            // carried out is repeated then, with what it covered.
            true => {
                self.disk.opened_again();
                open()
            }
            false => Err(e),
        });
        opened.unwrap_or_else(|e| panic!("open: {e}"))
    }

    /// Panics unless an operation was to fail.
    #[track_caller]
    pub fn allow(&self, error: &dyn Display) {
        assert!(self.disk.failed(), "{error}");
    }

    /// Records a change that failed: it may have happened.
    pub fn note_failure(&mut self, began: Time, what: Change) {
        let ended = Time::MAX;
        self.events.push(Event { began, ended, what });
    }

    /// Records a change that began at `began` and has ended.
    pub fn note(&mut self, began: Time, what: Change) {
        let ended = self.disk.now();
        self.events.push(Event { began, ended, what });
    }
}

/// Creates an image with these options in memory.
fn made(queue: &Queue, options: &CreateQcow2) -> Vec<u8> {
    let (memory, data) = (Memory::default(), Memory::default());
    let data: Option<&dyn Storage> = options.data_file.is_some().then_some(&data);
    queue
        .block_on(create_qcow2(queue, &memory, data, options, |_| {}))
        .unwrap();
    memory.to_vec()
}

/// Options of an image with clusters of 512 bytes to 16 KiB and at most
/// `clusters` of them.
fn options(rng: &mut Rng, clusters: u64) -> CreateQcow2 {
    let version = if rng.one_in(4) { 2 } else { 3 };
    let cluster_bits = 9 + rng.below(6) as u32;
    CreateQcow2::default()
        .size((clusters << cluster_bits).min(256 << 10) - 512 * rng.below(3))
        .version(version)
        .cluster_bits(cluster_bits)
        .refcount_order(if version == 2 { 4 } else { rng.below(7) as u32 })
        .compression(match version == 3 && rng.one_in(2) {
            true => Compression::Zstd,
            false => Compression::Zlib,
        })
}

/// Options for writing. Some caches are so small that metadata are written between flushes.
fn writable(rng: &mut Rng) -> OpenOptions {
    OpenOptions::default()
        .write(true)
        .discard(Some(true))
        .store_bitmaps(!is_any_broken() && rng.one_in(3))
        .l2_cache_entry_size(Some(512))
        .l2_cache_size(rng.one_in(2).then_some(1024))
}

/// Bytes without equal sectors, with some zeroes among them.
fn noise(rng: &mut Rng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for chunk in bytes.chunks_mut(2048) {
        if !rng.one_in(4) {
            rng.fill(chunk);
        }
    }
    bytes
}

/// A raw backing file with these bytes.
fn raw(name: &'static str, bytes: &[u8]) -> (&'static str, Under) {
    (name, Under::Raw(Arc::new(Memory::new(bytes.to_vec()))))
}
