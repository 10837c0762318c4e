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
    clients: AtomicU64,
}

#[derive(Debug)]
struct Kind {
    in_flight: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    times: Box<[AtomicU64]>,
}

/// A request in flight, until it is dropped.
#[derive(Debug)]
pub struct InFlight<'a>(&'a Kind);

/// A connected client, until it is dropped.
#[derive(Debug)]
pub struct Client<'a>(&'a Statistics);

/// The totals of one kind of requests.
#[derive(Clone, Debug)]
pub struct Totals {
    /// The name of the kind.
    pub name: &'static str,
    /// Requests that have ended.
    pub requests: u64,
    /// Those that failed.
    pub failed: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that have not ended.
    pub in_flight: u64,
    /// The sum of their latencies.
    pub time: Duration,
    /// How many took less than 2^n nanoseconds, for each n from [`Totals::FIRST`] on.
    pub below: Vec<u64>,
}

impl Totals {
    /// About a microsecond.
    pub const FIRST: u32 = 10;
    /// About 17 seconds.
    pub const LAST: u32 = 34;
}

impl Default for Kind {
    fn default() -> Self {
        Kind {
            in_flight: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
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
            clients: AtomicU64::new(0),
        }
    }

    /// Counts a connection, and its client until the answer is dropped.
    #[must_use]
    pub fn connected(&self) -> Client<'_> {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.clients.fetch_add(1, Ordering::Relaxed);
        Client(self)
    }

    /// Connections so far, and clients that are connected now.
    pub fn connections_and_clients(&self) -> (u64, u64) {
        let connections = self.connections.load(Ordering::Relaxed);
        (connections, self.clients.load(Ordering::Relaxed))
    }

    /// Counts a request in flight until the answer is dropped. `kind` is the index of its name.
    ///
    /// # Panics
    /// If there is no such kind.
    #[must_use]
    pub fn begin(&self, kind: usize) -> InFlight<'_> {
        let kind = &self.kinds[kind];
        kind.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(kind)
    }

    /// Counts a request that has ended. `kind` is the index of its name.
    ///
    /// # Panics
    /// If there is no such kind.
    pub fn add(&self, kind: usize, bytes: u64, took: Duration, failed: bool) {
        let kind = &self.kinds[kind];
        kind.bytes.fetch_add(bytes, Ordering::Relaxed);
        if failed {
            kind.failed.fetch_add(1, Ordering::Relaxed);
        }
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        kind.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        kind.times[bucket(nanoseconds)].fetch_add(1, Ordering::Relaxed);
    }

    /// The totals of each kind. Requests that end meanwhile are counted in a part of them.
    pub fn totals(&self) -> impl Iterator<Item = Totals> {
        let kinds = self.names.iter().zip(&self.kinds);
        kinds.map(|(name, kind)| kind.totals(name))
    }
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Kind {
    /// Requests in each bucket.
    fn counts(&self) -> Vec<u64> {
        let counts = self.times.iter().map(|n| n.load(Ordering::Relaxed));
        counts.collect()
    }

    fn totals(&self, name: &'static str) -> Totals {
        let counts = self.counts();
        let below = |power: u32| counts[..bucket(1 << power)].iter().sum();
        Totals {
            name,
            below: (Totals::FIRST..=Totals::LAST).map(below).collect(),
            requests: counts.iter().sum(),
            failed: self.failed.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            time: Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)),
        }
    }

    /// The latency that `share` of the requests did not exceed.
    fn percentile(&self, share: f64) -> Duration {
        let counts = self.counts();
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
            let requests: u64 = kind.counts().iter().sum();
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
        let totals = statistics.totals().next().unwrap();
        assert_eq!(
            (totals.requests, totals.failed, totals.bytes),
            (100, 1, 100)
        );
        assert_eq!(totals.time, Duration::from_micros(5050));
        // Below 2^10, 2^11, ... ns: 1 and 2 us, and so on.
        assert_eq!(totals.below[..4], [1, 2, 4, 8]);
        assert_eq!(totals.below.last(), Some(&100));
        let kind = &statistics.kinds[0];
        let half = kind.percentile(0.5).as_nanos();
        assert!((50_000..60_000).contains(&half), "{half}");
        assert!(
            statistics
                .to_string()
                .contains("read: 100 requests, 100 bytes, 1 failed")
        );
    }

    #[test]
    fn what_goes_on_is_counted_until_it_is_dropped() {
        let statistics = Statistics::new(&["read"]);
        let held = (
            statistics.connected(),
            statistics.begin(0),
            statistics.begin(0),
        );
        let in_flight = || statistics.totals().next().unwrap().in_flight;
        assert_eq!(statistics.connections_and_clients(), (1, 1));
        assert_eq!(in_flight(), 2);
        drop(held);
        assert_eq!(statistics.connections_and_clients(), (1, 0));
        assert_eq!(in_flight(), 0);
    }
}
