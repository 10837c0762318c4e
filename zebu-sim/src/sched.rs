//! The scheduler: an engine that waits in virtual time, and requests that the real queues drive.
//!
//! A request is a task of its queue. Its future is wrapped, so that it can be dropped or suspended
//! after a number of polls.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use zebu::internal::engine::{Completion, Engine, Interest, Notify, Op, Token, simulate_engines};
use zebu::internal::names::simulate_names;
use zebu::storage::{Queue, QueueOptions};

use crate::disk::{Disk, DiskNames};

/// What happens to a request's future.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is polled to its end.
    Run,
    /// It is dropped after this number of polls.
    Drop(u32),
    /// After this number of polls it is suspended until all other requests have ended.
    Stall(u32),
    /// The same, and then it is dropped.
    StallDrop(u32),
}

/// An engine without operations of its own: a queue waits for operations of the disk.
struct Waits {
    disk: Arc<Disk>,
    /// How often nothing was in flight.
    idle: u32,
}

/// The number of turns of another program, with nothing in flight, that counts as a hang.
const IDLE: u32 = 100_000;

struct NoNotify;

impl Notify for NoNotify {
    fn notify(&self) {}
}

#[allow(unsafe_code)]
impl Engine for Waits {
    unsafe fn submit(&mut self, _: Token, op: Op) {
        panic!("{op:?}: the simulated storage starts no operations of the engine");
    }

    fn watch(&mut self, _: Token, _: RawFd, _: Interest) {
        panic!("there are no descriptors in a simulation");
    }

    fn unwatch(&mut self, _: Token) {}

    fn poll(&mut self, wait: bool, _: &mut Vec<Completion>) -> io::Result<()> {
        if !wait {
            return Ok(());
        }
        // The other program may have ended what this one waits for.
        let has_paused = self.disk.pause();
        self.idle = match self.disk.advance() {
            true => 0,
            false => self.idle + 1,
        };
        if self.idle > if has_paused { IDLE } else { 0 } {
            panic!("hang: nothing is in flight, and an operation of the whole image waits");
        }
        Ok(())
    }

    fn notifier(&self) -> Arc<dyn Notify> {
        Arc::new(NoNotify)
    }
}

/// Makes all queues of this thread wait for `disk`, which has the files that it opens.
pub fn simulate(disk: &Arc<Disk>) {
    simulate_names(Some(Rc::new(DiskNames(disk.clone()))));
    let disk = disk.clone();
    simulate_engines(Some(Rc::new(move || {
        let disk = disk.clone();
        Box::new(Waits { disk, idle: 0 })
    })));
}

/// Ends that.
pub fn end_simulation() {
    simulate_names(None);
    simulate_engines(None);
}

/// A queue of the simulation.
pub fn queue(parts: usize) -> Queue {
    let options = QueueOptions::default().parts(parts).inflate_inline(true);
    Queue::new(options).expect("nothing is asked of the system")
}

/// The result of a request.
pub type Outcome = zebu::Result<Vec<u8>>;

/// A future of a request.
pub type RequestFuture = Pin<Box<dyn Future<Output = Outcome>>>;

struct Slot {
    future: Option<RequestFuture>,
    fate: Fate,
    polls: u32,
    stalled: bool,
    waker: Option<Waker>,
    outcome: Option<Outcome>,
}

/// A request that its queue drives.
#[derive(Clone)]
pub struct Driven(Rc<RefCell<Slot>>);

/// The number of polls of requests, which shows whether requests make progress.
pub type Polls = Rc<std::cell::Cell<u64>>;

struct Task(Driven, Polls);

impl Driven {
    /// Gives a request to a queue.
    pub fn spawn(queue: &Queue, future: RequestFuture, fate: Fate, polls: &Polls) -> Driven {
        let driven = Driven(Rc::new(RefCell::new(Slot {
            future: Some(future),
            fate,
            polls: 0,
            stalled: false,
            waker: None,
            outcome: None,
        })));
        drop(queue.spawn(Task(driven.clone(), polls.clone())));
        driven
    }

    /// Whether it has ended or was dropped.
    pub fn is_over(&self) -> bool {
        let slot = self.0.borrow();
        slot.future.is_none()
    }

    /// Takes its result; None: it was dropped.
    pub fn take_outcome(&self) -> Option<Outcome> {
        self.0.borrow_mut().outcome.take()
    }

    /// Whether it is suspended.
    pub fn is_stalled(&self) -> bool {
        self.0.borrow().stalled
    }

    /// Resumes it, or drops it if that is its fate.
    pub fn release(&self) {
        let (dropped, waker) = {
            let mut slot = self.0.borrow_mut();
            slot.stalled = false;
            let dropped = match slot.fate {
                Fate::StallDrop(_) => slot.future.take(),
                _ => None,
            };
            slot.fate = Fate::Run;
            (dropped, slot.waker.take())
        };
        drop(dropped);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Drops its future now.
    pub fn abandon(&self) {
        let future = self.0.borrow_mut().future.take();
        drop(future);
    }
}

impl Future for Task {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Task(driven, polls) = &*self;
        let mut future = {
            let mut slot = driven.0.borrow_mut();
            slot.waker = Some(context.waker().clone());
            if slot.stalled {
                return Poll::Pending;
            }
            match slot.future.take() {
                Some(future) => future,
                None => return Poll::Ready(()),
            }
        };
        polls.set(polls.get() + 1);
        let poll = future.as_mut().poll(context);
        let mut slot = driven.0.borrow_mut();
        slot.polls += 1;
        match (poll, slot.fate) {
            (Poll::Ready(outcome), _) => slot.outcome = Some(outcome),
            (Poll::Pending, Fate::Drop(polls)) if slot.polls >= polls => {}
            (Poll::Pending, Fate::Stall(polls) | Fate::StallDrop(polls)) if slot.polls >= polls => {
                slot.stalled = true;
                slot.future = Some(future);
                return Poll::Pending;
            }
            (Poll::Pending, _) => {
                slot.future = Some(future);
                return Poll::Pending;
            }
        }
        drop(slot);
        drop(future);
        Poll::Ready(())
    }
}

/// Runs the tasks of a queue that are ready.
pub fn turn(queue: &Queue) {
    queue.block_on(async {});
}

/// Drives a future of the whole image to its end, or drops it after so many polls.
pub fn run_or_drop<T>(
    queue: &Queue,
    drop_after: Option<u32>,
    future: impl Future<Output = T>,
) -> Option<T> {
    let mut future = Box::pin(future);
    let mut polls = 0;
    queue.block_on(std::future::poll_fn(move |context| {
        match future.as_mut().poll(context) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending => {
                polls += 1;
                match drop_after.is_some_and(|most| polls >= most) {
                    true => Poll::Ready(None),
                    false => Poll::Pending,
                }
            }
        }
    }))
}
