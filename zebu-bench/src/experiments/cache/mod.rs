//! P4: seed 003. The cache of L2 tables: its size, a hit, a miss, slices against whole tables.

mod answers;
mod look_up;
mod slices;
mod table;

use super::Experiment;
use super::requests::{SystemCalls, probe, scattering_step};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::inputs::filled;
use crate::measure::{Cell, Contender, Series, series};
use crate::report::Section;
use crate::report::verdict::{Bound, NO_SLOWER, Verdict};
use crate::units::{self, KIB};
use std::path::{Path, PathBuf};

const BLOCK: u64 = 4 * KIB;
/// Small clusters make many tables: one of 4 KiB maps 2 MiB of the disk.
const CLUSTER: u64 = 4 * KIB;
const TABLE: u64 = CLUSTER;
const MAPPED_BY_TABLE: u64 = TABLE / 8 * CLUSTER;
/// Sizes of the cache in tables; all of them besides.
const SIZES: [u64; 5] = [1, 2, 8, 32, 128];
const QUICK_SIZES: [u64; 2] = [1, 128];
/// A hit may cost this much, in nanoseconds.
const HIT: f64 = 200.0;

/// One column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pattern {
    random: bool,
    write: bool,
    depth: u64,
}

impl Pattern {
    fn name(self) -> String {
        let kind = if self.random { "random" } else { "sequential" };
        let what = if self.write { "writes" } else { "reads" };
        match self.depth {
            1 => format!("{kind} {what}, 1 in flight"),
            _ => format!("{kind} {what}"),
        }
    }
}

/// A cell: a size of the cache, a pattern, and what came out.
struct Measured {
    tables: u64,
    pattern: Pattern,
    count: u64,
    all: Vec<Series>,
}

impl Measured {
    fn rate(&self, name: &str) -> f64 {
        series::fastest(&self.all, name).map_or(f64::NAN, |s| self.count as f64 / s.median())
    }

    fn ratio(&self) -> f64 {
        self.rate("zebu") / self.rate("QEMU")
    }
}

/// The experiment `cache`.
pub struct Cache;

impl Experiment for Cache {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn about(&self) -> &'static str {
        "the cache of L2 tables: its size, a hit, a miss, slices (seed 003, P4)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let size = bench.filled_size();
        let image = filled::qcow2_of_clusters(bench, size, CLUSTER)?;
        let all = size / MAPPED_BY_TABLE;
        section.method(format!(
            "4 KiB requests, 32 in flight, on a full image of {} with clusters of {}: {all} L2 tables \
             of {}, each for {} of the disk. `l2-cache-size` is so many tables, \
             `l2-cache-entry-size` one; QEMU's least is two tables, so its row 1 has two. Random is \
             the step near 0.38 of the image, so each request falls into another table than the 32 \
             before it. Writes go to clusters that are allocated. `bench -t none`; QEMU is the better \
             of `-n` and `-i io_uring` (with `--quick` the one that a probe finds better), zebu has \
             its default engine.",
            units::size(size),
            units::size(CLUSTER),
            units::size(TABLE),
            units::size(MAPPED_BY_TABLE),
        ));
        let ground = Ground {
            bench,
            image,
            size,
            tables: all,
        };
        let measured = sizes(&ground, section);
        table::table(&ground, section, &measured);
        system_calls(&ground, section);
        let costs = look_up::measure(&ground, section);
        if let Err(e) = slices::table(bench, section) {
            section.note(format!("slices against whole tables are left out: {e}"));
        }
        verdicts(section, &measured, costs.hit);
        for answer in answers::all(&measured, &costs) {
            section.method(answer);
        }
        Ok(())
    }
}

/// The image that is measured.
struct Ground<'a> {
    bench: &'a Bench,
    image: PathBuf,
    size: u64,
    /// All its L2 tables.
    tables: u64,
}

impl Ground<'_> {
    fn contenders(&self, tables: u64, pattern: Pattern, count: u64) -> Vec<Contender> {
        let cache = (tables * TABLE, TABLE);
        contenders(self.bench, &self.image, self.size, cache, pattern, count)
    }
}

/// QEMU with each of its two engines, then zebu as it comes. `cache` is the size of the cache and
/// of its entries.
fn contenders(
    bench: &Bench,
    image: &Path,
    size: u64,
    cache: (u64, u64),
    pattern: Pattern,
    count: u64,
) -> Vec<Contender> {
    let mut verb = format!(
        "bench -c {count} -d {} -t none -s {BLOCK} --image-opts",
        pattern.depth
    );
    if pattern.random {
        verb += &format!(" -S {}", scattering_step(size, BLOCK));
    }
    if pattern.write {
        verb += " -w --pattern 255";
    }
    let options = format!(
        "driver=qcow2,file.filename={},l2-cache-size={},l2-cache-entry-size={}",
        image.display().to_string().replace(',', ",,"),
        cache.0,
        cache.1
    );
    let name = [Path::new(&options)];
    vec![
        bench.qemu(&verb, "-n", &name),
        bench.qemu(&verb, "-i io_uring", &name),
        bench.zebu(&verb, "", &name),
    ]
}

fn patterns(quick: bool) -> Vec<Pattern> {
    let mut all = Vec::new();
    for depth in if quick { &[32][..] } else { &[32, 1] } {
        for write in [false, true] {
            for random in [true, false] {
                all.push(Pattern {
                    random,
                    write,
                    depth: *depth,
                });
            }
        }
    }
    all
}

