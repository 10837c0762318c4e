//! The loops that drive a queue: futures are polled, operations are submitted once a turn, and the
//! tasks that wait for those that have ended are woken.
#![allow(unsafe_code)]

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Wake, Waker};

use super::super::engine::{Completion, Engine, EngineKind, Token, is_simulated};
use super::super::engine::{Op, OpKind};
use super::batch::Batch;
use super::execution::{Execution, Round};
use super::io::Slot;
use super::tasks::{ROOT, TaskWaker};
use super::{Inner, Queue};

impl Queue {
    /// Runs `future`, and all spawned ones beside it, until it is ready.
    ///
    /// # Panics
    /// If called from within a future that this queue drives.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        // The inner loop would take the wake-ups of the outer one.
        assert!(
            !self.inner.running.replace(true),
            "block_on within a future of the same queue"
        );
        let running = Running(&self.inner);
        let waker = Arc::new(TaskWaker::new(&self.inner.shared, ROOT));
        waker.wake_by_ref();
        let mut future = pin!(future);
        let std_waker = Waker::from(waker.clone());
        let output = loop {
            if self.inner.run_ready() {
                waker.begin();
                let mut context = Context::from_waker(&std_waker);
                if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                    break output;
                }
            }
            self.inner.drive(false);
        };
        drop(running);
        self.inner.arm_again();
        output
    }

    /// Polls the futures that were woken, starts what they submitted and takes what has ended,
    /// without blocking. True: there is more to do already, call it again; false: from now on
    /// [`Queue::as_fd`] becomes readable when something ends, when a future is woken (by
    /// [`Queue::spawn`] too), and when a request begins outside of this call.
    ///
    /// An event loop of the caller's own drives the queue so:
    ///
    /// ```no_run
    /// # use std::os::fd::AsFd;
    /// # fn wait_for_readable(fd: impl AsFd) {}
    /// # let queue = zebu::storage::Queue::new(Default::default())?;
    /// loop {
    ///     while queue.turn() {}
    ///     wait_for_readable(&queue); // epoll, poll, tokio's AsyncFd, ...
    /// }
    /// # std::io::Result::Ok(())
    /// ```
    ///
    /// # Panics
    /// If called from within a future that this queue drives.
    pub fn turn(&self) -> bool {
        assert!(
            !self.inner.running.replace(true),
            "turn within a future of the same queue"
        );
        let _running = Running(&self.inner);
        self.inner.shared.sleeps.store(false, Ordering::SeqCst);
        self.inner.run_ready();
        self.inner.armed.set(true);
        self.inner.arm()
    }
}

/// The descriptor for another event loop, which waits until it is readable; see [`Queue::turn`].
impl AsFd for Queue {
    /// # Panics
    /// If the engine is one of a simulation, or if the first call finds no descriptor free.
    fn as_fd(&self) -> BorrowedFd<'_> {
        let fd = self.inner.engine.borrow().descriptor();
        let fd = fd.expect("a descriptor for another event loop");
        // SAFETY: the engine keeps it open, and lives as long as the queue.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Ends [`Queue::block_on`] and [`Queue::turn`], also when a future panics.
struct Running<'a>(&'a Inner);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.set(false);
        if std::thread::panicking() {
            // The caller's event loop may go on, and must call `turn` again.
            self.0.arm_again();
        }
    }
}

/// The least bytes of a large read ([`super::QueueOptions::force_async`]).
const LARGE_READ: u64 = 512 << 10;

/// How many reads that were executed at once futures go on with in one turn without yielding.
const AT_ONCE: u32 = 16;

impl Inner {
    /// The result of a read of what is in the page cache, which this thread executes at once: it
    /// takes less time than to give it to the engine, which would copy on this thread too.
    ///
    /// # Safety
    /// The promise of [`Engine::submit`] holds.
    pub(super) unsafe fn read_at_once(&self, op: &Op) -> Option<i32> {
        let short = op.kind == OpKind::Read && op.length < LARGE_READ;
        if !short || !op.buffered || self.options.inline_buffered {
            return None;
        }
        // SAFETY: passed on.
        unsafe { op.complete_cached() }
    }

    /// Whether a future may go on with a result that it had at once. If not, it yields: futures that
    /// never wait would keep the others from running.
    pub(super) fn goes_on(&self) -> bool {
        let left = self.at_once.get();
        self.at_once.set(left.saturating_sub(1));
        left > 0
    }

    /// Starts an operation: at the end of this turn at the latest.
    pub(super) fn start(&self, token: Token, mut op: Op) {
        self.in_flight.set(self.in_flight.get() + 1);
        if self.options.inline_buffered && op.buffered {
            self.inline.borrow_mut().push_back((token, op));
            return;
        }
        op.force_async = self.forces_async(&op);
        let mut batch = self.batch.get();
        if !batch.takes(&op, self.options.aio_max_batch) {
            self.hand_over();
            self.engine.borrow_mut().hand_over();
            batch = Batch::default();
        }
        batch.add(&op);
        self.batch.set(batch);
        self.started.borrow_mut().push((token, op));
    }

    fn forces_async(&self, op: &Op) -> bool {
        let every = self.options.force_async;
        if every == 0 || !op.buffered || op.kind != OpKind::Read || op.length < LARGE_READ {
            return false;
        }
        let count = (self.large_reads.get() + 1) % every;
        self.large_reads.set(count);
        count == 0
    }

