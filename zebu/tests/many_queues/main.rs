//! Guards against blocks that are lost, misplaced, torn or made up when many
//! threads use one image for long: each with a queue of its own, their ranges
//! overlapping and side by side, over a backing chain, with caches so small
//! that slices come and go all the time, and snapshots taken, applied and
//! deleted between.
//!
//! Each block says which write it is of (`ledger`). When an image has been used
//! for a while it is checked by zebu and by QEMU, and both read every block;
//! the snapshots are read in whole, and the chain below has not changed.
//!
//! | variable                | meaning                                          |
//! |-------------------------|--------------------------------------------------|
//! | `ZEBU_QUEUES_REQUESTS`  | requests to make at least                        |
//! | `ZEBU_QUEUES_SECONDS`   | go on for so long at least                       |
//! | `ZEBU_QUEUES_SEED`      | the first image's seed; the next ones count up   |
//! | `ZEBU_QUEUES_ENGINE`    | `threads`, `native` or `io_uring` only           |
//!
//! A failure says the seed of its image. (Threads meet differently each time.)

#[path = "../common/mod.rs"]
mod common;
mod ledger;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::peer::{assert_clean, assert_content, text, write_sparse};
use common::{Rng, Sayer, Watchdog, cases, progress};
use ledger::{BLOCK, Ledger, Sequence, image_of, stamped};
use zebu::block::{Device, OpenOptions, Zeroing};
use zebu::jobs::{self, CreateQcow2, NewBacking, create_qcow2};
use zebu::names::Source;
use zebu::qcow2::SnapshotName;
use zebu::storage::{Buffer, CacheMode, EngineKind, OpenFile, Queue, QueueOptions, open_file};

/// Sequence numbers of what lies below: in the base, and in the image over it.
const BASE: Sequence = 1;
const MIDDLE: Sequence = 2;

/// One image, what lies below it, and what each block may be.
struct Run {
    rng: Rng,
    folder: PathBuf,
    engines: Vec<EngineKind>,
    cluster: usize,
    cache: CacheMode,
    /// The base's bytes, which stay.
    base: Vec<u8>,
    ledger: Arc<Ledger>,
    sequence: Arc<AtomicU64>,
    snapshots: Vec<(String, Vec<Sequence>)>,
}

fn queue_of(rng: &mut Rng, engines: &[EngineKind]) -> QueueOptions {
    QueueOptions::default()
        .engine(engines[rng.below(engines.len() as u64) as usize])
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
        // The base ends before the disk does, now and then.
        let base_blocks = [blocks, blocks * 2 / 3][rng.below(2) as usize];
        let mut sequences = vec![0; blocks];
        let cluster_blocks = (1 << cluster_bits) / BLOCK;
        for piece in sequences[..base_blocks].chunks_mut(3 * cluster_blocks + 1) {
            piece.fill(BASE * rng.below(2));
        }
        let base = image_of(&sequences[..base_blocks]);
        write_sparse(&folder.join("base.raw"), &base);
        let options = |backing: &str, format: &str| {
            CreateQcow2::default()
                .size(size as u64)
                .cluster_bits(cluster_bits)
                .extended_l2(extended_l2)
                .backing(Some(NewBacking::new(backing).format(Some(format.into()))))
        };
        create(folder, "middle.qcow2", &options("base.raw", "raw"));
        create(folder, "top.qcow2", &options("middle.qcow2", "qcow2"));
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
            rng,
        };
        run.fill_middle(&mut sequences);
        run.ledger = Arc::new(Ledger::new(&sequences));
        run
    }

    /// Puts pieces into the image in the middle.
    fn fill_middle(&mut self, sequences: &mut [Sequence]) {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let device = self.open(&queue, "middle.qcow2", None, true);
        for _ in 0..40 {
            let start = self.rng.below(sequences.len() as u64) as usize;
            let length = 1 + self.rng.below(2 * (self.cluster / BLOCK) as u64) as usize;
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
            // Two slices.
            .l2_cache_entry_size(Some(512))
            .l2_cache_size(Some(1024))
            .snapshot(snapshot.map(SnapshotName::from));
        let source = Source::Name(text(&self.folder.join(name)).into());
        Device::open(queue, &source, &options).unwrap_or_else(|e| panic!("open {name}: {e}"))
    }

    /// Has threads use the image; how many requests they made.
    fn round(&mut self, device: &Arc<Device>) -> u64 {
        let hot = self.rng.below(self.ledger.blocks() as u64) as usize;
        let count = 4 + self.rng.below(13) as usize;
        let failures = Mutex::new(Vec::new());
        let threads: Vec<Thread> = (0..count)
            .map(|number| Thread {
                number,
                threads: count,
                hot,
                requests: 20 + self.rng.below(180),
                depth: 1 + self.rng.below(8) as usize,
                cluster: self.cluster / BLOCK,
                queue: queue_of(&mut self.rng, &self.engines),
                rng: Rng::new(self.rng.next()),
                ledger: self.ledger.clone(),
                sequence: self.sequence.clone(),
                device: device.clone(),
            })
            .collect();
        let requests = threads.iter().map(|t| t.requests).sum();
        std::thread::scope(|scope| {
            for thread in threads {
                scope.spawn(|| thread.run(&failures));
            }
        });
        let failures = failures.into_inner().unwrap();
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        requests
    }

    /// What every block is, now that nobody writes.
    fn settle(&mut self, queue: &Queue, device: &Device) -> Vec<Sequence> {
        let mut bytes = vec![0; self.ledger.blocks() * BLOCK];
        let read = device.read_blocking(queue, 0, &mut bytes);
        read.unwrap_or_else(|e| panic!("read: {e}"));
        let sequences = self.ledger.settle(&bytes);
        sequences.unwrap_or_else(|wrong| panic!("{wrong}"))
    }

    /// Takes a snapshot, goes back to one, or deletes one. What the disk is.
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

    /// Uses the image for a while, and looks at it; how many requests were made.
    fn run(&mut self) -> u64 {
        let options = queue_of(&mut self.rng, &self.engines);
        let queue = Queue::new(options).unwrap();
        let mut requests = 0;
        for _ in 0..2 {
            let mut device = Arc::new(self.open(&queue, "top.qcow2", None, true));
            for _ in 0..3 {
                requests += self.round(&device);
                let owned = Arc::get_mut(&mut device).expect("all threads have ended");
                let now = self.settle(&queue, owned);
                let now = self.change_snapshots(&queue, owned, now);
                self.ledger = Arc::new(Ledger::new(&now));
            }
            let now = self.settle(&queue, &device);
            let device = Arc::into_inner(device).expect("all threads have ended");
            let closed = queue.block_on(device.close(&queue));
            closed.unwrap_or_else(|e| panic!("close: {e}"));
            self.verify(&queue, &now);
        }
        requests
    }

    /// The closed image is sound, and it and its snapshots read as they must.
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
        assert!(self.settle(queue, &device) == now, "read again");
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
        let base = std::fs::read(self.folder.join("base.raw")).unwrap();
        assert!(base == self.base, "the base has changed");
        progress();
    }
}

