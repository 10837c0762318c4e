//! A limit on the bytes that a job moves per second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::workers::Cursor;

/// How often a wait looks whether the job was stopped.
const TICK: Duration = Duration::from_millis(50);

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

    /// Sleeps until `length` more bytes may be moved, or the job has stopped. The whole thread
    /// sleeps, since its other workers are limited too.
    pub(super) fn wait(&self, length: u64, cursor: &Cursor) {
        let Some(rate) = self.rate else { return };
        let moved = self.moved.fetch_add(length, Ordering::Relaxed) + length;
        let due = Duration::from_secs_f64(moved as f64 / rate as f64);
        loop {
            let left = due.saturating_sub(self.start.elapsed());
            if left.is_zero() || cursor.is_stopped() {
                return;
            }
            std::thread::sleep(left.min(TICK));
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a stopped job that waits for its turn.
    use super::*;

    #[test]
    fn a_stopped_job_does_not_wait() {
        let (limiter, cursor) = (RateLimiter::new(Some(1)), Cursor::new(u64::MAX));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.wait(120, &cursor));
            std::thread::sleep(TICK);
            assert!(!waiting.is_finished());
            cursor.stop();
        });
        assert!(limiter.start.elapsed() < Duration::from_secs(60));
    }
}
