//! Guards against a request whose future is dropped, forgotten or no longer polled
//! at some await point, so that another request hangs, the device refuses to go
//! on, data that were acknowledged are lost, or an image is inconsistent.
//!
//! A case is a request, the poll after which it is given up, and how. Others, on
//! the same queue and on another, go on beside it. Then all of them must end; every
//! sector must read as a request that may have written it left it; writes, a flush
//! and the close must succeed; and a check must find nothing. The poll goes from the
//! first on until the request ends by itself.
//!
//! | variable               | meaning                                    |
//! |------------------------|--------------------------------------------|
//! | `ZEBU_DROPPED_SECONDS` | random images for so long                  |
//! | `ZEBU_DROPPED_SEED`    | the first seed                             |
//!
//! Futures are polled only when they were woken, in turns, so that a wake-up that is
//! lost is noticed, and without a clock. A failure says the seed that makes it again.

mod common;
#[allow(dead_code)]
#[path = "crash/disk.rs"]
mod disk;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use common::{Rng, Sayer, Watchdog, cases, engines, progress};
use disk::Disk;
use zebu::block::{Device, Format, OpenOptions, Preallocation, Storages, Zeroing};
use zebu::jobs::{self, CreateQcow2, create_qcow2};
use zebu::names::Source;
use zebu::qcow2::Compression;
use zebu::storage::nbd::{Nbd, NbdOptions, NbdServer};
use zebu::storage::{
    Buffer, CacheMode, EngineKind, Iov, Memory, OpKind, OpenFile, Queue, QueueOptions, Started,
    Storage, open_file, set_len,
};

const SECTOR: usize = 512;
/// Turns after which something that has not ended hangs. (With real files there is
/// a watchdog instead.)
const TURNS: usize = 50_000;

/// How a request is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Its future is dropped.
    Drop,
    /// It is not polled until all others have ended.
    Keep,
    /// It is forgotten.
    Forget,
    /// All requests of its queue are dropped, and the queue.
    End,
}

const HOWS: [How; 4] = [How::Drop, How::Keep, How::Forget, How::End];

/// A request; ranges in sectors.
#[derive(Clone, Debug)]
enum What {
    Read(Range<usize>),
    Status(Range<usize>),
    Write(Range<usize>, u8),
    Compressed(Range<usize>, u8),
    Zero(Range<usize>, Zeroing),
    ZeroQuickly(Range<usize>),
    Discard(Range<usize>),
    Flush,
}

impl What {
    /// What it changes, and to what.
    fn change(&self) -> Option<(Range<usize>, u8)> {
        match self {
            What::Write(range, tag) | What::Compressed(range, tag) => Some((range.clone(), *tag)),
            What::Zero(range, _) | What::ZeroQuickly(range) | What::Discard(range) => {
                Some((range.clone(), 0))
            }
            What::Read(_) | What::Status(_) | What::Flush => None,
        }
    }
}

fn offset(range: &Range<usize>) -> u64 {
    (range.start * SECTOR) as u64
}

fn length(range: &Range<usize>) -> usize {
    range.len() * SECTOR
}

/// What a request comes to: the bytes that it read.
type Done = zebu::Result<Vec<u8>>;
type Running<'a> = Pin<Box<dyn Future<Output = Done> + 'a>>;

fn start<'a>(device: &'a Device, queue: &'a Queue, what: &What) -> Running<'a> {
    let what = what.clone();
    Box::pin(async move {
        let tagged = |range: &Range<usize>, tag: u8| {
            let mut buffer = Buffer::new(length(range));
            buffer.fill(tag);
            buffer
        };
        let mut read = Vec::new();
        match what {
            What::Read(range) => {
                let buffer = Buffer::new(length(&range));
                let (buffer, result) = device
                    .read_buffer(queue, offset(&range), buffer, length(&range))
                    .await;
                result?;
                read = buffer[..length(&range)].to_vec();
            }
            What::Status(range) => {
                device
                    .status(queue, offset(&range), length(&range) as u64)
                    .await?;
            }
            What::Write(range, tag) => {
                let (at, count) = (offset(&range), length(&range));
                let buffer = tagged(&range, tag);
                device.write_buffer(queue, at, buffer, count).await.1?;
            }
            What::Compressed(range, tag) => {
                let mut buffer = tagged(&range, tag);
                // SAFETY: the buffer is part of the future, as the request is.
                let iov = unsafe { buffer.iov() }.slice(0, length(&range));
                device.write_compressed(queue, offset(&range), &iov).await?;
            }
            What::Zero(range, zeroing) => {
                let count = length(&range) as u64;
                device
                    .write_zeroes(queue, offset(&range), count, zeroing)
                    .await?;
            }
            What::ZeroQuickly(range) => {
                let count = length(&range) as u64;
                let result = device
                    .write_zeroes_quickly(queue, offset(&range), count, Zeroing::Unmap)
                    .await;
                match result {
                    Err(zebu::Error::Io(e)) if e.raw_os_error() == Some(95) => {
                        device
                            .write_zeroes(queue, offset(&range), count, Zeroing::Keep)
                            .await?;
                    }
                    other => other?,
                }
            }
            What::Discard(range) => {
                let count = length(&range) as u64;
                device.discard(queue, offset(&range), count).await?;
            }
            What::Flush => device.flush(queue).await?,
        }
        Ok(read)
    })
}

