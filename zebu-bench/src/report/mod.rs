//! The report: what was measured, as Markdown with charts.

pub mod cells;
pub mod machine;
pub mod summary;
pub mod svg;
pub mod table;
pub mod verdict;

use crate::error::{Context, Result};
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;
use svg::Chart;
use table::Table;
use verdict::Verdict;

/// What one experiment found.
#[derive(Debug, Default)]
pub struct Section {
    /// The experiment's name, as on the command line.
    pub name: String,
    /// Its heading.
    pub title: String,
    /// How it was done, a paragraph each.
    pub method: Vec<String>,
    /// Its targets and how they came out.
    pub verdicts: Vec<Verdict>,
    /// Its tables, each with a chart or without.
    pub tables: Vec<(Table, Option<Chart>)>,
    /// What was left out and why, and other remarks.
    pub notes: Vec<String>,
}

impl Section {
    /// An empty section.
    pub fn new(name: &str, title: &str) -> Self {
        println!("\n## {title}");
        Section {
            name: name.into(),
            title: title.into(),
            ..Section::default()
        }
    }

    /// Adds a paragraph on how it is done.
    pub fn method(&mut self, text: impl Into<String>) {
        self.method.push(text.into());
    }

    /// Adds a remark, told at once.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        println!("note: {text}");
        self.notes.push(text);
    }

    /// Adds the outcome of a target, told at once.
    pub fn verdict(&mut self, verdict: Verdict) {
        println!("target: {verdict}");
        self.verdicts.push(verdict);
    }

    /// Adds a table and its chart. A table without rows is left out.
    pub fn table(&mut self, table: Table, chart: Option<Chart>) {
        if !table.rows.is_empty() {
            self.tables.push((table, chart));
        }
    }
}

/// The whole report.
#[derive(Debug, Default)]
pub struct Report {
    /// Facts of the machine and versions: (what, value).
    pub facts: Vec<(String, String)>,
    /// What the experiments found.
    pub sections: Vec<Section>,
    /// What was left out of the whole suite.
    pub notes: Vec<String>,
}

/// What the time that a run takes is called among the facts.
const TOOK: &str = "the run took";

impl Report {
    /// Sets among the facts how long the run has taken so far.
    pub fn took(&mut self, time: Duration) {
        self.facts.retain(|(what, _)| what != TOOK);
        let seconds = time.as_secs();
        let text = format!("{} min {} s", seconds / 60, seconds % 60);
        self.facts.push((TOOK.into(), text));
    }

    /// Writes the report to `path`, and its charts into `charts/` beside it.
    pub fn write(&self, path: &Path) -> Result<()> {
        let dir = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let charts = dir.join("charts");
        std::fs::create_dir_all(&charts).context(|| charts.display().to_string())?;
        for section in &self.sections {
            for (file, chart) in charts_of(section) {
                let to = dir.join(&file);
                std::fs::write(&to, chart.draw()).context(|| to.display().to_string())?;
            }
        }
        std::fs::write(path, self.markdown()).context(|| path.display().to_string())
    }

    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut out = String::from("# Benchmarks\n\n");
        out.push_str(
            "Ratios are of medians, taken side by side: the programs of a cell run in turn \
             (A B B A). `1.234 (1.200–1.301)` is a median with the least and the greatest run. \
             CPU is user plus system seconds of the process; memory is its peak resident size. \
             [benchmarking.md](benchmarking.md) tells how to run this and how each cell is made, \
             [bounds.md](bounds.md) what bounds the targets that are missed.\n\n",
        );
        let mut facts = Table::new("", &["machine and programs", ""]);
        for (what, value) in &self.facts {
            facts.rows.push(vec![what.clone(), value.clone()]);
        }
        out.push_str(&facts.markdown());
        bullets(&mut out, &self.notes);
        self.targets(&mut out);
        for section in &self.sections {
            let _ = writeln!(out, "\n## {}\n", section.title);
            for p in &section.method {
                let _ = writeln!(out, "{p}\n");
            }
            let mut charts = charts_of(section).into_iter().peekable();
            for (table, chart) in &section.tables {
                if !table.title.is_empty() {
                    let _ = writeln!(out, "### {}\n", table.title);
                }
                out.push_str(&table.markdown());
                if chart.is_some()
                    && let Some((file, _)) = charts.next()
                {
                    let _ = writeln!(out, "\n![{}]({file})", table.title);
                }
                out.push('\n');
            }
            bullets(&mut out, &section.notes);
        }
        out
    }

    fn targets(&self, out: &mut String) {
        let verdicts: Vec<&Verdict> = self.sections.iter().flat_map(|s| &s.verdicts).collect();
        out.push_str("\n## Targets\n\n");
        out.push_str(&summary::table(&verdicts).markdown());
        let heads = ["", "experiment", "what", "bound", "reached", "outcome"];
        let mut table = Table::new("", &heads);
        for section in &self.sections {
            for v in &section.verdicts {
                table.rows.push(v.row(&section.name));
            }
        }
        if !table.rows.is_empty() {
            out.push_str("\n### Each figure\n\n");
            out.push_str(&table.markdown());
        }
    }
}

/// The charts of a section with the names of their files, from the report.
fn charts_of(section: &Section) -> Vec<(String, &Chart)> {
    section
        .tables
        .iter()
        .filter_map(|(_, chart)| chart.as_ref())
        .enumerate()
        .map(|(i, chart)| (format!("charts/{}-{}.svg", section.name, i + 1), chart))
        .collect()
}

fn bullets(out: &mut String, lines: &[String]) {
    if !lines.is_empty() {
        out.push('\n');
    }
    for line in lines {
        let _ = writeln!(out, "- {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdict::Bound;

    #[test]
    fn a_report_has_facts_targets_tables_and_notes_in_order() {
        let mut section = Section::new("convert", "Convert");
        section.method("How.");
        section.verdict(Verdict::new("P5", "zlib", Bound::AtLeast(3.0), 4.5));
        let mut table = Table::new("Times", &["image", "zebu"]);
        table.rows.push(vec!["zlib".into(), "1.0".into()]);
        section.table(table, Some(Chart::new("Times", "s")));
        section.table(Table::new("Empty", &["x"]), None);
        section.note("fio is not there");
        let mut report = Report {
            facts: vec![("CPU".into(), "a cpu".into())],
            sections: vec![section],
            notes: vec![],
        };
        report.took(Duration::from_secs(59));
        report.took(Duration::from_secs(125));
        let text = report.markdown();
        assert!(text.contains("2 min 5 s") && !text.contains("0 min 59 s"));
        let at = |s: &str| {
            text.find(s)
                .unwrap_or_else(|| panic!("{s} missing:\n{text}"))
        };
        assert!(at("a cpu") < at("## Targets"));
        assert!(at("## Targets") < at("### Each figure"));
        assert!(at("### Each figure") < at("## Convert"));
        assert!(at("How.") < at("### Times"));
        assert!(at("charts/convert-1.svg") < at("- fio is not there"));
        assert!(!text.contains("Empty"));
    }
}
