//! What a run does, as numbers.

use std::ops::RangeInclusive;

use super::Arguments;
use crate::arguments::size::{parse_number, parse_option, parse_within};
use crate::program::Failure;

/// The largest count, depth and size that qemu-img takes.
const MAX: u64 = i32::MAX as u64;
/// The most memory that the buffers of all requests may take, in bytes.
const MAX_BUFFERS: u64 = 8 << 30;

/// What to do, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Requests.
    pub count: u64,
    /// Requests in flight.
    pub depth: u64,
    /// Bytes of a request.
    pub size: u64,
    /// From one request's start to the next one's.
    pub step: u64,
    /// Where the first request starts.
    pub offset: u64,
    /// Requests are at random places instead.
    pub random: bool,
    /// Threads that share the requests.
    pub threads: u64,
    /// What is written; None: the requests are reads.
    pub pattern: Option<u8>,
    /// Requests between two flushes; 0: no flushes.
    pub flush_interval: u64,
    /// Flushes wait until nothing is in flight.
    pub drain: bool,
}

impl Plan {
    /// What the arguments say.
    pub fn new(arguments: &Arguments) -> Result<Plan, Failure> {
        let depth = value("queue depth", &arguments.depth, parse_number, 64, 1)?;
        let count = value("request count", &arguments.count, parse_number, 75000, 1)?;
        let size = value("buffer size", &arguments.buffer_size, parse_within, 4096, 1)?;
        let step = value("step size", &arguments.step_size, parse_within, 0, 0)?;
        let threads = value("number of threads", &arguments.threads, parse_number, 1, 1)?;
        let pattern = match &arguments.pattern {
            Some(text) => parse_number("pattern byte", text, 0..=255)? as u8,
            None => 0,
        };
        let interval = &arguments.flush_interval;
        let flush_interval = value("flush interval", interval, parse_number, 0, 0)?;
        let offset = match &arguments.offset {
            Some(text) => parse_option("offset", text)?,
            None => 0,
        };
        if size.saturating_mul(depth.min(count)) > MAX_BUFFERS {
            return Err(Failure::new(format!(
                "The buffers of {depth} requests of {size} bytes take more than {MAX_BUFFERS} bytes"
            )));
        }
        if threads > 1024 {
            let text = "Invalid number of threads specified. Must be between 1 and 1024.";
            return Err(Failure::new(text));
        }
        Ok(Plan {
            count,
            depth,
            size,
            step: if step == 0 { size } else { step },
            offset,
            random: arguments.random,
            threads,
            pattern: arguments.write.then_some(pattern),
            flush_interval,
            drain: !arguments.no_drain,
        })
    }

    /// Refuses flushes that mean nothing.
    pub fn check_flushes(&self) -> Result<(), Failure> {
        let text = match self.flush_interval {
            0 => return Ok(()),
            _ if self.pattern.is_none() => "--flush-interval is only available in write tests",
            interval if interval < self.depth => "Flush interval can't be smaller than depth",
            _ => return Ok(()),
        };
        Err(Failure::new(text))
    }

    /// The share of thread `index` in the requests and the depth.
    pub fn share(&self, index: u64) -> Plan {
        let part = |n: u64| n / self.threads + u64::from(index < n % self.threads);
        let before = (0..index).map(|i| self.share_of_count(i)).sum::<u64>();
        Plan {
            count: part(self.count),
            depth: part(self.depth).max(1),
            offset: self.offset.wrapping_add(before.wrapping_mul(self.step)),
            ..*self
        }
    }

    fn share_of_count(&self, index: u64) -> u64 {
        self.count / self.threads + u64::from(index < self.count % self.threads)
    }
}

/// An option's value from `min` to [`MAX`].
fn value(
    what: &str,
    text: &Option<String>,
    parse: fn(&str, &str, RangeInclusive<u64>) -> Result<u64, Failure>,
    default: u64,
    min: u64,
) -> Result<u64, Failure> {
    match text {
        Some(text) => parse(what, text, min..=MAX),
        None => Ok(default),
    }
}

#[cfg(test)]
pub mod tests {
    //! Guards against numbers that are parsed differently from qemu-img, and shares of threads that
    //! do not add up.
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::arguments::with_any_values;

    pub fn plan(arguments: &[&str]) -> Result<Plan, Failure> {
        let all = std::iter::once("bench").chain(arguments.iter().copied());
        let command = with_any_values(Arguments::command());
        let matches = command.try_get_matches_from(all).expect("arguments");
        Plan::new(&Arguments::from_arg_matches(&matches).expect("arguments"))
    }

    #[test]
    fn threads_share_all_requests() {
        let plan = plan(&["-c", "10", "-d", "3", "--threads", "4"]).expect("a plan");
        let shares: Vec<_> = (0..4).map(|i| plan.share(i)).collect();
        assert_eq!(shares.iter().map(|s| s.count).sum::<u64>(), 10);
        assert!(shares.iter().all(|s| s.depth == 1));
        assert_eq!(shares[2].offset, 6 * 4096);
    }

    #[test]
    fn numbers_are_checked() {
        // Octal, as in C.
        assert_eq!(plan(&["-c", "010"]).expect("a plan").count, 8);
        for (arguments, text) in [
            (
                ["-c", "0"],
                "Invalid request count specified. Must be between 1 and 2147483647.",
            ),
            (["-c", "4k"], "Invalid request count specified: '4k'"),
            (["-c", "08"], "Invalid request count specified: '08'"),
            (
                ["-d", "2147483648"],
                "Invalid queue depth specified. Must be between 1 and 2147483647.",
            ),
            (
                ["-s", "4G"],
                "Invalid buffer size specified. Must be between 1 and 2147483647.",
            ),
            (
                ["-S", "4G"],
                "Invalid step size specified. Must be between 0 and 2147483647.",
            ),
            (["-o", "x"], "Invalid offset specified: 'x'"),
            (
                ["-o", "-1"],
                "Invalid offset specified. Must be between 0 and 9223372036854775807.",
            ),
        ] {
            match plan(&arguments) {
                Err(Failure::Message { text: said, .. }) => assert_eq!(said, text),
                other => panic!("{arguments:?}: {other:?}"),
            }
        }
    }
}