/// How long a run should last, roughly.
fn run_seconds(bench: &Bench) -> f64 {
    bench.seconds(0.15, 1.0)
}

/// Makes contenders for a number of requests: QEMU with each engine, then zebu.
type Make<'a> = dyn Fn(u64) -> Vec<Contender> + 'a;

/// Runs cells in turn, since they are compared with each other too, each with as many requests as
/// a probe finds. For each the number and what came out; an error where neither program can do it.
fn measure(bench: &Bench, depth: u64, cells: &[Box<Make<'_>>]) -> Vec<Result<(u64, Vec<Series>)>> {
    let ready: Vec<Option<(u64, Vec<Contender>)>> = (cells.iter())
        .map(|make| {
            let seconds = run_seconds(bench);
            let probed = probe(bench, depth * 64, depth, u64::MAX / 2, seconds, make)?;
            let mut contenders = make(probed.count);
            if bench.options.quick {
                // The slower of QEMU's two engines is left out.
                contenders.remove(1 - probed.quicker(0, 1));
            }
            Some((probed.count, contenders))
        })
        .collect();
    let together = ready.iter().flatten().flat_map(|(_, c)| c.clone());
    let together = Cell {
        contenders: together.collect(),
        inputs: vec![],
        judge: None,
    };
    let mut all = bench.alternate_requests(depth, &together).into_iter();
    ready
        .into_iter()
        .map(|cell| {
            let (count, contenders) =
                cell.ok_or_else(|| Error::new("neither QEMU nor zebu can do it here"))?;
            Ok((count, all.by_ref().take(contenders.len()).collect()))
        })
        .collect()
}

fn note_failures(section: &mut Section, label: &str, all: &[Series]) {
    for s in all.iter().filter(|s| !s.ok()) {
        let why = s.failure.clone().unwrap_or_default();
        section.note(format!("{label}: {} is left out: {why}", s.label()));
    }
}

fn sizes(ground: &Ground<'_>, section: &mut Section) -> Vec<Measured> {
    let mut measured = Vec::new();
    let quick = ground.bench.options.quick;
    let sizes: &[u64] = if quick { &QUICK_SIZES } else { &SIZES };
    for pattern in patterns(quick) {
        let sizes = sizes.iter().copied().filter(|n| *n < ground.tables);
        let sizes: Vec<u64> = sizes.chain([ground.tables]).collect();
        let cell = |tables: &u64| -> Box<Make<'_>> {
            let tables = *tables;
            Box::new(move |count| ground.contenders(tables, pattern, count))
        };
        let cells: Vec<_> = sizes.iter().map(cell).collect();
        let all = measure(ground.bench, pattern.depth, &cells);
        for (tables, all) in sizes.into_iter().zip(all) {
            let label = format!("{tables} tables, {}", pattern.name());
            match all {
                Ok((count, all)) => {
                    note_failures(section, &label, &all);
                    let cell = Measured {
                        tables,
                        pattern,
                        count,
                        all,
                    };
                    println!(
                        "{label}: QEMU {:.0}, zebu {:.0} IOPS, {}",
                        cell.rate("QEMU"),
                        cell.rate("zebu"),
                        units::ratio(cell.ratio())
                    );
                    measured.push(cell);
                }
                Err(e) => section.note(format!("{label} is left out: {e}")),
            }
        }
    }
    measured
}

fn system_calls(ground: &Ground<'_>, section: &mut Section) {
    let pattern = Pattern {
        random: true,
        write: false,
        depth: 32,
    };
    let mut calls = SystemCalls::new("random reads, cache");
    for tables in [1, ground.tables] {
        let label = if tables == 1 { "1 table" } else { "all tables" };
        // More requests than tables, so that the first read of each is not in the difference.
        let few = ground.tables.next_multiple_of(32) * 4;
        let make = |count| ground.contenders(tables, pattern, count);
        calls.add(ground.bench, section, label, few, &make);
    }
    calls.finish(section);
}

fn verdicts(section: &mut Section, measured: &[Measured], hit: f64) {
    section.verdict(Verdict::new("P4", "a hit", Bound::AtMost(HIT), hit).unit(" ns"));
    for pattern in answers::patterns(measured) {
        let name = pattern.name();
        let slowest = (measured.iter())
            .filter(|m| m.pattern == pattern && m.ratio().is_finite())
            .min_by(|a, b| a.ratio().total_cmp(&b.ratio()));
        let tables = slowest.map_or(String::new(), |m| format!(" ({} tables)", m.tables));
        section.verdict(Verdict::new(
            "P4",
            format!("{name}: the slowest size against QEMU{tables}"),
            Bound::AtLeast(1.3),
            slowest.map_or(f64::NAN, Measured::ratio),
        ));
        let step = answers::worst_step(measured, pattern);
        let sizes = (step.as_ref()).map_or(String::new(), |s| {
            format!(" ({} tables against {})", s.larger, s.smaller)
        });
        section.verdict(Verdict::new(
            "P4",
            format!("{name}: a larger cache against the next smaller one{sizes}"),
            Bound::AtLeast(NO_SLOWER),
            step.map_or(f64::NAN, |s| s.ratio),
        ));
    }
}

/// A rate, or a dash if there is none.
fn rate(r: f64) -> String {
    if r.is_finite() {
        format!("{r:.0}")
    } else {
        "—".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_patterns_are_columns_of_the_table() {
        let all = patterns(false);
        assert_eq!(all.len(), 8);
        assert!(patterns(true).iter().all(|p| all.contains(p)));
    }
}
