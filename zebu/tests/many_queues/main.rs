//! Guards against blocks that are lost, misplaced, torn or invented when many threads use one
//! image for long. Each thread has its own queue, which it drives in one of several ways, ranges overlap and are adjacent, and there is a
//! backing chain. The caches are so small that slices are evicted all the time. Snapshots are
//! created, applied and deleted between the rounds. A bitmap records what changes.
//!
//! Each block contains the number of its write (`ledger`). At the end zebu and QEMU check the image
//! and read every block and snapshot, the backing chain must be unchanged, and what differs from the
//! start of the session must be dirty in the bitmap.
//!
//! `ZEBU_ONLY` is the only engine: `threads`, `native` or `io_uring`.
//!
//! A failure prints the seed of its image. (The schedule of threads differs in each run.)

mod exchanges;
mod exchanges_in_memory;
mod formats;
mod hooked;

use zebu_testkit::library::{self as common, dirty, driven, ledger, load};

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::peer::{assert_clean, assert_content, text};
use common::{Rng, Watchdog, progress, work};
use dirty::Bitmap;
use ledger::{BLOCK, Ledger, Sequence, image_of, stamped};
use load::{Handle, Load, Thread, settle};
use zebu::block::{Device, OpenOptions};
use zebu::jobs::{self, CreateQcow2, NewBacking, NewDataFile, create_qcow2};
use zebu::names::Source;
use zebu::qcow2::SnapshotName;
use zebu::storage::{CacheMode, EngineKind, OpenFile, Queue, QueueOptions, Storage, open_file};
use zebu_testkit::WRITTEN;

/// The numbers of the writes to the base, and to the image over it.
const BASE: Sequence = 1;
const MIDDLE: Sequence = 2;

/// One image, its backing chain, and the data that each block may have.
struct Run {
    rng: Rng,
    folder: PathBuf,
    engines: Vec<EngineKind>,
    cluster: usize,
    cache: CacheMode,
    /// The file of the base, which must not change.
    base: Vec<u8>,
    ledger: Arc<Ledger>,
    sequence: Arc<AtomicU64>,
    snapshots: Vec<(String, Vec<Sequence>)>,
    /// What changed in this session.
    bitmap: Option<Bitmap>,
    store_bitmaps: bool,
}

fn queue_of(rng: &mut Rng, engines: &[EngineKind]) -> QueueOptions {
    QueueOptions::default()
        .engine(rng.pick(engines))
        .parts(1 + rng.below(8) as usize)
        .inline_buffered(rng.one_in(3))
        .force_async(rng.below(3) as u32)
}

impl Run {
    /// Makes a chain of three images.
    fn new(seed: u64, folder: &Path, engines: &[EngineKind], is_disk: bool) -> Run {
        let mut rng = Rng::new(seed);
        let extended_l2 = rng.one_in(3);
        let cluster_bits = match extended_l2 {
            true => 14 + rng.below(3) as u32,
            false => 9 + rng.below(8) as u32,
        };
        let size = (1024 << cluster_bits).min(16 << 20) + BLOCK * rng.below(9) as usize;
        let blocks = size / BLOCK;
        // Some bases are shorter than the disk.
        let base_blocks = rng.pick(&[blocks, blocks * 2 / 3]);
        let mut sequences = vec![0; blocks];
        let cluster_blocks = (1 << cluster_bits) / BLOCK;
        for piece in sequences[..base_blocks].chunks_mut(3 * cluster_blocks + 1) {
            piece.fill(BASE * rng.below(2));
        }
        let format = rng.pick(WRITTEN);
        formats::make(
            folder,
            "base",
            &format,
            &image_of(&sequences[..base_blocks]),
        );
        let base = std::fs::read(folder.join("base")).unwrap();
        let mut options = |backing: &str, format: &str| {
            CreateQcow2::default()
                .size(size as u64)
                .cluster_bits(cluster_bits)
                .extended_l2(extended_l2)
                // Snapshots need more than a few bits.
                .refcount_order(3 + rng.below(4) as u32)
                .backing(Some(NewBacking::new(backing).format(Some(format.into()))))
        };
        let middle = options("base", format.name);
        let top = options("middle.qcow2", "qcow2");
        let data = rng.one_in(4).then(|| NewDataFile::new("middle.data"));
        create(folder, "middle.qcow2", &middle.data_file(data));
        create(folder, "top.qcow2", &top);
        let cache = match rng.below(3) {
            0 if is_disk => CacheMode::None,
            1 => CacheMode::Unsafe,
            _ => CacheMode::WriteBack,
        };
        let mut run = Run {
            folder: folder.to_path_buf(),
            engines: engines.to_vec(),
            cluster: 1 << cluster_bits,
            cache,
            base,
            ledger: Arc::new(Ledger::new(&sequences)),
            sequence: Arc::new(AtomicU64::new(MIDDLE + 1)),
            snapshots: Vec::new(),
            bitmap: None,
            store_bitmaps: rng.one_in(2),
            rng,
        };
        run.fill_middle(&mut sequences);
        run.ledger = Arc::new(Ledger::new(&sequences));
        run
    }

