//! A limit of the bytes that a job moves in a second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the lanes of a job have moved since it began, and how much they may.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes a second; None: no limit.
    rate: Option<u64>,
    start: Instant,
    moved: AtomicU64,
}

impl Pace {
    /// A job that begins now. A rate of 0 is no limit.
    pub(super) fn new(rate: Option<u64>) -> Self {
        Pace {
            rate: rate.filter(|rate| *rate > 0),
            start: Instant::now(),
            moved: AtomicU64::new(0),
        }
    }

    /// Sleeps until `length` more bytes may be moved. The whole thread sleeps:
    /// there is nothing to do for its other lanes either.
    pub(super) fn wait(&self, length: u64) {
        let Some(rate) = self.rate else { return };
        let moved = self.moved.fetch_add(length, Ordering::Relaxed) + length;
        let due = Duration::from_secs_f64(moved as f64 / rate as f64);
        std::thread::sleep(due.saturating_sub(self.start.elapsed()));
    }
}
