//! Gates, which one request passes at a time, and ranges, which one request holds at a time, or some
//! that share them.
//! Waiting is a future: no thread blocks.
//!
//! A release wakes all tasks that wait for the gate, or for a range that overlaps, and they try again.
//! So a waiter that was dropped takes no wake-up with it.

use super::sync::{Mutex, MutexGuard};
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

/// A lock that is waited for asynchronously.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<GateState>,
}

#[derive(Debug, Default)]
struct GateState {
    held: bool,
    waiting: Vec<Waker>,
}

/// The guard of a [`Gate`].
#[derive(Debug)]
pub struct Pass<'a>(&'a Gate);

impl Gate {
    /// Waits until it is free.
    #[doc(hidden)]
    pub async fn enter(&self) -> Pass<'_> {
        poll_fn(|context| {
            let mut state = self.state();
            if !state.held {
                state.held = true;
                return Poll::Ready(Pass(self));
            }
            if !state.waiting.iter().any(|w| w.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.0.state();
            state.held = false;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Range locks. A range is held as a whole or not at all, so no request holds a part while it waits
/// for the rest.
#[derive(Debug, Default)]
pub struct Ranges {
    state: Mutex<RangesState>,
}

#[derive(Debug, Default)]
struct RangesState {
    held: Vec<(Range<u64>, Hold)>,
    waiting: Vec<(Range<u64>, Waker)>,
}

/// Whether other requests may hold a range, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    Alone,
    Shared,
}

/// The guard of a range.
#[derive(Debug)]
pub struct Held<'a> {
    ranges: &'a Ranges,
    range: Range<u64>,
    hold: Hold,
}

impl Ranges {
    /// Waits until no request holds any of `range`, which is not empty.
    #[doc(hidden)]
    pub async fn hold(&self, range: Range<u64>) -> Held<'_> {
        self.enter(range, Hold::Alone).await
    }

    /// Waits until no request holds any of `range`, which is not empty, alone.
    pub(crate) async fn share(&self, range: Range<u64>) -> Held<'_> {
        self.enter(range, Hold::Shared).await
    }

    async fn enter(&self, range: Range<u64>, hold: Hold) -> Held<'_> {
        debug_assert!(!range.is_empty());
        poll_fn(|context| {
            let mut state = self.state();
            let conflicts = |(held, how): &(Range<u64>, Hold)| {
                (hold == Hold::Alone || *how == Hold::Alone) && overlap(held, &range)
            };
            if !state.held.iter().any(conflicts) {
                state.held.push((range.clone(), hold));
                return Poll::Ready(Held {
                    ranges: self,
                    range: range.clone(),
                    hold,
                });
            }
            let known = |w: &(Range<u64>, Waker)| w.0 == range && w.1.will_wake(context.waker());
            if !state.waiting.iter().any(known) {
                state.waiting.push((range.clone(), context.waker().clone()));
            }
            Poll::Pending
        })
        .await
    }

    fn state(&self) -> MutexGuard<'_, RangesState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let woken = {
            let mut state = self.ranges.state();
            let is_this = |held: &(Range<u64>, Hold)| held.0 == self.range && held.1 == self.hold;
            let place = state.held.iter().position(is_this);
            state.held.swap_remove(place.expect("held until dropped"));
            // In the order in which they came: clusters are allocated in that of the requests.
            let waiting = std::mem::take(&mut state.waiting).into_iter();
            let (woken, rest): (Vec<_>, Vec<_>) =
                waiting.partition(|(range, _)| overlap(range, &self.range));
            state.waiting = rest;
            woken
        };
        woken.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