/// Says whether a future was woken.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A request in flight.
struct Task<'a> {
    what: What,
    running: Option<Running<'a>>,
    woken: Arc<Woken>,
    /// Polls until it is given up; None: it never is.
    left: Option<usize>,
}

impl<'a> Task<'a> {
    fn new(device: &'a Device, queue: &'a Queue, what: What) -> Self {
        Task {
            running: Some(start(device, queue, &what)),
            what,
            woken: Arc::new(Woken(AtomicBool::new(true))),
            left: None,
        }
    }

    fn all(device: &'a Device, queue: &'a Queue, all: Vec<What>) -> Vec<Self> {
        let new = |what| Task::new(device, queue, what);
        all.into_iter().map(new).collect()
    }

    /// Polls it if it was woken and may be.
    fn poll(&mut self) -> Option<Done> {
        let running = self.running.as_mut()?;
        if self.left == Some(0) || !self.woken.0.swap(false, Ordering::SeqCst) {
            return None;
        }
        self.left = self.left.map(|left| left - 1);
        let waker = Waker::from(self.woken.clone());
        match running.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => None,
            Poll::Ready(done) => {
                self.running = None;
                Some(done)
            }
        }
    }
}

/// One turn of a queue: each of these tasks is polled once at most, and the engine
/// entered once.
fn turn(queue: &Queue, tasks: &mut [Task<'_>], end: &mut dyn FnMut(&What, Done)) {
    let mut again = false;
    queue.block_on(poll_fn(|context| {
        if again {
            return Poll::Ready(());
        }
        again = true;
        for task in tasks.iter_mut() {
            if let Some(done) = task.poll() {
                end(&task.what, done);
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }));
}

/// What each sector may read as.
#[derive(Clone)]
struct Model {
    now: Vec<BTreeSet<u8>>,
    /// And at any time until now.
    ever: Vec<BTreeSet<u8>>,
}

impl Model {
    fn new(sectors: usize) -> Self {
        let empty = vec![BTreeSet::from([0]); sectors];
        Model {
            now: empty.clone(),
            ever: empty,
        }
    }

    /// It may happen from now on.
    fn begin(&mut self, what: &What) {
        if let Some((range, tag)) = what.change() {
            self.ever[range].iter_mut().for_each(|set| {
                set.insert(tag);
            });
        }
    }

    /// It has happened, or (`sure` false) perhaps.
    fn end(&mut self, what: &What, sure: bool) {
        let Some((range, tag)) = what.change() else {
            return;
        };
        // A discard of a part of a cluster does nothing.
        let sure = sure && !matches!(what, What::Discard(_));
        for set in &mut self.now[range] {
            if sure {
                set.clear();
            }
            set.insert(tag);
        }
    }

    fn check(sets: &[BTreeSet<u8>], bytes: &[u8], what: &str) {
        for ((nth, set), sector) in sets.iter().enumerate().zip(bytes.chunks(SECTOR)) {
            let tag = sector[0];
            assert!(
                set.contains(&tag) && sector.iter().all(|b| *b == tag),
                "{what}: sector {nth} reads {tag}, and may be {set:?}"
            );
        }
    }
}

/// Where images of cases are kept.
trait Place {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage>;
    fn queue(&self) -> Queue;
    /// Whether requests of one block wait for each other, and how large these are.
    fn block(&self) -> usize;
    /// Whether every turn brings everything on its way.
    fn is_prompt(&self) -> bool;
}

/// Memory whose operations take a few turns.
struct Delayed;

impl Place for Delayed {
    fn storage(&self, _: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        let disk = Disk::new(Some(Rng::new(rng.next())), None);
        disk.files(vec![bytes.to_vec()]).remove(0)
    }

    fn queue(&self) -> Queue {
        let options = QueueOptions::default()
            .engine(EngineKind::Threads)
            .inflate_inline(true);
        Queue::new(options).unwrap()
    }

    fn block(&self) -> usize {
        1
    }

    fn is_prompt(&self) -> bool {
        true
    }
}

/// Files, with an engine.
struct Files {
    folder: tempfile::TempDir,
    engine: EngineKind,
    cache: CacheMode,
}

impl Place for Files {
    fn storage(&self, name: &str, bytes: &[u8], _: &mut Rng) -> Arc<dyn Storage> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let how = OpenFile::default().write(true).cache(self.cache);
        open_file(path, how).unwrap()
    }

    fn queue(&self) -> Queue {
        let options = QueueOptions::default()
            .engine(self.engine)
            .inflate_inline(true);
        Queue::new(options).unwrap()
    }

    fn block(&self) -> usize {
        if self.cache == CacheMode::None {
            4096
        } else {
            1
        }
    }

    fn is_prompt(&self) -> bool {
        false
    }
}

/// Bytes that images may take where they cannot make their storage larger.
const ROOM: u64 = 64 << 20;

/// The disks of other images, which are files.
struct Nested(Files, Cell<u32>);

impl Place for Nested {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        let queue = self.queue();
        self.1.set(self.1.get() + 1);
        let name = format!("{name}{}", self.1.get());
        let file = self.0.storage(&name, &[], rng);
        let options = CreateQcow2::default().size(ROOM).cluster_bits(12);
        queue
            .block_on(create_qcow2(&queue, &*file, None, &options, |_| {}))
            .unwrap();
        let write = OpenOptions::default().write(true);
        let device = Device::from_storage(&queue, file, &write).unwrap();
        device.write_blocking(&queue, 0, bytes).unwrap();
        queue.block_on(device.close(&queue)).unwrap();
        let path = self.0.folder.path().join(name);
        let source = format!(
            "driver=raw,file.driver=qcow2,file.file.driver=file,file.file.filename={}",
            path.display()
        );
        let device = Device::open(&queue, &Source::Options(source.into()), &write).unwrap();
        let Some(raw) = device.top().as_raw() else {
            unreachable!("it was said to be raw");
        };
        raw.storage().clone()
    }

    fn queue(&self) -> Queue {
        self.0.queue()
    }

    /// A cluster of the image below.
    fn block(&self) -> usize {
        4096
    }

    fn is_prompt(&self) -> bool {
        false
    }
}

/// Exports of NBD servers.
struct Exports(Files, RefCell<Vec<Child>>);

impl Place for Exports {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        self.end();
        drop(self.0.storage(name, bytes, rng));
        let path = self.0.folder.path().join(name);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(ROOM).unwrap();
        let socket = self.0.folder.path().join("socket");
        let server = Command::new("qemu-nbd")
            .args(["-t", "-e", "8", "-f", "raw", "-k"])
            .args([&socket, &path])
            .spawn()
            .unwrap();
        self.1.borrow_mut().push(server);
        while !socket.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut options = NbdOptions::new(NbdServer::Unix(socket), "");
        options.write = true;
        options.cache = self.0.cache;
        // The socket is there a moment before the server listens.
        options.open_timeout = Duration::from_secs(30);
        Arc::new(Nbd::open(options).unwrap())
    }

    fn queue(&self) -> Queue {
        self.0.queue()
    }

    fn block(&self) -> usize {
        1
    }

    fn is_prompt(&self) -> bool {
        false
    }
}

