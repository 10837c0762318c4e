//! The requests are executed and timed.
//!
//! Each request in flight is a future with its own buffer, both reused for the next one. Nothing is
//! allocated, locked or printed for a request.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use zebu::block::Device;
use zebu::storage::{Buffer, EngineKind, Handle, Queue, QueueOptions};

use super::flush_schedule::{FlushSchedule, Next};
use super::offsets::Offsets;
use super::plan::Plan;
use crate::program::Failure;

/// What is in a buffer before something is read into it.
const UNREAD: u8 = 0xa5;

/// A queue on this thread.
pub fn queue(engine: EngineKind) -> std::io::Result<Queue> {
    Queue::new(QueueOptions::default().engine(engine))
}

/// What the requests of one thread share.
struct Share {
    device: Arc<Device>,
    queue: Queue,
    size: usize,
    /// Requests not yet made.
    left: Cell<u64>,
    offsets: RefCell<Offsets>,
    schedule: FlushSchedule,
    /// Flushes that were made beside the writes.
    flushes: RefCell<Vec<Handle<()>>>,
    error: RefCell<Option<zebu::Error>>,
}

impl Share {
    /// The offset of the next request; None if there are no more.
    fn next(&self) -> Option<u64> {
        let left = self.left.get().checked_sub(1)?;
        self.left.set(left);
        Some(self.offsets.borrow_mut().next())
    }

    /// Executes reads until there are none left.
    async fn read(self: Rc<Self>, mut buffer: Buffer) {
        while let Some(offset) = self.next() {
            let reading = self
                .device
                .read_buffer(&self.queue, offset, buffer, self.size);
            let result;
            (buffer, result) = reading.await;
            self.note(result);
        }
    }

    /// Executes writes and flushes until there are none left.
    async fn write(self: Rc<Self>, mut buffer: Buffer) {
        loop {
            self.schedule.wait().await;
            let Some(offset) = self.next() else {
                return;
            };
            let next = self.schedule.begin(self.left.get());
            if next == Next::FlushConcurrently {
                let flush = self.queue.spawn(self.clone().flush());
                self.flushes.borrow_mut().push(flush);
            }
            let writing = self
                .device
                .write_buffer(&self.queue, offset, buffer, self.size);
            let result;
            (buffer, result) = writing.await;
            self.note(result);
            if self.schedule.end() == Next::Flush {
                self.clone().flush().await;
                self.schedule.resume();
            }
        }
    }

    async fn flush(self: Rc<Self>) {
        let result = self.device.flush(&self.queue).await;
        self.note(result);
    }

    /// After a failure there are no more requests.
    fn note(&self, result: zebu::Result<()>) {
        if let Err(error) = result {
            self.left.set(0);
            self.error.borrow_mut().get_or_insert(error);
        }
    }
}

/// One thread's requests, ready to start.
struct Run {
    share: Rc<Share>,
    writes: bool,
    buffers: Vec<Buffer>,
}

impl Run {
    fn new(device: Arc<Device>, queue: Queue, plan: &Plan, index: u64) -> zebu::Result<Run> {
        let size = plan.size as usize;
        let offsets = Offsets::new(plan, device.size(), index);
        let depth = plan.depth.min(plan.count);
        let share = Share {
            device,
            queue,
            size,
            left: Cell::new(plan.count),
            offsets: RefCell::new(offsets),
            schedule: FlushSchedule::new(plan.flush_interval, plan.drain, depth),
            flushes: RefCell::default(),
            error: RefCell::new(None),
        };
        // Touched here, so that no page fault is measured.
        let buffers = (0..depth).map(|_| touched(size, plan.pattern.unwrap_or(UNREAD)));
        Ok(Run {
            share: Rc::new(share),
            writes: plan.pattern.is_some(),
            buffers: buffers.collect::<zebu::Result<_>>()?,
        })
    }

    /// Makes all requests.
    fn finish(self) -> zebu::Result<()> {
        let queue = &self.share.queue;
        let workers: Vec<_> = self
            .buffers
            .into_iter()
            .map(|buffer| match self.writes {
                true => queue.spawn(self.share.clone().write(buffer)),
                false => queue.spawn(self.share.clone().read(buffer)),
            })
            .collect();
        queue.block_on(async {
            for worker in workers {
                worker.await;
            }
            for flush in self.share.flushes.take() {
                flush.await;
            }
        });
        self.share.error.take().map_or(Ok(()), Err)
    }
}

fn touched(size: usize, byte: u8) -> zebu::Result<Buffer> {
    let mut buffer = Buffer::try_new(size)?;
    buffer.fill(byte);
    Ok(buffer)
}

/// Executes all requests on this thread. Returns the time.
pub fn measure(device: Arc<Device>, queue: Queue, plan: &Plan) -> Result<Duration, Failure> {
    let run = Run::new(device, queue, plan, 0).map_err(|e| request_failed(&e))?;
    let start = Instant::now();
    run.finish().map_err(|e| request_failed(&e))?;
    Ok(start.elapsed())
}

/// Shares the requests out to threads and returns how long all of them took.
pub fn measure_threads(
    device: &Arc<Device>,
    engine: EngineKind,
    plan: &Plan,
) -> Result<Duration, Failure> {
    let ready = Barrier::new(plan.threads as usize + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.threads)
            .map(|index| {
                let (device, ready) = (device.clone(), &ready);
                scope.spawn(move || {
                    let run = queue(engine)
                        .map_err(zebu::Error::from)
                        .and_then(|queue| Run::new(device, queue, &plan.share(index), index));
                    ready.wait();
                    run?.finish()
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        for thread in threads {
            let result = thread.join().map_err(|_| Failure::new("A thread failed"))?;
            result.map_err(|e| request_failed(&e))?;
        }
        Ok(start.elapsed())
    })
}

fn request_failed(error: &zebu::Error) -> Failure {
    let text = match error {
        // QEMU's word for it.
        zebu::Error::OutOfRange { .. } => "Input/output error".to_string(),
        other => other.to_string(),
    };
    Failure::new(format!("Failed request: {text}"))
}
