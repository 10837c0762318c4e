//! Guards against damage by writes that fail: outside the disk, to a read-only image, through an
//! entry that refers to the image's own tables, on a disk that is full or fails.
//!
//! Each failure must be returned by its request. The image must be consistent, other data
//! unchanged, and later writes must succeed.

use std::path::Path;
use std::sync::Arc;

use crate::common::faulty::{Faulty, libc_eio, libc_enospc};
use crate::common::peer::{
    assert_clean, assert_consistent, assert_content, qemu_img, qemu_io, text,
};
use crate::common::{Cases, Rng, Watchdog, cases, progress};
use zebu::block::{Device, OpenOptions, Zeroing};
use zebu::jobs::{CreateQcow2, create_qcow2};
use zebu::names::Source;
use zebu::storage::{Buffer, Iov, Memory, Queue};
use zebu::{Error, Result};

fn queue() -> Queue {
    Queue::new(Default::default()).unwrap()
}

fn writable() -> OpenOptions {
    OpenOptions::default().write(true).discard(Some(true))
}

fn open(queue: &Queue, path: &Path, options: &OpenOptions) -> Result<Device> {
    Device::open(queue, &Source::Name(text(path).into()), options)
}

/// Every request that changes something, of `length` bytes at `offset`.
fn change_all(queue: &Queue, device: &Device, offset: u64, length: u64) -> Vec<Result<()>> {
    let bytes = vec![0x77; length as usize];
    // SAFETY: `bytes` lives until all requests have ended, and is only read.
    let iov = unsafe { Iov::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) };
    queue.block_on(async {
        vec![
            device.write(queue, offset, &iov).await,
            device.write_compressed(queue, offset, &iov).await,
            (device.write_zeroes(queue, offset, length, Zeroing::Keep)).await,
            (device.write_zeroes(queue, offset, length, Zeroing::Unmap)).await,
            device.discard(queue, offset, length).await,
        ]
    })
}

#[test]
fn outside_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue();
    for format in ["raw", "qcow2"] {
        let path = folder.path().join(format);
        qemu_img(&["create", "-q", "-f", format, text(&path), "1M"]).ok("create");
        let device = open(&queue, &path, &writable()).unwrap();
        let size = 1 << 20;
        for (offset, length) in [
            (size, 512),
            (size - 512, 1024),
            (size + (64 << 10), 64 << 10),
            (u64::MAX - 511, 512),
            (u64::MAX, 512),
            (0, size + 512),
        ] {
            for result in change_all(&queue, &device, offset, length) {
                let what = format!("{format}: {length} bytes at {offset}");
                assert!(
                    matches!(result, Err(Error::OutOfRange { .. } | Error::Io(_))),
                    "{what}: {result:?}"
                );
            }
        }
        // An empty range at the end is inside the disk.
        device.write_blocking(&queue, size, &[]).unwrap();
        queue.block_on(device.close(&queue)).unwrap();
        assert_content(
            &path,
            format,
            &vec![0; size as usize],
            "nothing was written",
        );
    }
    assert_clean(&folder.path().join("qcow2"), "nothing was written");
}

#[test]
fn not_open_for_writing() {
    let folder = tempfile::tempdir().unwrap();
    let queue = queue();
    for format in ["raw", "qcow2"] {
        let path = folder.path().join(format);
        qemu_img(&["create", "-q", "-f", format, text(&path), "1M"]).ok("create");
        let before = std::fs::read(&path).unwrap();
        let device = open(&queue, &path, &OpenOptions::default()).unwrap();
        for result in change_all(&queue, &device, 0, 64 << 10) {
            assert!(result.is_err(), "{format}");
        }
        queue.block_on(device.close(&queue)).unwrap();
        assert!(std::fs::read(&path).unwrap() == before, "{format}");
    }
}

