//! Limits of groups of nodes: bytes and requests in a second.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// The largest value of a limit.
const MOST: u64 = 1_000_000_000_000_000;
/// A bucket without a burst holds what flows out in this part of a second.
const PART: f64 = 0.1;

/// Groups by their ids (`throttle-group`).
pub type ThrottleGroups = BTreeMap<String, ThrottleGroup>;

/// A limit, with what may pass at once. Bytes or requests in a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleBucket {
    /// On average; 0: no limit.
    pub average: u64,
    /// In a burst; 0: there are none.
    pub max: u64,
    /// How long a burst may last, in seconds.
    pub length: u64,
}

impl Default for ThrottleBucket {
    fn default() -> Self {
        ThrottleBucket {
            average: 0,
            max: 0,
            length: 1,
        }
    }
}

/// The limits of a group. Those of all requests exclude those of reads and of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// Bytes of all requests, of reads, of writes (`bps-total`, `bps-read`, `bps-write`).
    pub bytes: [ThrottleBucket; 3],
    /// All requests, reads, writes (`iops-total`, `iops-read`, `iops-write`).
    pub requests: [ThrottleBucket; 3],
    /// A larger request counts as several of so many bytes; 0: as one (`iops-size`).
    pub request_size: u64,
}

impl ThrottleLimits {
    /// Sets a limit by its name, as `iops-total-max`. False: there is none of this name.
    pub fn set(&mut self, name: &str, value: u64) -> bool {
        if name == "iops-size" {
            self.request_size = value;
            return true;
        }
        let Some((unit, rest)) = name.split_once('-') else {
            return false;
        };
        let (of, what) = rest.split_once('-').unwrap_or((rest, ""));
        let buckets = match unit {
            "bps" => &mut self.bytes,
            "iops" => &mut self.requests,
            _ => return false,
        };
        let Some(place) = ["total", "read", "write"].iter().position(|n| *n == of) else {
            return false;
        };
        let bucket = &mut buckets[place];
        match what {
            "" if rest == of => bucket.average = value,
            "max" => bucket.max = value,
            "max-length" => bucket.length = value,
            _ => return false,
        }
        true
    }

    fn check(&self) -> Result<(), &'static str> {
        let both = |kind: &[ThrottleBucket; 3], of: fn(&ThrottleBucket) -> u64| {
            of(&kind[0]) > 0 && (of(&kind[1]) > 0 || of(&kind[2]) > 0)
        };
        for kind in [&self.bytes, &self.requests] {
            if both(kind, |b| b.average) || both(kind, |b| b.max) {
                return Err(
                    "bps/iops/max total values and read/write values cannot be used at the same time",
                );
            }
        }
        if self.request_size > 0 && self.requests.iter().all(|b| b.average == 0) {
            return Err("iops size requires an iops value to be set");
        }
        for bucket in self.bytes.iter().chain(&self.requests) {
            if bucket.average > MOST || bucket.max > MOST {
                return Err("bps/iops/max values must be within [0, 1000000000000000]");
            }
            if bucket.length == 0 {
                return Err("the burst length cannot be 0");
            }
            if bucket.length > 1 && bucket.max == 0 {
                return Err("burst length set without burst rate");
            }
            if bucket.max > 0 && MOST / bucket.length < bucket.max {
                return Err("burst length too high for this burst rate");
            }
            if bucket.max > 0 && bucket.average == 0 {
                return Err("bps_max/iops_max require corresponding bps/iops values");
            }
            if bucket.max > 0 && bucket.max < bucket.average {
                return Err("bps_max/iops_max cannot be lower than bps/iops");
            }
        }
        Ok(())
    }
}

/// Nodes that keep to limits together (`--object throttle-group`). A clone is the same group.
#[derive(Clone, Debug)]
pub struct ThrottleGroup(Arc<Group>);

#[derive(Debug)]
struct Group {
    limits: ThrottleLimits,
    levels: Mutex<Levels>,
}

/// How full the buckets are: bytes, then requests.
#[derive(Debug)]
struct Levels {
    of: [[Level; 3]; 2],
    at: Instant,
}

#[derive(Clone, Copy, Debug, Default)]
struct Level {
    long: f64,
    burst: f64,
}

/// What a request has taken of a group, which it gives back if it is dropped before its time.
pub(super) struct Taken<'a> {
    group: &'a Group,
    is_write: bool,
    amounts: [f64; 2],
}

impl ThrottleGroup {
    /// A group with these limits.
    ///
    /// # Errors
    /// [`Error::Refused`] in QEMU's words if they contradict each other.
    pub fn new(limits: ThrottleLimits) -> Result<Self> {
        limits.check().map_err(|e| Error::Refused(e.into()))?;
        Ok(ThrottleGroup(Arc::new(Group {
            limits,
            levels: Mutex::new(Levels {
                of: Default::default(),
                at: Instant::now(),
            }),
        })))
    }

    /// Its limits.
    pub fn limits(&self) -> ThrottleLimits {
        self.0.limits
    }

    /// How long a request waits that comes now, behind all that came before, and what it has taken.
    pub(super) fn take(&self, is_write: bool, bytes: u64) -> (Duration, Taken<'_>) {
        self.0.take(is_write, bytes, Instant::now())
    }
}

