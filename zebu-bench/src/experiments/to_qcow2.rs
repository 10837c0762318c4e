//! P5: a raw image of a real file system to qcow2.

use super::convert::to_raw as with_output;
use super::{Experiment, best};
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::inputs::fs_image::{self, Kind};
use crate::measure::series::{fastest, find};
use crate::measure::{Cell, Contender, Series};
use crate::peers::qemu::done;
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, Verdict};
use crate::units;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is tried to find QEMU's best.
const QEMU_FLAGS: [&str; 4] = [
    "",
    "-m 16 -W",
    "-m 16 -W -t none",
    "-m 16 -W -t none -T none",
];
/// How zebu is measured: as it comes, and in any order.
const ZEBU_FLAGS: [&str; 2] = ["", "-W"];
/// Peak memory of any conversion, in MiB (P8).
const LIMIT_MIB: f64 = 64.0;

/// The experiment `to-qcow2`.
pub struct ToQcow2;

/// The contenders of a cell, and the lengths of what they made, by name and flags.
struct Measured {
    all: Vec<Series>,
    lengths: HashMap<(String, String), u64>,
}

impl Measured {
    fn length(&self, series: Option<&Series>) -> f64 {
        let key = series.map(|s| (s.name.clone(), s.flags.clone()));
        key.and_then(|key| self.lengths.get(&key))
            .map_or(f64::NAN, |length| *length as f64)
    }
}

impl Experiment for ToQcow2 {
    fn name(&self) -> &'static str {
        "to-qcow2"
    }

    fn about(&self) -> &'static str {
        "a real file system to plain, zlib and zstd qcow2 (P5)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let size = bench.size();
        let raw = fs_image::raw(bench, size)?;
        section.method(format!(
            "A raw file-system image of {} ({} GiB, {} MiB of it data) to new qcow2 images of three \
             kinds on the same file system. Flags of QEMU: the fastest of {}. Each program's image \
             is checked and compared with the raw one by qemu-img, once. Sizes are lengths of files, \
             against that of QEMU without flags, which packs in order.",
            bench.options.tree.display(),
            size as f64 / units::GIB as f64,
            fs_image::allocated(&raw)? / units::MIB,
            QEMU_FLAGS.map(|f| if f.is_empty() { "none".into() } else { format!("`{f}`") }).join(", "),
        ));
        let mut cells = Cells::new("Convert to qcow2: every program", "image");
        let mut summary = Table::new(
            "Convert to qcow2: seconds",
            &[
                "image",
                "QEMU",
                "QEMU best",
                "its flags",
                "zebu",
                "zebu `-W`",
                "zebu against QEMU best",
                "size against QEMU",
                "peak MiB",
            ],
        );
        let mut chart = Chart::new(
            "Convert to qcow2",
            "MiB of virtual size a second, more is better",
        );
        for (kind, target) in [(Kind::Plain, 1.5), (Kind::Zlib, 6.0), (Kind::Zstd, 2.0)] {
            let label = kind.name();
            let measured = one(bench, section, kind, &raw)?;
            let all = &measured.all;
            let qemu = fastest(all, "QEMU");
            cells.add(section, label, all, qemu);
            let zebu = find(all, "zebu", "");
            let speed = qemu.zip(zebu).map_or(f64::NAN, |(q, z)| z.speedup_over(q));
            let length = measured.length(zebu) / measured.length(find(all, "QEMU", ""));
            let peak = zebu.map_or(f64::NAN, |z| z.peak as f64 / units::MIB as f64);
            section.verdict(Verdict::new(
                format!("convert to {label} qcow2, against QEMU's best"),
                Bound::AtLeast(target),
                speed,
            ));
            section.verdict(Verdict::new(
                format!("size of {label} qcow2, against QEMU's"),
                Bound::AtMost(1.02),
                length,
            ));
            section.verdict(
                Verdict::new(
                    format!("peak memory of convert to {label} qcow2"),
                    Bound::AtMost(LIMIT_MIB),
                    peak,
                )
                .unit(" MiB"),
            );
            let shown = |s: Option<&Series>| s.map_or("—".into(), Series::shown);
            summary.rows.push(vec![
                label.into(),
                shown(find(all, "QEMU", "")),
                shown(qemu),
                qemu.map_or("—".into(), |q| match q.flags.is_empty() {
                    true => "none".into(),
                    false => format!("`{}`", q.flags),
                }),
                shown(zebu),
                shown(find(all, "zebu", ZEBU_FLAGS[1])),
                units::ratio(speed),
                units::ratio(length),
                zebu.map_or("—".into(), |z| units::mib(z.peak)),
            ]);
            let rate = |s: &Series| (size / units::MIB) as f64 / s.median();
            let bars = [("QEMU best", qemu), ("zebu", zebu)];
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

fn one(bench: &Bench, section: &mut Section, kind: Kind, raw: &Path) -> Result<Measured> {
    let verb = format!("convert -f raw -O qcow2 {}", kind.options().join(" "));
    let lengths = RefCell::new(HashMap::new());
    let cell = |contenders| Cell {
        contenders,
        inputs: vec![raw.to_owned()],
        judge: Some(Box::new(|c: &Contender, _: &_| {
            let length = judged(&bench.peers.qemu.img, c, raw)?;
            let key = (c.name.clone(), c.flags.clone());
            lengths.borrow_mut().insert(key, length);
            Ok(())
        })),
    };
    let qemu = |flags: &str| with_output(bench, bench.qemu(&verb, flags, &[raw]), "qemu.qcow2");
    let best = best::of(
        bench,
        section,
        kind.name(),
        cell(QEMU_FLAGS.map(qemu).to_vec()),
    );
    let mut contenders = vec![qemu("")];
    contenders.extend(best.filter(|b| !b.flags.is_empty()));
    for (i, flags) in ZEBU_FLAGS.iter().enumerate() {
        contenders.push(with_output(
            bench,
            bench.zebu(&verb, flags, &[raw]),
            &format!("zebu-{i}.qcow2"),
        ));
    }
    let all = bench.alternate(&cell(contenders));
    let lengths = lengths.take();
    Ok(Measured { all, lengths })
}

/// The length of what a contender made, if it is whole and has the content of `raw`.
fn judged(qemu_img: &Path, contender: &Contender, raw: &Path) -> Result<u64> {
    let output: &PathBuf = contender
        .output
        .as_ref()
        .ok_or_else(|| Error::new("no output"))?;
    let mut check = Command::new(qemu_img);
    check.args(["check", "-q", "-f", "qcow2"]).arg(output);
    done(check)?;
    let mut compare = Command::new(qemu_img);
    compare
        .args(["compare", "-q", "-f", "raw", "-F", "qcow2"])
        .arg(raw)
        .arg(output);
    done(compare)?;
    let about = || output.display().to_string();
    Ok(output.metadata().context(about)?.len())
}