impl Exports {
    fn end(&self) {
        for mut server in self.1.borrow_mut().drain(..) {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = std::fs::remove_file(self.0.folder.path().join("socket"));
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        self.end();
    }
}

/// An image that cases start with.
struct Origin {
    format: Format,
    bytes: Vec<u8>,
    backing: Option<Vec<u8>>,
    model: Model,
    /// Sectors of a cluster.
    cluster: usize,
    options: OpenOptions,
    version: u32,
    /// A case begins with more dirty tables than may gather.
    large: bool,
    note: String,
}

impl Origin {
    fn sectors(&self) -> usize {
        self.model.now.len()
    }

    /// An image of a random kind, with something of every kind in it.
    fn new(seed: u64) -> Origin {
        let mut rng = Rng::new(seed);
        // With a refcount table that is about to be full.
        let large = rng.one_in(6);
        let extended_l2 = !large && rng.one_in(4);
        let cluster_bits = match extended_l2 {
            true => 14,
            false if large => 9,
            false => 9 + rng.below(5) as u32,
        };
        let version = if !extended_l2 && rng.one_in(5) { 2 } else { 3 };
        let cluster = (1usize << cluster_bits) / SECTOR;
        let sectors = match large {
            true => 6000,
            false => (24 * cluster).clamp(160, 640),
        };
        let format = match !large && rng.one_in(10) {
            true => Format::RAW,
            false => Format::QCOW2,
        };
        let create = CreateQcow2::default()
            .size((sectors * SECTOR) as u64)
            .version(version)
            .cluster_bits(cluster_bits)
            .extended_l2(extended_l2)
            .refcount_order(match version {
                2 => 4,
                _ if large => 6,
                _ => 3 + rng.below(4) as u32,
            })
            .compression(match version == 3 && rng.one_in(2) {
                true => Compression::Zstd,
                false => Compression::Zlib,
            });
        let queue = common::queue(EngineKind::Threads, false);
        let memory = Arc::new(Memory::default());
        match format.name() {
            "raw" => {
                let length = (sectors * SECTOR) as u64;
                let longer = set_len(&*memory, &queue, length);
                queue.block_on(longer).unwrap();
            }
            _ => {
                queue
                    .block_on(create_qcow2(&queue, &*memory, None, &create, |_| {}))
                    .unwrap();
            }
        }
        let has_backing = format == Format::QCOW2 && rng.one_in(2);
        let backing = has_backing.then(|| {
            let length = [sectors, sectors / 2, sectors + 9][rng.below(3) as usize];
            vec![9u8; length * SECTOR]
        });
        let options = OpenOptions::default()
            .format(Some(format))
            .write(true)
            .discard(Some(true))
            .l2_cache_entry_size(Some(512))
            .l2_cache_size(rng.one_in(2).then_some(512));
        let mut origin = Origin {
            format,
            bytes: Vec::new(),
            backing,
            model: Model::new(sectors),
            cluster,
            options,
            version,
            large,
            note: format!("{format:?}, {create:?}"),
        };
        if let Some(backing) = &origin.backing {
            let behind = backing.len() / SECTOR;
            for model in [&mut origin.model.now, &mut origin.model.ever] {
                model[..sectors.min(behind)].fill(BTreeSet::from([9]));
            }
        }
        let mut device = origin.open(&queue, memory.clone()).unwrap();
        if large {
            // All that one cluster of the refcount table counts, but a little.
            let mut done = 0;
            while done < 3700 {
                let end = (done + 500).min(3700);
                let what = What::Write(done..end, 3);
                queue.block_on(start(&device, &queue, &what)).unwrap();
                origin.model.end(&what, true);
                done = end;
            }
            queue.block_on(device.close(&queue)).unwrap();
            let used = memory.len().unwrap() as usize / SECTOR;
            let left = (4080 + rng.below(16) as usize).saturating_sub(used);
            device = origin.open(&queue, memory.clone()).unwrap();
            let what = What::Write(done..done + left.max(1), 3);
            queue.block_on(start(&device, &queue, &what)).unwrap();
            origin.model.end(&what, true);
        } else if format == Format::QCOW2 {
            for _ in 0..4 {
                let at = rng.below((sectors / cluster) as u64) as usize * cluster;
                let what = What::Compressed(at..at + cluster, 7);
                let result = queue.block_on(start(&device, &queue, &what));
                origin.model.end(&what, true);
                if let Err(e) = result {
                    assert!(allowed(&what, &e), "{what:?}: {e}");
                }
            }
        }
        let rounds = if large { 0 } else { 1 + rng.below(2) };
        for round in 0..rounds {
            if round == 1 && format == Format::QCOW2 {
                queue.block_on(device.snapshot_create(&queue, "s")).unwrap();
            }
            for _ in 0..rng.below(12) {
                let what = origin.request(&mut rng, &[], None);
                origin.model.begin(&what);
                let result = queue.block_on(start(&device, &queue, &what));
                match result {
                    Ok(_) => origin.model.end(&what, true),
                    // It is allocated already.
                    Err(e) if matches!(what, What::Compressed(..)) => drop(e),
                    Err(e) => panic!("{what:?}: {e}"),
                }
                // What is not known for sure is looked up.
                if let (What::Discard(range), true) = (&what, true) {
                    let read = queue.block_on(start(&device, &queue, &What::Read(range.clone())));
                    for (set, sector) in origin.model.now[range.clone()]
                        .iter_mut()
                        .zip(read.unwrap().chunks(SECTOR))
                    {
                        *set = BTreeSet::from([sector[0]]);
                    }
                }
            }
        }
        queue.block_on(device.close(&queue)).unwrap();
        origin.bytes = memory.to_vec();
        if format == Format::QCOW2 && version == 3 && rng.one_in(3) {
            // An unknown feature: the first write clears it.
            origin.bytes[95] |= 0x40;
        }
        origin.model.ever = origin.model.now.clone();
        origin
    }

