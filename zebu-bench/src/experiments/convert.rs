//! P5: a qcow2 image of a real file system to raw.

use super::Experiment;
use super::conversion::{Conversion, Conversions, content, speed, tried};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::fs_image::{self, Kind};
use crate::inputs::same::same;
use crate::measure::Contender;
use crate::measure::series::{fastest, find};
use crate::report::Section;
use crate::report::verdict::{Bound, Verdict};

/// How zebu is measured: as it comes, and written past the page cache in any order.
const ZEBU_FLAGS: [&str; 2] = ["", "-t none -W"];

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
            "A {} as qcow2 of three kinds, to a new raw file on the same file system. Flags of QEMU: \
             the fastest of {}. The output of each program is compared with the raw image once. \
             Before each run outputs are removed, the file system is synced and the input is read \
             into the page cache (or dropped from it with `--cold`). go-qcow2reader and qcow2-rs run \
             with their own defaults; qcow2-rs reads past the page cache and knows no zstd. \
             With `--quick` these two run on zlib only.",
            content(bench, &raw)?,
            tried(bench),
        ));
        let peers = &["go-qcow2reader", "qcow2-rs"];
        let mut conversions = Conversions::new(bench, "Convert to raw", ZEBU_FLAGS, peers, &[]);
        for (kind, target) in [(Kind::Zlib, 3.0), (Kind::Zstd, 2.0), (Kind::Plain, 1.25)] {
            let label = kind.name();
            let image = fs_image::qcow2(bench, size, kind)?;
            let mut others: Vec<Contender> = Vec::new();
            if kind == Kind::Zlib || !bench.options.quick {
                others.extend(bench.peers.go.iter().map(|go| go.contender(&image, None)));
                let qcow2_rs = bench.peers.qcow2_rs.iter();
                others.extend(
                    qcow2_rs
                        .filter(|_| kind != Kind::Zstd)
                        .map(|it| it.contender(&image)),
                );
            }
            let judge = |c: &Contender| c.output.as_ref().map_or(Ok(()), |o| same(o, &raw));
            let conversion = Conversion {
                label,
                verb: "convert -f qcow2 -O raw",
                input: &image,
                ending: "raw",
                others,
                judge: &judge,
            };
            let all = conversions.measure(section, conversion);
            let ratio = conversions.add(section, label, &all, vec![]);
            section.verdict(Verdict::new(
                "P5",
                format!("convert {label} to raw, against QEMU's best"),
                Bound::AtLeast(target),
                ratio,
            ));
            if kind == Kind::Zlib {
                section.verdict(Verdict::new(
                    "P5",
                    "convert zlib to raw, against go-qcow2reader",
                    Bound::AtLeast(5.0),
                    speed(find(&all, "zebu", ""), fastest(&all, "go-qcow2reader")),
                ));
            }
        }
        conversions.finish(section);
        Ok(())
    }
}