/// Offset of the first L2 table, of an image with one.
fn l2_table(image: &[u8]) -> usize {
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    (word(word(40) as usize) & 0x00ff_ffff_ffff_fe00) as usize
}

#[test]
fn entries_that_point_to_tables() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    let queue = queue();
    let table = |image: &[u8], field: usize| {
        u64::from_be_bytes(image[field..field + 8].try_into().unwrap())
    };
    for (what, field) in [("header", 0), ("L1 table", 40), ("refcount table", 48)] {
        qemu_img(&["create", "-q", "-f", "qcow2", text(&path), "1M"]).ok("create");
        qemu_io(&path, "qcow2", &[], &["write -P 1 0 128k".into()]).ok("write");
        let mut image = std::fs::read(&path).unwrap();
        let host = if field == 0 { 0 } else { table(&image, field) };
        let entry = l2_table(&image);
        image[entry..entry + 8].copy_from_slice(&(host | 1 << 63).to_be_bytes());
        if host == 0 {
            // An entry of 0 is unallocated, so the refcount block is used instead.
            let block = table(&image, table(&image, 48) as usize);
            image[entry..entry + 8].copy_from_slice(&(block | 1 << 63).to_be_bytes());
        }
        std::fs::write(&path, &image).unwrap();
        let device = open(&queue, &path, &writable()).unwrap();
        let result = device.write_blocking(&queue, 512, &[5; 512]);
        assert!(result.is_err(), "{what}");
        // The image is marked as corrupt.
        let result = device.write_blocking(&queue, 64 << 10, &[5; 512]);
        assert!(
            result.is_err(),
            "{what}: a write to a corrupt image succeeds"
        );
        let _ = queue.block_on(device.close(&queue));
        let result = open(&queue, &path, &writable());
        let error = result.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("corrupt"), "{what}: {error}");
        let after = std::fs::read(&path).unwrap();
        // Only the header has changed.
        assert!(
            after[512..] == image[512..],
            "{what}: more than the header has changed"
        );
        open(&queue, &path, &OpenOptions::default()).expect("a corrupt image opens for reading");
    }
}

/// A random image in memory that is used while its storage fails.
struct Trial {
    rng: Rng,
    memory: Arc<Memory>,
    faulty: Arc<Faulty>,
    queue: Queue,
    bytes: Vec<u8>,
    /// The bytes that requests wrote since this was cleared.
    touched: Vec<bool>,
    cluster: usize,
    refused: usize,
}

impl Trial {
    fn new(seed: u64) -> (Trial, Device) {
        let mut rng = Rng::new(seed);
        let queue = queue();
        let extended_l2 = rng.one_in(3);
        let cluster_bits = match extended_l2 {
            true => 14 + rng.below(3) as u32,
            false => 9 + rng.below(8) as u32,
        };
        let size = (256u64 << cluster_bits).min(4 << 20) - 512 * rng.below(8);
        let memory = Arc::new(Memory::default());
        let options = CreateQcow2::default()
            .size(size)
            .cluster_bits(cluster_bits)
            .extended_l2(extended_l2)
            .refcount_order(rng.below(7) as u32)
            .lazy_refcounts(rng.one_in(4));
        queue
            .block_on(create_qcow2(&queue, &*memory, None, &options, |_| {}))
            .unwrap();
        let faulty = Faulty::new(memory.clone(), seed);
        let options = writable()
            // Small caches, so that metadata are written between flushes.
            .l2_cache_entry_size(Some(512))
            .l2_cache_size(rng.one_in(2).then_some(1024));
        let device = Device::from_storage(&queue, faulty.clone(), &options).unwrap();
        let trial = Trial {
            rng,
            memory,
            faulty,
            queue,
            bytes: vec![0; size as usize],
            touched: vec![false; size as usize],
            cluster: 1 << cluster_bits,
            refused: 0,
        };
        (trial, device)
    }