    /// Whether a request is not for this format.
    fn does_nothing(&self, what: &What) -> bool {
        matches!(what, What::Compressed(..)) && self.format == Format::RAW
            // Version 2 cannot say that the backing file is not meant.
            || matches!(what, What::Discard(_)) && self.version == 2 && self.backing.is_some()
    }

    fn open(&self, queue: &Queue, image: Arc<dyn Storage>) -> zebu::Result<Device> {
        let backing = self.backing.clone().map(|bytes| {
            let raw = OpenOptions::default().format(Some(Format::RAW));
            Device::from_storage(queue, Arc::new(Memory::new(bytes)), &raw).unwrap()
        });
        let storages = Storages::new(image).backing(backing);
        Device::from_storages(queue, storages, &self.options)
    }

    /// A random request that changes nothing of these ranges; mostly near a sector.
    fn request(&self, rng: &mut Rng, taken: &[Range<usize>], near: Option<usize>) -> What {
        loop {
            let tag = 10 + rng.below(240) as u8;
            let whole = rng.one_in(2);
            let most = (3 * self.cluster).max(4) as u64;
            let unit = if whole { self.cluster } else { 1 };
            let start = match near.filter(|_| !rng.one_in(4)) {
                Some(near) => near + rng.below(2 * most) as usize,
                None => rng.below(self.sectors() as u64) as usize,
            };
            let start = start.min(self.sectors() - 1) / unit * unit;
            let count = (1 + rng.below(most) as usize).next_multiple_of(unit);
            let range = start..(start + count).min(self.sectors());
            let what = match rng.below(16) {
                0 | 1 | 12 | 13 => What::Read(range),
                2 => What::Flush,
                3 => What::Zero(range, Zeroing::Keep),
                4 => What::Zero(range, Zeroing::Unmap),
                5 => What::Discard(range),
                6 | 14 if whole => What::Compressed(range, tag),
                7 => What::Status(range),
                8 => What::ZeroQuickly(range),
                _ => What::Write(range, tag),
            };
            if self.does_nothing(&what) {
                continue;
            }
            let hits = |changed: &Range<usize>| {
                taken
                    .iter()
                    .any(|t| t.start < changed.end && changed.start < t.end)
            };
            if what.change().is_some_and(|(range, _)| hits(&range)) {
                continue;
            }
            return what;
        }
    }

