//! P7: images of terabytes, where only tables are read.

use super::Experiment;
use super::conversion::with_output;
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::inputs::{big, fs_image};
use crate::measure::child::{self, Outcome};
use crate::measure::series::{fastest, find};
use crate::measure::{Cell, Contender, Series};
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, NO_SLOWER, Verdict};
use crate::units::{self, GIB, KIB, MIB, TIB};
use std::path::Path;

/// Memory may be this many times as much on the largest image as on the smallest.
const GROWTH: f64 = 1.25;

const COMMANDS: [&str; 5] = [
    "info",
    "info --output=json",
    "map -f qcow2",
    "map -f qcow2 --output=json",
    "check -f qcow2",
];

/// The experiment `metadata`.
pub struct Metadata;

impl Experiment for Metadata {
    fn name(&self) -> &'static str {
        "metadata"
    }

    fn about(&self) -> &'static str {
        "an empty 8 TiB image to raw; info, map and check of 1 TiB images (P7)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let step = if bench.options.quick { GIB } else { 128 * MIB };
        section.method(format!(
            "An empty 8 TiB image to a raw file: its output must have the right size and no blocks. \
             Then info, map and check of two images of 1 TiB: one with a 64 KiB cluster of data in \
             each {}, one with all tables (`preallocation=metadata`, not with `--quick`). What the programs print is \
             compared with what QEMU prints; a difference is noted and does not end the cell.",
            units::size(step)
        ));
        let mut cells = Cells::new("Tables only", "what");
        if let Err(e) = empty_to_raw(bench, section, &mut cells) {
            section.note(format!("the empty 8 TiB image is left out: {e}"));
        }
        let mut images = vec![("scattered", big::scattered(bench, TIB, step)?)];
        if !bench.options.quick {
            images.push(("all tables", big::preallocated(bench, TIB)?));
        }
        for (name, image) in &images {
            for verb in COMMANDS {
                let all = bench.alternate(&Cell {
                    contenders: vec![
                        bench.qemu(verb, "", &[image]),
                        bench.zebu(verb, "", &[image]),
                    ],
                    inputs: vec![],
                    judge: None,
                });
                if find(&all, "zebu", "").is_some() {
                    same_words(bench, section, verb, name, image);
                }
                judge(section, &mut cells, &format!("{verb}, 1 TiB, {name}"), &all);
            }
        }
        cells.finish(section);
        growth(bench, section, step)
    }
}

fn judge(section: &mut Section, cells: &mut Cells, label: &str, all: &[Series]) {
    let qemu = fastest(all, "QEMU");
    cells.add(section, label, all, qemu);
    let speed = find(all, "zebu", "")
        .zip(qemu)
        .map_or(f64::NAN, |(z, q)| z.speedup_over(q));
    section.verdict(Verdict::new("P7", label, Bound::AtLeast(NO_SLOWER), speed));
}

fn empty_to_raw(bench: &Bench, section: &mut Section, cells: &mut Cells) -> Result<()> {
    let image = big::empty(bench, 8 * TIB)?;
    let verb = "convert -f qcow2 -O raw";
    let all = bench.alternate(&Cell {
        contenders: vec![
            with_output(bench, bench.qemu(verb, "", &[&image]), "qemu.raw"),
            with_output(bench, bench.zebu(verb, "", &[&image]), "zebu.raw"),
        ],
        inputs: vec![],
        judge: Some(Box::new(|c: &Contender, _: &Outcome| {
            c.output.as_ref().map_or(Ok(()), |o| is_hole(o, 8 * TIB))
        })),
    });
    judge(
        section,
        cells,
        "convert of an empty 8 TiB image to raw",
        &all,
    );
    Ok(())
}

/// Whether a file has that size and no data. Reading it all would take an hour.
fn is_hole(path: &Path, size: u64) -> Result<()> {
    let length = path
        .metadata()
        .context(|| path.display().to_string())?
        .len();
    if length != size {
        return Err(Error::new(format!(
            "its output has {length} bytes where {size} are right"
        )));
    }
    match fs_image::allocated(path)? {
        // QEMU writes the first block, to learn the alignment that the file wants.
        n if n <= 64 * KIB => Ok(()),
        n => Err(Error::new(format!(
            "its output has {n} bytes allocated where none are needed"
        ))),
    }
}

/// Notes it if zebu does not print what QEMU prints.
fn same_words(bench: &Bench, section: &mut Section, verb: &str, name: &str, image: &Path) {
    let scratch = bench.scratch();
    let said = |c: Contender| child::run(&c.command, &scratch).map(|o| o.stdout);
    let (qemu, zebu) = (
        said(bench.qemu(verb, "", &[image])),
        said(bench.zebu(verb, "", &[image])),
    );
    if let (Ok(q), Ok(z)) = (qemu, zebu)
        && q != z
    {
        let line = q
            .lines()
            .zip(z.lines())
            .position(|(a, b)| a != b)
            .unwrap_or(0)
            + 1;
        section.note(format!(
            "{verb}, {name}: zebu prints other than QEMU from line {line} on"
        ));
    }
}

/// Peak memory over image sizes.
fn growth(bench: &Bench, section: &mut Section, step: u64) -> Result<()> {
    let sizes = [GIB, 64 * GIB, TIB];
    let mut table = Table::new(
        "Peak memory in MiB over image size, scattered data",
        &["command", "program", "1 GiB", "64 GiB", "1 TiB"],
    );
    let mut chart = Chart::new(
        "Peak memory at 1 TiB, scattered data",
        "MiB, less is better",
    );
    let images = sizes.map(|s| big::scattered(bench, s, step));
    let images = images.into_iter().collect::<Result<Vec<_>>>()?;
    let scratch = bench.scratch();
    for verb in COMMANDS {
        let mut bars = Vec::new();
        for make in [Bench::qemu, Bench::zebu] {
            let runs = images.iter().map(|i| make(bench, verb, "", &[i]));
            let name = make(bench, verb, "", &[]).name;
            let peaks: Result<Vec<u64>> = runs
                .map(|c| child::run(&c.command, &scratch).map(|o| o.peak))
                .collect();
            let peaks = match peaks {
                Ok(p) => p,
                Err(e) => {
                    section.note(format!("memory of {verb}: {name} is left out: {e}"));
                    continue;
                }
            };
            let mut row = vec![verb.to_string(), name.clone()];
            row.extend(peaks.iter().map(|p| units::mib(*p)));
            table.say(row);
            bars.push((name.clone(), peaks[2] as f64 / MIB as f64));
            if name == "zebu" {
                section.verdict(Verdict::new(
                    "P7",
                    format!("peak memory of {verb} at 1 TiB against 1 GiB"),
                    Bound::AtMost(GROWTH),
                    peaks[2] as f64 / peaks[0] as f64,
                ));
            }
        }
        chart.group(verb, bars);
    }
    section.table(table, Some(chart));
    Ok(())
}
