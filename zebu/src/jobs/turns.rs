//! Lanes that work side by side and then step forward one after the other, in
//! the order in which they took their chunks.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;

use crate::storage::yield_once;

/// Whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of the next ticket.
    issued: u64,
    /// The number whose turn it is.
    current: u64,
    /// Tickets that were given back before their turn.
    given_back: BTreeSet<u64>,
    waiting: BTreeMap<u64, (ThreadId, Waker)>,
    /// The thread that has the current ticket's holder, who waited, was woken, and has not run yet.
    woken: Option<ThreadId>,
}

/// A place in the order. Dropped, it is the next one's turn.
#[derive(Debug)]
pub(super) struct Ticket<'a> {
    turns: &'a Turns,
    number: u64,
}

impl Turns {
    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.0)
    }

    /// A ticket for what `take` takes, in the order of taking.
    pub(super) fn take<T>(&self, take: impl FnOnce() -> Option<T>) -> Option<(Ticket<'_>, T)> {
        let mut state = self.state();
        let taken = take()?;
        let number = state.issued;
        state.issued += 1;
        let ticket = Ticket {
            turns: self,
            number,
        };
        Some((ticket, taken))
    }

    /// Lets the lane of this thread go on that was woken for its turn, until it waits for something
    /// else or drops its ticket. For who is about to keep the thread busy: all lanes of the others
    /// may wait for that one.
    pub(super) async fn let_go(&self) {
        while self.state().woken == Some(std::thread::current().id()) {
            yield_once().await;
        }
    }
}

impl Ticket<'_> {
    /// Waits until all tickets before this one were dropped.
    pub(super) fn turn(&self) -> impl Future<Output = ()> + '_ {
        Turn(self)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        let state = &mut *state;
        state.waiting.remove(&self.number);
        state.given_back.insert(self.number);
        while state.given_back.remove(&state.current) {
            state.current += 1;
        }
        if self.number < state.current {
            // He who was woken gave it back.
            state.woken = None;
        }
        if let Some((thread, waker)) = state.waiting.remove(&state.current) {
            state.woken = Some(thread);
            waker.wake();
        }
    }
}

struct Turn<'a>(&'a Ticket<'a>);

impl Future for Turn<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Ticket { turns, number } = self.0;
        let mut state = turns.state();
        if state.current == *number {
            state.woken = None;
            return Poll::Ready(());
        }
        let who = (std::thread::current().id(), context.waker().clone());
        state.waiting.insert(*number, who);
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    //! Guards against lanes that overtake each other, and against a job that
    //! waits for ever for the turn of a lane that gave up.
    use super::*;
    use crate::storage::{Queue, QueueOptions};
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::Arc;

    #[test]
    fn in_order_whoever_comes_first() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let turns: &'static Turns = Box::leak(Box::default());
        let seen = Rc::new(RefCell::new(Vec::new()));
        let mut tickets: Vec<_> = (0..6)
            .map(|i| turns.take(|| Some(i)).expect("taken"))
            .collect();
        tickets.reverse();
        let running: Vec<_> = tickets
            .into_iter()
            .map(|(ticket, i)| {
                let seen = seen.clone();
                queue.spawn(async move {
                    // Every third gives up.
                    if i % 3 != 1 {
                        ticket.turn().await;
                        seen.borrow_mut().push(i);
                    }
                })
            })
            .collect();
        queue.block_on(async {
            for lane in running {
                lane.await;
            }
        });
        assert_eq!(*seen.borrow(), [0, 2, 3, 5]);
        assert!(turns.take(|| None::<()>).is_none());
    }

    #[test]
    fn who_has_his_turn_goes_before_who_keeps_the_thread() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let turns: &'static Turns = Box::leak(Box::default());
        let seen = Rc::new(RefCell::new(Vec::new()));
        let first = turns.take(|| Some(())).unwrap().0;
        let lanes: Vec<_> = (1..4)
            .map(|i| {
                let (ticket, ()) = turns.take(|| Some(())).unwrap();
                let seen = seen.clone();
                queue.spawn(async move {
                    ticket.turn().await;
                    seen.borrow_mut().push(i);
                })
            })
            .collect();
        queue.block_on(async {
            yield_once().await;
            turns.let_go().await;
            assert!(seen.borrow().is_empty(), "it is nobody's turn");
            drop(first);
            turns.let_go().await;
            assert_eq!(*seen.borrow(), [1, 2, 3]);
            for lane in lanes {
                lane.await;
            }
        });
        assert_eq!(turns.state().woken, None);
        // One of another thread is not waited for.
        turns.state().woken = Some(std::thread::spawn(|| ()).thread().id());
        queue.block_on(turns.let_go());
    }

    #[test]
    fn across_threads() {
        let turns = Arc::new(Turns::default());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (turns, seen) = (turns.clone(), seen.clone());
                std::thread::spawn(move || {
                    let queue = Queue::new(QueueOptions::default()).unwrap();
                    for _ in 0..200 {
                        let (ticket, _) = turns.take(|| Some(())).unwrap();
                        queue.block_on(ticket.turn());
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
