//! Many threads, each with its queue and several requests in flight, whose
//! ranges overlap. What reads find is judged afterwards, by `history`.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use zebu::Error;
use zebu::block::{Device, Format, Zeroing};
use zebu::storage::{Buffer, EngineKind, Queue, QueueOptions};

use crate::common::peer;
use crate::common::{Rng, progress};
use crate::disk::assert_same;
use crate::history::{Event, SECTOR, What, Word, judge, stamped, words};
use crate::setup::{Opening, Setup, queue_options};
use crate::trace;

/// What the threads of one run share.
struct Shared {
    clock: AtomicU64,
    /// The next write's.
    id: AtomicU32,
    sectors: usize,
    /// Sectors of a cluster.
    cluster: usize,
    /// Where most requests go.
    hot: usize,
    compresses: bool,
    failures: Mutex<Vec<String>>,
}

impl Shared {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }
}

pub fn run(seed: u64, folder: &Path, engines: &[EngineKind]) -> usize {
    let mut rng = Rng::new(seed);
    let setup = setup(&mut rng);
    trace(|| format!("{setup:?}"));
    let sectors = setup.size() as usize / SECTOR;
    let shared = Arc::new(Shared {
        clock: AtomicU64::new(1),
        id: AtomicU32::new(1),
        sectors,
        cluster: setup.cluster() as usize / SECTOR,
        hot: rng.below(sectors as u64) as usize,
        compresses: setup.format == Format::QCOW2 && !setup.has_data_file(),
        failures: Mutex::default(),
    });
    let mut content = make(&setup, folder, &shared);
    let mut steps = 0;
    for _ in 0..1 + rng.below(3) {
        let opening = Opening::random(&mut rng, setup.cluster(), engines);
        trace(|| format!("{opening:?}"));
        let queue = Queue::new(opening.queue.clone()).unwrap();
        let device = Arc::new(opening.open(&queue, &setup, folder, true));
        for _ in 0..1 + rng.below(4) {
            let threads: Vec<_> = (0..2 + rng.below(3) as usize)
                .map(|number| Thread {
                    number,
                    rng: Rng::new(rng.next()),
                    steps: 5 + rng.below(60) as usize,
                    depth: 1 + rng.below(8) as usize,
                    queue: queue_options(&mut rng, engines),
                })
                .collect();
            trace(|| format!("{} threads", threads.len()));
            steps += threads.iter().map(|t| t.steps).sum::<usize>();
            content = round(&shared, &device, &queue, threads, &content);
        }
        let device = Arc::try_unwrap(device).expect("all threads have ended");
        let result = queue.block_on(device.close(&queue));
        result.unwrap_or_else(|e| panic!("close: {e}"));
        let image = setup.image(folder);
        if setup.format == Format::QCOW2 {
            peer::assert_clean(&image, "after a close");
        }
        let bytes: Vec<u8> = content
            .iter()
            .flat_map(|word| [word.to_le_bytes(); SECTOR / 8])
            .flatten()
            .collect();
        peer::assert_content(&image, setup.format.name(), &bytes, "after a close");
        if setup.data_file_is_raw() {
            let data = std::fs::read(folder.join("data.raw")).unwrap();
            let data = &data[..bytes.len().min(data.len())];
            assert_same(data, &bytes, 0, "the data file as a raw image");
        }
    }
    steps
}

/// Small, so that the threads meet.
fn setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::random(rng);
    let clusters = 2 + rng.below(30);
    let size = (clusters << setup.options.cluster_bits).min(4 << 20);
    setup.options.size = size.min(setup.options.size);
    setup.used_before = false;
    setup
}

/// The image as it is before the first round, and the word of each sector.
fn make(setup: &Setup, folder: &Path, shared: &Shared) -> Vec<Word> {
    let mut content = vec![0; shared.sectors];
    if let Some((length, _)) = setup.backing {
        let id = shared.id.fetch_add(1, Ordering::SeqCst);
        let bytes = stamped(id, 0..length as usize / SECTOR);
        setup.make_backing(folder, &bytes);
        for (word, found) in content.iter_mut().zip(words(&bytes)) {
            *word = found[0];
        }
    }
    setup.make(folder);
    content
}

struct Thread {
    number: usize,
    rng: Rng,
    steps: usize,
    depth: usize,
    queue: QueueOptions,
}

