//! A limit on the bytes that a job moves per second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that the workers of a job have moved since it began, and their limit.
#[derive(Debug)]
pub(super) struct RateLimiter {
    /// Bytes a second; None: no limit.
    rate: Option<u64>,
    start: Instant,
    moved: AtomicU64,
}

impl RateLimiter {
    /// A limiter for a job that begins now. A rate of 0 is no limit.
    pub(super) fn new(rate: Option<u64>) -> Self {
        RateLimiter {
            rate: rate.filter(|rate| *rate > 0),
            start: Instant::now(),
            moved: AtomicU64::new(0),
        }
    }

    /// Sleeps until `length` more bytes may be moved. The whole thread sleeps, since its other
    /// workers are limited too.
    pub(super) fn wait(&self, length: u64) {
        let Some(rate) = self.rate else { return };
        let moved = self.moved.fetch_add(length, Ordering::Relaxed) + length;
        let due = Duration::from_secs_f64(moved as f64 / rate as f64);
        std::thread::sleep(due.saturating_sub(self.start.elapsed()));
    }
}
