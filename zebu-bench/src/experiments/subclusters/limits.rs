//! What bounds the experiment: fio on a raw file, and the system calls of a write.

use super::task::{BLOCK, Layout, Task};
use super::{EMPTY, Ground, run_seconds};
use crate::error::{Error, Result};
use crate::experiments::requests::{SystemCalls, probe};
use crate::inputs::filled;
use crate::measure::child::command;
use crate::measure::{Cell, series};
use crate::peers::fio::Job;
use crate::report::Section;
use crate::units::KIB;

/// Rates of fio on a raw file: (requests in flight, into a hole, over data).
pub fn of_fio(ground: &Ground<'_>, section: &mut Section) -> Vec<(u64, f64, f64)> {
    let bench = ground.bench;
    let Some(fio) = &bench.peers.fio else {
        return Vec::new();
    };
    let mut rates = Vec::new();
    let depths: &[u64] = if bench.options.quick { &[32] } else { &[32, 1] };
    for depth in depths.iter().copied() {
        let rate = |sparse: bool| -> Result<f64> {
            let size = if sparse { EMPTY } else { ground.base_size };
            let file = match sparse {
                true => bench.output("limit.raw"),
                false => filled::raw(bench, ground.base_size)?,
            };
            let make = |count| {
                let mut contender = fio.contender(&Job {
                    engine: "native",
                    random: true,
                    write: true,
                    block: BLOCK,
                    depth: depth as u32,
                    count,
                    file: &file,
                    start: 0,
                    size,
                    laid_out: !sparse,
                });
                if sparse {
                    let mut truncate = command(["truncate", "-s", &EMPTY.to_string()]);
                    truncate.push(file.clone().into());
                    contender.setup = vec![truncate];
                    contender.output = Some(file.clone());
                }
                vec![contender]
            };
            let probed = probe(
                bench,
                256,
                depth,
                ground.room / BLOCK / 4,
                run_seconds(bench, depth),
                &make,
            )
            .ok_or_else(|| Error::new("fio fails"))?;
            let all = bench.alternate(&Cell {
                contenders: make(probed.count),
                inputs: vec![],
                judge: None,
            });
            let fio = series::fastest(&all, "fio").ok_or_else(|| Error::new("fio fails"))?;
            Ok(probed.count as f64 / fio.median())
        };
        match (rate(true), rate(false)) {
            (Ok(hole), Ok(data)) => rates.push((depth, hole, data)),
            (Err(e), _) | (_, Err(e)) => section.note(format!("the limit is left out: {e}")),
        }
    }
    rates
}

/// What a write costs in system calls, at the default cluster size.
pub fn system_calls(ground: &Ground<'_>, section: &mut Section) {
    let mut calls = SystemCalls::new("image");
    for backed in [false, true] {
        for extended in [false, true] {
            let task = Task {
                layout: Layout {
                    cluster: 64 * KIB,
                    extended,
                },
                backed,
                depth: 32,
                block: BLOCK,
                written: false,
            };
            let make = |count| ground.contenders(task, count);
            calls.add(ground.bench, section, &task.label(), 640, &make);
        }
    }
    calls.finish(section);
}
