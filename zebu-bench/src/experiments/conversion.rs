//! What conversions to raw and to qcow2 share: who runs with which flags, and the tables.

use super::best;
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image;
use crate::measure::child::Outcome;
use crate::measure::series::{fastest, find};
use crate::measure::{Cell, Contender, Series};
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::units;
use std::path::Path;

/// What is tried to find QEMU's best.
const QEMU_FLAGS: [&str; 5] = [
    "",
    "-m 16 -W",
    "-m 16 -W -t none",
    "-W",
    "-m 16 -W -t none -T none",
];
/// How many of them, from the first on, with `--quick`.
const QUICK_FLAGS: usize = 3;

/// One cell: an image that is converted.
pub struct Conversion<'a> {
    /// Its row in the tables.
    pub label: &'a str,
    /// What QEMU and zebu are told, but for the flags.
    pub verb: &'a str,
    /// What is read.
    pub input: &'a Path,
    /// What the names of outputs end in.
    pub ending: &'a str,
    /// Contenders besides QEMU and zebu; their command lines lack the output.
    pub others: Vec<Contender>,
    /// Judges what a contender made.
    pub judge: &'a dyn Fn(&Contender) -> Result<()>,
}

/// Conversions in one direction: measured one by one, then shown together.
pub struct Conversions<'a> {
    bench: &'a Bench,
    zebu_flags: [&'static str; 2],
    peers: &'static [&'static str],
    cells: Cells,
    summary: Table,
    chart: Chart,
}

impl<'a> Conversions<'a> {
    /// None yet. `zebu_flags` are how zebu is measured, as it comes first. `peers` are programs
    /// besides QEMU that have a column, and `more` columns behind all.
    pub fn new(
        bench: &'a Bench,
        title: &str,
        zebu_flags: [&'static str; 2],
        peers: &'static [&'static str],
        more: &[&str],
    ) -> Self {
        let other = format!("zebu `{}`", zebu_flags[1]);
        let mut heads = match bench.options.quick {
            true => vec!["image", "QEMU best", "its flags", "zebu"],
            false => vec!["image", "QEMU", "QEMU best", "its flags", "zebu", &other],
        };
        heads.extend(peers);
        heads.push("zebu against QEMU best");
        heads.extend(more);
        Conversions {
            bench,
            zebu_flags,
            peers,
            cells: Cells::new(&format!("{title}: every program"), "image"),
            summary: Table::new(&format!("{title}: seconds"), &heads),
            chart: Chart::new(title, "MiB of virtual size a second, more is better"),
        }
    }

    /// Measures a conversion by QEMU as it comes, by QEMU with its best flags, by zebu with either
    /// flags, and by the others. With `--quick` not by QEMU as it comes, and by zebu as it comes only.
    pub fn measure(&self, section: &mut Section, conversion: Conversion<'_>) -> Vec<Series> {
        let bench = self.bench;
        let Conversion {
            label,
            verb,
            input,
            ending,
            others,
            judge,
        } = conversion;
        let cell = |contenders| Cell {
            contenders,
            inputs: vec![input.to_owned()],
            judge: Some(Box::new(|c: &Contender, _: &Outcome| judge(c))),
        };
        let to = |c: Contender, name: &str| with_output(bench, c, &format!("{name}.{ending}"));
        let qemu = |flags: &&str| to(bench.qemu(verb, flags, &[input]), "qemu");
        let tried = qemu_flags(bench).iter().map(qemu).collect();
        let best = best::of(bench, section, label, cell(tried));
        let best = best.unwrap_or_else(|| qemu(&""));
        let mut contenders = vec![best];
        if !bench.options.quick && !contenders[0].flags.is_empty() {
            contenders.insert(0, qemu(&""));
        }
        let zebu_flags = match bench.options.quick {
            true => &self.zebu_flags[..1],
            false => &self.zebu_flags[..],
        };
        for (i, flags) in zebu_flags.iter().enumerate() {
            let name = format!("zebu-{i}");
            contenders.push(to(bench.zebu(verb, flags, &[input]), &name));
        }
        for other in others {
            let name = other.name.clone();
            contenders.push(to(other, &name));
        }
        bench.alternate(&cell(contenders))
    }

    /// Puts a measured cell into the tables, with what the columns behind all show. Returns how
    /// many times as fast as QEMU's best zebu is, as it comes.
    pub fn add(
        &mut self,
        section: &mut Section,
        label: &str,
        all: &[Series],
        more: Vec<String>,
    ) -> f64 {
        let qemu = fastest(all, "QEMU");
        self.cells.add(section, label, all, qemu);
        let zebu = find(all, "zebu", "");
        let speed = speed(zebu, qemu);
        let shown = |s: Option<&Series>| s.map_or("—".into(), Series::shown);
        let mut row = vec![
            label.into(),
            shown(qemu),
            qemu.map_or("—".into(), |q| named(&q.flags)),
            shown(zebu),
        ];
        if !self.bench.options.quick {
            row.insert(1, shown(find(all, "QEMU", "")));
            row.push(shown(find(all, "zebu", self.zebu_flags[1])));
        }
        row.extend(self.peers.iter().map(|p| shown(fastest(all, p))));
        row.push(units::ratio(speed));
        row.extend(more);
        self.summary.rows.push(row);
        let rate = |s: &Series| (self.bench.size() / units::MIB) as f64 / s.median();
        let mut bars = vec![("QEMU best".to_string(), qemu), ("zebu".into(), zebu)];
        bars.extend(self.peers.iter().map(|p| (p.to_string(), fastest(all, p))));
        let bars = bars.into_iter().filter_map(|(n, s)| Some((n, rate(s?))));
        self.chart.group(label, bars);
        speed
    }

    /// Puts the tables into the section.
    pub fn finish(self, section: &mut Section) {
        section.table(self.summary, Some(self.chart));
        self.cells.finish(section);
    }
}

/// How many times as fast as `b` `a` is; NaN if one of them has no figures.
pub fn speed(a: Option<&Series>, b: Option<&Series>) -> f64 {
    a.zip(b).map_or(f64::NAN, |(a, b)| a.speedup_over(b))
}

/// The image that is converted, in words.
pub fn content(bench: &Bench, raw: &Path) -> Result<String> {
    Ok(format!(
        "file-system image of {} ({} MiB, {} MiB of it data)",
        bench.options.tree.display(),
        bench.size() / units::MIB,
        fs_image::allocated(raw)? / units::MIB
    ))
}

/// What is tried to find QEMU's best, in words.
pub fn tried(bench: &Bench) -> String {
    let names: Vec<String> = qemu_flags(bench).iter().map(|f| named(f)).collect();
    names.join(", ")
}

/// Adds the output to a command line.
pub fn with_output(bench: &Bench, mut contender: Contender, name: &str) -> Contender {
    let output = bench.output(name);
    contender.command.push(output.clone().into());
    contender.output = Some(output);
    contender
}

fn qemu_flags(bench: &Bench) -> &'static [&'static str] {
    match bench.options.quick {
        true => &QEMU_FLAGS[..QUICK_FLAGS],
        false => &QEMU_FLAGS,
    }
}

fn named(flags: &str) -> String {
    match flags.is_empty() {
        true => "none".into(),
        false => format!("`{flags}`"),
    }
}
