//! P2: seed 001. Each engine against fio with the same engine on a raw file.

mod dd;
mod tables;

use super::Experiment;
use super::requests::{SystemCalls, probe, scattering_step};
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::filled;
use crate::measure::{Cell, Contender, Series, series};
use crate::peers::fio::Job;
use crate::report::Section;
use crate::report::cells::Cells;
use crate::units::{self, KIB, MIB};
use std::path::{Path, PathBuf};

/// The experiment `engines`.
pub struct Engines;

const ENGINES: [&str; 3] = ["threads", "native", "io_uring"];
const DEPTHS: [u32; 2] = [1, 32];
/// First requests of a probe, for each in flight.
const PROBE: u64 = 64;
/// And at least so many.
const LEAST_PROBE: u64 = 1024;

/// One kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pattern {
    block: u64,
    random: bool,
}

const PATTERNS: [Pattern; 5] = [
    Pattern {
        block: 16 * KIB,
        random: false,
    },
    Pattern {
        block: 64 * KIB,
        random: false,
    },
    Pattern {
        block: 256 * KIB,
        random: false,
    },
    Pattern {
        block: MIB,
        random: false,
    },
    Pattern {
        block: 4 * KIB,
        random: true,
    },
];

impl Pattern {
    fn name(self) -> String {
        let kind = if self.random { "random" } else { "sequential" };
        format!("{} {kind}", units::size(self.block))
    }
}

/// The image, and where in its file the data of its `size` bytes begin.
#[derive(Debug)]
struct Ground {
    qcow2: PathBuf,
    start: u64,
    size: u64,
}

/// What a cell measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Task {
    engine: &'static str,
    depth: u32,
    pattern: Pattern,
    write: bool,
}

impl Task {
    fn label(self) -> String {
        format!(
            "{}, {} {}, {} in flight",
            self.engine,
            self.pattern.name(),
            if self.write { "writes" } else { "reads" },
            self.depth
        )
    }
}

/// One cell, measured.
struct Measured {
    task: Task,
    count: u64,
    all: Vec<Series>,
}

impl Measured {
    fn of(&self, name: &str) -> Option<&Series> {
        series::fastest(&self.all, name)
    }

    /// Requests a second.
    fn rate(&self, s: &Series) -> f64 {
        self.count as f64 / s.median()
    }

    /// CPU seconds a request.
    fn cpu(&self, name: &str) -> Option<f64> {
        Some(self.of(name)?.cpu_median() / self.count as f64)
    }
}

impl Experiment for Engines {
    fn name(&self) -> &'static str {
        "engines"
    }

    fn about(&self) -> &'static str {
        "threads, native and io_uring against fio on the same place of the disk (seed 001, P2)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let size = bench.filled_size();
        let (qcow2, start) = filled::qcow2_in_one_piece(bench, size)?;
        let ground = Ground { qcow2, start, size };
        section.method(format!(
            "`bench -t none -i ENGINE` on a full qcow2 image of {}, and fio with O_DIRECT and the same \
             engine on the part of its file where the data lie, without a gap: the same bytes in the same \
             place of the disk, to fio a raw file; for `threads`, as many of fio's threads with a \
             blocking request each, which is less work than a pool with a queue. bench has no random \
             mode: its step `-S` is an odd multiple of 4 KiB near 0.38 of the image, and bench goes on \
             at the front when it passes the end, so each request falls far from the last and every \
             block has its turn. The number of requests of a cell is chosen so that a run lasts about \
             {:.2} s ({:.2} s at random); it is the same for all. fio's CPU has its start in it, \
             which is heavy.",
            units::size(size),
            run_seconds(bench, PATTERNS[0]),
            run_seconds(bench, PATTERNS[4])
        ));
        let writes = bench.writes(&ground.qcow2);
        if !writes {
            section.note("writes are left out: --writes never is given");
        }
        let mut cells = Cells::new("Engines: every program", "requests");
        let mut measured = Vec::new();
        for task in tasks(bench.options.quick) {
            if task.write && !writes {
                continue;
            }
            match cell(bench, &ground, task) {
                Some(cell) => {
                    cells.add(section, &task.label(), &cell.all, cell.of("QEMU"));
                    measured.push(cell);
                }
                None => section.note(format!(
                    "{}: neither fio nor QEMU can do it here",
                    task.label()
                )),
            }
        }
        for depth in DEPTHS {
            tables::rates(section, &measured, depth);
            tables::cpu(section, &measured, depth);
        }
        tables::verdicts(section, &measured);
        dd::lines(bench, section, &ground, writes);
        system_calls(bench, section, &ground);
        cells.finish(section);
        Ok(())
    }
}

