//! Memory of requests: a number of bytes for each step that a request goes through.
//!
//! What a request takes below the device may be far more than its length: a write of 512 bytes to
//! an overlay copies a cluster, and a read of them inflates one. Each of these places reserves the
//! bytes before it takes them, and waits if there are none.
//!
//! # Why nothing waits for ever
//!
//! Copying a cluster may inflate one, and both may need a bounce buffer, so one request may hold
//! memory while it waits for more. Each step has bytes of its own, and the steps are in this order:
//! margins of copies, what is inflated, the same of an image in which the first one is stored
//! (`file.driver=qcow2`), and so on; bounce buffers last. A request that holds bytes of a step waits
//! only for those of later steps, and never for anything that another request does while that
//! waits for the same or an earlier step. So those that hold bytes of the last step end, then
//! those of the step before. To keep this:
//!
//! - a request reserves the bytes of one step at once, or gives back what it holds of it first;
//! - a lock that requests which hold bytes of a step wait for is taken after the bytes (blocks of a
//!   file), or held by no request that waits for bytes of that step (guest clusters, tables);
//! - bytes are given in the order in which they were asked for, so that large requests get theirs;
//!   one that asks for more than all gets it when it is alone;
//! - an unbroken section ([`Queue::unbroken`]) waits for no bytes, but takes them over the budget.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use crate::lock;

/// Bytes that requests may take, shared by all its clones: see
/// [`QueueOptions::memory`](super::QueueOptions::memory).
///
/// Bytes are given in the order in which they are asked for. A request for more than there are
/// gets them when nothing else is reserved.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Bytes of each step.
    bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    steps: Vec<StepBytes>,
    held: usize,
    peak: usize,
    /// Tasks that have waited.
    waits: u64,
}

/// The bytes of one step.
#[derive(Debug, Default)]
struct StepBytes {
    held: usize,
    waiting: VecDeque<(u64, Waker)>,
}

/// What a request takes memory for below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The old content of clusters, around what is written.
    Margins,
    /// Compressed data, and what they inflate to.
    Inflated,
    /// Aligned memory for direct I/O.
    Bounce,
}

impl Step {
    /// Its place, in an image at `depth`: 0 is free for users of a budget of their own.
    pub(super) fn index(self, depth: u8) -> usize {
        match self {
            Step::Bounce => 1,
            Step::Margins => 2 + 2 * usize::from(depth),
            Step::Inflated => 3 + 2 * usize::from(depth),
        }
    }
}

/// Bytes of a [`Budget`], which are free again when this is dropped.
#[derive(Debug)]
pub struct Reserved {
    budget: Budget,
    step: usize,
    bytes: usize,
}

impl Budget {
    /// What each of the servers of this project gives to all requests of a process together.
    pub const SERVERS: usize = 64 << 20;

    /// `bytes` for each step: margins of copies, inflated data, bounce buffers.
    pub fn new(bytes: usize) -> Self {
        Budget(Arc::new(Shared {
            bytes,
            state: Mutex::default(),
        }))
    }

    /// Reserves `bytes` if they are free and nothing waits for some.
    pub fn try_reserve(&self, bytes: usize) -> Option<Reserved> {
        self.try_step(0, bytes)
    }

    /// Reserves `bytes` as soon as they are free.
    pub async fn reserve(&self, bytes: usize) -> Reserved {
        self.step(0, bytes).await
    }

    /// Bytes of all steps that are reserved now.
    pub fn held(&self) -> usize {
        self.state().held
    }

    /// The most bytes of all steps that were ever reserved at once.
    pub fn peak(&self) -> usize {
        self.state().peak
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    pub(super) fn try_step(&self, step: usize, bytes: usize) -> Option<Reserved> {
        let mut state = self.state();
        let free = state.place(step).waiting.is_empty();
        (free && state.take(step, bytes, self.0.bytes)).then(|| self.reserved(step, bytes))
    }

    /// Reserves bytes, also if there are none left.
    pub(super) fn step_now(&self, step: usize, bytes: usize) -> Reserved {
        self.state().add(step, bytes);
        self.reserved(step, bytes)
    }

    pub(super) fn step(&self, step: usize, bytes: usize) -> Reserving<'_> {
        Reserving {
            budget: self,
            step,
            bytes,
            number: None,
        }
    }

    fn reserved(&self, step: usize, bytes: usize) -> Reserved {
        Reserved {
            budget: self.clone(),
            step,
            bytes,
        }
    }
}

impl State {
    fn place(&mut self, step: usize) -> &mut StepBytes {
        if self.steps.len() <= step {
            self.steps.resize_with(step + 1, StepBytes::default);
        }
        &mut self.steps[step]
    }

    fn take(&mut self, step: usize, bytes: usize, total: usize) -> bool {
        let place = self.place(step);
        let all = place.held.saturating_add(bytes);
        if place.held != 0 && all > total {
            return false;
        }
        self.add(step, bytes);
        true
    }