    /// One request. If it failed, each byte must be old or new.
    fn step(&mut self, device: &Device, must_work: bool) {
        progress();
        let size = self.bytes.len();
        let start = self.rng.index(size);
        let most = self.rng.pick(&[512, self.cluster, 3 * self.cluster]);
        let mut range = start..(start + 1 + self.rng.index(most)).min(size);
        let kind = self.rng.below(10);
        if kind == 9 {
            range.start = range.start / self.cluster * self.cluster;
            range.end = (range.start + self.cluster).min(size);
        }
        let mut new = vec![0; range.len()];
        let (offset, length) = (range.start as u64, range.len() as u64);
        let queue = &self.queue;
        let result = match kind {
            0..6 => {
                self.rng.fill(&mut new);
                device.write_blocking(queue, offset, &new)
            }
            6 => queue.block_on(device.write_zeroes(queue, offset, length, Zeroing::Keep)),
            7 => queue.block_on(device.write_zeroes(queue, offset, length, Zeroing::Unmap)),
            8 => queue.block_on(device.flush(queue)),
            _ => {
                new.fill(self.rng.next() as u8);
                let mut buffer = Buffer::new(new.len());
                buffer.copy_from_slice(&new);
                // SAFETY: the buffer lives until the write has ended.
                let iov = unsafe { buffer.iov() };
                queue.block_on(device.write_compressed(queue, offset, &iov))
            }
        };
        if kind == 8 {
            new.copy_from_slice(&self.bytes[range.clone()]);
        }
        let mut found = vec![0; range.len()];
        let read = device.read_blocking(queue, offset, &mut found);
        read.unwrap_or_else(|e| panic!("read after {result:?}: {e}"));
        match result {
            Ok(()) => assert!(found == new, "{kind} at {range:x?} reads as other data"),
            Err(e) => {
                // A compressed write fails where a cluster is allocated.
                assert!(!must_work || kind == 9, "{kind} at {range:x?}: {e}");
                self.refused += 1;
                let old = &self.bytes[range.clone()];
                let known = found.iter().zip(old.iter().zip(&new));
                let wrong = known.filter(|(f, (o, n))| f != o && f != n).count();
                assert!(
                    wrong == 0,
                    "{kind} at {range:x?}: {e}: {wrong} bytes are neither old nor new"
                );
            }
        }
        self.touched[range.clone()].fill(true);
        self.bytes[range].copy_from_slice(&found);
    }

    /// QEMU checks and reads the image.
    fn verify(&self, folder: &Path, clean: bool) {
        let path = folder.join("disk.qcow2");
        std::fs::write(&path, self.memory.to_vec()).unwrap();
        match clean {
            true => assert_clean(&path, "after failures"),
            false => assert_consistent(&path, "after failures"),
        }
        assert_content(&path, "qcow2", &self.bytes, "after failures");
    }
}

/// Runs the trials of `seeds`, with failures that `fail` causes for some time.
fn tried(mut seeds: Cases, fail: impl Fn(&Faulty, &mut Rng)) {
    let folder = tempfile::tempdir().unwrap();
    let mut refused = 0;
    while let Some(seed) = seeds.next() {
        let _watchdog = Watchdog::new(&format!("seed {seed}"));
        let (mut trial, device) = Trial::new(seed);
        for _ in 0..1 + trial.rng.below(3) {
            for _ in 0..trial.rng.below(40) {
                trial.step(&device, true);
            }
            fail(&trial.faulty, &mut trial.rng);
            for _ in 0..60 {
                trial.step(&device, false);
            }
            trial.faulty.fail_writes(0, 0);
            trial.faulty.set_free_blocks(0);
            for _ in 0..20 {
                trial.step(&device, true);
            }
        }
        let queue = trial.queue.clone();
        queue.block_on(device.close(&queue)).unwrap();
        trial.verify(folder.path(), true);
        refused += trial.refused;
        seeds.add(trial.faulty.failures());
    }
    println!("{refused} requests failed");
    assert!(refused > 0 && seeds.done() > 0 || !zebu_testkit::are_usual());
}

