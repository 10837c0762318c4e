//! Seed 004, P5: compare of a raw image with qcow2.

use super::Experiment;
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image::{self, Kind};
use crate::measure::Case;
use crate::results::{self, Group, Ratio, Row, Unit};

/// How many times as fast as QEMU compare of a compressed image is to be.
const FLOOR: f64 = 4.0;
const VERB: &str = "compare -f raw -F qcow2";

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "compare",
    title: "Compare",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    to.about = "The same raw image against qcow2 images with its content, all in the page \
                cache."
        .into();
    let raw = fs_image::raw(bench, bench.options.size)?;
    let mut times = Group::new("Seconds", Unit::Seconds, Ratio::Speed);
    for (kind, floor) in [(Kind::Zlib, Some(FLOOR)), (Kind::Plain, None)] {
        let image = fs_image::image(bench, bench.options.size, kind)?;
        let files = [raw.as_path(), &image];
        let all = bench.measure(Case {
            programs: vec![
                bench.qemu(VERB, "", &files),
                bench.qemu(VERB, "-T none", &files),
                bench.zebu(VERB, "", &files),
            ],
            inputs: files.map(Into::into).to_vec(),
            judge: None,
        });
        let label = format!("raw with {}", kind.name());
        to.add(&mut times, Row::new(&label, floor, &all, |s| s), &all);
    }
    to.groups.push(times);
    Ok(())
}