    /// Writes to some ranges of the image in the middle.
    fn fill_middle(&mut self, sequences: &mut [Sequence]) {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let device = self.open(&queue, "middle.qcow2", None, true);
        for _ in 0..40 {
            let start = self.rng.index(sequences.len());
            let length = 1 + self.rng.index(2 * (self.cluster / BLOCK));
            let blocks = start..(start + length).min(sequences.len());
            let bytes = stamped(MIDDLE, blocks.clone());
            let at = (blocks.start * BLOCK) as u64;
            device.write_blocking(&queue, at, &bytes).unwrap();
            sequences[blocks].fill(MIDDLE);
        }
        queue.block_on(device.close(&queue)).unwrap();
    }

    fn open(&self, queue: &Queue, name: &str, snapshot: Option<&str>, write: bool) -> Device {
        let options = OpenOptions::default()
            .write(write)
            .cache(self.cache)
            .discard(Some(true))
            .store_bitmaps(self.store_bitmaps)
            // Two slices.
            .l2_cache_entry_size(Some(512))
            .l2_cache_size(Some(1024))
            .snapshot(snapshot.map(SnapshotName::from));
        let source = Source::Name(text(&self.folder.join(name)).into());
        Device::open(queue, &source, &options).unwrap_or_else(|e| panic!("open {name}: {e}"))
    }

    /// Threads use the image; returns the number of their requests.
    fn round(&mut self, device: &Arc<Device>) -> u64 {
        let load = Load {
            device: Handle::Plain(device.clone()),
            ledger: self.ledger.clone(),
            sequence: self.sequence.clone(),
            cluster: self.cluster / BLOCK,
            compresses: false,
            refuses: false,
            hot: self.rng.index(self.ledger.blocks()),
        };
        let count = 4 + self.rng.below(13);
        let thread = |_| Thread {
            queue: queue_of(&mut self.rng, &self.engines),
            driven: self.rng.pick(&driven::WAYS),
            requests: 20 + self.rng.below(180),
            depth: 1 + self.rng.index(8),
            rng: Rng::new(self.rng.next()),
        };
        load.run((0..count).map(thread).collect())
    }

    /// Creates, applies or deletes a snapshot. Returns the new content of the disk.
    fn change_snapshots(
        &mut self,
        queue: &Queue,
        device: &mut Device,
        now: Vec<Sequence>,
    ) -> Vec<Sequence> {
        let count = self.snapshots.len() as u64;
        if count < 3 && (count == 0 || self.rng.one_in(2)) {
            let name = format!("s{}", self.sequence.fetch_add(1, Ordering::SeqCst));
            let taken = queue.block_on(device.snapshot_create(queue, &name));
            taken.unwrap_or_else(|e| panic!("snapshot {name}: {e}"));
            self.snapshots.push((name, now.clone()));
            return now;
        }
        let place = self.rng.below(count) as usize;
        let (name, then) = self.snapshots[place].clone();
        let named = SnapshotName::from(name.as_str());
        if self.rng.one_in(2) {
            let applied = queue.block_on(device.snapshot_apply(queue, &named));
            applied.unwrap_or_else(|e| panic!("apply {name}: {e}"));
            return then;
        }
        let deleted = queue.block_on(device.snapshot_delete(queue, &named));
        deleted.unwrap_or_else(|e| panic!("delete {name}: {e}"));
        self.snapshots.remove(place);
        now
    }

    /// Uses the image in rounds and verifies it. Returns the number of requests.
    fn run(&mut self) -> u64 {
        let options = queue_of(&mut self.rng, &self.engines);
        let queue = Queue::new(options).unwrap();
        let mut requests = 0;
        for _ in 0..2 {
            let mut device = self.open(&queue, "top.qcow2", None, true);
            self.begin_bitmap(&queue, &mut device);
            let mut device = Arc::new(device);
            for _ in 0..3 {
                requests += self.round(&device);
                let owned = Arc::get_mut(&mut device).expect("all threads have ended");
                let now = settle(&self.ledger, &queue, owned);
                let now = self.change_snapshots(&queue, owned, now);
                self.ledger = Arc::new(Ledger::new(&now));
            }
            let now = settle(&self.ledger, &queue, &device);
            let device = Arc::into_inner(device).expect("all threads have ended");
            let closed = queue.block_on(device.close(&queue));
            closed.unwrap_or_else(|e| panic!("close: {e}"));
            self.verify(&queue, &now);
        }
        requests
    }

