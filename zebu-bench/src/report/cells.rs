//! The table every experiment can show: each contender of each cell with all its figures.

use super::Section;
use super::svg::Chart;
use super::table::Table;
use crate::measure::Series;
use crate::units;

/// Collects the series of cells into one table and one chart.
#[derive(Debug)]
pub struct Cells {
    table: Table,
    chart: Chart,
}

impl Cells {
    /// An empty table; `cell` is the head of its first column.
    pub fn new(title: &str, cell: &str) -> Self {
        let heads = [
            cell,
            "program",
            "seconds",
            "CPU s",
            "peak MiB",
            "speed against QEMU",
            "CPU against QEMU",
        ];
        println!("{}", heads.join(" | "));
        Cells {
            table: Table::new(title, &heads),
            chart: Chart::new(title, "seconds, less is better"),
        }
    }

    /// Adds a cell, each series a row; `base` is what ratios are taken against. A contender that
    /// failed becomes a note of the section.
    pub fn add(
        &mut self,
        section: &mut Section,
        label: &str,
        all: &[Series],
        base: Option<&Series>,
    ) {
        for s in all {
            if let Some(why) = &s.failure {
                section.note(format!("{label}: {} is left out: {why}", s.label()));
                continue;
            }
            let (speed, cpu) = base.map_or((f64::NAN, f64::NAN), |b| {
                (s.speedup_over(b), s.cpu_against(b))
            });
            self.table.say(vec![
                label.into(),
                s.label(),
                s.shown(),
                units::seconds(s.cpu_median()),
                units::mib(s.peak),
                units::ratio(speed),
                units::ratio(cpu),
            ]);
        }
        self.chart.group(
            label,
            all.iter()
                .filter(|s| s.ok())
                .map(|s| (s.label(), s.median())),
        );
    }

    /// Puts the table and its chart into the section.
    pub fn finish(self, section: &mut Section) {
        section.table(self.table, Some(self.chart));
    }
}
