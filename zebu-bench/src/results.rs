//! What a run of the suite found: the figures of every run, as they are saved.

use crate::error::{Context, Result};
use crate::measure::Series;
use crate::measure::stats::{geometric_mean, median};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The whole run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Results {
    /// Facts of the machine, and versions: (what, value).
    pub machine: Vec<(String, String)>,
    /// Peers that are missing, and why.
    pub notes: Vec<String>,
    /// How long it took.
    pub seconds: f64,
    /// What was measured.
    pub experiments: Vec<Experiment>,
}

/// One experiment.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Experiment {
    /// Its name on the command line.
    pub name: String,
    /// Its heading on the page.
    pub title: String,
    /// What is measured and how, in a few sentences.
    pub about: String,
    /// Its tables.
    pub groups: Vec<Group>,
    /// What was left out.
    pub notes: Vec<String>,
}

/// Rows that share a table and a unit.
#[derive(Debug, Serialize, Deserialize)]
pub struct Group {
    /// Heading of the table.
    pub title: String,
    /// What its figures are.
    pub unit: Unit,
    /// Which ratio its rows have.
    pub ratio: Ratio,
    /// What the geometric mean of the ratios must reach.
    pub mean_floor: Option<f64>,
    /// How it is drawn, if it is.
    pub chart: Option<Scale>,
    /// The rows.
    pub rows: Vec<Row>,
}

/// One thing that was measured.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    /// What it is.
    pub label: String,
    /// What its ratio must reach: at least this, or at most for sizes.
    pub bound: Option<f64>,
    /// A figure for each program.
    pub figures: Vec<Figure>,
}

/// What one program reached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// Its name: `zebu`, `QEMU`, `fio`, …
    pub program: String,
    /// The flags that it was fastest with.
    pub flags: String,
    /// The figure of each run.
    pub runs: Vec<f64>,
}

/// The unit of figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Seconds; less is better.
    Seconds,
    /// Requests a second.
    Requests,
    /// Mebibytes a second.
    Throughput,
    /// Mebibytes; less is better.
    Mebibytes,
    /// Nanoseconds; less is better.
    Nanoseconds,
}

impl Unit {
    /// Its name on an axis or over a table.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Seconds => "seconds",
            Unit::Requests => "requests a second",
            Unit::Throughput => "MiB a second",
            Unit::Mebibytes => "MiB",
            Unit::Nanoseconds => "nanoseconds",
        }
    }

    /// Whether less is better.
    pub fn less_is_better(self) -> bool {
        !matches!(self, Unit::Requests | Unit::Throughput)
    }
}

/// Which ratio a group shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ratio {
    /// How many times as fast as QEMU zebu is.
    Speed,
    /// The same, judged against fio.
    SpeedOfFio,
    /// How many times as fast as the same program with native AIO.
    SpeedOfNative,
    /// How many times as fast as imago.
    SpeedOfImago,
    /// zebu's figure divided by QEMU's, for sizes.
    Size,
    /// No ratio: zebu's own figure is judged.
    None,
}

/// How a group is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scale {
    /// The figures themselves.
    Absolute,
    /// Divided by QEMU's median, where rows differ by orders of magnitude.
    Relative,
}

impl Results {
    /// Writes them to a file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let name = || path.display().to_string();
        let text = serde_json::to_string_pretty(self).context(name)?;
        std::fs::write(path, text).context(name)
    }

    /// Reads them from a file.
    pub fn load(path: &Path) -> Result<Results> {
        let name = || path.display().to_string();
        let text = std::fs::read_to_string(path).context(name)?;
        serde_json::from_str(&text).context(name)
    }
}

impl Experiment {
    /// An experiment without figures.
    pub fn new(name: &str, title: &str) -> Self {
        Experiment {
            name: name.into(),
            title: title.into(),
            ..Experiment::default()
        }
    }

    /// Adds a remark and prints it.
    pub fn note(&mut self, text: String) {
        println!("note: {text}");
        self.notes.push(text);
    }

    /// Adds a row to a group and prints it. Programs that failed are left out with a note; a row
    /// without a figure of zebu is left out.
    pub fn add(&mut self, group: &mut Group, row: Row, all: &[Series]) {
        for s in all.iter().filter(|s| !s.ok()) {
            let why = s.failure.as_deref().unwrap_or("it did not run");
            self.note(format!("{}: {} is left out: {why}", row.label, s.label()));
        }
        if row.of("zebu").is_some() {
            group.say(&row);
            group.rows.push(row);
        }
    }
}

impl Group {
    /// Whether it compares speed.
    pub fn is_speed(&self) -> bool {
        matches!(self.ratio, Ratio::Speed | Ratio::SpeedOfFio)
    }

    /// A group without rows.
    pub fn new(title: &str, unit: Unit, ratio: Ratio) -> Self {
        Group {
            title: title.into(),
            unit,
            ratio,
            mean_floor: None,
            chart: None,
            rows: Vec::new(),
        }
    }

    /// The same, drawn.
    pub fn drawn(self, scale: Scale) -> Self {
        Group {
            chart: Some(scale),
            ..self
        }
    }

    /// The same, whose mean ratio must reach that.
    pub fn with_mean(self, floor: f64) -> Self {
        Group {
            mean_floor: Some(floor),
            ..self
        }
    }

