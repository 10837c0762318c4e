//! P9: images of other formats to raw and qcow2.

use super::Experiment;
use super::convert::{add, content, memory, programs, same};
use super::to_qcow2::judged;
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image::{self, Kind};
use crate::measure::{Case, Program};
use crate::results::{self, Group, Ratio, Unit};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "formats",
    title: "Convert from other formats",
    run,
};

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    let raw = fs_image::raw(bench, bench.options.size)?;
    to.about = format!(
        "A {} as VMDK (`streamOptimized`), VHDX and VDI; the input is in the page cache. VHDX and \
         VDI: both programs end with the data on the disk (`-t none`). Every output is compared \
         with the raw image once.",
        content(bench, &raw)?
    );
    let mut times = Group::new("Seconds", Unit::Seconds, Ratio::Speed);
    let mut memory = memory();
    let cases = [
        (Kind::Stream, "raw", 4.0),
        (Kind::Stream, "qcow2", 4.0),
        (Kind::Vhdx, "raw", 1.25),
        (Kind::Vdi, "raw", 1.25),
    ];
    for (kind, format, floor) in cases {
        let image = fs_image::image(bench, bench.options.size, kind)?;
        let judge = |p: &Program| match format {
            "raw" => same(p, &raw),
            _ => judged(&bench.peers.qemu.img, p, &raw).map(|_| ()),
        };
        let all = bench.measure(Case {
            programs: programs(bench, kind, &image, format),
            inputs: vec![image.clone()],
            judge: Some(&judge),
        });
        let label = format!("{} to {format}", kind.name());
        add(to, &mut times, &mut memory, (&label, floor), &all);
    }
    to.groups.extend([times, memory]);
    Ok(())
}