    /// The range of whole clusters around it.
    fn clusters(&self, range: &Range<usize>) -> Range<usize> {
        range.start / self.cluster * self.cluster..range.end.next_multiple_of(self.cluster)
    }
}

/// Whether an error is to be expected: a compressed write to what is allocated.
fn allowed(what: &What, error: &zebu::Error) -> bool {
    matches!(what, What::Compressed(..))
        && matches!(error, zebu::Error::Io(e) if e.raw_os_error() == Some(5))
}

/// What a request came to.
fn ended(model: &mut Model, ever: &[BTreeSet<u8>], what: &What, done: Done) {
    progress();
    match (what, done) {
        (What::Read(range), Ok(bytes)) => {
            Model::check(&ever[range.clone()], &bytes, &format!("{what:?}"));
        }
        (_, Ok(_)) => model.end(what, true),
        (_, Err(e)) if allowed(what, &e) => {}
        (_, Err(e)) => panic!("{what:?}: {e}"),
    }
}

/// One case. False if the request ended by itself before its `left`th poll.
fn case(
    place: &dyn Place,
    origin: &Origin,
    seed: u64,
    victim: &What,
    left: usize,
    how: How,
) -> bool {
    let mut rng = Rng::new(seed ^ (left as u64) << 32);
    let image = place.storage("image", &origin.bytes, &mut rng);
    let (first, second) = (place.queue(), place.queue());
    let device = origin.open(&second, image.clone()).unwrap();
    let mut model = origin.model.clone();
    if origin.large {
        for sector in (0..65 * 64).step_by(64) {
            let what = What::Write(sector..sector + 1, 4);
            drive(place, &[&second], start(&device, &second, &what)).unwrap();
            model.end(&what, true);
        }
        model.ever = model.now.clone();
    }

    // The requests. Those that change something lie beside each other, and where
    // the one that is given up may hold clusters for long, not in these.
    let mut dice = Rng::new(seed);
    let mut taken: Vec<Range<usize>> = Vec::new();
    if let Some((range, _)) = victim.change() {
        taken.push(match how {
            How::Drop | How::End => range,
            How::Keep | How::Forget => origin.clusters(&range),
        });
    }
    let near = match victim {
        What::Flush => None,
        What::Read(range) | What::Status(range) => Some(range.start),
        other => other.change().map(|(range, _)| range.start),
    };
    let mut requests = [Vec::new(), Vec::new()];
    for _ in 0..2 + dice.below(8) {
        let what = origin.request(&mut dice, &taken, near);
        taken.extend(what.change().map(|(range, _)| range));
        requests[dice.below(2) as usize].push(what);
    }
    let nth = dice.below(requests[0].len() as u64 + 1) as usize;
    requests[0].insert(nth, victim.clone());
    requests.iter().flatten().for_each(|what| model.begin(what));
    let ever = model.ever.clone();

    let [on_first, on_second] = requests;
    let mut own = Task::all(&device, &first, on_first);
    let mut beside = Task::all(&device, &second, on_second);
    own[nth].left = Some(left);
    let mut turns = Turns::new(place);
    while own[nth].running.is_some() && own[nth].left != Some(0) {
        match rng.below(2) {
            0 => turn(&first, &mut own, &mut |what, done| {
                ended(&mut model, &ever, what, done)
            }),
            _ => turn(&second, &mut beside, &mut |what, done| {
                ended(&mut model, &ever, what, done);
            }),
        }
        turns.next(&own, &beside);
    }
    let gave_up = own[nth].running.is_some();
    if gave_up {
        model.end(victim, false);
    }
    if gave_up && how == How::End {
        for task in own.iter().filter(|task| task.running.is_some()) {
            model.end(&task.what, false);
        }
        drop(own);
        drop(first);
        let mut turns = Turns::new(place);
        while beside.iter().any(|task| task.running.is_some()) {
            turn(&second, &mut beside, &mut |what, done| {
                ended(&mut model, &ever, what, done)
            });
            turns.next(&[], &beside);
        }
        drop(beside);
        after(
            place,
            origin,
            &mut rng,
            device,
            image,
            &[&second],
            model,
            victim,
            how,
        );
        return true;
    }
    if gave_up {
        match how {
            How::Drop => own[nth].running = None,
            How::Forget => std::mem::forget(own[nth].running.take()),
            How::Keep | How::End => {}
        }
    }
    // All the others; then also the one that was kept.
    for kept in [gave_up && how == How::Keep, false] {
        if !kept {
            own[nth].left = None;
        }
        let mut turns = Turns::new(place);
        loop {
            let count = own.iter().chain(&beside);
            let count = count.filter(|task| task.running.is_some()).count();
            if count == usize::from(kept) {
                break;
            }
            turn(&first, &mut own, &mut |what, done| {
                ended(&mut model, &ever, what, done)
            });
            turn(&second, &mut beside, &mut |what, done| {
                ended(&mut model, &ever, what, done)
            });
            turns.next(&own, &beside);
        }
    }
    drop((own, beside));
    let queues = [&first, &second];
    after(
        place, origin, &mut rng, device, image, &queues, model, victim, how,
    );
    gave_up
}

/// Counts turns, and says what hangs.
struct Turns {
    left: Option<usize>,
}

impl Turns {
    fn new(place: &dyn Place) -> Turns {
        Turns {
            left: place.is_prompt().then_some(TURNS),
        }
    }

