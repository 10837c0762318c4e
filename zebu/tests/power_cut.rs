//! Guards against an image that a power cut makes inconsistent, and against
//! data that were flushed and are not there afterwards.
//!
//! A random image is used at random; its storage remembers every write and
//! flush. Then the power goes at any moment: of what was not flushed any part
//! may be on the disk, sector by sector. What is there must open, have no
//! errors (clusters may leak), and contain for each byte what was flushed or
//! what was written later.

mod common;

use std::sync::Arc;

use common::peer::{assert_consistent, qemu_img, text};
use common::recorder::Recorder;
use common::{Rng, Sayer, Watchdog};
use zebu::block::{Device, LayerImage, OpenOptions, Zeroing};
use zebu::format::Compression;
use zebu::jobs::{self, CreateQcow2, create_qcow2};
use zebu::storage::{Buffer, Memory, Queue};

/// A change of the disk, or a flush (without bytes), and which part of the
/// log it made.
struct Change {
    from: usize,
    to: usize,
    at: usize,
    bytes: Vec<u8>,
    is_flush: bool,
}

/// A use of an image, and everything that it did.
struct History {
    recorder: Arc<Recorder>,
    changes: Vec<Change>,
    size: usize,
    lazy: bool,
}

fn queue() -> Queue {
    Queue::new(Default::default()).unwrap()
}

fn open(storage: Arc<Recorder>, queue: &Queue, rng: &mut Rng) -> Device {
    let options = OpenOptions {
        write: true,
        discard: Some(true),
        l2_cache_entry_size: Some(512),
        l2_cache_size: rng.one_in(2).then_some(1024),
        ..OpenOptions::default()
    };
    Device::from_storage(queue, storage, &options).unwrap()
}

fn use_image(rng: &mut Rng) -> History {
    let queue = queue();
    // So many tables that metadata are written between flushes too.
    let wide = rng.one_in(3);
    let extended_l2 = !wide && rng.one_in(3);
    let cluster_bits = match extended_l2 {
        true => 14,
        false if wide => 9,
        false => 9 + rng.below(6) as u32,
    };
    let size = match wide {
        true => 4 << 20,
        false => (300u64 << cluster_bits).min(1 << 20),
    };
    let version = if !extended_l2 && rng.one_in(4) { 2 } else { 3 };
    let lazy = version == 3 && rng.one_in(4);
    let memory = Memory::default();
    let options = CreateQcow2 {
        size,
        version,
        cluster_bits,
        extended_l2,
        refcount_order: if version == 2 { 4 } else { rng.below(7) as u32 },
        lazy_refcounts: lazy,
        compression: match version == 3 && rng.one_in(2) {
            true => Compression::Zstd,
            false => Compression::Zlib,
        },
        ..CreateQcow2::default()
    };
    create_qcow2(&queue, &memory, None, &options).unwrap();
    let recorder = Arc::new(Recorder::new(memory.to_vec()));
    let device = open(recorder.clone(), &queue, rng);
    let mut history = History {
        recorder,
        changes: Vec::new(),
        size: size as usize,
        lazy,
    };
    let cluster = 1 << cluster_bits;
    for nth in 0..if wide { 200 } else { 60 } {
        if wide && nth % 40 == 39 {
            history.flush(&device, &queue);
        }
        let most = match rng.below(4) {
            0 | 1 if wide => 256 << 10,
            0 | 1 => 512,
            2 => cluster,
            _ => 4 * cluster,
        };
        history.step(&device, &queue, rng, cluster, most);
    }
    let from = history.recorder.len_of_log();
    queue.block_on(device.close(&queue)).unwrap();
    history.note(from, 0, Vec::new(), true);
    history
}

impl History {
    fn note(&mut self, from: usize, at: usize, bytes: Vec<u8>, is_flush: bool) {
        self.changes.push(Change {
            from,
            to: self.recorder.len_of_log(),
            at,
            bytes,
            is_flush,
        });
    }

