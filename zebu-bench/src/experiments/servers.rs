//! What the experiments with servers share: the table of requests a second.

use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::filled;
use crate::measure::alternate::Rules;
use crate::measure::{self, Cell, Series, series};
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, Verdict};
use crate::units::{self, MIB};
use std::path::PathBuf;

/// The size of the image that is served from the page cache: it stays there.
const CACHED_SIZE: u64 = 256 * MIB;

/// A full qcow2 image and how it is served.
pub struct Served {
    /// The image.
    pub image: PathBuf,
    /// Bytes of the disk in it.
    pub size: u64,
    /// Whether through the page cache, where it lies when a run begins. What is measured then is the
    /// server; past the page cache (`O_DIRECT`) it is the server and the device.
    pub cached: bool,
}

impl Served {
    /// The two that are measured: past the page cache, and through it.
    pub fn both(bench: &Bench) -> Result<[Self; 2]> {
        let one = |size, cached| {
            Ok(Served {
                image: filled::qcow2(bench, size)?,
                size,
                cached,
            })
        };
        Ok([one(bench.filled_size(), false)?, one(CACHED_SIZE, true)?])
    }

    /// What is brought into the page cache before each run.
    pub fn inputs(&self) -> Vec<PathBuf> {
        match self.cached {
            true => vec![self.image.clone()],
            false => vec![],
        }
    }
}

/// How many requests the first probe has, and how many seconds a run is to last, of rows with `depth`
/// requests of `block` bytes in flight. One at a time is faster in the first tenth of a second than
/// from then on (from the page cache several times as fast), or slower where the scheduler has put
/// server and client on two processors: runs must be long enough to show what lasts.
pub fn duration(bench: &Bench, cached: bool, block: u64, depth: u64) -> (u64, f64) {
    const SETTLED: f64 = 0.7;
    let quick = bench.options.quick;
    let cached_for = if quick { SETTLED } else { 2.0 * SETTLED };
    match (block, depth) {
        (MIB, _) => (128, bench.seconds(0.2, 2.0)),
        (_, 1) if cached => (10_000, bench.seconds(SETTLED, 2.0).max(cached_for)),
        (_, 1) if !quick => (500, bench.seconds(SETTLED, 2.0).max(SETTLED)),
        _ => (500 * depth.min(16), bench.seconds(0.2, 2.0)),
    }
}

/// Runs a cell with `depth` requests in flight on each connection; with `--quick` three times.
pub fn alternate(bench: &Bench, depth: u64, cell: &Cell<'_>) -> Vec<Series> {
    if bench.options.quick && bench.options.runs.is_none() {
        let runs = 3;
        return measure::alternate(
            &Rules {
                runs,
                ..bench.rules()
            },
            cell,
        );
    }
    bench.alternate_requests(depth, cell)
}

/// How rows tell where the image is served from.
pub fn place(cached: bool) -> &'static str {
    if cached { "page cache" } else { "device" }
}

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
