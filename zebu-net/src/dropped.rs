//! Changes on other machines whose requests were dropped before their reply.
//!
//! A server may execute requests in any order. So a request that overlaps such a change is sent
//! only after its reply, and finds the range as before the change or as after it.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

#[cfg(any(feature = "rbd", feature = "ssh"))]
use crate::storage::{Iov, OpKind, Started};

/// The dropped changes of one storage.
#[derive(Debug, Default)]
pub(super) struct DroppedChanges {
    /// How many there are, so that the common case needs no lock.
    count: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ranges: Vec<Range<u64>>,
    waiting: Vec<Waker>,
}

/// A dropped change, until its reply.
#[derive(Debug)]
pub(super) struct DroppedChange {
    changes: Arc<DroppedChanges>,
    range: Range<u64>,
}

impl DroppedChanges {
    pub(super) fn add(self: &Arc<Self>, range: Range<u64>) -> DroppedChange {
        self.state().ranges.push(range.clone());
        self.count.fetch_add(1, Ordering::SeqCst);
        DroppedChange {
            changes: self.clone(),
            range,
        }
    }

    /// Whether a request of `range` may be sent.
    pub(super) fn allow(&self, range: &Range<u64>) -> bool {
        self.count.load(Ordering::SeqCst) == 0 || !self.state().overlap(range)
    }

    /// Waits until a request of `range` may be sent.
    pub(super) async fn wait(&self, range: &Range<u64>) {
        poll_fn(|context| {
            let mut state = self.state();
            if !state.overlap(range) {
                return Poll::Ready(());
            }
            if !state.waiting.iter().any(|w| w.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Starts an operation, after the end of the dropped changes that it overlaps.
    #[cfg(any(feature = "rbd", feature = "ssh"))]
    pub(super) fn start(
        self: &Arc<Self>,
        range: Range<u64>,
        memory: Option<&Iov>,
        start: impl FnOnce(Option<&Iov>) -> Started + 'static,
    ) -> Started {
        if self.allow(&range) {
            return start(memory);
        }
        let (changes, memory) = (self.clone(), memory.cloned());
        Started::later(async move {
            changes.wait(&range).await;
            start(memory.as_ref()).wait().await
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        crate::lock(&self.state)
    }
}

/// What an operation reads or changes.
#[cfg(any(feature = "rbd", feature = "ssh"))]
pub(super) fn range_of(kind: OpKind, offset: u64, length: u64) -> Range<u64> {
    match kind {
        OpKind::SetLength => length..u64::MAX,
        OpKind::Extent => offset..u64::MAX,
        OpKind::Flush => 0..u64::MAX,
        _ => offset..offset.saturating_add(length),
    }
}

impl State {
    fn overlap(&self, range: &Range<u64>) -> bool {
        let mut ranges = self.ranges.iter();
        ranges.any(|other| other.start < range.end && range.start < other.end)
    }
}

impl Drop for DroppedChange {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.changes.state();
            let place = state.ranges.iter().position(|r| *r == self.range);
            state
                .ranges
                .swap_remove(place.expect("there until it is dropped"));
            std::mem::take(&mut state.waiting)
        };
        self.changes.count.fetch_sub(1, Ordering::SeqCst);
        waiting.into_iter().for_each(Waker::wake);
    }
}