    fn next(&mut self, own: &[Task<'_>], beside: &[Task<'_>]) {
        if let Some(left) = &mut self.left {
            *left -= 1;
            if *left < TURNS / 2 {
                // A thread that compresses may have to be let run.
                std::thread::sleep(Duration::from_millis(1));
            }
            let hang = own
                .iter()
                .chain(beside)
                .filter(|task| task.running.is_some());
            assert!(
                *left > 0,
                "hang: {:?}",
                hang.map(|t| &t.what).collect::<Vec<_>>()
            );
        }
    }
}

/// Runs one future on the last of these queues, and drives all.
fn drive<T>(place: &dyn Place, queues: &[&Queue], future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let woken = Arc::new(Woken(AtomicBool::new(true)));
    let waker = Waker::from(woken.clone());
    let mut turns = Turns::new(place);
    loop {
        let mut result = None;
        for (nth, queue) in queues.iter().enumerate() {
            let mut again = false;
            queue.block_on(poll_fn(|context| {
                if again {
                    return Poll::Ready(());
                }
                again = true;
                if nth + 1 == queues.len()
                    && woken.0.swap(false, Ordering::SeqCst)
                    && let Poll::Ready(value) =
                        future.as_mut().poll(&mut Context::from_waker(&waker))
                {
                    result = Some(value);
                }
                context.waker().wake_by_ref();
                Poll::Pending
            }));
        }
        if let Some(value) = result {
            return value;
        }
        turns.next(&[], &[]);
    }
}

/// The device goes on as if nothing had happened.
#[allow(clippy::too_many_arguments)]
fn after(
    place: &dyn Place,
    origin: &Origin,
    rng: &mut Rng,
    device: Device,
    image: Arc<dyn Storage>,
    queues: &[&Queue],
    mut model: Model,
    victim: &What,
    how: How,
) {
    let queue = *queues.last().unwrap();
    // What was forgotten holds its clusters for ever.
    let held = match (how, victim.change()) {
        (How::Forget, Some((range, _))) => vec![origin.clusters(&range)],
        _ => Vec::new(),
    };
    for round in 0..3 {
        for _ in 0..4 {
            let what = origin.request(rng, &held, None);
            model.begin(&what);
            match drive(place, queues, start(&device, queue, &what)) {
                Ok(bytes) => {
                    if let What::Read(range) = &what {
                        Model::check(&model.ever[range.clone()], &bytes, "after");
                    }
                    model.end(&what, true);
                }
                Err(e) if allowed(&what, &e) => {}
                Err(e) => panic!("after, {what:?}: {e}"),
            }
        }
        if let Err(e) = drive(place, queues, device.flush(queue)) {
            panic!("flush {round}: {e}");
        }
    }
    let all = What::Read(0..origin.sectors());
    let read = drive(place, queues, start(&device, queue, &all)).unwrap();
    Model::check(&model.now, &read, "after");
    if let Err(e) = drive(place, queues, device.close(queue)) {
        panic!("close: {e}");
    }
    // A future that was forgotten has the storage still.
    let reopened = origin.open(queue, image.clone()).unwrap();
    let read = drive(place, queues, start(&reopened, queue, &all)).unwrap();
    Model::check(&model.now, &read, "reopened");
    drop(reopened);
    checked(origin, queue, image, how == How::Forget);
}

/// The image has no error, and leaks nothing unless that is allowed.
fn checked(origin: &Origin, queue: &Queue, image: Arc<dyn Storage>, leaks: bool) {
    if origin.format == Format::RAW {
        return;
    }
    let options = OpenOptions::default()
        .inspect(true)
        .format(Some(Format::QCOW2));
    let device = Device::from_storage(queue, image, &options).unwrap();
    let Some(image) = device.top().as_qcow2() else {
        unreachable!("opened as qcow2");
    };
    let mut found = Vec::new();
    let report = queue
        .block_on(jobs::check(
            queue,
            image,
            &mut |message| found.push(format!("{message:?}")),
            |_| {},
        ))
        .unwrap();
    assert!(
        report.corruptions == 0 && report.check_errors == 0 && (leaks || report.leaks == 0),
        "{report:?} {found:?}"
    );
}

/// All cases of a request; how many.
fn all_of(place: &dyn Place, origin: &Origin, seed: u64, victim: &What, step: usize) -> u64 {
    let mut count = 0;
    // With direct I/O one that is not polled may hold a block, of which others have
    // another part.
    let has_own_blocks =
        origin.cluster * SECTOR >= place.block() && !matches!(victim, What::Compressed(..));
    for how in HOWS {
        let is_held = matches!(how, How::Keep | How::Forget);
        if is_held && place.block() > 1 && !has_own_blocks {
            continue;
        }
        let mut left = seed as usize % step;
        loop {
            let _sayer = Sayer(format!(
                "seed {seed}: {how:?} of {victim:?} after {left} polls; {}",
                origin.note
            ));
            count += 1;
            if !case(place, origin, seed, victim, left, how) {
                break;
            }
            left += step;
        }
    }
    count
}

/// Requests of one image, each given up everywhere; how many cases.
fn image(place: &dyn Place, seed: u64, requests: usize, step: usize) -> u64 {
    let origin = {
        let _sayer = Sayer(format!("origin of seed {seed}"));
        Origin::new(seed)
    };
    let mut rng = Rng::new(seed);
    let mut count = all_of(place, &origin, seed, &What::Flush, step);
    for _ in 0..requests {
        let victim = origin.request(&mut rng, &[], None);
        count += all_of(place, &origin, seed, &victim, step);
    }
    count
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect(name))
}