    /// Takes bytes, also if there are none left.
    fn add(&mut self, step: usize, bytes: usize) {
        let place = self.place(step);
        place.held = place.held.saturating_add(bytes);
        self.held = self.held.saturating_add(bytes);
        self.peak = self.peak.max(self.held);
    }

    /// The first task that waits for bytes of a step.
    fn first(&mut self, step: usize) -> Option<Waker> {
        let place = self.place(step);
        place.waiting.front().map(|(_, waker)| waker.clone())
    }
}

/// Waits for bytes.
pub(super) struct Reserving<'a> {
    budget: &'a Budget,
    step: usize,
    bytes: usize,
    /// Its place among those that wait.
    number: Option<u64>,
}

impl Future for Reserving<'_> {
    type Output = Reserved;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Reserved> {
        let (budget, step, bytes) = (self.budget, self.step, self.bytes);
        let mut state = budget.state();
        let first = state.place(step).waiting.front().map(|w| w.0);
        let is_next = first.is_none() || first == self.number;
        if is_next && state.take(step, bytes, budget.0.bytes) {
            if self.number.take().is_some() {
                state.place(step).waiting.pop_front();
            }
            // There may be enough for the next one, too.
            let next = state.first(step);
            drop(state);
            next.into_iter().for_each(Waker::wake);
            return Poll::Ready(budget.reserved(step, bytes));
        }
        match self.number {
            None => {
                state.waits += 1;
                let number = state.waits;
                let waker = context.waker().clone();
                state.place(step).waiting.push_back((number, waker));
                self.number = Some(number);
            }
            Some(number) => {
                let mut waiting = state.place(step).waiting.iter_mut();
                if let Some((_, waker)) = waiting.find(|w| w.0 == number) {
                    waker.clone_from(context.waker());
                }
            }
        }
        Poll::Pending
    }
}

impl Drop for Reserving<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else {
            return;
        };
        let next = {
            let mut state = self.budget.state();
            state.place(self.step).waiting.retain(|w| w.0 != number);
            state.first(self.step)
        };
        next.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let next = {
            let mut state = self.budget.state();
            state.held -= self.bytes;
            state.place(self.step).held -= self.bytes;
            state.first(self.step)
        };
        next.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against memory that is reserved twice or lost, and against a task that waits for it
    //! and is never woken.
    use super::*;
    use crate::storage::{Queue, QueueOptions, yield_once};

    #[test]
    fn what_is_dropped_can_be_reserved() {
        let budget = Budget::new(10);
        let seven = budget.try_reserve(7).unwrap();
        assert!(budget.try_reserve(4).is_none());
        let three = budget.try_reserve(3).unwrap();
        let other = budget.clone();
        let thread = std::thread::spawn(move || {
            let queue = Queue::new(QueueOptions::default()).unwrap();
            let eight = queue.block_on(other.reserve(8));
            assert!(other.try_reserve(3).is_none() && other.try_reserve(2).is_some());
            drop(eight);
        });
        // Not enough, then enough.
        for reserved in [seven, three] {
            while budget.state().place(0).waiting.is_empty() {
                std::thread::yield_now();
            }
            drop(reserved);
        }
        thread.join().unwrap();
        assert_eq!((budget.held(), budget.peak()), (0, 10));
        // More than there are, alone.
        let eleven = budget.try_reserve(11).unwrap();
        assert!(budget.try_reserve(1).is_none());
        drop(eleven);
        assert!(budget.try_reserve(1).is_some());
    }

    /// Any number of tasks, each with steps in order, some of which give up waiting.
    #[test]
    fn every_request_gets_its_steps() {
        let queue = Queue::new(QueueOptions::default().memory(Some(Budget::new(100)))).unwrap();
        let tasks = if cfg!(miri) { 10 } else { 1000 };
        queue.block_on(async {
            let run = |number: usize| {
                let queue = queue.clone();
                async move {
                    let bytes = 1 + number * 37 % 130;
                    let margins = queue.reserve(Step::Margins, bytes).await;
                    yield_once().await;
                    if number.is_multiple_of(3) {
                        // It waits, and is dropped.
                        let mut waiting = std::pin::pin!(queue.reserve(Step::Inflated, bytes));
                        std::future::poll_fn(|context| {
                            let _ = waiting.as_mut().poll(context);
                            Poll::Ready(())
                        })
                        .await;
                    }
                    let inflated = queue.reserve(Step::Inflated, bytes).await;
                    yield_once().await;
                    let bounce = queue.reserve(Step::Bounce, bytes).await;
                    yield_once().await;
                    drop((bounce, inflated, margins));
                }
            };
            let running: Vec<_> = (0..tasks).map(|n| queue.spawn(run(n))).collect();
            for task in running {
                task.await;
            }
        });
        let budget = queue.options().memory.as_ref().unwrap();
        assert_eq!(budget.held(), 0);
        assert!(budget.peak() <= 3 * 130, "{}", budget.peak());
    }
}