/// Has the threads use the device, and judges what they found. What the disk
/// contains afterwards.
fn round(
    shared: &Arc<Shared>,
    device: &Arc<Device>,
    queue: &Queue,
    threads: Vec<Thread>,
    before: &[Word],
) -> Vec<Word> {
    let mut events = std::thread::scope(|scope| {
        let threads: Vec<_> = threads
            .into_iter()
            .map(|thread| scope.spawn(|| thread.run(shared.clone(), device.clone())))
            .collect();
        let events = threads.into_iter().flat_map(|thread| match thread.join() {
            Ok(events) => events,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        events.collect::<Vec<Event>>()
    });
    let failures = shared.failures.lock().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    // Nobody writes any more: this read must find the last of everything, and
    // whole sectors of it.
    let mut bytes = vec![0; shared.sectors * SECTOR];
    let began = shared.now();
    let result = device.read_blocking(queue, 0, &mut bytes);
    result.unwrap_or_else(|e| panic!("read: {e}"));
    let found = words(&bytes);
    let after: Vec<Word> = found.iter().map(|words| words[0]).collect();
    let torn: Vec<_> = found.iter().filter(|words| words.len() > 1).collect();
    events.push(Event {
        began,
        ended: Some(shared.now()),
        sectors: 0..shared.sectors,
        what: What::Read(found.clone()),
        thread: usize::MAX,
    });
    judge(before, &events).unwrap_or_else(|wrong| panic!("{wrong}"));
    assert!(torn.is_empty(), "sectors of several writes: {torn:x?}");
    after
}

impl Thread {
    fn run(mut self, shared: Arc<Shared>, device: Arc<Device>) -> Vec<Event> {
        let queue = Queue::new(self.queue.clone()).unwrap();
        let events = Rc::new(RefCell::new(Vec::new()));
        let mut flight = VecDeque::new();
        for _ in 0..self.steps {
            if flight.len() >= self.depth
                && let Some(handle) = flight.pop_front()
            {
                queue.block_on(handle);
            }
            let (request, sectors) = shared.draw(&mut self.rng);
            trace(|| format!("thread {}: {request:?} {sectors:?}", self.number));
            let future = perform(
                shared.clone(),
                device.clone(),
                queue.clone(),
                request,
                sectors,
                self.number,
                events.clone(),
            );
            flight.push_back(queue.spawn(future));
        }
        for handle in flight {
            queue.block_on(handle);
        }
        events.take()
    }
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Read,
    Write,
    Compressed,
    Zero(Zeroing),
    Discard,
    Flush,
}

impl Shared {
    fn draw(&self, rng: &mut Rng) -> (Request, Range<usize>) {
        let request = match rng.below(32) {
            0..9 => Request::Read,
            9..13 if self.compresses => Request::Compressed,
            13..16 => Request::Zero([Zeroing::Keep, Zeroing::Unmap][rng.below(2) as usize]),
            16..19 => Request::Discard,
            19 => Request::Flush,
            _ => Request::Write,
        };
        let near = 2 * self.cluster as u64;
        let mut start = match rng.one_in(4) {
            true => rng.below(self.sectors as u64) as usize,
            false => (self.hot + rng.below(near) as usize) % self.sectors,
        };
        let most = match rng.below(4) {
            0 | 1 => 8,
            2 => self.cluster,
            _ => 2 * self.cluster,
        };
        let mut length = 1 + rng.below(most as u64) as usize;
        let whole = matches!(request, Request::Compressed) || rng.one_in(3);
        if whole {
            start = start / self.cluster * self.cluster;
            length = length.next_multiple_of(self.cluster);
        }
        (request, start..(start + length).min(self.sectors))
    }
}

/// Carries a request out and puts down when, and what it found.
async fn perform(
    shared: Arc<Shared>,
    device: Arc<Device>,
    queue: Queue,
    request: Request,
    sectors: Range<usize>,
    thread: usize,
    events: Rc<RefCell<Vec<Event>>>,
) {
    let offset = (sectors.start * SECTOR) as u64;
    let length = sectors.len() * SECTOR;
    let id = match request {
        Request::Write | Request::Compressed => shared.id.fetch_add(1, Ordering::SeqCst),
        _ => 0,
    };
    let mut buffer = Buffer::new(length);
    if id != 0 {
        buffer.copy_from_slice(&stamped(id, sectors.clone()));
    }
    let began = shared.now();
    let result = match request {
        Request::Read => {
            let (read, result) = device.read_buffer(&queue, offset, buffer, length).await;
            buffer = read;
            result
        }
        Request::Write => {
            let written = device.write_buffer(&queue, offset, buffer, length).await;
            buffer = written.0;
            written.1
        }
        Request::Compressed => {
            // SAFETY: the buffer lives until the write has ended.
            let iov = unsafe { buffer.iov() };
            device.write_compressed(&queue, offset, &iov).await
        }
        Request::Zero(zeroing) => {
            let length = length as u64;
            device.write_zeroes(&queue, offset, length, zeroing).await
        }
        Request::Discard => device.discard(&queue, offset, length as u64).await,
        Request::Flush => device.flush(&queue).await,
    };
    progress();
    let ended = shared.now();
    let what = match request {
        Request::Read => What::Read(words(&buffer)),
        Request::Flush => What::Read(Vec::new()),
        _ => What::Wrote(id),
    };
    let certain = match (request, result) {
        // The cluster may be allocated already.
        (Request::Compressed, Err(Error::Io(_))) => false,
        // Not a panic: the requests that this one waits with must end, or those
        // of other threads never do.
        (_, Err(e)) => {
            let line = format!("thread {thread}: {request:?} {sectors:?}: {e}");
            shared.failures.lock().unwrap().push(line);
            false
        }
        (Request::Discard, Ok(())) => false,
        (_, Ok(())) => true,
    };
    events.borrow_mut().push(Event {
        began,
        ended: certain.then_some(ended),
        sectors,
        what,
        thread,
    });
}
