//! Seed 004's own tables: convert with 1, 2, 4 and 8 workers, in order and in any order, through
//! the page cache and past it.

use super::Experiment;
use super::convert::to_raw;
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image::{self, Kind};
use crate::inputs::same::same;
use crate::measure::series::find;
use crate::measure::{Cell, Contender};
use crate::report::Section;
use crate::report::cells::Cells;

/// The experiment `workers`.
pub struct Workers;

impl Experiment for Workers {
    fn name(&self) -> &'static str {
        "workers"
    }

    fn about(&self) -> &'static str {
        "convert to raw with 1, 2, 4, 8 workers, ordered, -W, -W -t none (seed 004's tables)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        section.method(
            "`convert -m N` of the images of `convert`, each pair with the same flags. The ratio is \
             against QEMU with those flags.",
        );
        let size = bench.size();
        let raw = fs_image::raw(bench, size)?;
        let workers: &[u32] = if bench.options.quick {
            &[1, 8]
        } else {
            &[1, 2, 4, 8]
        };
        for kind in [Kind::Zlib, Kind::Plain] {
            let image = fs_image::qcow2(bench, size, kind)?;
            let mut cells = Cells::new(
                &format!("Convert of {} with N workers", kind.name()),
                "flags",
            );
            for how in ["", "-W", "-W -t none"] {
                for m in workers {
                    let flags = format!("-m {m} {how}");
                    let flags = flags.trim();
                    let verb = "convert -f qcow2 -O raw";
                    let all = bench.alternate(&Cell {
                        contenders: vec![
                            to_raw(bench, bench.qemu(verb, flags, &[&image]), "qemu.raw"),
                            to_raw(bench, bench.zebu(verb, flags, &[&image]), "zebu.raw"),
                        ],
                        inputs: vec![image.clone()],
                        judge: Some(Box::new(|c: &Contender, _: &_| {
                            c.output
                                .as_ref()
                                .map_or(Ok(()), |output| same(output, &raw))
                        })),
                    });
                    cells.add(section, flags, &all, find(&all, "QEMU", flags));
                }
            }
            cells.finish(section);
        }
        Ok(())
    }
}
