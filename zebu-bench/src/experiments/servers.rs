//! What the experiments with servers share: the table of requests a second.

use crate::measure::{Series, series};
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, Verdict};
use crate::units;

/// One row.
pub struct Row {
    /// Its name.
    pub label: String,
    /// How many times as fast as QEMU zebu is to be.
    pub target: f64,
    /// Requests of a run, and what came out; None where no server ran.
    pub measured: Option<(u64, Vec<Series>)>,
}

/// Puts the rows into the section as they come: rates, CPU of the server, whether P6 is met. `name` is
/// the protocol's, `peer` QEMU's server.
pub fn table(section: &mut Section, name: &str, peer: &str, rows: impl Iterator<Item = Row>) {
    let mut cells = Cells::new(&format!("{name}: every program"), "requests");
    let title = format!("{name}: requests a second");
    let peer_cpu = format!("{peer}: CPU µs a request");
    let heads = [
        "requests",
        peer,
        "zebu",
        "ratio",
        &peer_cpu,
        "zebu: CPU µs a request",
    ];
    let mut table = Table::new(&title, &heads);
    let mut chart = Chart::new(&title, "requests a second, more is better");
    for row in rows {
        let Some((count, all)) = row.measured else {
            section.note(format!("{}: no server ran", row.label));
            continue;
        };
        let (qemu, zebu) = (series::fastest(&all, "QEMU"), series::fastest(&all, "zebu"));
        cells.add(section, &row.label, &all, qemu);
        let rate = |s: Option<&Series>| s.map_or(f64::NAN, |s| count as f64 / s.median());
        let cpu = |s: Option<&Series>| s.map_or(f64::NAN, |s| s.cpu_median() / count as f64);
        let ratio = rate(zebu) / rate(qemu);
        chart.group(
            &row.label,
            [("QEMU", qemu), ("zebu", zebu)].map(|(name, s)| (name.to_string(), rate(s))),
        );
        let figure = |n: f64, text: String| if n.is_finite() { text } else { "—".into() };
        let whole = |n: f64| figure(n, format!("{n:.0}"));
        let micro = |n: f64| figure(n, format!("{:.1}", n * 1e6));
        table.say(vec![
            row.label.clone(),
            whole(rate(qemu)),
            whole(rate(zebu)),
            units::ratio(ratio),
            micro(cpu(qemu)),
            micro(cpu(zebu)),
        ]);
        let bound = Bound::AtLeast(row.target);
        section.verdict(Verdict::new("P6", row.label, bound, ratio));
    }
    section.table(table, Some(chart));
    cells.finish(section);
}