fn create(folder: &Path, name: &str, options: &CreateQcow2) {
    let how = OpenFile::default()
        .write(true)
        .create(true)
        .cache(CacheMode::Unsafe);
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let file = open_file(folder.join(name), how).unwrap();
    queue
        .block_on(create_qcow2(&queue, &*file, None, options, |_| {}))
        .unwrap();
}

/// One of those who use the image together.
struct Thread {
    number: usize,
    threads: usize,
    /// Where all meet.
    hot: usize,
    requests: u64,
    depth: usize,
    /// Blocks of a cluster.
    cluster: usize,
    queue: QueueOptions,
    rng: Rng,
    ledger: Arc<Ledger>,
    sequence: Arc<AtomicU64>,
    device: Arc<Device>,
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Read,
    Write,
    Zero(Zeroing),
    Discard,
    Flush,
}

impl Thread {
    fn run(mut self, failures: &Mutex<Vec<String>>) {
        let queue = Queue::new(self.queue.clone()).unwrap();
        let mine = Rc::new(RefCell::new(Vec::new()));
        let mut flight = VecDeque::new();
        for _ in 0..self.requests {
            if flight.len() >= self.depth
                && let Some(handle) = flight.pop_front()
            {
                queue.block_on(handle);
            }
            let (request, blocks) = self.draw();
            let (ledger, device) = (self.ledger.clone(), self.device.clone());
            let sequence = self.sequence.fetch_add(1, Ordering::SeqCst);
            let (in_task, mine, number) = (queue.clone(), mine.clone(), self.number);
            flight.push_back(queue.spawn(async move {
                let line = format!("thread {number}: {request:?} {blocks:?}");
                let done = perform(&ledger, &device, &in_task, request, blocks, sequence);
                if let Err(wrong) = done.await {
                    // Not a panic: others may wait for requests of this queue.
                    mine.borrow_mut().push(format!("{line}: {wrong}"));
                }
                progress();
            }));
        }
        for handle in flight {
            queue.block_on(handle);
        }
        failures.lock().unwrap().append(&mut mine.borrow_mut());
    }

