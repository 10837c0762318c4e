//! When an attempt that failed is made again.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use super::failure::{Pause, Trouble};

/// Attempts in a row without progress.
const ATTEMPTS: u32 = 9;
/// The wait before the second attempt; doubled for each further one.
const FIRST: Duration = Duration::from_millis(100);
/// The longest wait that this side chooses.
const LONGEST: Duration = Duration::from_secs(5);
/// The longest wait that a server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(60);

/// The attempts at one thing.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    failed: u32,
    /// Attempts that were made without a wait.
    at_once: u32,
}

impl Attempts {
    /// There was progress: waits are short again.
    pub fn progress(&mut self) {
        *self = Attempts::default();
    }

    /// The wait before the next attempt, and whether all requests to this server are to wait as
    /// long; or the error, if there is to be none.
    pub fn failed(&mut self, trouble: Trouble) -> Result<(Duration, bool), Trouble> {
        let pause = match trouble {
            Trouble::RetryNow(_) if self.at_once < 4 => {
                self.at_once += 1;
                return Ok((Duration::ZERO, false));
            }
            Trouble::Transient { pause, .. } => pause,
            _ => return Err(trouble),
        };
        self.failed += 1;
        if self.failed >= ATTEMPTS {
            return Err(trouble);
        }
        let own = LONGEST.min(FIRST * 2u32.pow(self.failed - 1));
        let wait = match pause {
            Some(Pause {
                length: Some(length),
            }) => own.max(length.min(LONGEST_ASKED)),
            _ => own,
        };
        Ok((with_jitter(wait), pause.is_some()))
    }
}

/// Up to a quarter more, at random: clients that failed together come back one by one.
fn with_jitter(wait: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) % 1024;
    wait + wait.mul_f64(random as f64 / 4096.0)
}

#[cfg(test)]
mod tests {
    //! Guards against a storm of requests, and against endless attempts.
    use super::*;

    fn transient(pause: Option<Pause>) -> Trouble {
        Trouble::Transient {
            what: "busy".into(),
            pause,
        }
    }

    #[test]
    fn waits_grow_and_end() {
        let mut attempts = Attempts::default();
        let mut waits = Vec::new();
        while let Ok((wait, all)) = attempts.failed(transient(None)) {
            assert!(!all);
            waits.push(wait);
        }
        assert_eq!(waits.len(), 8);
        assert!(waits[0] >= FIRST && waits[7] <= LONGEST * 5 / 4);
        let total: Duration = waits.iter().sum();
        assert!(total > Duration::from_secs(10) && total < Duration::from_secs(30));
        attempts.progress();
        assert!(attempts.failed(transient(None)).unwrap().0 < FIRST * 2);
    }

    #[test]
    fn a_server_may_ask_for_more_time_and_all_wait() {
        let asked = |seconds| {
            let length = Some(Duration::from_secs(seconds));
            Attempts::default().failed(transient(Some(Pause { length })))
        };
        let (wait, all) = asked(7).unwrap();
        assert!(all && wait >= Duration::from_secs(7) && wait < Duration::from_secs(9));
        assert!(asked(100_000).unwrap().0 <= LONGEST_ASKED * 5 / 4);
    }

    #[test]
    fn what_lasts_is_not_tried_again() {
        for trouble in [Trouble::permanent("no"), Trouble::Changed("other".into())] {
            assert!(Attempts::default().failed(trouble).is_err());
        }
        let mut attempts = Attempts::default();
        let again = || Trouble::RetryNow("moved".into());
        assert_eq!(
            (0..9)
                .take_while(|_| attempts.failed(again()).is_ok())
                .count(),
            4
        );
    }
}
