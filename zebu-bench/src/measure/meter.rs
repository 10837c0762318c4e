//! Where the seconds of a run are read: on the suite's clock, or in what the program prints.

use super::child::Outcome;
use crate::error::{Error, Result};
use serde_json::Value;

/// Which clock counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meter {
    /// The wall clock of the whole process.
    Wall,
    /// `Run completed in N seconds.`, as qemu-img bench and zebu bench print it; this leaves
    /// opening the image out, as the seed's own table does. Where it says less than 10 ms the
    /// three places it has are too few and the wall clock is taken.
    Bench,
    /// fio's JSON: the seconds its requests took, made from their number and their rate, as
    /// its runtime is only reported in milliseconds.
    Fio,
    /// The one or the other, by what a client of a server prints.
    Client,
}

impl Meter {
    /// The seconds of a run.
    pub fn seconds(self, outcome: &Outcome) -> Result<f64> {
        match self {
            Meter::Wall => Ok(outcome.wall),
            Meter::Bench => {
                let s = bench_seconds(&outcome.stdout)
                    .ok_or_else(|| Error::new("its output has no line 'Run completed in'"))?;
                Ok(if s < 0.01 { outcome.wall } else { s })
            }
            Meter::Fio => fio_seconds(&outcome.stdout)
                .ok_or_else(|| Error::new("its output is not fio's JSON")),
            Meter::Client => bench_seconds(&outcome.stdout)
                .or_else(|| fio_seconds(&outcome.stdout))
                .ok_or_else(|| Error::new("its output says no time")),
        }
    }
}

fn bench_seconds(text: &str) -> Option<f64> {
    let rest = text.split("Run completed in ").nth(1)?;
    rest.split_whitespace().next()?.parse().ok()
}

fn fio_seconds(text: &str) -> Option<f64> {
    // fio may print a line or two before its JSON.
    let json: Value = serde_json::from_str(&text[text.find('{')?..]).ok()?;
    let job = &json["jobs"][0];
    ["read", "write"].iter().find_map(|d| {
        let ios = job[d]["total_ios"].as_f64()?;
        let rate = job[d]["iops"].as_f64()?;
        (ios > 0.0 && rate > 0.0).then(|| ios / rate)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(stdout: &str) -> Outcome {
        Outcome {
            wall: 9.0,
            stdout: stdout.into(),
            ..Outcome::default()
        }
    }

    #[test]
    fn bench_line_is_read() {
        let out = "Sending 100 read requests, 4096 bytes each\nRun completed in 1.234 seconds.\n";
        assert_eq!(Meter::Bench.seconds(&said(out)), Ok(1.234));
        assert!(Meter::Bench.seconds(&said("nothing")).is_err());
    }

    #[test]
    fn a_bench_time_of_few_places_yields_to_the_wall_clock() {
        assert_eq!(
            Meter::Bench.seconds(&said("Run completed in 0.003 seconds.")),
            Ok(9.0)
        );
    }

    #[test]
    fn fio_json_is_read_past_leading_lines() {
        let out = r#"fio: note
{"jobs":[{"read":{"total_ios":2000,"iops":1000.0},"write":{"total_ios":0,"iops":0}}]}"#;
        assert_eq!(Meter::Fio.seconds(&said(out)), Ok(2.0));
        let out =
            r#"{"jobs":[{"read":{"total_ios":0,"iops":0},"write":{"total_ios":50,"iops":100}}]}"#;
        assert_eq!(Meter::Fio.seconds(&said(out)), Ok(0.5));
        assert!(Meter::Fio.seconds(&said("no")).is_err());
    }

    #[test]
    fn wall_is_wall() {
        assert_eq!(Meter::Wall.seconds(&said("")), Ok(9.0));
    }
}
