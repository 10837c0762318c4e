//! The `threads` engine: a pool of threads that make blocking system calls.
//!
//! A thread that runs out of work yields its processor a few times before it
//! sleeps: a worker that has ended an operation, so that the poller makes the
//! next one meanwhile, and the poller, so that workers end theirs. That saves
//! most of the `futex(2)` calls.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::Thread;
use std::time::Duration;

use super::engine::{Completion, Engine, Interest, Notify, Token};
use super::op::Op;
use super::uring::EventFd;
use super::watch::Watches;
use crate::lock;

/// Workers at most, as in QEMU's pool.
const MAX_WORKERS: usize = 64;
/// A worker without work for this long ends.
const IDLE: Duration = match cfg!(test) {
    true => Duration::from_millis(20),
    false => Duration::from_secs(10),
};

/// How often a worker without work, and the poller with nothing ended, yield
/// before they sleep: about ten microseconds, in which at depth 32 the next
/// request comes, or ends.
const WORKER_YIELDS: u32 = 32;
const POLLER_YIELDS: u32 = 4;

/// The engine. Workers are started when there is work for them.
pub struct Threads {
    shared: Arc<Shared>,
    /// Taken since the last poll.
    batch: Vec<(Token, Op)>,
    watches: Watches,
    /// Whether `in_poll` is set for another event loop.
    armed: bool,
}

struct Shared {
    work: Mutex<Work>,
    /// Signalled for each operation put into `waiting`.
    arrived: Condvar,
    /// What workers have done and the poller has not fetched.
    done: Mutex<Vec<Completion>>,
    notified: AtomicBool,
    /// The thread that polls.
    poller: Thread,
    /// Whether it sleeps in `poll(2)`, or is about to, since it waits for
    /// descriptors too, or in another event loop. Then `event` wakes it.
    in_poll: AtomicBool,
    event: EventFd,
}

#[derive(Default)]
struct Work {
    waiting: VecDeque<(Token, Op)>,
    workers: usize,
    /// Workers that sleep, or were woken and have not run yet.
    idle: usize,
    /// Workers that yield: they look into `waiting` again before they sleep.
    yielding: usize,
    closing: bool,
}

impl Notify for Shared {
    fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.wake_poller();
    }
}

impl Shared {
    /// Called after there is something for the poller to see.
    fn wake_poller(&self) {
        // Pairs with `sleep`: either we see that it polls, or it sees what is
        // there.
        fence(Ordering::SeqCst);
        if self.in_poll.load(Ordering::SeqCst) {
            self.event.notify();
        } else {
            self.poller.unpark();
        }
    }
}

impl Threads {
    /// An engine, polled by this thread, with no workers yet.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new()?;
        Ok(Threads {
            watches: Watches::new(event.as_fd()),
            shared: Arc::new(Shared {
                work: Mutex::default(),
                arrived: Condvar::new(),
                done: Mutex::default(),
                notified: AtomicBool::new(false),
                poller: std::thread::current(),
                in_poll: AtomicBool::new(false),
                event,
            }),
            batch: Vec::new(),
            armed: false,
        })
    }

    /// Gives the batch to the workers.
    fn give_to_workers(&mut self) {
        let count = self.batch.len();
        let mut work = lock(&self.shared.work);
        work.waiting.extend(self.batch.drain(..));
        // A thread that yields needs no wake-up.
        let needed = work.waiting.len().saturating_sub(work.yielding);
        let new = needed.saturating_sub(work.idle);
        let new = new.min(MAX_WORKERS - work.workers);
        for _ in 0..new {
            let shared = self.shared.clone();
            let spawned = std::thread::Builder::new()
                .name("zebu-io".into())
                .stack_size(64 << 10)
                .spawn(move || run(&shared));
            // Without a new worker the others do the work.
            if spawned.is_ok() {
                work.workers += 1;
            }
        }
        let alone = work.workers == 0;
        let wake = count.min(needed).min(work.idle);
        // Unlocked first, so that the woken thread does not wait for this one.
        drop(work);
        for _ in 0..wake {
            self.shared.arrived.notify_one();
        }
        while alone && let Some((token, op)) = { lock(&self.shared.work).waiting.pop_front() } {
            // SAFETY: as in `run`.
            let result = unsafe { op.complete() };
            lock(&self.shared.done).push((token, result));
        }
    }
}

impl Threads {
    /// Sleeps until a descriptor is ready or `wake_poller` was called.
    fn sleep(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        let shared = &self.shared;
        shared.in_poll.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let idle = lock(&shared.done).is_empty() && !shared.notified.load(Ordering::Acquire);
        let woken = self.watches.look(idle, done);
        shared.in_poll.store(false, Ordering::SeqCst);
        if woken? {
            shared.event.clear();
        }
        Ok(())
    }
}