/// Images from a first seed on: so many, or for as long as was asked for.
fn images(place: &dyn Place, most: u64, requests: usize, step: usize) -> u64 {
    let first = number("ZEBU_DROPPED_SEED").unwrap_or(1);
    let time = number("ZEBU_DROPPED_SECONDS").map(Duration::from_secs);
    let begun = Instant::now();
    let mut count = 0;
    for seed in first.. {
        let goes_on = match time {
            Some(time) => begun.elapsed() < time,
            None => seed < first + most,
        };
        if !goes_on {
            break;
        }
        count += image(place, seed, requests, step);
    }
    count
}

#[test]
fn given_up_at_every_await_point() {
    let _watchdog = Watchdog::new("requests that are given up");
    cases(images(&Delayed, 24, 4, 1), "requests given up");
}

/// Whole changes of an image that are dropped: it takes no more writes, or goes on,
/// and when it is opened again the change has happened or not.
#[test]
fn changes_of_the_whole_image() {
    let _watchdog = Watchdog::new("changes of the whole image that are dropped");
    let first = number("ZEBU_DROPPED_SEED").unwrap_or(1);
    let mut count = 0;
    for seed in first..first + 20 {
        let origin = Origin::new(seed);
        if origin.format == Format::RAW || origin.large {
            continue;
        }
        for kind in 0..6 {
            for left in 0.. {
                let _sayer = Sayer(format!("seed {seed}: change {kind} after {left} polls"));
                count += 1;
                if whole(&origin, seed, kind, left) {
                    break;
                }
            }
        }
    }
    cases(count, "changes of the whole image dropped");
}

/// Whether the change ended by itself.
fn whole(origin: &Origin, seed: u64, kind: u32, left: usize) -> bool {
    let mut rng = Rng::new(seed ^ (left as u64) << 32);
    let image = Delayed.storage("image", &origin.bytes, &mut rng);
    let queue = Delayed.queue();
    let mut device = origin.open(&queue, image.clone()).unwrap();
    let size = device.size();
    let unit = (origin.cluster * SECTOR) as u64;
    let mut model = origin.model.clone();
    // Requests before, one of which is dropped: its task may be there still.
    for _ in 0..3 {
        let what = origin.request(&mut rng, &[], None);
        model.begin(&what);
        let result = drive(&Delayed, &[&queue], start(&device, &queue, &what));
        match result {
            Ok(_) => model.end(&what, true),
            Err(e) => assert!(allowed(&what, &e), "{what:?}: {e}"),
        }
    }
    let flush = Task::all(&device, &queue, vec![What::Flush]);
    let mut flush = flush;
    flush[0].poll();
    drop(flush);
    let ended = {
        let name = zebu::qcow2::SnapshotName::IdOrName("new".into());
        let mut change: Pin<Box<dyn Future<Output = zebu::Result<()>>>> = match kind {
            0 => Box::pin(device.resize(&queue, size + 5 * unit, Preallocation::Off)),
            1 => Box::pin(device.resize(&queue, size / 2 / 512 * 512, Preallocation::Off)),
            2 => Box::pin(device.resize(&queue, size + 5 * unit, Preallocation::Metadata)),
            3 => Box::pin(device.snapshot_create(&queue, "new")),
            4 => Box::pin(device.make_empty(&queue)),
            _ => Box::pin(async {
                device.snapshot_create(&queue, "new").await?;
                device.snapshot_apply(&queue, &name).await?;
                device.snapshot_delete(&queue, &name).await
            }),
        };
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        let mut polls = 0;
        let mut turns = Turns::new(&Delayed);
        loop {
            if woken.0.swap(false, Ordering::SeqCst) {
                if polls == left {
                    break false;
                }
                polls += 1;
                let mut context = Context::from_waker(&waker);
                if let Poll::Ready(result) = change.as_mut().poll(&mut context) {
                    // (A snapshot of version 2 may be impossible to resize.)
                    drop(result);
                    break true;
                }
            }
            turn(&queue, &mut [], &mut |_, _| ());
            turns.next(&[], &[]);
        }
    };
    progress();
    // It reads, and a write and the close have an answer.
    let most = device.size().min(size) as usize / SECTOR;
    let read = What::Read(0..most.min(origin.sectors() / 2));
    let bytes = drive(&Delayed, &[&queue], start(&device, &queue, &read)).unwrap();
    if kind != 4 {
        Model::check(&model.now, &bytes, "after a change");
    }
    let what = What::Write(0..1, 77);
    let written = drive(&Delayed, &[&queue], start(&device, &queue, &what));
    model.end(&what, written.is_ok());
    let _ = drive(&Delayed, &[&queue], device.close(&queue));
    // The next session.
    let device = origin.open(&queue, image.clone()).unwrap();
    let found = device.size();
    assert!(
        [size, size + 5 * unit, size / 2 / 512 * 512].contains(&found),
        "{found} bytes"
    );
    let read = What::Read(0..origin.sectors() / 2);
    let bytes = drive(&Delayed, &[&queue], start(&device, &queue, &read)).unwrap();
    if kind != 4 {
        Model::check(&model.now, &bytes, "reopened after a change");
    }
    drive(&Delayed, &[&queue], device.close(&queue)).unwrap();
    if kind < 3 || kind == 4 {
        checked(origin, &queue, image, true);
    }
    ended
}

