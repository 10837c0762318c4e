//! Targets and whether they were met.

use std::fmt;

/// A ratio to this one still counts as "no slower": two runs of one program differ by as much
/// on a quiet machine.
pub const NO_SLOWER: f64 = 0.97;

/// What a figure must be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
}

/// A target and what was reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The project's target that it belongs to: `P1`, …
    pub target: &'static str,
    /// What is judged.
    pub what: String,
    /// What it must be.
    pub bound: Bound,
    /// What it is.
    pub reached: f64,
    /// The unit behind the figures: `×` or ` MiB`.
    pub unit: &'static str,
}

impl Verdict {
    /// A target that is a ratio.
    pub fn new(target: &'static str, what: impl Into<String>, bound: Bound, reached: f64) -> Self {
        Verdict {
            target,
            what: what.into(),
            bound,
            reached,
            unit: "×",
        }
    }

    /// The same with another unit.
    pub fn unit(mut self, unit: &'static str) -> Self {
        self.unit = unit;
        self
    }

    /// Whether there is a figure at all.
    pub fn measured(&self) -> bool {
        !self.reached.is_nan()
    }

    /// Whether the target was met.
    pub fn met(&self) -> bool {
        match self.bound {
            Bound::AtLeast(b) => self.reached >= b,
            Bound::AtMost(b) => self.reached <= b,
        }
    }

    /// How good the figure is against its bound: 1 is just met, less is missed.
    pub fn margin(&self) -> f64 {
        match self.bound {
            Bound::AtLeast(b) => self.reached / b,
            Bound::AtMost(b) => b / self.reached,
        }
    }

    /// `met`, or by how much it was missed, as a share of the target.
    pub fn outcome(&self) -> String {
        if !self.measured() {
            return "not measured".into();
        }
        if self.met() {
            return "met".into();
        }
        let by = match self.bound {
            Bound::AtLeast(b) => 1.0 - self.reached / b,
            Bound::AtMost(b) => self.reached / b - 1.0,
        };
        format!("missed by {:.1} %", by * 100.0)
    }

    /// What it must be, as text.
    pub fn wanted(&self) -> String {
        match self.bound {
            Bound::AtLeast(b) => format!("≥ {}{}", plain(b), self.unit),
            Bound::AtMost(b) => format!("≤ {}{}", plain(b), self.unit),
        }
    }

    /// What it is, as text.
    pub fn got(&self) -> String {
        if !self.measured() {
            "—".into()
        } else {
            format!("{:.2}{}", self.reached, self.unit)
        }
    }

    /// The row of the table of targets.
    pub fn row(&self, experiment: &str) -> Vec<String> {
        vec![
            self.target.into(),
            experiment.into(),
            self.what.clone(),
            self.wanted(),
            self.got(),
            self.outcome(),
        ]
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} (target {}): {}",
            self.what,
            self.got(),
            self.wanted(),
            self.outcome()
        )
    }
}

fn plain(v: f64) -> String {
    let text = format!("{v:.3}");
    text.trim_end_matches('0').trim_end_matches('.').into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn met_and_missed() {
        assert_eq!(
            Verdict::new("P1", "a", Bound::AtLeast(3.0), 3.0).outcome(),
            "met"
        );
        assert_eq!(
            Verdict::new("P1", "a", Bound::AtLeast(3.0), 1.5).outcome(),
            "missed by 50.0 %"
        );
        assert_eq!(
            Verdict::new("P1", "a", Bound::AtMost(64.0), 80.0).outcome(),
            "missed by 25.0 %"
        );
        assert_eq!(
            Verdict::new("P1", "a", Bound::AtMost(0.6), f64::NAN).outcome(),
            "not measured"
        );
    }

    #[test]
    fn shown_with_unit() {
        let v = Verdict::new("P8", "peak", Bound::AtMost(64.0), 31.25).unit(" MiB");
        assert_eq!(v.to_string(), "peak: 31.25 MiB (target ≤ 64 MiB): met");
        assert_eq!(
            Verdict::new("P1", "x", Bound::AtLeast(1.25), 2.0).wanted(),
            "≥ 1.25×"
        );
    }
}
