//! How many generated cases a test has, and which.

use std::time::{Duration, Instant};

/// The seeds of a test's generated cases. Dropped, it prints `cases: N` and what they were, or, if
/// the test panics, the seed that repeats the failure.
pub struct Cases {
    first: u64,
    next: u64,
    /// How many, if the time does not tell.
    most: u64,
    /// Of what was added, not of seeds.
    is_work: bool,
    time: Option<Duration>,
    begun: Instant,
    /// What the test has counted.
    added: Option<u64>,
    what: String,
}

/// The number in an environment variable, if it is set.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|e| panic!("{name}={text}: {e}")),
    )
}

/// The seeds from 1 on, `default` of them.
pub fn cases(default: u64, what: impl Into<String>) -> Cases {
    Cases {
        first: number("ZEBU_SEED").unwrap_or(1),
        next: number("ZEBU_SEED").unwrap_or(1),
        most: number("ZEBU_CASES").unwrap_or(default),
        is_work: false,
        time: number("ZEBU_SECONDS").map(Duration::from_secs),
        begun: Instant::now(),
        added: None,
        what: what.into(),
    }
}

/// The seeds from 1 on, until `default` was added by [`Cases::add`].
pub fn work(default: u64, what: impl Into<String>) -> Cases {
    let mut cases = cases(default, what);
    cases.is_work = true;
    cases.added = Some(0);
    cases
}

impl Cases {
    /// Begins with this seed, unless another one is asked for.
    #[must_use]
    pub fn from(mut self, first: u64) -> Self {
        if number("ZEBU_SEED").is_none() {
            (self.first, self.next) = (first, first);
        }
        self
    }

    /// Runs for `default` if neither a number nor a time is asked for.
    #[must_use]
    pub fn for_time(mut self, default: Duration) -> Self {
        if number("ZEBU_CASES").is_none() && self.time.is_none() {
            self.time = Some(default);
        }
        self
    }

    /// One of several loops of a test, which has this part of the time.
    #[must_use]
    pub fn share(mut self, part: usize, of: usize) -> Self {
        self.time = self.time.map(|time| time * part as u32 / of as u32);
        self
    }

    /// Counts what the test has done: this is printed instead of the number of seeds.
    pub fn add(&mut self, count: u64) {
        *self.added.get_or_insert(0) += count;
    }

    /// How many seeds there were.
    pub fn seeds(&self) -> u64 {
        self.next - self.first
    }

    /// How many cases there were, as they are counted.
    pub fn done(&self) -> u64 {
        self.added.unwrap_or(self.seeds())
    }
}

impl Iterator for Cases {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let is_over = match self.time {
            Some(time) => self.begun.elapsed() >= time,
            None if self.is_work => self.done() >= self.most,
            None => self.seeds() >= self.most,
        };
        if is_over {
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }
}

impl Drop for Cases {
    fn drop(&mut self) {
        let Cases { next, what, .. } = &*self;
        if !std::thread::panicking() {
            // After the dots of the test harness.
            println!("\ncases: {} {what}", self.done());
        } else if self.seeds() > 0 {
            eprintln!("failed with ZEBU_SEED={} ZEBU_CASES=1: {what}", next - 1);
        }
    }
}

/// Whether the cases are the tests' own, so that they may expect something of all of them together.
pub fn are_usual() -> bool {
    ["ZEBU_SEED", "ZEBU_CASES", "ZEBU_SECONDS"]
        .iter()
        .all(|name| std::env::var_os(name).is_none())
}

/// A number below `n` for a seed. Those of seeds that follow each other are spread over all.
pub fn spread(seed: u64, n: u64) -> u64 {
    let fraction = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((u128::from(fraction) * u128::from(n)) >> 64) as u64
}

/// The name of the only thing that is wanted (`ZEBU_ONLY`).
pub fn only() -> Option<String> {
    std::env::var("ZEBU_ONLY").ok()
}

/// Whether what has this name is wanted.
pub fn is_only(name: &str) -> bool {
    only().is_none_or(|only| only == name)
}

/// Whether all cases are wanted, also the slowest (`ZEBU_ALL`).
pub fn all() -> bool {
    std::env::var_os("ZEBU_ALL").is_some()
}

/// One in `of` of a test's cases, or all with `ZEBU_ALL`: each has the options that the next one
/// has, in another combination. `ZEBU_PART` is the index of the first one.
pub fn part<T>(of: usize, cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let first = number("ZEBU_PART").unwrap_or(0) as usize;
    let (first, step) = if all() { (0, 1) } else { (first % of, of) };
    cases.into_iter().skip(first).step_by(step)
}

/// Whether each step is to be printed (`ZEBU_TRACE`).
pub fn trace() -> bool {
    std::env::var_os("ZEBU_TRACE").is_some()
}

/// Whether a failed case is to be left as it is (`ZEBU_KEEP`).
pub fn keep() -> bool {
    std::env::var_os("ZEBU_KEEP").is_some()
}