    fn draw(&mut self) -> (Request, Range<usize>) {
        let (rng, blocks, cluster) = (&mut self.rng, self.ledger.blocks(), self.cluster);
        let request = match rng.below(32) {
            0..10 => Request::Read,
            10..13 => Request::Zero([Zeroing::Keep, Zeroing::Unmap][rng.below(2) as usize]),
            13..16 => Request::Discard,
            16 => Request::Flush,
            _ => Request::Write,
        };
        let most = [8, cluster, 2 * cluster][rng.below(3) as usize].min(1024);
        let mut length = 1 + rng.below(most as u64) as usize;
        let mut start = match rng.below(4) {
            // Where all go: they overlap.
            0 | 1 => (self.hot + rng.below(3 * cluster as u64) as usize) % blocks,
            // A piece of one's own, beside another thread's.
            2 => {
                length = 1 + cluster / 4;
                let nth = rng.below(1 + (blocks / length / self.threads) as u64) as usize;
                (nth * self.threads + self.number) * length % blocks
            }
            _ => rng.below(blocks as u64) as usize,
        };
        if rng.one_in(3) {
            start = start / cluster * cluster;
            length = length.next_multiple_of(cluster);
        }
        (request, start..(start + length).min(blocks))
    }
}

/// Carries a request out, and says what was wrong.
async fn perform(
    ledger: &Ledger,
    device: &Device,
    queue: &Queue,
    request: Request,
    blocks: Range<usize>,
    sequence: Sequence,
) -> Result<(), String> {
    let (offset, length) = ((blocks.start * BLOCK) as u64, blocks.len() * BLOCK);
    let mut buffer = Buffer::new(length);
    let began = ledger.begin();
    match request {
        Request::Write => {
            buffer.copy_from_slice(&stamped(sequence, blocks.clone()));
            ledger.writes(blocks.clone(), began, sequence, true);
        }
        Request::Zero(_) => ledger.writes(blocks.clone(), began, 0, true),
        Request::Discard => ledger.writes(blocks.clone(), began, 0, false),
        Request::Read | Request::Flush => {}
    }
    let result = match request {
        Request::Read => {
            let (read, result) = device.read_buffer(queue, offset, buffer, length).await;
            buffer = read;
            result
        }
        Request::Write => {
            let (written, result) = device.write_buffer(queue, offset, buffer, length).await;
            buffer = written;
            result
        }
        Request::Zero(how) => device.write_zeroes(queue, offset, length as u64, how).await,
        Request::Discard => device.discard(queue, offset, length as u64).await,
        Request::Flush => device.flush(queue).await,
    };
    let verdict = match (request, result) {
        (_, Err(e)) => Err(e.to_string()),
        (Request::Read, Ok(())) => ledger.judge(blocks, began, &buffer),
        (Request::Flush, Ok(())) => Ok(()),
        (_, Ok(())) => {
            ledger.wrote(blocks, began);
            Ok(())
        }
    };
    ledger.end(began);
    verdict
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect(name))
}

/// Uses one image after another until there were enough requests: with each
/// engine alone, then with all of them together.
fn use_images(requests: u64) {
    let least = number("ZEBU_QUEUES_REQUESTS").unwrap_or(requests);
    let time = Duration::from_secs(number("ZEBU_QUEUES_SECONDS").unwrap_or(0));
    let first = number("ZEBU_QUEUES_SEED").unwrap_or(1);
    let mut engines = common::engines();
    if let Ok(only) = std::env::var("ZEBU_QUEUES_ENGINE") {
        engines.retain(|engine| engine.name() == only);
        assert!(!engines.is_empty(), "{only}: no such engine here");
    }
    let (start, mut done, mut images) = (Instant::now(), 0, 0);
    for seed in first.. {
        let name = format!("ZEBU_QUEUES_SEED={seed} ZEBU_QUEUES_REQUESTS=1");
        let _sayer = Sayer(name.clone());
        let _watchdog = Watchdog::new(&name);
        let alone = engines.get(seed as usize % (engines.len() + 1));
        let used = alone.map_or(&engines[..], std::slice::from_ref);
        // Half of them where direct I/O is real, half where it is fast.
        let is_disk = seed % 2 == 0 || !Path::new("/dev/shm").is_dir();
        let place = match is_disk {
            true => Path::new(env!("CARGO_TARGET_TMPDIR")),
            false => Path::new("/dev/shm"),
        };
        let folder = tempfile::tempdir_in(place).unwrap();
        done += Run::new(seed, folder.path(), used, is_disk).run();
        images += 1;
        if done >= least && start.elapsed() >= time {
            break;
        }
    }
    println!("{images} images, seeds from {first} on");
    cases(done, "verified requests");
}

#[test]
fn many_queues() {
    use_images(30_000);
}

#[test]
#[ignore = "slow"]
fn many_queues_for_long() {
    use_images(300_000);
}