    fn say(&self, row: &Row) {
        let one = |f: &Figure| format!("{} {:.4}", f.program, f.median());
        let all: Vec<String> = row.figures.iter().map(one).collect();
        let ratio = self
            .ratio_of(row)
            .map_or(String::new(), |r| format!(", {r:.2}×"));
        println!("{}: {}{ratio}", row.label, all.join(", "));
    }

    /// How many times as good as `other` zebu is in a row.
    pub fn advantage(&self, row: &Row, other: &str) -> Option<f64> {
        let (zebu, other) = (row.of("zebu")?.median(), row.of(other)?.median());
        Some(match self.unit.less_is_better() {
            true => other / zebu,
            false => zebu / other,
        })
    }

    /// The ratio that the table shows.
    pub fn ratio_of(&self, row: &Row) -> Option<f64> {
        match self.ratio {
            Ratio::Speed | Ratio::SpeedOfFio => self.advantage(row, "QEMU"),
            Ratio::SpeedOfNative => self.advantage(row, "native"),
            Ratio::SpeedOfImago => self.advantage(row, "imago"),
            Ratio::Size => Some(row.of("zebu")?.median() / row.of("QEMU")?.median()),
            Ratio::None => None,
        }
    }

    /// What is judged: a ratio, or zebu's own figure.
    pub fn judged(&self, row: &Row) -> Option<f64> {
        match self.ratio {
            Ratio::SpeedOfFio => self.advantage(row, "fio"),
            Ratio::None => Some(row.of("zebu")?.median()),
            _ => self.ratio_of(row),
        }
    }

    /// Whether a row holds its bound; None if it has none.
    pub fn holds(&self, row: &Row) -> Option<bool> {
        let (bound, judged) = (row.bound?, self.judged(row)?);
        Some(match self.ratio {
            Ratio::Size | Ratio::None => judged <= bound,
            _ => judged >= bound,
        })
    }

    /// All ratios of the table.
    pub fn ratios(&self) -> Vec<f64> {
        self.rows.iter().filter_map(|r| self.ratio_of(r)).collect()
    }

    /// The geometric mean of the ratios.
    pub fn mean(&self) -> f64 {
        geometric_mean(&self.ratios())
    }
}

impl Row {
    /// A row of the programs that ran, `figure` made from the seconds of a run.
    pub fn new(
        label: &str,
        bound: Option<f64>,
        all: &[Series],
        figure: impl Fn(f64) -> f64,
    ) -> Self {
        let one = |s: &Series| Figure {
            program: s.name.clone(),
            flags: s.flags.clone(),
            runs: s.seconds.iter().map(|s| figure(*s)).collect(),
        };
        Row {
            label: label.into(),
            bound,
            figures: all.iter().filter(|s| s.ok()).map(one).collect(),
        }
    }

    /// The figure of a program.
    pub fn of(&self, program: &str) -> Option<&Figure> {
        self.figures.iter().find(|f| f.program == program)
    }
}

impl Figure {
    /// The median of the runs.
    pub fn median(&self) -> f64 {
        median(&self.runs)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A row of two programs.
    pub fn row(label: &str, bound: Option<f64>, figures: &[(&str, &[f64])]) -> Row {
        let one = |(program, runs): &(&str, &[f64])| Figure {
            program: (*program).into(),
            flags: String::new(),
            runs: runs.to_vec(),
        };
        Row {
            label: label.into(),
            bound,
            figures: figures.iter().map(one).collect(),
        }
    }

    #[test]
    fn less_is_better_for_seconds_and_more_for_rates() {
        let r = row(
            "a",
            Some(1.5),
            &[("QEMU", &[2.0, 3.0, 9.0]), ("zebu", &[1.0, 1.5, 8.0])],
        );
        let seconds = Group::new("g", Unit::Seconds, Ratio::Speed);
        assert_eq!(seconds.ratio_of(&r), Some(2.0));
        assert_eq!(seconds.holds(&r), Some(true));
        let rates = Group::new("g", Unit::Requests, Ratio::Speed);
        assert_eq!(rates.ratio_of(&r), Some(0.5));
        assert_eq!(rates.holds(&r), Some(false));
    }

    #[test]
    fn sizes_and_own_figures_are_at_most_their_bound() {
        let r = row("a", Some(1.02), &[("QEMU", &[100.0]), ("zebu", &[101.0])]);
        let sizes = Group::new("g", Unit::Mebibytes, Ratio::Size);
        assert_eq!(sizes.holds(&r), Some(true));
        let own = Group::new("g", Unit::Mebibytes, Ratio::None);
        assert_eq!(own.holds(&r), Some(false));
        assert_eq!(own.ratio_of(&r), None);
    }

    #[test]
    fn results_are_read_as_they_were_saved() {
        let mut e = Experiment::new("n", "T");
        let mut g = Group::new("g", Unit::Seconds, Ratio::Speed).drawn(Scale::Relative);
        e.add(&mut g, row("a", None, &[("zebu", &[0.25])]), &[]);
        e.groups.push(g);
        let results = Results {
            experiments: vec![e],
            ..Results::default()
        };
        let path = std::env::temp_dir().join(format!("zebu-bench-results-{}", std::process::id()));
        results.save(&path).unwrap();
        let read = Results::load(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(format!("{read:?}"), format!("{results:?}"));
    }
}
