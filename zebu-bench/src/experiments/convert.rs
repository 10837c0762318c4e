//! P5: a qcow2 image of a real file system to raw.

use super::{Experiment, best};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image::{self, Kind};
use crate::inputs::same::same;
use crate::measure::series::{fastest, find};
use crate::measure::{Cell, Contender, Series};
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, Verdict};
use crate::units;
use std::path::Path;

/// What is tried to find QEMU's best.
const QEMU_FLAGS: [&str; 5] = [
    "",
    "-W",
    "-m 16 -W",
    "-m 16 -W -t none",
    "-m 16 -W -t none -T none",
];
/// How zebu is measured: as it comes, and written past the page cache in any order.
const ZEBU_FLAGS: [&str; 2] = ["", "-t none -W"];
const VERB: &str = "convert -f qcow2 -O raw";

/// The experiment `convert`.
pub struct Convert;

impl Experiment for Convert {
    fn name(&self) -> &'static str {
        "convert"
    }

    fn about(&self) -> &'static str {
        "zlib, zstd and plain qcow2 of a real file system to raw (seed 004, P5)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let size = bench.size();
        let raw = fs_image::raw(bench, size)?;
        section.method(format!(
            "A file-system image of {} ({} GiB, {} MiB of it data) as qcow2 of three kinds, to a \
             new raw file on the same file system. Flags of QEMU: the fastest of {}. The output of \
             each program is compared with the raw image once. Before each run outputs are removed, \
             the file system is synced and the input is read into the page cache (or dropped from \
             it with `--cold`). go-qcow2reader runs with its own defaults.",
            bench.options.tree.display(),
            size as f64 / units::GIB as f64,
            fs_image::allocated(&raw)? / units::MIB,
            QEMU_FLAGS.map(|f| if f.is_empty() { "none".into() } else { format!("`{f}`") }).join(", "),
        ));
        let mut cells = Cells::new("Convert to raw: every program", "image");
        let mut summary = Table::new(
            "Convert to raw: seconds",
            &[
                "image",
                "QEMU",
                "QEMU best",
                "its flags",
                "zebu",
                "zebu `-t none -W`",
                "go-qcow2reader",
                "zebu against QEMU best",
            ],
        );
        let mut chart = Chart::new(
            "Convert to raw",
            "MiB of virtual size a second, more is better",
        );
        for (kind, target) in [(Kind::Zlib, 3.0), (Kind::Zstd, 2.0), (Kind::Plain, 1.25)] {
            let label = kind.name();
            let all = one(bench, section, size, kind, &raw)?;
            let qemu = fastest(&all, "QEMU");
            cells.add(section, label, &all, qemu);
            let zebu = find(&all, "zebu", "");
            let go = fastest(&all, "go-qcow2reader");
            let speed = |a: Option<&Series>, b: Option<&Series>| {
                a.zip(b).map_or(f64::NAN, |(a, b)| a.speedup_over(b))
            };
            section.verdict(Verdict::new(
                format!("convert {label} to raw, against QEMU's best"),
                Bound::AtLeast(target),
                speed(zebu, qemu),
            ));
            if kind == Kind::Zlib {
                section.verdict(Verdict::new(
                    "convert zlib to raw, against go-qcow2reader",
                    Bound::AtLeast(5.0),
                    speed(zebu, go),
                ));
            }
            let shown = |s: Option<&Series>| s.map_or("—".into(), Series::shown);
            summary.rows.push(vec![
                label.into(),
                shown(find(&all, "QEMU", "")),
                shown(qemu),
                qemu.map_or("—".into(), |q| {
                    if q.flags.is_empty() {
                        "none".into()
                    } else {
                        format!("`{}`", q.flags)
                    }
                }),
                shown(zebu),
                shown(find(&all, "zebu", ZEBU_FLAGS[1])),
                shown(go),
                units::ratio(speed(zebu, qemu)),
            ]);
            let rate = |s: &Series| (size / units::MIB) as f64 / s.median();
            let bars = [("QEMU best", qemu), ("zebu", zebu), ("go-qcow2reader", go)];
            chart.group(
                label,
                bars.into_iter()
                    .filter_map(|(n, s)| Some((n.to_string(), rate(s?)))),
            );
        }
        section.table(summary, Some(chart));
        cells.finish(section);
        Ok(())
    }
}

fn one(
    bench: &Bench,
    section: &mut Section,
    size: u64,
    kind: Kind,
    raw: &Path,
) -> Result<Vec<Series>> {
    let image = fs_image::qcow2(bench, size, kind)?;
    let cell = |contenders| Cell {
        contenders,
        inputs: vec![image.clone()],
        judge: Some(Box::new(|c: &Contender, _: &_| {
            c.output.as_ref().map_or(Ok(()), |output| same(output, raw))
        })),
    };
    let qemu = |flags: &str| to_raw(bench, bench.qemu(VERB, flags, &[&image]), "qemu.raw");
    let best = best::of(
        bench,
        section,
        kind.name(),
        cell(QEMU_FLAGS.map(qemu).to_vec()),
    );

    let mut contenders = vec![qemu("")];
    contenders.extend(best.filter(|b| !b.flags.is_empty()));
    for (i, flags) in ZEBU_FLAGS.iter().enumerate() {
        contenders.push(to_raw(
            bench,
            bench.zebu(VERB, flags, &[&image]),
            &format!("zebu-{i}.raw"),
        ));
    }
    if let Some(go) = bench.peers.go.as_ref().filter(|_| kind != Kind::Plain) {
        contenders.push(to_raw(bench, go.contender(&image), "go.raw"));
    }
    Ok(bench.alternate(&cell(contenders)))
}

/// Adds the output to a command line.
pub fn to_raw(bench: &Bench, mut contender: Contender, name: &str) -> Contender {
    let output = bench.output(name);
    contender.command.push(output.clone().into());
    contender.output = Some(output);
    contender
}