    /// Adds a bitmap to the image, instead of the one of the last session.
    fn begin_bitmap(&mut self, queue: &Queue, device: &mut Device) {
        if let Some(old) = self.bitmap.take() {
            let removed = queue.block_on(device.bitmap_remove(queue, old.name));
            removed.unwrap_or_else(|e| panic!("remove the bitmap: {e}"));
        }
        let granularity = self.rng.pick(&[512, 4096, 64 << 10]);
        let added = device.bitmap_add(queue, "bitmap", Some(granularity), true);
        let added = queue.block_on(added);
        added.unwrap_or_else(|e| panic!("add a bitmap: {e}"));
        let content = image_of(&settle(&self.ledger, queue, device));
        self.bitmap = Some(Bitmap::new("bitmap".into(), granularity, true, &content));
    }

    /// Checks the closed image, and verifies the content of it and of its snapshots.
    fn verify(&mut self, queue: &Queue, now: &[Sequence]) {
        let device = self.open(queue, "top.qcow2", None, false);
        let Some(image) = device.top().as_qcow2() else {
            panic!("it is qcow2");
        };
        let report = queue
            .block_on(jobs::check(
                queue,
                image,
                &mut |message| println!("{message}"),
                |_| {},
            ))
            .unwrap();
        let wrong = report.corruptions + report.leaks + report.check_errors;
        assert_eq!(wrong, 0, "{report:?}");
        assert!(settle(&self.ledger, queue, &device) == now, "read again");
        if let Some(bitmap) = &self.bitmap {
            let bits = queue.block_on(device.bitmap(queue, &bitmap.name));
            let right = bitmap.compare(&bits.unwrap(), &image_of(now));
            right.unwrap_or_else(|why| panic!("the bitmap: {why}"));
        }
        for (name, then) in &self.snapshots {
            let device = self.open(queue, "top.qcow2", Some(name), false);
            let mut bytes = vec![0; then.len() * BLOCK];
            device.read_blocking(queue, 0, &mut bytes).unwrap();
            let found = Ledger::new(then).settle(&bytes);
            found.unwrap_or_else(|wrong| panic!("snapshot {name}: {wrong}"));
        }
        let top = self.folder.join("top.qcow2");
        assert_clean(&top, "after a close");
        assert_content(&top, "qcow2", &image_of(now), "after a close");
        let base = std::fs::read(self.folder.join("base")).unwrap();
        assert!(base == self.base, "the base has changed");
        progress();
    }
}

/// A new file.
fn new_file(path: &Path) -> Arc<dyn Storage> {
    let how = OpenFile::default()
        .write(true)
        .create(true)
        .cache(CacheMode::Unsafe);
    open_file(path, how).unwrap()
}

/// Makes a qcow2 image, and its data file.
fn create(folder: &Path, name: &str, options: &CreateQcow2) {
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let file = new_file(&folder.join(name));
    let mut options = options.clone();
    let data = options.data_file.as_mut().map(|data| {
        // QEMU takes a relative name relative to the current folder.
        let path = folder.join(&data.name);
        data.name = text(&path).into();
        new_file(&path)
    });
    let created = create_qcow2(&queue, &*file, data.as_deref(), &options, |_| {});
    queue.block_on(created).unwrap();
}

/// The engines to be used.
fn engines() -> Vec<EngineKind> {
    let mut engines = common::engines();
    engines.retain(|engine| zebu_testkit::is_only(engine.name()));
    assert!(!engines.is_empty(), "no such engine here");
    engines
}

/// Uses one image after another until there were enough requests: with each engine alone, then
/// with all of them together.
fn use_images(requests: u64) {
    let engines = engines();
    let mut seeds = work(requests, "verified requests");
    while let Some(seed) = seeds.next() {
        let _watchdog = Watchdog::new(&format!("seed {seed}"));
        let alone = engines.get(seed as usize % (engines.len() + 1));
        let used = alone.map_or(&engines[..], std::slice::from_ref);
        // Half of the images are on a disk, which has direct I/O, half on tmpfs, which is faster.
        let is_disk = seed % 2 == 0 || !Path::new("/dev/shm").is_dir();
        let place = match is_disk {
            true => Path::new(env!("CARGO_TARGET_TMPDIR")),
            false => Path::new("/dev/shm"),
        };
        let folder = tempfile::tempdir_in(place).unwrap();
        seeds.add(Run::new(seed, folder.path(), used, is_disk).run());
    }
    println!("{} images", seeds.seeds());
}

#[test]
fn many_queues() {
    use_images(30_000);
}

#[test]
#[ignore = "slow"]
fn many_queues_for_long() {
    use_images(100_000);
}
