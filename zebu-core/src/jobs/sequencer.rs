//! Workers that process chunks in parallel, and then perform a step one after the other, in the
//! order in which they took their chunks.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;

use crate::storage::yield_once;

/// The order of the tickets.
#[derive(Debug, Default)]
pub(super) struct Sequencer(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of the next ticket.
    issued: u64,
    /// The number of the ticket that may proceed.
    current: u64,
    /// Tickets that were dropped before they became current.
    returned: BTreeSet<u64>,
    waiting: BTreeMap<u64, (ThreadId, Waker)>,
    /// The thread of the worker with the current ticket, if it was woken and has not run yet.
    woken: Option<ThreadId>,
}

/// A place in the order. Dropping it lets the next one proceed.
#[derive(Debug)]
pub(super) struct Ticket<'a> {
    sequencer: &'a Sequencer,
    number: u64,
}

impl Sequencer {
    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.0)
    }

    /// A ticket for what `take` returns, in the order of the calls.
    pub(super) fn take<T>(&self, take: impl FnOnce() -> Option<T>) -> Option<(Ticket<'_>, T)> {
        let mut state = self.state();
        let taken = take()?;
        let number = state.issued;
        state.issued += 1;
        let ticket = Ticket {
            sequencer: self,
            number,
        };
        Some((ticket, taken))
    }

    /// Yields until the worker of this thread that was woken for its ticket waits for something
    /// else or drops the ticket. Call it before keeping the thread busy: the workers of all other
    /// threads may wait for that one.
    pub(super) async fn yield_to_current(&self) {
        while self.state().woken == Some(std::thread::current().id()) {
            yield_once().await;
        }
    }
}

impl Ticket<'_> {
    /// Waits until all tickets before this one were dropped.
    pub(super) fn wait(&self) -> impl Future<Output = ()> + '_ {
        Wait(self)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.sequencer.state();
        let state = &mut *state;
        state.waiting.remove(&self.number);
        state.returned.insert(self.number);
        while state.returned.remove(&state.current) {
            state.current += 1;
        }
        if self.number < state.current {
            // The woken worker dropped it.
            state.woken = None;
        }
        if let Some((thread, waker)) = state.waiting.remove(&state.current) {
            state.woken = Some(thread);
            waker.wake();
        }
    }
}

struct Wait<'a>(&'a Ticket<'a>);

impl Future for Wait<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Ticket { sequencer, number } = self.0;
        let mut state = sequencer.state();
        if state.current == *number {
            state.woken = None;
            return Poll::Ready(());
        }
        let waiting = (std::thread::current().id(), context.waker().clone());
        state.waiting.insert(*number, waiting);
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    //! Guards against workers that run out of order, and against a job that hangs because a ticket was
    //! dropped.
    use super::*;
    use crate::storage::{Queue, QueueOptions};
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::Arc;

    #[test]
    fn workers_run_in_order_of_their_tickets() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let sequencer: &'static Sequencer = Box::leak(Box::default());
        let seen = Rc::new(RefCell::new(Vec::new()));
        let mut tickets: Vec<_> = (0..6)
            .map(|i| sequencer.take(|| Some(i)).expect("taken"))
            .collect();
        tickets.reverse();
        let running: Vec<_> = tickets
            .into_iter()
            .map(|(ticket, i)| {
                let seen = seen.clone();
                queue.spawn(async move {
                    // Every third worker drops its ticket.
                    if i % 3 != 1 {
                        ticket.wait().await;
                        seen.borrow_mut().push(i);
                    }
                })
            })
            .collect();
        queue.block_on(async {
            for worker in running {
                worker.await;
            }
        });
        assert_eq!(*seen.borrow(), [0, 2, 3, 5]);
        assert!(sequencer.take(|| None::<()>).is_none());
    }

    #[test]
    fn a_woken_worker_runs_before_a_busy_one() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let sequencer: &'static Sequencer = Box::leak(Box::default());
        let seen = Rc::new(RefCell::new(Vec::new()));
        let first = sequencer.take(|| Some(())).unwrap().0;
        let workers: Vec<_> = (1..4)
            .map(|i| {
                let (ticket, ()) = sequencer.take(|| Some(())).unwrap();
                let seen = seen.clone();
                queue.spawn(async move {
                    ticket.wait().await;
                    seen.borrow_mut().push(i);
                })
            })
            .collect();
        queue.block_on(async {
            yield_once().await;
            sequencer.yield_to_current().await;
            assert!(seen.borrow().is_empty(), "no ticket is current");
            drop(first);
            sequencer.yield_to_current().await;
            assert_eq!(*seen.borrow(), [1, 2, 3]);
            for worker in workers {
                worker.await;
            }
        });
        assert_eq!(sequencer.state().woken, None);
        // A worker of another thread is not waited for.
        sequencer.state().woken = Some(std::thread::spawn(|| ()).thread().id());
        queue.block_on(sequencer.yield_to_current());
    }

    #[test]
    fn across_threads() {
        let sequencer = Arc::new(Sequencer::default());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (sequencer, seen) = (sequencer.clone(), seen.clone());
                std::thread::spawn(move || {
                    let queue = Queue::new(QueueOptions::default()).unwrap();
                    for _ in 0..200 {
                        let (ticket, _) = sequencer.take(|| Some(())).unwrap();
                        queue.block_on(ticket.wait());
                        seen.lock().unwrap().push(ticket.number);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(seen.lock().unwrap().iter().copied().eq(0..800));
    }
}
