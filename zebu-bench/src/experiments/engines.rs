//! P2: seed 001. Each engine against fio with the same engine on a raw file.

use super::Experiment;
use crate::bench::Bench;
use crate::error::Result;
use crate::inputs::filled;
use crate::measure::alternate::Rules;
use crate::measure::stats::geometric_mean;
use crate::measure::{Cell, Contender, Series, alternate, series};
use crate::options::Writes;
use crate::peers::fio::Job;
use crate::report::Section;
use crate::report::cells::Cells;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, Verdict};
use crate::units::{self, KIB, MIB};
use std::path::{Path, PathBuf};

/// The experiment `engines`.
pub struct Engines;

const ENGINES: [&str; 3] = ["threads", "native", "io_uring"];
const DEPTHS: [u32; 2] = [1, 32];

/// One kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pattern {
    block: u64,
    random: bool,
}

const PATTERNS: [Pattern; 5] = [
    Pattern {
        block: 4 * KIB,
        random: true,
    },
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
];

impl Pattern {
    fn name(self) -> String {
        format!(
            "{} {}",
            units::size(self.block),
            if self.random { "random" } else { "sequential" }
        )
    }
}

/// The files and the direction of a table.
struct Ground {
    qcow2: PathBuf,
    raw: PathBuf,
    size: u64,
    write: bool,
}

/// One cell, measured.
struct Measured {
    engine: &'static str,
    depth: u32,
    pattern: Pattern,
    count: u64,
    all: Vec<Series>,
}

impl Measured {
    fn of(&self, name: &str) -> Option<&Series> {
        series::fastest(&self.all, name)
    }

    fn rate(&self, s: &Series) -> f64 {
        self.count as f64 / s.median()
    }
}

impl Experiment for Engines {
    fn name(&self) -> &'static str {
        "engines"
    }

    fn about(&self) -> &'static str {
        "threads, native and io_uring against fio on a raw file (seed 001, P2)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let size = bench.size();
        let mut ground = Ground {
            qcow2: filled::qcow2(bench, size)?,
            raw: filled::raw(bench, size)?,
            size,
            write: false,
        };
        section.method(format!(
            "`bench -t none -i ENGINE` on a full qcow2 image of {}, and fio with O_DIRECT and the same \
             engine on a raw file with the same bytes; for `threads`, as many of fio's threads with a blocking request each, which is \
             less work than a pool with a queue. bench has no random mode: its step `-S` is an odd \
             multiple of 4 KiB near 0.38 of the image, and bench goes on at the front when it passes \
             the end, so each request falls far from the last and every block has its turn. The number \
             of requests of a cell is chosen so that a run lasts about {:.2} s; it is the same for all. \
             fio's CPU has its start in it, which is heavy.",
            units::size(size),
            run_seconds(bench)
        ));
        direction(bench, section, &ground);
        if bench.options.quick && bench.options.writes == Writes::Auto {
            section.note("writes are left out with --quick; --writes always measures them");
        } else if bench.writes(&ground.qcow2) {
            ground.write = true;
            direction(bench, section, &ground);
        } else {
            section
                .note("writes are left out: zebu has no bench -w yet, or --writes never is given");
        }
        Ok(())
    }
}

/// With `--quick` only the request sizes at the ends and in the middle.
fn patterns(bench: &Bench) -> impl Iterator<Item = Pattern> {
    let quick = bench.options.quick;
    PATTERNS
        .into_iter()
        .filter(move |p| !quick || [4 * KIB, 64 * KIB, MIB].contains(&p.block))
}

/// How long a run should last. At depth 1 a request takes up to 1.4 times as long on a processor
/// that does not get the device's interrupts, and short runs differ by the one that they get.
fn run_seconds(bench: &Bench) -> f64 {
    if bench.options.quick { 1.0 } else { 2.5 }
}

