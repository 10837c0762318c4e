//! Seed 004, P5: a qcow2 image of a real file system to raw.

use super::Experiment;
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image::{self, Kind};
use crate::measure::{Case, Program, Series};
use crate::peers::qemu::done;
use crate::results::{self, Group, Ratio, Row, Scale, Unit};
use crate::units::{self, MIB};
use std::path::Path;
use std::process::Command;

/// What peak memory of any conversion may be, in MiB.
const MEMORY: f64 = 64.0;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "convert",
    title: "Convert to raw",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    let raw = fs_image::raw(bench, bench.options.size)?;
    to.about = format!(
        "A {} as qcow2, compressed with zlib or zstd or plain, to a new raw file on the same \
         disk; the input is in the page cache. Plain: all programs end with the data on the \
         disk (`-t none`). Every output is compared with the raw image once.",
        content(bench, &raw)?
    );
    let mut times = Group::new("Seconds", Unit::Seconds, Ratio::Speed).drawn(Scale::Absolute);
    let mut memory = memory();
    for (kind, floor) in [(Kind::Zlib, 3.3), (Kind::Zstd, 2.5), (Kind::Plain, 1.25)] {
        let image = fs_image::image(bench, bench.options.size, kind)?;
        let judge = |p: &Program| same(p, &raw);
        let all = bench.measure(Case {
            programs: with_peers(bench, kind, &image),
            inputs: vec![image.clone()],
            judge: Some(&judge),
        });
        let label = format!("{} to raw", kind.name());
        add(to, &mut times, &mut memory, (&label, floor), &all);
    }
    to.groups.extend([times, memory]);
    Ok(())
}

/// QEMU with each set of its flags and zebu, which convert an image of that kind to a format.
pub fn programs(bench: &Bench, kind: Kind, image: &Path, format: &str) -> Vec<Program> {
    let verb = format!("convert -f {} -O {format}", kind.format());
    let out = |name: &str| bench.output(&format!("{name}.{format}"));
    let (qemu, zebu): (&[&str], &str) = match kind.is_compressed() {
        true => (&["", "-m 16 -W", "-m 16 -W -t none"], ""),
        false => (
            &["-t none -m 16 -W", "-t none -W", "-t none -T none -m 16 -W"],
            "-t none",
        ),
    };
    let variant = |flags: &&str| bench.qemu(&verb, flags, &[image]).to(out("qemu"));
    let mut all: Vec<Program> = qemu.iter().map(variant).collect();
    all.push(bench.zebu(&verb, zebu, &[image]).to(out("zebu")));
    all
}

fn with_peers(bench: &Bench, kind: Kind, image: &Path) -> Vec<Program> {
    let raw = |name: &str| bench.output(&format!("{name}.raw"));
    let mut all = programs(bench, kind, image, "raw");
    // qcow2-rs knows no zstd; both leave plain data to the page cache.
    if kind != Kind::Plain {
        let go = bench.peers.go.iter();
        all.extend(go.map(|go| go.convert(image).to(raw("go"))));
    }
    if kind == Kind::Zlib {
        let it = bench.peers.qcow2_rs.iter();
        all.extend(it.map(|it| it.convert(image).to(raw("qcow2-rs"))));
    }
    all
}

/// Whether a program's output has the content of `raw`.
pub fn same(program: &Program, raw: &Path) -> Result<()> {
    let mut cmp = Command::new("cmp");
    cmp.arg(raw).args(&program.output);
    done(cmp)
}

/// The group of peak memory, which conversions to raw and to qcow2 share.
pub fn memory() -> Group {
    Group::new("Peak memory in MiB", Unit::Mebibytes, Ratio::None)
}

/// Adds the seconds and the peak memory of a conversion.
pub fn add(
    to: &mut results::Experiment,
    times: &mut Group,
    memory: &mut Group,
    (label, floor): (&str, f64),
    all: &[Series],
) {
    to.add(times, Row::new(label, Some(floor), all, |s| s), all);
    let mut row = Row::new(label, Some(MEMORY), all, |s| s);
    row.figures
        .retain(|f| f.program == "zebu" || f.program == "QEMU");
    for figure in &mut row.figures {
        let series = all.iter().find(|s| s.name == figure.program && s.ok());
        let peak = series.map_or(&[][..], |s| &s.peak);
        figure.runs = peak.iter().map(|p| p / MIB as f64).collect();
    }
    to.add(memory, row, &[]);
}

/// The image that is converted, in words.
pub fn content(bench: &Bench, raw: &Path) -> Result<String> {
    Ok(format!(
        "file-system image of {} ({}, {} MiB of it data)",
        bench.options.tree.display(),
        units::size(bench.options.size),
        fs_image::allocated(raw)? / MIB
    ))
}