/// Passes everything on, but its flushes take a turn and fail.
#[derive(Debug)]
struct FailingFlushes(Memory, AtomicBool);

// SAFETY: all is passed on to a storage that keeps the promise.
unsafe impl Storage for FailingFlushes {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::Flush && self.1.load(Ordering::SeqCst) {
            let mut waited = false;
            return Started::later(poll_fn(move |context| {
                if std::mem::replace(&mut waited, true) {
                    return Poll::Ready(Err(std::io::Error::from_raw_os_error(5)));
                }
                context.waker().wake_by_ref();
                Poll::Pending
            }));
        }
        // SAFETY: passed on.
        unsafe { self.0.start(queue, kind, offset, length, memory) }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&self.0)
    }
}

/// The kernel tells of a failed flush once. If the request that it was for is gone,
/// the next one is told.
#[test]
fn the_error_of_a_dropped_flush_is_not_lost() {
    let _watchdog = Watchdog::new("a dropped flush that fails");
    let mut images = 0;
    for seed in 1..60 {
        let origin = Origin::new(seed);
        for ends in [false, true] {
            let _sayer = Sayer(format!("seed {seed}, the queue ends: {ends}"));
            let queues = [Delayed.queue(), Delayed.queue()];
            let storage = FailingFlushes(Memory::new(origin.bytes.clone()), false.into());
            let storage = Arc::new(storage);
            let device = origin.open(&queues[0], storage.clone()).unwrap();
            let write = What::Write(0..1, 5);
            drive(&Delayed, &[&queues[0]], start(&device, &queues[0], &write)).unwrap();
            storage.1.store(true, Ordering::SeqCst);
            let mut flush = Task::new(&device, &queues[0], What::Flush);
            assert!(flush.poll().is_none(), "it takes a turn");
            drop(flush);
            storage.1.store(false, Ordering::SeqCst);
            let [first, second] = queues;
            let result = match ends {
                true => {
                    drop(first);
                    drive(&Delayed, &[&second], device.flush(&second))
                }
                false => drive(&Delayed, &[&first, &second], device.flush(&second)),
            };
            assert!(result.is_err(), "nobody was told");
            images += 1;
        }
    }
    cases(images, "dropped flushes that failed");
}

#[test]
fn given_up_on_real_files() {
    let mut count = 0;
    for engine in engines() {
        for cache in [
            CacheMode::None,
            CacheMode::WriteBack,
            CacheMode::WriteThrough,
        ] {
            let name = format!("{engine}, {}", cache.name());
            let _watchdog = Watchdog::new(&name);
            let _sayer = Sayer(name);
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let place = Files {
                folder,
                engine,
                cache,
            };
            count += images(&place, 1, 1, 3);
        }
    }
    cases(count, "requests given up on real files");
}

fn with_files() -> Files {
    Files {
        folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        engine: EngineKind::Threads,
        cache: CacheMode::WriteBack,
    }
}

#[test]
fn given_up_in_an_image_in_another_image() {
    let _watchdog = Watchdog::new("requests that are given up in an image in another one");
    let place = Nested(with_files(), Cell::new(0));
    cases(
        images(&place, 2, 1, 3),
        "requests given up in an image in another one",
    );
}

#[test]
fn given_up_on_an_nbd_server() {
    let _watchdog = Watchdog::new("requests that are given up on an NBD server");
    let place = Exports(with_files(), RefCell::default());
    cases(
        images(&place, 2, 1, 3),
        "requests given up on an NBD server",
    );
}
