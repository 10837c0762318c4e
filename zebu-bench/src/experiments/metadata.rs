//! P7: images of terabytes with little in them.

use super::{Experiment, NOT_SLOWER};
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::inputs::big;
use crate::inputs::fs_image;
use crate::measure::{Case, Program};
use crate::results::{self, Group, Ratio, Row, Unit};
use crate::units::{KIB, MIB, TIB};
use std::path::Path;

const COMMANDS: [&str; 4] = [
    "info",
    "map -f qcow2",
    "map -f qcow2 --output=json",
    "check -f qcow2",
];
/// The scattered image has a cluster of data in each so many bytes.
const STEP: u64 = 128 * MIB;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "metadata",
    title: "Terabytes of virtual size",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    to.about = "An empty image of 8 TiB to raw, and commands on an image of 1 TiB with one \
                cluster of data in each 128 MiB."
        .into();
    let mut times = Group::new("Seconds", Unit::Seconds, Ratio::Speed);
    let empty = big::empty(bench, 8 * TIB)?;
    let verb = "convert -f qcow2 -O raw";
    let judge = |p: &Program| p.output.as_ref().map_or(Ok(()), |o| is_hole(o, 8 * TIB));
    let all = bench.measure(Case {
        programs: vec![
            bench.qemu(verb, "", &[&empty]).to(bench.output("qemu.raw")),
            bench
                .qemu(verb, "-m 16 -W", &[&empty])
                .to(bench.output("qemu.raw")),
            bench.zebu(verb, "", &[&empty]).to(bench.output("zebu.raw")),
        ],
        inputs: vec![],
        judge: Some(&judge),
    });
    let row = Row::new("convert of 8 TiB, empty", Some(NOT_SLOWER), &all, |s| s);
    to.add(&mut times, row, &all);
    let image = big::scattered(bench, TIB, STEP)?;
    for verb in COMMANDS {
        let all = bench.measure(Case {
            programs: [Bench::qemu, Bench::zebu]
                .map(|by| by(bench, verb, "", &[&image]))
                .into(),
            inputs: vec![],
            judge: None,
        });
        let label = format!("{} of 1 TiB", verb.replace(" -f qcow2", ""));
        let row = Row::new(&label, Some(NOT_SLOWER), &all, |s| s);
        to.add(&mut times, row, &all);
    }
    to.groups.push(times);
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
