//! Many requests in flight together, on one queue and on several.
//!
//! Requests that are in flight together have different sectors, so the expected content is known,
//! but share clusters, tables and refcounts.

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use zebu::block::{Device, OpenOptions, Zeroing};
use zebu::jobs::CreateQcow2;
use zebu::storage::{Buffer, Queue};

use super::requests::{Use, begin_with};
use super::{Dice, History, noise, options, raw, writable};
use crate::common::Rng;
use crate::disk::{Disk, Time};
use crate::judge::{Change, Event, Layout, Model, content};

/// Threads that share an image.
const THREADS: usize = 3;

type Request<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Records the requests.
struct Log<'a> {
    disk: &'a Disk,
    events: &'a Mutex<Vec<Event>>,
    /// A request has returned the error of a failed flush.
    flush_error: &'a AtomicBool,
}

impl Log<'_> {
    /// Executes a request, and records it when it has ended.
    async fn note<T>(&self, what: Change, request: impl Future<Output = zebu::Result<T>>) {
        let began = self.disk.now();
        // A write may still succeed until the failed flush has returned its error. A later flush may
        // not.
        let nothing_succeeds = match what {
            Change::Flush => self.disk.flush_failed(),
            _ => self.flush_error.load(Ordering::SeqCst),
        };
        let mut ended = Time::MAX;
        match request.await {
            Ok(_) => {
                assert!(!nothing_succeeds, "after a failed flush");
                ended = self.disk.now();
            }
            Err(e) => {
                assert!(self.disk.failed(), "{e}");
                self.flush_error
                    .fetch_or(self.disk.flush_failed(), Ordering::SeqCst);
            }
        }
        let event = Event { began, ended, what };
        self.events.lock().unwrap().push(event);
    }
}