fn direction(bench: &Bench, section: &mut Section, ground: &Ground) {
    let how = if ground.write { "writes" } else { "reads" };
    let mut cells = Cells::new(&format!("Engines, {how}: every program"), "requests");
    let mut measured = Vec::new();
    for depth in DEPTHS {
        for pattern in patterns(bench) {
            for engine in ENGINES {
                let Some(cell) = cell(bench, ground, engine, depth, pattern) else {
                    section.note(format!(
                        "{engine}, {}: neither fio nor QEMU can do it here",
                        pattern.name()
                    ));
                    continue;
                };
                let label = format!("{engine}, {}, {depth} in flight", pattern.name());
                cells.add(section, &label, &cell.all, cell.of("QEMU"));
                measured.push(cell);
            }
        }
    }
    for depth in DEPTHS {
        seed_table(section, &measured, depth, how);
    }
    verdicts(section, &measured, how);
    cells.finish(section);
}

fn cell(
    bench: &Bench,
    ground: &Ground,
    engine: &'static str,
    depth: u32,
    pattern: Pattern,
) -> Option<Measured> {
    let count = calibrate(bench, ground, engine, depth, pattern)?;
    let all = bench.alternate(&Cell {
        contenders: contenders(bench, ground, engine, depth, pattern, count, true),
        inputs: vec![],
        judge: None,
    });
    Some(Measured {
        engine,
        depth,
        pattern,
        count,
        all,
    })
}

/// The number of requests that take the time a run should last, found with a short run of the
/// peers.
fn calibrate(
    bench: &Bench,
    ground: &Ground,
    engine: &str,
    depth: u32,
    pattern: Pattern,
) -> Option<u64> {
    // Enough that it lasts well over the 10 ms below which bench's clock is too coarse.
    let probe = (u64::from(depth) * 256)
        .max(2048)
        .min(ground.size / pattern.block);
    let rules = Rules {
        runs: 1,
        ..bench.rules()
    };
    let contenders = contenders(bench, ground, engine, depth, pattern, probe, false);
    let all = alternate(
        &rules,
        &Cell {
            contenders,
            inputs: vec![],
            judge: None,
        },
    );
    let quickest = all
        .iter()
        .filter(|s| s.ok())
        .map(Series::median)
        .min_by(f64::total_cmp)?;
    let count = (probe as f64 * run_seconds(bench) / quickest) as u64;
    Some(count.max(probe).next_multiple_of(u64::from(depth)))
}

fn contenders(
    bench: &Bench,
    ground: &Ground,
    engine: &str,
    depth: u32,
    pattern: Pattern,
    count: u64,
    with_zebu: bool,
) -> Vec<Contender> {
    let mut verb = format!(
        "bench -c {count} -d {depth} -f qcow2 -t none -s {}",
        pattern.block
    );
    if pattern.random {
        verb += &format!(" -S {}", scattering_step(ground.size, pattern.block));
    }
    if ground.write {
        verb += " -w --pattern 255";
    }
    let flags = format!("-i {engine}");
    let file: &[&Path] = &[&ground.qcow2];
    let job = Job {
        engine,
        random: pattern.random,
        write: ground.write,
        block: pattern.block,
        depth,
        count,
        file: &ground.raw,
        size: ground.size,
    };
    let mut all = Vec::new();
    if with_zebu {
        all.push(bench.zebu(&verb, &flags, file));
    }
    all.push(bench.qemu(&verb, &flags, file));
    all.extend(bench.peers.fio.iter().map(|fio| fio.contender(&job)));
    all
}

/// A step that scatters requests over an image: an odd number of blocks near 0.38 (the golden
/// section) of it. Odd, so on an image of 2^n blocks every block has its turn before one comes
/// again; and less than the 2 GiB that bench allows.
fn scattering_step(size: u64, block: u64) -> u64 {
    let blocks = (size as f64 / block as f64 * 0.381_966) as u64;
    (blocks.min((1 << 31) / block - 2) | 1) * block
}