    /// One request, of at most `most` bytes.
    fn step(&mut self, device: &Device, queue: &Queue, rng: &mut Rng, cluster: usize, most: usize) {
        let wide = self.size > 1 << 20;
        let kind = match wide {
            true => [0, 0, 0, 6, 8, 10][rng.below(6) as usize],
            false => rng.below(12),
        };
        let start = match wide || rng.one_in(3) {
            true => rng.below(self.size as u64) as usize,
            false => rng.below((8 * cluster).min(self.size) as u64) as usize,
        };
        let mut range = start..(start + 1 + rng.below(most as u64) as usize).min(self.size);
        if kind >= 8 {
            range.start = range.start / cluster * cluster;
            range.end = (range.end.next_multiple_of(cluster)).min(self.size);
        }
        let (offset, length) = (range.start as u64, range.len());
        let mut bytes = vec![0; length];
        let from = self.recorder.len_of_log();
        match kind {
            0..6 => {
                rng.fill(&mut bytes);
                device.write_blocking(queue, offset, &bytes).unwrap();
            }
            6 => {
                let future = device.write_zeroes(queue, offset, length as u64, Zeroing::Unmap);
                queue.block_on(future).unwrap();
            }
            7 => return self.flush(device, queue),
            8 | 9 => {
                bytes.fill(rng.next() as u8);
                let mut buffer = Buffer::new(length);
                buffer.copy_from_slice(&bytes);
                // SAFETY: the buffer lives until the write has ended.
                let iov = unsafe { buffer.iov() };
                // Refused where something is, cluster by cluster.
                let _ = queue.block_on(device.write_compressed(queue, offset, &iov));
            }
            _ => {
                let future = device.discard(queue, offset, length as u64);
                queue.block_on(future).unwrap();
            }
        }
        // A write may be refused, a discard do less than it was asked.
        device.read_blocking(queue, offset, &mut bytes).unwrap();
        self.note(from, range.start, bytes, false);
    }

    fn flush(&mut self, device: &Device, queue: &Queue) {
        let from = self.recorder.len_of_log();
        queue.block_on(device.flush(queue)).unwrap();
        self.note(from, 0, Vec::new(), true);
    }

    /// Looks at what a power cut after `count` entries of the log may leave.
    fn judge(&self, count: usize, rng: &mut Rng, by_qemu: bool) {
        let image = self.recorder.after_cut(count, rng);
        let queue = queue();
        let storage = Arc::new(Memory::new(image.clone()));
        let device = Device::from_storage(&queue, storage, &OpenOptions::default());
        let device = device.unwrap_or_else(|e| panic!("open: {e}"));
        if !self.lazy {
            check(&device, &queue);
        }
        if by_qemu {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("disk.qcow2");
            std::fs::write(&path, &image).unwrap();
            if self.lazy {
                let args = ["check", "-q", "-r", "all", "-f", "qcow2", text(&path)];
                qemu_img(&args).ok("qemu-img check -r all");
            } else {
                assert_consistent(&path, "after a power cut");
            }
        }
        let mut found = vec![0; self.size];
        let result = device.read_blocking(&queue, 0, &mut found);
        result.unwrap_or_else(|e| panic!("read: {e}"));
        self.compare(count, &found);
    }

    fn compare(&self, count: usize, found: &[u8]) {
        let began = self.changes.iter().take_while(|c| c.from < count);
        let began: Vec<_> = began.collect();
        let flushed = began.iter().rposition(|c| c.is_flush && c.to <= count);
        let (durable, rest) = began.split_at(flushed.map_or(0, |n| n + 1));
        let mut expected = vec![0; self.size];
        for change in durable {
            expected[change.at..change.at + change.bytes.len()].copy_from_slice(&change.bytes);
        }
        let differ = |at: &usize| found[*at] != expected[*at];
        let blocks = (0..self.size).step_by(4096).filter(|at| {
            let block = *at..(*at + 4096).min(self.size);
            found[block.clone()] != expected[block]
        });
        let places = blocks.flat_map(|at| at..(at + 4096).min(self.size));
        for at in places.filter(differ) {
            let byte = &found[at];
            let is_later = || {
                let mut values = rest
                    .iter()
                    .map(|c| at.checked_sub(c.at).and_then(|n| c.bytes.get(n)));
                values.any(|value| value == Some(byte))
            };
            assert!(
                is_later(),
                "byte {at:#x} is {byte:#04x}, was {:#04x} when it was flushed, and nobody wrote it",
                expected[at]
            );
        }
    }
}

fn check(device: &Device, queue: &Queue) {
    let LayerImage::Qcow2(image) = &device.top().image else {
        panic!("it is qcow2");
    };
    let mut messages = Vec::new();
    let report = jobs::check(queue, image, &mut |message| messages.push(message));
    let report = report.unwrap_or_else(|e| panic!("check: {e}"));
    let sound = report.corruptions == 0 && report.check_errors == 0;
    assert!(sound, "{report:?}\n{messages:?}");
}

#[test]
fn at_any_moment() {
    let number = |name: &str, default: u64| {
        let text = std::env::var(name).ok();
        text.map_or(default, |text| text.parse().expect(name))
    };
    let first = number("ZEBU_MODEL_SEED", 1);
    for seed in first..first + number("ZEBU_POWER_CUTS", 40) {
        let mut rng = Rng::new(seed);
        let _sayer = Sayer(format!("ZEBU_MODEL_SEED={seed} ZEBU_POWER_CUTS=1"));
        let _watchdog = Watchdog::new(&format!("seed {seed}"));
        let history = use_image(&mut rng);
        for nth in 0..40 {
            let count = rng.below(history.recorder.len_of_log() as u64 + 1) as usize;
            history.judge(count, &mut rng, nth == 0);
        }
    }
}
