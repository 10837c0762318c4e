//! Statistics of a served device: requests, bytes, latencies.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets for each doubling of the latency: a percentile is right to an eighth.
const STEPS: usize = 8;
/// Doublings, from a nanosecond on: more than a century.
const DOUBLINGS: usize = 64 - 3;

/// Counters of one export, of all its connections together.
#[derive(Debug)]
pub struct Statistics {
    names: &'static [&'static str],
    kinds: Box<[Kind]>,
    connections: AtomicU64,
}

#[derive(Debug)]
struct Kind {
    requests: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    times: Box<[AtomicU64]>,
}

impl Default for Kind {
    fn default() -> Self {
        Kind {
            requests: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            times: (0..DOUBLINGS * STEPS).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

/// The bucket of a latency.
fn bucket(nanoseconds: u64) -> usize {
    let n = nanoseconds.max(STEPS as u64);
    let doubling = n.ilog2() as usize - 3;
    let step = (n >> doubling) as usize - STEPS;
    doubling * STEPS + step
}

/// The longest latency in a bucket.
fn longest(bucket: usize) -> Duration {
    let (doubling, step) = (bucket / STEPS, bucket % STEPS);
    let end = ((STEPS + step + 1) as u128) << doubling;
    Duration::from_nanos(u64::try_from(end - 1).unwrap_or(u64::MAX))
}

impl Statistics {
    /// Statistics of requests of these kinds.
    pub fn new(names: &'static [&'static str]) -> Self {
        Statistics {
            names,
            kinds: names.iter().map(|_| Kind::default()).collect(),
            connections: AtomicU64::new(0),
        }
    }

    /// Counts a connection.
    pub fn connected(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request. `kind` is the index of its name.
    ///
    /// # Panics
    /// If there is no such kind.
    pub fn add(&self, kind: usize, bytes: u64, took: Duration, failed: bool) {
        let kind = &self.kinds[kind];
        kind.requests.fetch_add(1, Ordering::Relaxed);
        kind.bytes.fetch_add(bytes, Ordering::Relaxed);
        if failed {
            kind.failed.fetch_add(1, Ordering::Relaxed);
        }
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        kind.times[bucket(nanoseconds)].fetch_add(1, Ordering::Relaxed);
    }
}

impl Kind {
    /// The latency that `share` of the requests did not exceed.
    fn percentile(&self, share: f64) -> Duration {
        let counts: Vec<u64> = self
            .times
            .iter()
            .map(|n| n.load(Ordering::Relaxed))
            .collect();
        let total: u64 = counts.iter().sum();
        let wanted = (total as f64 * share).ceil() as u64;
        let mut sum = 0;
        for (bucket, count) in counts.iter().enumerate() {
            sum += count;
            if sum >= wanted && *count > 0 {
                return longest(bucket);
            }
        }
        Duration::ZERO
    }
}

/// A line for each kind of request that occurred.
impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connections = self.connections.load(Ordering::Relaxed);
        writeln!(f, "  connections: {connections}")?;
        for (name, kind) in self.names.iter().zip(&self.kinds) {
            let requests = kind.requests.load(Ordering::Relaxed);
            if requests == 0 {
                continue;
            }
            let microseconds = |share| kind.percentile(share).as_nanos() as f64 / 1000.0;
            writeln!(
                f,
                "  {name}: {requests} requests, {} bytes, {} failed; microseconds: \
                 50% {:.1}, 90% {:.1}, 99% {:.1}, 99.9% {:.1}, 100% {:.1}",
                kind.bytes.load(Ordering::Relaxed),
                kind.failed.load(Ordering::Relaxed),
                microseconds(0.5),
                microseconds(0.9),
                microseconds(0.99),
                microseconds(0.999),
                microseconds(1.0),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a latency that is counted in the wrong bucket, or in none.
    use super::*;

    #[test]
    fn every_latency_has_a_bucket() {
        for bit in 0..64 {
            for n in [1u64 << bit, (1 << bit) + (1 << bit) / 3, u64::MAX >> bit] {
                let end = longest(bucket(n)).as_nanos() as u64;
                assert!(end >= n && end - n <= n / 4 + 8, "{n}: {end}");
            }
        }
        assert_eq!(bucket(u64::MAX), DOUBLINGS * STEPS - 1);
        let statistics = Statistics::new(&["read"]);
        for n in 1..=100 {
            let took = Duration::from_micros(n);
            statistics.add(0, 1, took, n == 3);
        }
        let kind = &statistics.kinds[0];
        let half = kind.percentile(0.5).as_nanos();
        assert!((50_000..60_000).contains(&half), "{half}");
        assert!(
            statistics
                .to_string()
                .contains("read: 100 requests, 100 bytes, 1 failed")
        );
    }
}
