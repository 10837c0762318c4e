//! Seed 004, P5: a raw image of a real file system to qcow2.

use super::Experiment;
use super::convert::{add, content, memory};
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::inputs::fs_image::{self, Kind};
use crate::measure::{Case, Program};
use crate::peers::qemu::done;
use crate::results::{self, Figure, Group, Ratio, Row, Scale, Unit};
use crate::units::MIB;
use std::cell::RefCell;
use std::path::Path;
use std::process::Command;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "to-qcow2",
    title: "Convert to qcow2",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    let raw = fs_image::raw(bench, bench.options.size)?;
    to.about = format!(
        "The raw {} to a new qcow2 image, plain or compressed (`-c`); both programs end with the \
         data on the disk (`-t none`). qemu-img checks every image and compares it with the raw one once. Sizes are lengths of files.",
        content(bench, &raw)?
    );
    let mut times = Group::new("Seconds", Unit::Seconds, Ratio::Speed).drawn(Scale::Absolute);
    let mut sizes = Group::new("Size of the image in MiB", Unit::Mebibytes, Ratio::Size);
    let mut memory = memory();
    for (kind, floor) in [(Kind::Plain, 1.5), (Kind::Zlib, 5.5), (Kind::Zstd, 2.0)] {
        let lengths = RefCell::new(Vec::new());
        let judge = |p: &Program| {
            let length = judged(&bench.peers.qemu.img, p, &raw)? as f64 / MIB as f64;
            lengths.borrow_mut().push(Figure {
                program: p.name.clone(),
                flags: p.flags.clone(),
                runs: vec![length],
            });
            Ok(())
        };
        let all = bench.measure(Case {
            programs: programs(bench, kind, &raw),
            inputs: vec![raw.clone()],
            judge: Some(&judge),
        });
        let label = format!("raw to {}", kind.name());
        add(to, &mut times, &mut memory, (&label, floor), &all);
        let row = Row {
            label,
            bound: Some(1.02),
            figures: lengths.take(),
        };
        to.add(&mut sizes, row, &[]);
    }
    to.groups.extend([times, sizes, memory]);
    Ok(())
}

fn programs(bench: &Bench, kind: Kind, raw: &Path) -> Vec<Program> {
    let verb = format!("convert -f raw -O qcow2 {}", kind.options().join(" "));
    let out = |name: &str| bench.output(&format!("{name}.qcow2"));
    // Compressed clusters are packed in the order in which they are written, so `-W` and `-m` change
    // little but the order.
    let qemu: &[&str] = match kind {
        Kind::Plain => &["-t none -m 16 -W", "-t none -W"],
        _ => &["-t none", "-t none -m 16 -W"],
    };
    let variant = |flags: &&str| bench.qemu(&verb, flags, &[raw]).to(out("qemu"));
    let mut all: Vec<Program> = qemu.iter().map(variant).collect();
    all.push(bench.zebu(&verb, "-t none", &[raw]).to(out("zebu")));
    all
}

/// The length of what a program made, if it is whole and has the content of `raw`.
pub fn judged(qemu_img: &Path, program: &Program, raw: &Path) -> Result<u64> {
    let output = program.output.as_ref();
    let output = output.ok_or_else(|| Error::new("no output"))?;
    let mut check = Command::new(qemu_img);
    check.args(["check", "-q", "-f", "qcow2"]).arg(output);
    done(check)?;
    let mut compare = Command::new(qemu_img);
    compare
        .args(["compare", "-q", "-f", "raw", "-F", "qcow2"])
        .arg(raw)
        .arg(output);
    done(compare)?;
    let length = output.metadata().context(|| output.display().to_string())?;
    Ok(length.len())
}
