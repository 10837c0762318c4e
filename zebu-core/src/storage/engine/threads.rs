//! The `threads` engine: workers execute all operations.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::Thread;

use super::eventfd::EventFd;
use super::op::Op;
use super::watch::Watches;
use super::workers::Workers;
use super::{Completion, Engine, Interest, Notify, Token};

/// How often the polling thread yields before it sleeps: with many requests in flight one ends
/// meanwhile, which saves the wake-up.
const POLLER_YIELDS: u32 = 4;

/// The engine.
pub struct Threads {
    workers: Workers,
    poller: Arc<Poller>,
    /// Taken since the last poll.
    batch: Vec<(Token, Op)>,
    watches: Watches,
    /// Whether `in_poll` is set for another event loop.
    armed: bool,
}

/// What wakes the thread that polls.
struct Poller {
    notified: AtomicBool,
    thread: Thread,
    /// Whether it sleeps in `poll(2)`, or is about to, because it waits for descriptors or in
    /// another event loop: `event` wakes it then.
    in_poll: AtomicBool,
    event: EventFd,
}

impl Notify for Poller {
    fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.wake();
    }
}

impl Poller {
    /// Wakes the thread, after the reason for it is visible.
    fn wake(&self) {
        // Pairs with `sleep`: either `in_poll` is seen here, or the reason there.
        fence(Ordering::SeqCst);
        if self.in_poll.load(Ordering::SeqCst) {
            self.event.notify();
        } else {
            self.thread.unpark();
        }
    }
}

impl Threads {
    /// An engine, polled by this thread, with no workers yet.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new()?;
        let watches = Watches::new(event.as_fd());
        let poller = Arc::new(Poller {
            notified: AtomicBool::new(false),
            thread: std::thread::current(),
            in_poll: AtomicBool::new(false),
            event,
        });
        let woken = poller.clone();
        Ok(Threads {
            workers: Workers::new(move || woken.wake()),
            poller,
            batch: Vec::new(),
            watches,
            armed: false,
        })
    }

    #[cfg(test)]
    pub(super) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Sleeps until a descriptor is ready or [`Poller::wake`] was called.
    fn sleep(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        let poller = &self.poller;
        poller.in_poll.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let idle = !self.workers.have_ended() && !poller.notified.load(Ordering::Acquire);
        let woken = self.watches.look(idle, done);
        poller.in_poll.store(false, Ordering::SeqCst);
        if woken? {
            poller.event.clear();
        }
        Ok(())
    }
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
            // Before ended operations are taken below: those that end later unpark this thread.
            self.poller.in_poll.store(false, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
        let before = done.len();
        self.watches.take_cancelled(done);
        let wait = wait && done.len() == before;
        if !self.batch.is_empty() {
            // SAFETY: `submit` was promised that the memory stays valid.
            unsafe { self.workers.submit(self.batch.drain(..)) };
        }
        let mut yields = 0;
        loop {
            self.workers.take_ended(done);
            let woken = wait && self.poller.notified.swap(false, Ordering::Acquire);
            if woken || !wait || done.len() > before {
                return self.watches.look_sometimes(done);
            }
            if yields < POLLER_YIELDS {
                yields += 1;
                std::thread::yield_now();
            } else if self.watches.is_empty() {
                // An unpark since the checks above is not lost.
                std::thread::park();
            } else {
                self.sleep(done)?;
            }
        }
    }

    fn notifier(&self) -> Arc<dyn Notify> {
        self.poller.clone()
    }

    fn arm(&mut self, done: &mut Vec<Completion>) -> io::Result<bool> {
        self.armed = true;
        self.poller.in_poll.store(true, Ordering::SeqCst);
        // Before the checks below: what ends later makes it readable again.
        self.poller.event.clear();
        fence(Ordering::SeqCst);
        self.poller.notified.store(false, Ordering::Release);
        self.watches.arm();
        self.watches.look(false, done)?;
        self.poll(false, done)?;
        Ok(false)
    }

    fn descriptor(&self) -> io::Result<RawFd> {
        self.watches.descriptor(&self.poller.event)
    }
}