    /// Gives the engine what was started.
    fn hand_over(&self) {
        let mut engine = self.engine.borrow_mut();
        for (token, op) in self.started.borrow_mut().drain(..) {
            // SAFETY: `Queue::submit` was promised that the memory stays valid.
            unsafe { engine.submit(token, op) };
        }
        self.batch.set(Batch::default());
    }

    /// Ends a turn of the loop: this thread executes at most one operation, so that its bytes are
    /// used while they are in the processor's cache, and gives the others to the engine.
    pub(super) fn end_round(&self, sleeps: bool, done: &mut Vec<Completion>) {
        self.at_once.set(AT_ONCE);
        let alone = self.in_flight.get() == 1;
        let first = self.inline.borrow_mut().pop_front();
        let round = Round {
            alone,
            sleeps: sleeps && self.watches.get() == 0,
            inline_buffered: first.is_some(),
        };
        let first = match alone {
            true => first.or_else(|| self.started.borrow_mut().pop()),
            false => first,
        };
        if let Some((token, op)) = first {
            // SAFETY: `Queue::submit` was promised that the memory stays valid.
            match unsafe { Execution::of(&op, round).perform(&op) } {
                Some(result) => done.push((token, result)),
                None => self.started.borrow_mut().push((token, op)),
            }
        }
        self.hand_over();
    }

    /// Ends a turn of the loop and enters the engine once; waits there for an end if it must, or
    /// if no future is ready.
    pub(super) fn drive(&self, must_wait: bool) {
        let sleeps = || must_wait || self.shared.ready().is_empty();
        self.collect(sleeps(), |engine, done| {
            // The engine may have no event.
            if done.len() == self.in_flight.get() && !done.is_empty() && self.watches.get() == 0 {
                return Ok(());
            }
            // SeqCst pairs with `wake_by_ref`.
            self.shared.sleeps.store(true, Ordering::SeqCst);
            std::sync::atomic::fence(Ordering::SeqCst);
            let wait = done.is_empty() && self.inline.borrow().is_empty() && sleeps();
            let result = engine.poll(wait, done);
            self.shared.sleeps.store(false, Ordering::SeqCst);
            result
        });
    }

    /// Enters the engine without waiting, so that the descriptor reports what comes. True: there
    /// is something to do already.
    fn arm(&self) -> bool {
        let mut more = false;
        self.collect(false, |engine, done| {
            more = engine.arm(done)?;
            Ok(())
        });
        // SeqCst pairs with `wake_by_ref`.
        self.shared.sleeps.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        more || !self.inline.borrow().is_empty() || !self.shared.ready().is_empty()
    }

    /// After the engine was entered outside of [`Queue::turn`]: makes the descriptor report again
    /// what comes, if an event loop of the caller's waits for it.
    pub(super) fn arm_again(&self) {
        if self.armed.get() && !self.running.get() && self.arm() {
            self.shared.notify.notify();
        }
    }

    /// Called after something was given to the engine. Outside of the queue's loops, the caller's
    /// event loop must then call [`Queue::turn`].
    pub(super) fn submitted(&self) {
        let sleeps = &self.shared.sleeps;
        if self.armed.get() && !self.running.get() && sleeps.swap(false, Ordering::SeqCst) {
            self.shared.notify.notify();
        }
    }

    /// Ends a turn of the loop, enters the engine by `enter`, records what has ended and wakes
    /// the futures that wait for it. `sleeps`: the thread has nothing else to do.
    fn collect(
        &self,
        sleeps: bool,
        enter: impl FnOnce(&mut dyn Engine, &mut Vec<Completion>) -> io::Result<()>,
    ) {
        let mut done = self.done.take();
        let mut wakers = self.wakers.take();
        self.end_round(sleeps, &mut done);
        let panicked = AbortOnPanic(self.options.engine);
        let result = enter(&mut **self.engine.borrow_mut(), &mut done);
        std::mem::forget(panicked);
        if let Err(e) = result {
            abort(self.options.engine, &e);
        }
        {
            let mut slots = self.slots.borrow_mut();
            for (token, result) in done.drain(..) {
                // The kernel could not start it now: it is repeated as after a signal.
                let result = match result == -libc::EAGAIN {
                    true => -libc::EINTR,
                    false => result,
                };
                let slot = &mut slots.slots[token as usize];
                let Slot::Busy(waker, file) = std::mem::replace(slot, Slot::Ended(result)) else {
                    unreachable!("an operation ends once");
                };
                let count = match file {
                    Some(_) => &self.in_flight,
                    None => &self.watches,
                };
                count.set(count.get() - 1);
                wakers.extend(waker);
            }
        }
        self.done.replace(done);
        // Only now, with nothing borrowed and every end recorded: a waker is foreign code, which
        // may drop an `Io` and so enter this function again.
        wakers.drain(..).for_each(Waker::wake);
        self.wakers.replace(wakers);
    }
}

/// Ends the process: after a failure of the engine it is unknown which operations
/// are in flight, and to unwind would free memory that the kernel still uses.
#[cold]
fn abort(engine: EngineKind, why: &dyn std::fmt::Display) -> ! {
    eprintln!("The {engine} I/O engine failed: {why}");
    std::process::abort()
}

/// Ends the process if it is dropped by a panic.
struct AbortOnPanic(EngineKind);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        // No kernel uses the memory of a simulation.
        if !is_simulated() {
            abort(self.0, &"it panicked");
        }
    }
}
