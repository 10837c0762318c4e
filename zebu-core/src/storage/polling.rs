//! Polling before a thread sleeps.
//!
//! To wake a thread may take longer than what it waits for, so polling a few times is quicker where
//! the next event is near. Whether it is near is learnt from the polls before. After polls without
//! success, polling is tried again after [`AGAIN`] waits, and more and more rarely.
//!
//! Between two polls the thread yields its processor to the threads that it waits for. If they keep
//! it, the limit of time is reached and the thread sleeps: a thread that is woken gets a processor
//! sooner than one that has yielded.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Waits that sleep at once before polling is tried again: at first, and at most.
const AGAIN: u32 = 32;
const SELDOM: u32 = 1024;
/// Successes that are counted at most. Each failure halves the count.
const MOST: u32 = 8;

/// Decides whether one thread polls again or sleeps.
pub struct Polling {
    longest: Duration,
    /// Recent successes.
    credit: Cell<u32>,
    /// Waits in a row that slept at once.
    slept: Cell<u32>,
    /// How many there are before polling is tried again.
    again: Cell<u32>,
    wait: Cell<Wait>,
}

/// The state of the current wait.
#[derive(Clone, Copy)]
enum Wait {
    /// There is none.
    No,
    Looking(Instant),
    Asleep,
}

impl Polling {
    /// Polls for `longest` at a time at most; zero: never.
    pub fn new(longest: Duration) -> Self {
        Polling {
            longest,
            credit: Cell::new(MOST),
            slept: Cell::new(0),
            again: Cell::new(AGAIN),
            wait: Cell::new(Wait::No),
        }
    }

    /// Called when there is nothing to do. True: poll again at once; false: prepare what wakes the
    /// thread, poll once more, and sleep.
    pub fn polls_again(&self) -> bool {
        let again = match self.wait.get() {
            Wait::No => self.begin(),
            Wait::Looking(since) => {
                let again = since.elapsed() < self.longest;
                if !again {
                    self.failed();
                    self.wait.set(Wait::Asleep);
                }
                again
            }
            Wait::Asleep => false,
        };
        if again {
            std::thread::yield_now();
        }
        again
    }

    fn begin(&self) -> bool {
        let slept = self.slept.get();
        let looks = !self.longest.is_zero() && (self.credit.get() > 0 || slept >= self.again.get());
        if looks {
            self.slept.set(0);
            self.wait.set(Wait::Looking(Instant::now()));
        } else {
            self.slept.set(slept.saturating_add(1));
            self.wait.set(Wait::Asleep);
        }
        looks
    }

    /// Called when there was something to do.
    pub fn found(&self) {
        let Wait::Looking(since) = self.wait.replace(Wait::No) else {
            return;
        };
        match since.elapsed() < self.longest {
            true => {
                self.credit.set((self.credit.get() + 1).min(MOST));
                self.again.set(AGAIN);
            }
            false => self.failed(),
        }
    }

    fn failed(&self) {
        let credit = self.credit.get();
        self.credit.set(credit / 2);
        if credit == 0 {
            self.again.set((2 * self.again.get()).min(SELDOM));
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a thread that never sleeps although nothing happens, and one that never polls
    //! again.
    use super::*;

    const FOR_EVER: Duration = Duration::from_secs(3600);
    const NO_TIME: Duration = Duration::from_nanos(1);

    /// Waits without success. Returns how often it polled.
    fn in_vain(polling: &Polling) -> usize {
        let looks = (0..).take_while(|_| polling.polls_again()).count();
        assert!(!polling.polls_again(), "it sleeps until something is found");
        polling.found();
        looks
    }

    #[test]
    fn without_polling_it_sleeps_at_once() {
        let polling = Polling::new(Duration::ZERO);
        assert!((0..1000).all(|_| in_vain(&polling) == 0));
    }

    #[test]
    fn polling_without_success_becomes_rare() {
        let polling = Polling::new(NO_TIME);
        let waits = 10 * SELDOM as usize;
        let tries: Vec<usize> = (0..waits).filter(|_| in_vain(&polling) > 0).collect();
        let last = tries.windows(2).next_back().unwrap();
        assert_eq!(last[1] - last[0], SELDOM as usize + 1);
        assert!(tries.len() < 25, "{tries:?}");
    }

    #[test]
    fn slow_events_are_not_polled_for() {
        let polling = Polling::new(NO_TIME);
        for _ in 0..MOST {
            polling.polls_again();
            polling.found();
        }
        assert_eq!(in_vain(&polling), 0);
    }

    #[test]
    fn polling_resumes_after_a_success() {
        let mut polling = Polling::new(NO_TIME);
        while in_vain(&polling) > 0 {}
        polling.longest = FOR_EVER;
        let sleeps = (0..).take_while(|_| !polling.polls_again());
        assert!(sleeps.map(|_| polling.found()).count() <= SELDOM as usize);
        polling.found();
        for _ in 0..100 {
            assert!(polling.polls_again() && polling.polls_again());
            polling.found();
        }
    }
}