#[test]
fn a_full_disk() {
    tried(cases(39, "operations failed: full"), |faulty, rng| {
        faulty.set_free_blocks(1 + rng.below(40))
    });
}

#[test]
fn writes_that_fail() {
    tried(cases(40, "operations failed").from(100), |faulty, rng| {
        let errno = rng.pick(&[libc_eio(), libc_enospc()]);
        faulty.fail_writes(1 + rng.below(20), errno);
    });
}

/// The data that a failed flush covered may be lost, which cannot be detected. So every later write
/// must fail.
#[test]
fn flushes_that_fail() {
    let folder = tempfile::tempdir().unwrap();
    for seed in cases(19, "flushes failed") {
        let (mut trial, device) = Trial::new(seed);
        for _ in 0..30 {
            trial.step(&device, true);
        }
        let queue = trial.queue.clone();
        queue.block_on(device.flush(&queue)).unwrap();
        let flushed = trial.bytes.clone();
        trial.touched.fill(false);
        for _ in 0..10 {
            trial.step(&device, true);
        }
        trial.faulty.fail_flushes(1);
        let changed = device.write_blocking(&queue, 0, &[1; 512]);
        let result = queue.block_on(device.flush(&queue));
        assert!(changed.is_err() || result.is_err());
        trial.faulty.fail_flushes(0);
        assert!(queue.block_on(device.flush(&queue)).is_err());
        assert!(device.write_blocking(&queue, 0, &[2; 512]).is_err());
        assert!(queue.block_on(device.close(&queue)).is_err());
        // On the disk, each byte is as at the last flush, unless it was written later.
        let path = folder.path().join("disk.qcow2");
        let image = trial.memory.to_vec();
        std::fs::write(&path, &image).unwrap();
        let is_dirty = image[79] & 1 != 0;
        if !is_dirty {
            assert_consistent(&path, "after a failed flush");
        }
        let device = open(&queue, &path, &OpenOptions::default()).unwrap();
        let mut found = vec![0; flushed.len()];
        device.read_blocking(&queue, 0, &mut found).unwrap();
        trial.touched[..512].fill(true);
        for (at, touched) in trial.touched.iter().enumerate() {
            assert!(*touched || found[at] == flushed[at], "byte {at:#x}");
        }
    }
}

/// The change of a bitmap that fails is not stored later.
#[test]
fn bitmaps_on_a_full_disk() {
    let (queue, memory) = (queue(), Arc::new(Memory::default()));
    let options = CreateQcow2::default().size(1 << 20);
    let created = create_qcow2(&queue, &*memory, None, &options, |_| {});
    queue.block_on(created).unwrap();
    let faulty = Faulty::new(memory.clone(), 1);
    let mut device = Device::from_storage(&queue, faulty.clone(), &writable()).unwrap();
    let add = device.bitmap_add(&queue, "b", None, true);
    queue.block_on(add).unwrap();
    device.write_blocking(&queue, 0, &[1; 4096]).unwrap();
    queue.block_on(device.flush(&queue)).unwrap();
    faulty.set_free_blocks(1);
    let cleared = queue.block_on(device.bitmap_clear(&queue, "b"));
    assert!(cleared.is_err());
    let disabled = queue.block_on(device.bitmap_enable(&queue, "b", false));
    assert!(disabled.is_err());
    faulty.set_free_blocks(0);
    let other = 512 << 10;
    device.write_blocking(&queue, other, &[2; 4096]).unwrap();
    queue.block_on(device.close(&queue)).unwrap();
    let device = Device::from_storage(&queue, memory, &OpenOptions::default()).unwrap();
    let bits = queue.block_on(device.bitmap(&queue, "b")).unwrap();
    assert!(bits.run(0, 4096).0 && bits.run(other, other + 4096).0);
}
