//! When writes are flushed.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// What is to be done now besides a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing.
    Nothing,
    /// A flush, while other writes go on.
    FlushConcurrently,
    /// A flush, for which all others wait: [`FlushSchedule::resume`] ends that.
    Flush,
}

/// The flushes of one thread: one each time that the number of remaining writes is a multiple of
/// the interval, as in qemu-img.
pub struct FlushSchedule {
    interval: u64,
    drain: bool,
    in_flight: Cell<u64>,
    /// No write starts until a flush has been made.
    stopped: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl FlushSchedule {
    /// A flush after `interval` writes (0: none). With `drain` it waits until no write is in
    /// flight. `depth` is the number of writes in flight.
    pub fn new(interval: u64, drain: bool, depth: u64) -> FlushSchedule {
        let places = match interval {
            0 => 0,
            _ => depth as usize,
        };
        FlushSchedule {
            interval,
            drain,
            in_flight: Cell::new(0),
            stopped: Cell::new(false),
            waiting: RefCell::new(Vec::with_capacity(places)),
        }
    }

    /// Waits until a write may start.
    pub async fn wait(&self) {
        poll_fn(|context| {
            if !self.stopped.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Notes the start of a write, after which `left` writes remain.
    pub fn begin(&self, left: u64) -> Next {
        self.in_flight.set(self.in_flight.get() + 1);
        if self.interval == 0 || !left.is_multiple_of(self.interval) {
            return Next::Nothing;
        }
        if !self.drain {
            return Next::FlushConcurrently;
        }
        self.stopped.set(true);
        Next::Nothing
    }

    /// A write has ended.
    pub fn end(&self) -> Next {
        let in_flight = self.in_flight.get() - 1;
        self.in_flight.set(in_flight);
        match self.stopped.get() && in_flight == 0 {
            true => Next::Flush,
            false => Next::Nothing,
        }
    }

    /// Writes may start again.
    pub fn resume(&self) {
        self.stopped.set(false);
        for waker in self.waiting.borrow_mut().drain(..) {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against missing or early flushes, which would falsify the measurement.
    use super::*;

    #[test]
    fn a_flush_waits_for_what_is_in_flight() {
        let schedule = FlushSchedule::new(3, true, 2);
        assert_eq!(schedule.begin(8), Next::Nothing);
        assert_eq!(schedule.begin(7), Next::Nothing);
        assert_eq!(schedule.end(), Next::Nothing);
        assert_eq!(schedule.begin(6), Next::Nothing);
        assert!(schedule.stopped.get());
        assert_eq!(schedule.end(), Next::Nothing);
        assert_eq!(schedule.end(), Next::Flush);
        schedule.resume();
        assert!(!schedule.stopped.get());
        assert_eq!(schedule.begin(5), Next::Nothing);
        assert_eq!(schedule.end(), Next::Nothing);
    }

    #[test]
    fn or_goes_on_beside_them() {
        let schedule = FlushSchedule::new(2, false, 2);
        let next: Vec<_> = (0..5).rev().map(|left| schedule.begin(left)).collect();
        let (none, flush) = (Next::Nothing, Next::FlushConcurrently);
        assert_eq!(next, [flush, none, flush, none, flush]);
        assert!(!schedule.stopped.get());
        let never = FlushSchedule::new(0, true, 2);
        assert_eq!(never.begin(0), Next::Nothing);
        assert_eq!(never.end(), Next::Nothing);
    }
}
