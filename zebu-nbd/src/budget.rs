//! Memory of the connections of a server: what each has for itself, whatever
//! others do, and what they have together besides.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

use crate::transmission::MAX_BYTES;

/// Bytes that all have together.
const TOTAL: usize = 1 << 30;

/// Bytes that each of `clients` connections has for itself: its fair share of a
/// GiB, if that is at least 1 MiB and no more than one may have.
pub fn own(clients: usize) -> usize {
    (TOTAL / clients.max(1)).clamp(1 << 20, MAX_BYTES)
}

/// Bytes that can be taken and are given back.
#[derive(Debug)]
pub struct Budget(Mutex<State>);

#[derive(Debug)]
struct State {
    free: usize,
    waiting: Vec<Waker>,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(TOTAL)
    }
}

impl Budget {
    fn new(bytes: usize) -> Self {
        Budget(Mutex::new(State {
            free: bytes,
            waiting: Vec::new(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes `bytes` if they are there.
    pub fn take(&self, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let mut state = self.state();
        let left = state.free.checked_sub(bytes);
        state.free = left.unwrap_or(state.free);
        left.is_some()
    }

    /// Takes `bytes` as soon as they are there.
    pub async fn take_later(&self, bytes: usize) {
        poll_fn(|context| {
            let mut state = self.state();
            match state.free.checked_sub(bytes) {
                Some(left) => {
                    state.free = left;
                    Poll::Ready(())
                }
                None => {
                    if !state.waiting.iter().any(|w| w.will_wake(context.waker())) {
                        state.waiting.push(context.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Gives `bytes` back.
    pub fn give(&self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let waiting = {
            let mut state = self.state();
            state.free += bytes;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against memory that is taken twice or lost, and against a task that waits
    //! for it and is never woken.
    use super::*;
    use zebu::storage::{Queue, QueueOptions};

    #[test]
    fn what_is_given_back_can_be_taken() {
        let budget = std::sync::Arc::new(Budget::new(10));
        assert!(budget.take(0) && budget.take(7) && !budget.take(4) && budget.take(3));
        let other = budget.clone();
        let thread = std::thread::spawn(move || {
            let queue = Queue::new(QueueOptions::default()).unwrap();
            queue.block_on(other.take_later(8));
        });
        while budget.state().waiting.is_empty() {
            std::thread::yield_now();
        }
        // Not enough, then enough.
        budget.give(7);
        while budget.state().waiting.is_empty() {
            std::thread::yield_now();
        }
        budget.give(3);
        thread.join().unwrap();
        assert!(budget.take(2) && !budget.take(1));
    }
}