impl Group {
    /// Every request has its place when it comes, so that none overtakes another one and nothing is
    /// held while it waits.
    fn take(&self, is_write: bool, bytes: u64, now: Instant) -> (Duration, Taken<'_>) {
        let limits = &self.limits;
        let size = limits.request_size;
        let requests = match size > 0 && bytes > size {
            true => bytes as f64 / size as f64,
            false => 1.0,
        };
        let taken = Taken {
            group: self,
            is_write,
            amounts: [bytes as f64, requests],
        };
        let mut levels = crate::lock(&self.levels);
        let passed = now.saturating_duration_since(levels.at).as_secs_f64();
        levels.at = levels.at.max(now);
        let mut wait = 0.0f64;
        for (kind, buckets) in [limits.bytes, limits.requests].iter().enumerate() {
            for (of, bucket) in buckets.iter().enumerate() {
                levels.of[kind][of].leak(bucket, passed);
            }
            for of in taken.places() {
                let level = &mut levels.of[kind][of];
                wait = wait.max(level.wait(&buckets[of]));
                level.add(taken.amounts[kind]);
            }
        }
        drop(levels);
        (Duration::from_secs_f64(wait.min(1e9)), taken)
    }
}

impl Taken<'_> {
    fn places(&self) -> [usize; 2] {
        [0, 1 + usize::from(self.is_write)]
    }

    /// The request has had its time.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut levels = crate::lock(&self.group.levels);
        for (kind, amount) in self.amounts.into_iter().enumerate() {
            for of in self.places() {
                levels.of[kind][of].add(-amount);
            }
        }
    }
}

impl Level {
    fn leak(&mut self, bucket: &ThrottleBucket, seconds: f64) {
        self.long = (self.long - bucket.average as f64 * seconds).max(0.0);
        self.burst = (self.burst - bucket.max as f64 * seconds).max(0.0);
    }

    /// Seconds until it is no fuller than the bucket is large.
    fn wait(&self, bucket: &ThrottleBucket) -> f64 {
        let (average, max) = (bucket.average as f64, bucket.max as f64);
        if bucket.average == 0 {
            return 0.0;
        }
        if bucket.max == 0 {
            return ((self.long - average * PART) / average).max(0.0);
        }
        let long = ((self.long - max * bucket.length as f64) / average).max(0.0);
        match bucket.length {
            1 => long,
            _ => long.max((self.burst - max * PART) / max),
        }
    }

    fn add(&mut self, amount: f64) {
        self.long = (self.long + amount).max(0.0);
        self.burst = (self.burst + amount).max(0.0);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against requests that pass too early, or wait for what was dropped.
    use super::*;

    fn group(limits: &[(&str, u64)]) -> ThrottleGroup {
        let mut all = ThrottleLimits::default();
        for (name, value) in limits {
            assert!(all.set(name, *value), "{name}");
        }
        ThrottleGroup::new(all).unwrap()
    }

    #[test]
    fn requests_get_their_places_in_order() {
        let group = group(&[("iops-total", 10), ("bps-write", 1000)]);
        let now = Instant::now();
        let take = |is_write, bytes, after: f64| {
            let at = now + Duration::from_secs_f64(after);
            let (wait, taken) = group.0.take(is_write, bytes, at);
            taken.keep();
            (wait.as_secs_f64() * 100.0).round() / 100.0
        };
        // A bucket holds a tenth of a second.
        assert_eq!(take(false, 512, 0.0), 0.0);
        assert_eq!(take(false, 512, 0.0), 0.0);
        assert_eq!(take(false, 512, 0.0), 0.1);
        assert_eq!(take(true, 5000, 0.0), 0.2);
        assert_eq!(take(true, 100, 0.0), 4.9);
        // Reads do not wait for the bytes of writes.
        assert_eq!(take(false, 512, 0.5), 0.0);
    }

    #[test]
    fn a_dropped_request_takes_nothing() {
        let group = group(&[("iops-total", 1)]);
        let start = Instant::now();
        for seconds in [0, 10] {
            let now = start + Duration::from_secs(seconds);
            group.0.take(false, 1, now).1.keep();
            let waits = group.0.take(false, 1, now).0.as_secs_f64();
            assert!(waits > 0.8, "{waits}");
            drop(group.0.take(false, 1, now));
            drop(group.0.take(true, 1, now));
            // One was kept, and one is dropped at the end of its statement.
            let later = now + Duration::from_secs(1);
            assert!(group.0.take(false, 1, later).0 < Duration::from_millis(150));
        }
    }

    #[test]
    fn limits_that_contradict_each_other_are_refused() {
        for limits in [
            &[("iops-total", 1), ("iops-read", 2)][..],
            &[("iops-total-max", 1)],
            &[("iops-total", 5), ("iops-total-max", 1)],
            &[("iops-size", 4096)],
            &[("iops-total", 10), ("iops-total-max-length", 0)],
            &[("bps-total", MOST + 1)],
        ] {
            let mut all = ThrottleLimits::default();
            limits
                .iter()
                .for_each(|(name, value)| assert!(all.set(name, *value)));
            assert!(ThrottleGroup::new(all).is_err(), "{limits:?}");
        }
        let mut all = ThrottleLimits::default();
        for name in [
            "iops",
            "iops-all",
            "bps-total-",
            "bps-total-min",
            "x",
            "iops-size-max",
        ] {
            assert!(!all.set(name, 1), "{name}");
        }
    }
}