/// As the seed has it: a row an engine and program, a column a request size.
fn seed_table(section: &mut Section, measured: &[Measured], depth: u32, how: &str) {
    let title = format!("Engines, {how}, {depth} in flight");
    let mut heads = vec!["program and engine".to_string()];
    heads.extend(
        PATTERNS
            .iter()
            .map(|p| format!("{}, {}", p.name(), if p.random { "IOPS" } else { "MiB/s" })),
    );
    heads.push("CPU µs a 4K request".into());
    let mut table = Table {
        title: title.clone(),
        heads,
        rows: Vec::new(),
    };
    let mut chart = Chart::new(&format!("{title}: 4K random"), "IOPS, more is better");
    for engine in ENGINES {
        let mut bars = Vec::new();
        for program in ["QEMU", "zebu", "fio"] {
            let mut row = vec![format!("{program} {engine}")];
            let mut cpu = String::from("—");
            for pattern in PATTERNS {
                let cell = measured
                    .iter()
                    .find(|m| (m.engine, m.depth, m.pattern) == (engine, depth, pattern));
                let Some((m, s)) = cell.and_then(|m| Some((m, m.of(program)?))) else {
                    row.push("—".into());
                    continue;
                };
                if pattern.random {
                    row.push(format!("{:.0}", m.rate(s)));
                    cpu = format!("{:.1}", s.cpu_median() / m.count as f64 * 1e6);
                    bars.push((program.to_string(), m.rate(s)));
                } else {
                    row.push(format!(
                        "{:.0}",
                        m.rate(s) * pattern.block as f64 / MIB as f64
                    ));
                }
            }
            row.push(cpu);
            if row.iter().skip(1).any(|c| c != "—") {
                table.rows.push(row);
            }
        }
        chart.group(engine, bars);
    }
    section.table(table, Some(chart));
}

fn verdicts(section: &mut Section, measured: &[Measured], how: &str) {
    for engine in ENGINES {
        for depth in DEPTHS {
            let of = || {
                measured
                    .iter()
                    .filter(|m| m.engine == engine && m.depth == depth)
            };
            let against_fio = |m: &Measured| Some(m.of("zebu")?.speedup_over(m.of("fio")?));
            for (what, random) in [
                ("4K random", true),
                ("sequential, geometric mean of sizes", false),
            ] {
                let ratios: Vec<f64> = of()
                    .filter(|m| m.pattern.random == random)
                    .filter_map(against_fio)
                    .collect();
                if !ratios.is_empty() {
                    section.verdict(Verdict::new(
                        format!("{how}, {engine}, {depth} in flight, {what}: speed against fio"),
                        Bound::AtLeast(0.9),
                        geometric_mean(&ratios),
                    ));
                }
            }
        }
    }
    for depth in DEPTHS {
        let of = |program| native_against_threads(measured, program, depth);
        if let Some(ratio) = of("zebu") {
            section.verdict(Verdict::new(
                format!("{how}, {depth} in flight: CPU a request, zebu native against zebu threads (geometric mean)"),
                Bound::AtMost(0.67),
                ratio,
            ));
        }
        // What the engines cost without a pool (fio: a blocking call each) and with one (QEMU).
        let peers: Vec<String> = ["fio", "QEMU"]
            .into_iter()
            .filter_map(|name| Some(format!("{name} {}", units::ratio(of(name)?))))
            .collect();
        if !peers.is_empty() {
            section.note(format!(
                "{how}, {depth} in flight: CPU of native against threads within the peers: {}",
                peers.join(", ")
            ));
        }
    }
}

/// CPU a request of a program's native engine against that of its threads, over all sizes.
fn native_against_threads(measured: &[Measured], program: &str, depth: u32) -> Option<f64> {
    let cpu = |engine, pattern| {
        let m = measured
            .iter()
            .find(|m| (m.engine, m.depth, m.pattern) == (engine, depth, pattern))?;
        Some(m.of(program)?.cpu_median() / m.count as f64)
    };
    let ratios: Vec<f64> = PATTERNS
        .iter()
        .filter_map(|p| Some(cpu("native", *p)? / cpu("threads", *p)?))
        .collect();
    (!ratios.is_empty()).then(|| geometric_mean(&ratios))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    #[test]
    fn the_step_visits_every_block_once_before_it_repeats() {
        let (size, block) = (64 * MIB, 4 * KIB);
        let step = scattering_step(size, block);
        let mut seen = vec![false; (size / block) as usize];
        let mut at = 0;
        for _ in 0..size / block {
            assert!(!std::mem::replace(&mut seen[(at / block) as usize], true));
            at = (at + step) % size;
        }
    }

    #[test]
    fn the_step_is_one_that_bench_takes() {
        for size in [GIB, 4 * GIB, 64 * GIB] {
            let step = scattering_step(size, 4 * KIB);
            assert!(step < 1 << 31 && step.is_multiple_of(4 * KIB) && (step / (4 * KIB)) % 2 == 1);
        }
    }
}