/// Everything that is measured. With `--quick` of requests in order only reads of one size, at the
/// larger depth.
fn tasks(quick: bool) -> Vec<Task> {
    let mut tasks = Vec::new();
    for write in [false, true] {
        for depth in DEPTHS {
            for pattern in PATTERNS {
                let in_quick =
                    pattern.random || (pattern.block, depth, write) == (64 * KIB, 32, false);
                if quick && !in_quick {
                    continue;
                }
                tasks.extend(ENGINES.map(|engine| Task {
                    engine,
                    depth,
                    pattern,
                    write,
                }));
            }
        }
    }
    tasks
}

/// How long a run should last. A small request takes up to 1.4 times as long on a processor
/// that does not get the device's interrupts, and short runs differ by the one that they get: so
/// those at random are not very short, and there are nine of them at either depth.
fn run_seconds(bench: &Bench, pattern: Pattern) -> f64 {
    let usual = bench.seconds(0.12, 1.5);
    match pattern.random && !bench.options.quick {
        true => usual.max(0.6),
        false => usual,
    }
}

fn cell(bench: &Bench, ground: &Ground, task: Task) -> Option<Measured> {
    let depth = u64::from(task.depth);
    let peers = |count| {
        let mut all = contenders(bench, ground, task, count, bench.options.quick);
        if bench.options.quick {
            // fio takes longer to start than such a run lasts. QEMU alone would not
            // do: its own start is in its first requests.
            all.retain(|c| c.name != "fio");
        }
        all
    };
    // Enough to outlast what QEMU sometimes takes to start.
    let first = (depth * PROBE).max(LEAST_PROBE);
    let probed = probe(
        bench,
        first,
        depth,
        u64::MAX / 2,
        run_seconds(bench, task.pattern),
        &peers,
    )?;
    let cell = Cell {
        contenders: contenders(bench, ground, task, probed.count, true),
        inputs: vec![],
        judge: None,
    };
    let all = match task.pattern.random {
        true => bench.alternate_requests(1, &cell),
        false => bench.alternate(&cell),
    };
    Some(Measured {
        task,
        count: probed.count,
        all,
    })
}

fn contenders(
    bench: &Bench,
    ground: &Ground,
    task: Task,
    count: u64,
    with_zebu: bool,
) -> Vec<Contender> {
    let Task {
        engine,
        depth,
        pattern,
        write,
    } = task;
    let mut verb = format!(
        "bench -c {count} -d {depth} -f qcow2 -t none -s {}",
        pattern.block
    );
    if pattern.random {
        verb += &format!(" -S {}", scattering_step(ground.size, pattern.block));
    }
    if write {
        verb += " -w --pattern 255";
    }
    let flags = format!("-i {engine}");
    let file: &[&Path] = &[&ground.qcow2];
    let job = Job {
        engine,
        random: pattern.random,
        write,
        block: pattern.block,
        depth,
        count,
        file: &ground.qcow2,
        start: ground.start,
        size: ground.size,
        laid_out: true,
    };
    let mut all = Vec::new();
    if with_zebu {
        all.push(bench.zebu(&verb, &flags, file));
    }
    all.push(bench.qemu(&verb, &flags, file));
    all.extend(bench.peers.fio.iter().map(|fio| fio.contender(&job)));
    all
}

/// What a random read costs in system calls: of the programs, not of fio.
fn system_calls(bench: &Bench, section: &mut Section, ground: &Ground) {
    let mut calls = SystemCalls::new("4K random reads");
    for depth in DEPTHS {
        for engine in ENGINES {
            let task = Task {
                engine,
                depth,
                pattern: PATTERNS[4],
                write: false,
            };
            let make = |count| {
                let mut all = contenders(bench, ground, task, count, true);
                all.retain(|c| c.name != "fio");
                all
            };
            let label = format!("{engine}, {depth} in flight");
            calls.add(bench, section, &label, 640, &make);
        }
    }
    calls.finish(section);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_is_measured_both_ways_by_each_engine() {
        let all = tasks(false);
        assert_eq!(all.len(), 2 * 2 * 5 * 3);
        assert!(PATTERNS[4].random);
        let quick = tasks(true);
        assert!(quick.iter().all(|t| all.contains(t)));
        assert!(quick.iter().any(|t| t.write) && quick.iter().any(|t| t.depth == 1));
    }
}
