//! The runs of one program in one cell.

use super::stats::{greatest, least, median};
use crate::units;

/// The counted runs of one contender in one cell, or why there are none.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// The contender's name: `zebu`, `QEMU`, …
    pub name: String,
    /// The flags that tell it from the same program's other contenders.
    pub flags: String,
    /// Seconds of each run, by the contender's meter.
    pub seconds: Vec<f64>,
    /// CPU seconds of each run.
    pub cpu: Vec<f64>,
    /// Greatest peak memory over the runs, bytes.
    pub peak: u64,
    /// Why it was left out, if it was.
    pub failure: Option<String>,
}

impl Series {
    /// Median seconds.
    pub fn median(&self) -> f64 {
        median(&self.seconds)
    }

    /// Median CPU seconds.
    pub fn cpu_median(&self) -> f64 {
        median(&self.cpu)
    }

    /// How many times as fast as `peer` this is: the ratio of medians.
    pub fn speedup_over(&self, peer: &Series) -> f64 {
        peer.median() / self.median()
    }

    /// This one's CPU seconds as a fraction of `peer`'s.
    pub fn cpu_against(&self, peer: &Series) -> f64 {
        self.cpu_median() / peer.cpu_median()
    }

    /// Whether it has figures.
    pub fn ok(&self) -> bool {
        self.failure.is_none() && !self.seconds.is_empty()
    }

    /// Name and flags.
    pub fn label(&self) -> String {
        if self.flags.is_empty() {
            self.name.clone()
        } else {
            format!("{} `{}`", self.name, self.flags)
        }
    }

    /// The median and the spread as a table shows them: `1.234 (1.200–1.301)`.
    pub fn shown(&self) -> String {
        if !self.ok() {
            return "—".into();
        }
        format!(
            "{} ({}–{})",
            units::seconds(self.median()),
            units::seconds(least(&self.seconds)),
            units::seconds(greatest(&self.seconds))
        )
    }
}

/// The series of that name that has figures, the fastest if several.
pub fn fastest<'a>(all: &'a [Series], name: &str) -> Option<&'a Series> {
    all.iter()
        .filter(|s| s.name == name && s.ok())
        .min_by(|a, b| a.median().total_cmp(&b.median()))
}

/// The first series of that name and these flags that has figures.
pub fn find<'a>(all: &'a [Series], name: &str, flags: &str) -> Option<&'a Series> {
    all.iter()
        .find(|s| s.name == name && s.flags == flags && s.ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, flags: &str, seconds: &[f64]) -> Series {
        Series {
            name: name.into(),
            flags: flags.into(),
            seconds: seconds.to_vec(),
            cpu: seconds.to_vec(),
            ..Series::default()
        }
    }

    #[test]
    fn speedup_is_the_ratio_of_medians() {
        let a = series("zebu", "", &[1.0, 1.1, 5.0]);
        let b = series("QEMU", "", &[3.3, 3.0, 9.0]);
        assert!((a.speedup_over(&b) - 3.0).abs() < 1e-9);
        assert!((a.cpu_against(&b) - 1.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn the_fastest_of_a_name_leaves_failures_out() {
        let mut broken = series("QEMU", "-W", &[]);
        broken.failure = Some("no".into());
        let all = [
            broken,
            series("QEMU", "", &[3.0]),
            series("QEMU", "-m 16", &[2.0]),
        ];
        assert_eq!(fastest(&all, "QEMU").unwrap().flags, "-m 16");
        assert!(fastest(&all, "zebu").is_none());
        assert!(find(&all, "QEMU", "-W").is_none());
    }

    #[test]
    fn shown_has_median_and_spread() {
        assert_eq!(
            series("a", "", &[1.0, 2.0, 3.0]).shown(),
            "2.000 (1.000–3.000)"
        );
        assert_eq!(series("a", "", &[]).shown(), "—");
    }
}
