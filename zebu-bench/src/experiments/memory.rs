//! P8: peak memory of convert with default flags.

use super::Experiment;
use super::conversion::with_output;
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::big;
use crate::inputs::fragmented::{Order, image};
use crate::inputs::fs_image::{self, Kind};
use crate::measure::child;
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, Verdict};
use crate::units::{self, GIB, MIB, TIB};
use std::path::PathBuf;

const LIMIT_MIB: f64 = 64.0;

/// The experiment `memory`.
pub struct Memory;

impl Experiment for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn about(&self) -> &'static str {
        "peak memory of convert over kinds and sizes of image (P8)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        section.method(
            "Peak resident memory (`ru_maxrss`) of `convert` to raw with default flags; the greatest \
             of the runs.",
        );
        // Peaks hardly vary.
        let runs = match (bench.options.runs, bench.options.quick) {
            (None, true) => 2,
            _ => bench.rules().runs,
        };
        let mut table = Table::new("Peak memory of convert, MiB", &["image", "QEMU", "zebu"]);
        let mut chart = Chart::new("Peak memory of convert", "MiB, less is better");
        for (label, image) in images(bench)? {
            let mut row = vec![label.clone()];
            let mut bars = Vec::new();
            for make in [Bench::qemu, Bench::zebu] {
                let c = with_output(
                    bench,
                    make(bench, "convert -f qcow2 -O raw", "", &[&image]),
                    "memory.raw",
                );
                let mut peak = 0;
                let mut failure = None;
                for _ in 0..runs {
                    match child::run(&c.command, &bench.scratch()) {
                        Ok(o) => peak = peak.max(o.peak),
                        Err(e) => failure = Some(e),
                    }
                    if let Some(output) = &c.output {
                        let _ = std::fs::remove_file(output);
                    }
                }
                if let Some(e) = failure {
                    section.note(format!("{label}: {} is left out: {e}", c.name));
                    row.push("—".into());
                    continue;
                }
                row.push(units::mib(peak));
                bars.push((c.name.clone(), peak as f64 / MIB as f64));
                if c.name == "zebu" {
                    section.verdict(
                        Verdict::new(
                            "P8",
                            format!("peak memory of convert, {label}"),
                            Bound::AtMost(LIMIT_MIB),
                            peak as f64 / MIB as f64,
                        )
                        .unit(" MiB"),
                    );
                }
            }
            table.say(row);
            chart.group(&label, bars);
        }
        section.table(table, Some(chart));
        Ok(())
    }
}

fn images(bench: &Bench) -> Result<Vec<(String, PathBuf)>> {
    let sizes = match (bench.options.size, bench.options.quick) {
        (Some(size), _) => vec![size, 2 * size],
        (None, true) => vec![256 * MIB, GIB],
        (None, false) => vec![GIB, 2 * GIB, 4 * GIB],
    };
    let mut images = Vec::new();
    for size in sizes {
        // With --quick each kind at one size, the kind that needs most memory at both.
        let all = !bench.options.quick || size == bench.size();
        let kinds = [Kind::Zlib, Kind::Zstd, Kind::Plain];
        for kind in kinds.into_iter().take(if all { 3 } else { 1 }) {
            images.push((
                format!("{} {}", units::size(size), kind.name()),
                fs_image::qcow2(bench, size, kind)?,
            ));
        }
    }
    let size = bench.size();
    images.push((
        format!("{} t-rand", units::size(size)),
        image(bench, size, Order::Rand)?,
    ));
    images.push(("8T empty".into(), big::empty(bench, 8 * TIB)?));
    Ok(images)
}