/// A worker.
fn run(shared: &Shared) {
    let mut work = lock(&shared.work);
    let mut yields = 0;
    loop {
        if let Some((token, op)) = work.waiting.pop_front() {
            drop(work);
            // SAFETY: `Engine::submit` was promised that the memory and the
            // descriptor are valid until the completion is reported.
            let result = unsafe { op.complete() };
            let first = {
                let mut done = lock(&shared.done);
                done.push((token, result));
                done.len() == 1
            };
            // The first since the poller fetched has woken it.
            if first {
                shared.wake_poller();
            }
            yields = 0;
            work = lock(&shared.work);
        } else if work.closing {
            break;
        } else if yields < WORKER_YIELDS {
            yields += 1;
            work.yielding += 1;
            drop(work);
            std::thread::yield_now();
            work = lock(&shared.work);
            work.yielding -= 1;
        } else {
            work.idle += 1;
            let (guard, timeout) = shared
                .arrived
                .wait_timeout(work, IDLE)
                .unwrap_or_else(|e| e.into_inner());
            work = guard;
            work.idle -= 1;
            if timeout.timed_out() && work.waiting.is_empty() {
                break;
            }
        }
    }
    work.workers -= 1;
}

impl Engine for Threads {
    unsafe fn submit(&mut self, token: Token, op: Op) {
        self.batch.push((token, op));
    }

    fn watch(&mut self, token: Token, fd: RawFd, interest: Interest) {
        self.watches.add(token, fd, interest);
    }

    fn unwatch(&mut self, token: Token) {
        self.watches.cancel(token);
    }

    fn poll(&mut self, wait: bool, done: &mut Vec<Completion>) -> io::Result<()> {
        if wait && self.armed {
            self.armed = false;
            // Before `done` is looked at below: what ends later unparks this thread.
            self.shared.in_poll.store(false, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
        let before = done.len();
        self.watches.take_cancelled(done);
        let wait = wait && done.len() == before;
        if !self.batch.is_empty() {
            self.give_to_workers();
        }
        let mut yields = 0;
        loop {
            done.append(&mut lock(&self.shared.done));
            let woken = wait && self.shared.notified.swap(false, Ordering::Acquire);
            if woken || !wait || done.len() > before {
                return self.watches.look_sometimes(done);
            }
            if yields < POLLER_YIELDS {
                yields += 1;
                std::thread::yield_now();
            } else if self.watches.is_empty() {
                // An unpark between the looks above and here is not lost.
                std::thread::park();
            } else {
                self.sleep(done)?;
            }
        }
    }

    fn notifier(&self) -> Arc<dyn Notify> {
        self.shared.clone()
    }

    fn arm(&mut self, done: &mut Vec<Completion>) -> io::Result<bool> {
        self.armed = true;
        self.shared.in_poll.store(true, Ordering::SeqCst);
        // Before looking: what ends afterwards makes it readable again.
        self.shared.event.clear();
        fence(Ordering::SeqCst);
        self.shared.notified.store(false, Ordering::Release);
        self.watches.arm();
        self.watches.look(false, done)?;
        self.poll(false, done)?;
        Ok(false)
    }

    fn descriptor(&self) -> io::Result<RawFd> {
        self.watches.descriptor(&self.shared.event)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        lock(&self.shared.work).closing = true;
        self.shared.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    //! Guards against threads that are started for nothing or never end, and
    //! against operations that wait for a worker that has just ended.
    use super::super::engine::tests::reads_in_flight;
    use super::*;
    use std::time::Instant;

    fn workers(threads: &Threads) -> usize {
        lock(&threads.shared.work).workers
    }

    #[test]
    fn workers_are_as_many_as_there_is_work_for() {
        let mut threads = Threads::new().unwrap();
        for count in [1, 2, 1000, 1] {
            reads_in_flight(&mut threads, count);
            assert!((1..=MAX_WORKERS).contains(&workers(&threads)));
        }
    }

    #[test]
    fn idle_workers_end_and_come_back() {
        let mut threads = Threads::new().unwrap();
        // About when they end, so that some batches meet them on their way.
        for round in 0..40u32 {
            reads_in_flight(&mut threads, 2 + round % 3);
            std::thread::sleep(IDLE + Duration::from_micros(u64::from(round) * 50) - IDLE / 20);
        }
        let start = Instant::now();
        while workers(&threads) > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "they never end");
            std::thread::sleep(IDLE);
        }
        reads_in_flight(&mut threads, 100);
        // And when the engine goes, whatever they do.
        let shared = Arc::downgrade(&threads.shared);
        drop(threads);
        while shared.upgrade().is_some() {
            assert!(start.elapsed() < Duration::from_secs(60), "they never end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
