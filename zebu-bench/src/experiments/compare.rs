//! P5: compare of a raw image with qcow2.

use super::{Experiment, best};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::inputs::fs_image::{self, Kind};
use crate::measure::child::Outcome;
use crate::measure::series::{fastest, find};
use crate::measure::{Cell, Contender};
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::verdict::{Bound, NO_SLOWER, Verdict};

const VERB: &str = "compare -f raw -F qcow2";

/// The experiment `compare`.
pub struct Compare;

impl Experiment for Compare {
    fn name(&self) -> &'static str {
        "compare"
    }

    fn about(&self) -> &'static str {
        "compare of the raw image with its zlib, zstd and plain qcow2 (P5)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        section.method(
            "`compare -f raw -F qcow2` of two images with the same content, both in the page cache. \
             Flags of QEMU: the faster of none and `-T none`.",
        );
        let size = bench.size();
        let raw = fs_image::raw(bench, size)?;
        let mut cells = Cells::new("Compare", "images");
        for (kind, target) in [
            (Kind::Zlib, Some(4.0)),
            (Kind::Zstd, None),
            (Kind::Plain, None),
        ] {
            let image = fs_image::qcow2(bench, size, kind)?;
            let label = format!("raw and {}", kind.name());
            let cell = |contenders| Cell {
                contenders,
                inputs: vec![raw.clone(), image.clone()],
                judge: Some(Box::new(|_: &Contender, outcome: &Outcome| {
                    identical(outcome)
                })),
            };
            let qemu = |flags| bench.qemu(VERB, flags, &[&raw, &image]);
            let Some(best) = best::of(
                bench,
                section,
                &label,
                cell(vec![qemu(""), qemu("-T none")]),
            ) else {
                continue;
            };
            let all = bench.alternate(&cell(vec![best, bench.zebu(VERB, "", &[&raw, &image])]));
            let peer = fastest(&all, "QEMU");
            cells.add(section, &label, &all, peer);
            let speed = find(&all, "zebu", "")
                .zip(peer)
                .map_or(f64::NAN, |(z, q)| z.speedup_over(q));
            section.verdict(Verdict::new(
                "P5",
                format!("compare {label}"),
                Bound::AtLeast(target.unwrap_or(NO_SLOWER)),
                speed,
            ));
        }
        cells.finish(section);
        Ok(())
    }
}

fn identical(outcome: &Outcome) -> Result<()> {
    if outcome.stdout.contains("Images are identical.") {
        Ok(())
    } else {
        Err(Error::new("it does not say that the images are identical"))
    }
}