/// Waits for all of them.
async fn all(mut requests: Vec<Request<'_>>) {
    std::future::poll_fn(|cx| {
        requests.retain_mut(|request| request.as_mut().poll(cx).is_pending());
        match requests.is_empty() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

/// The events of a history, in the order in which they began.
fn sorted(events: Mutex<Vec<Event>>) -> Vec<Event> {
    let mut events = events.into_inner().unwrap();
    events.sort_by_key(|event| event.began);
    events
}

/// A write to a range, of new bytes.
fn write<'a>(
    log: &'a Log<'_>,
    device: &'a Device,
    queue: &'a Queue,
    rng: &mut Rng,
    at: usize,
    length: usize,
) -> Request<'a> {
    let mut bytes = vec![0; length];
    rng.fill(&mut bytes);
    let mut buffer = Buffer::new(length);
    buffer.copy_from_slice(&bytes);
    Box::pin(log.note(Change::Write(at, bytes), async move {
        let (_, result) = device.write_buffer(queue, at as u64, buffer, length).await;
        result
    }))
}

fn image(rng: &mut Dice) -> (CreateQcow2, Layout, Vec<u8>) {
    let mut options = options(rng, 60).version(3);
    options.size &= !((1 << options.cluster_bits) - 1);
    let mut active = vec![0; options.size as usize];
    let mut layout = Layout::default();
    if rng.one_in(3) {
        active = noise(rng, active.len());
        layout.backings.push(raw("base.raw", &active));
        options.backing = Some(zebu::jobs::NewBacking::new("base.raw").format(Some("raw".into())));
    }
    (options, layout, active)
}

/// How the image is opened. Most with bitmaps store them with each flush.
fn open_options(rng: &mut Dice, has_bitmaps: bool) -> OpenOptions {
    let options = writable(rng);
    match has_bitmaps {
        true => options.store_bitmaps(!rng.one_in(4)),
        false => options,
    }
}

/// Clears the bitmaps, so that requests set bits again. No request is in flight.
fn clear_bitmaps(queue: &Queue, device: &mut Device, model: &mut Model, log: &Log<'_>) {
    model.active = content(queue, device).unwrap();
    for nth in 0..model.bitmaps.len() {
        let began = log.disk.now();
        let bitmap = &mut model.bitmaps[nth];
        bitmap.clear(&model.active);
        let clear = device.bitmap_clear(queue, &bitmap.name);
        queue.block_on(clear).unwrap();
        let what = Change::Becomes(model.clone());
        let ended = log.disk.now();
        log.events
            .lock()
            .unwrap()
            .push(Event { began, ended, what });
    }
}

/// Batches of requests on one queue, flushes among them.
pub fn in_flight(queue: &Queue, rng: &mut Dice) -> History {
    batches(queue, rng, false)
}

pub fn in_flight_bitmaps(queue: &Queue, rng: &mut Dice) -> History {
    batches(queue, rng, true)
}

fn batches(queue: &Queue, rng: &mut Dice, has_bitmaps: bool) -> History {
    let (options, layout, active) = image(rng);
    let used = begin_with(queue, rng, &options, layout, active, has_bitmaps);
    batches_on(queue, rng, used)
}

/// The batches on an image.
pub fn batches_on(queue: &Queue, rng: &mut Dice, mut used: Use<'_>) -> History {
    let has_bitmaps = used.has_bitmaps;
    let mut model = used.history.before.clone();
    let mut device = used.history.open(queue, &open_options(rng, has_bitmaps));
    let disk = used.history.disk.clone();
    let events = Mutex::new(Vec::new());
    let log = Log {
        disk: &disk,
        events: &events,
        flush_error: &AtomicBool::new(false),
    };
    let cluster = used.cluster;
    let clusters = used.active.len() / cluster;
    for _ in 0..12 {
        let mut requests: Vec<Request<'_>> = Vec::new();
        // Each request has its own sectors, in clusters that others use, too.
        let first = rng.index(clusters) * cluster;
        let end = (first + 6 * cluster).min(used.active.len());
        let mut at = first;
        while at < end {
            let length = (512 * (1 + rng.below(8) as usize)).min(end - at);
            let is_whole = at.is_multiple_of(cluster) && at + cluster <= end;
            match rng.below(8) {
                0 | 1 if is_whole => {
                    let (at64, length64) = (at as u64, cluster as u64);
                    let unmap = rng.one_in(2);
                    let (device, log) = (&device, &log);
                    let zeroes = Change::Write(at, vec![0; cluster]);
                    requests.push(Box::pin(log.note(zeroes, async move {
                        match unmap {
                            true => device.discard(queue, at64, length64).await,
                            false => {
                                let how = Zeroing::Unmap;
                                device.write_zeroes(queue, at64, length64, how).await
                            }
                        }
                    })));
                    at += cluster;
                    continue;
                }
                2 => requests.push(Box::pin(log.note(Change::Flush, device.flush(queue)))),
                3 => {}
                _ => requests.push(write(&log, &device, queue, rng, at, length)),
            }
            at += length;
        }
        let swaps = requests.len();
        for nth in 0..swaps {
            requests.swap(nth, rng.index(swaps));
        }
        queue.block_on(all(requests));
        if has_bitmaps && rng.fault.is_none() && rng.one_in(4) {
            clear_bitmaps(queue, &mut device, &mut model, &log);
        }
    }
    used.history.events = sorted(events);
    used.close(device)
}

/// Several threads, each with its queue and its sectors.
pub fn queues(queue: &Queue, rng: &mut Dice) -> History {
    threads(queue, rng, false)
}

pub fn queues_bitmaps(queue: &Queue, rng: &mut Dice) -> History {
    threads(queue, rng, true)
}

fn threads(queue: &Queue, rng: &mut Dice, has_bitmaps: bool) -> History {
    let (options, layout, active) = image(rng);
    let used = begin_with(queue, rng, &options, layout, active, has_bitmaps);
    threads_on(queue, rng, used)
}

/// The threads on an image.
pub fn threads_on(queue: &Queue, rng: &mut Dice, mut used: Use<'_>) -> History {
    let has_bitmaps = used.has_bitmaps;
    let mut model = used.history.before.clone();
    let mut device = used.history.open(queue, &open_options(rng, has_bitmaps));
    let disk = used.history.disk.clone();
    let events = Mutex::new(Vec::new());
    let log = Log {
        disk: &disk,
        events: &events,
        flush_error: &AtomicBool::new(false),
    };
    let sectors = used.active.len() / 512;
    for _ in 0..3 {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let rng = Rng::new(rng.next());
                let (log, device) = (&log, &device);
                scope.spawn(move || one_thread(log, device, rng, sectors, thread));
            }
        });
        if has_bitmaps && rng.fault.is_none() {
            clear_bitmaps(queue, &mut device, &mut model, &log);
        }
    }
    used.history.events = sorted(events);
    used.close(device)
}

/// Batches of writes to the sectors of one thread.
fn one_thread(log: &Log<'_>, device: &Device, mut rng: Rng, sectors: usize, thread: usize) {
    let queue = Queue::new(Default::default()).unwrap();
    for _ in 0..4 {
        // Few sectors, so that the threads use the same clusters.
        let place = rng.below(sectors as u64 / 4) as usize;
        let mut requests = Vec::new();
        for sector in place..(place + 8).min(sectors) {
            if sector % THREADS == thread {
                let at = sector * 512;
                requests.push(write(log, device, &queue, &mut rng, at, 512));
            }
        }
        if rng.one_in(3) {
            let flush = log.note(Change::Flush, device.flush(&queue));
            requests.push(Box::pin(flush));
        }
        queue.block_on(all(requests));
    }
}
