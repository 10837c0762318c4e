//! Memory for requests: the share of each connection, and a reserve that all connections of a
//! server use besides.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

/// Bytes of the buffers of one connection. One request is taken whatever it needs.
pub const MAX_BYTES: usize = 64 << 20;
/// Bytes of all shares together, and of the reserve.
const TOTAL: usize = 1 << 30;

/// The share of one of `clients` connections, in bytes: 1 MiB to [`MAX_BYTES`].
pub fn share(clients: usize) -> usize {
    (TOTAL / clients.max(1)).clamp(1 << 20, MAX_BYTES)
}

/// The reserve.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    free: usize,
    waiting: Vec<Waker>,
}

/// Bytes of a budget, which are free again when this is dropped.
#[derive(Debug)]
pub struct Reserved {
    budget: Budget,
    bytes: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(TOTAL)
    }
}

impl Budget {
    fn new(bytes: usize) -> Self {
        Budget(Arc::new(Mutex::new(State {
            free: bytes,
            waiting: Vec::new(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reserves `bytes` if they are free.
    pub fn try_reserve(&self, bytes: usize) -> Option<Reserved> {
        self.state().reserve(self, bytes)
    }

    /// Reserves `bytes` as soon as they are free.
    pub async fn reserve(&self, bytes: usize) -> Reserved {
        poll_fn(|context| {
            let mut state = self.state();
            if let Some(reserved) = state.reserve(self, bytes) {
                return Poll::Ready(reserved);
            }
            if !state.waiting.iter().any(|w| w.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
}

impl State {
    fn reserve(&mut self, budget: &Budget, bytes: usize) -> Option<Reserved> {
        self.free = self.free.checked_sub(bytes)?;
        let budget = budget.clone();
        Some(Reserved { budget, bytes })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.budget.state();
            state.free += self.bytes;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against memory that is reserved twice or lost, and against a task that waits for it
    //! and is never woken.
    use super::*;
    use zebu::storage::{Queue, QueueOptions};

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
            while budget.state().waiting.is_empty() {
                std::thread::yield_now();
            }
            drop(reserved);
        }
        thread.join().unwrap();
        assert!(budget.try_reserve(11).is_none() && budget.try_reserve(10).is_some());
    }
}
