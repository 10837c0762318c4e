//! P4: seed 003. The cache of L2 tables: its size, a hit, a miss, slices against whole tables.

mod answers;

use super::Experiment;
use super::requests::{SystemCalls, probe, scattering_step};
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::inputs::{big, filled};
use crate::measure::child::{self, command};
use crate::measure::{Cell, Contender, Series, series};
use crate::peers::fio::Job;
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;
use crate::report::verdict::{Bound, NO_SLOWER, Verdict};
use crate::units::{self, KIB, MIB, TIB};
use std::path::{Path, PathBuf};

const BLOCK: u64 = 4 * KIB;
/// Small clusters make many tables: one of 4 KiB maps 2 MiB of the disk.
const CLUSTER: u64 = 4 * KIB;
const TABLE: u64 = CLUSTER;
const MAPPED_BY_TABLE: u64 = TABLE / 8 * CLUSTER;
/// Sizes of the cache in tables; all of them besides.
const SIZES: [u64; 5] = [1, 2, 8, 32, 128];
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
        table(&ground, section, &measured);
        system_calls(&ground, section);
        let costs = cost_of_a_look_up(&ground, section);
        if let Err(e) = slices(bench, section) {
            section.note(format!("slices against whole tables are left out: {e}"));
        }
        verdicts(section, &measured, costs.hit);
        for answer in answers::all(&measured, &costs) {
            section.method(answer);
        }
        section.note(
            "bonnie++ in a guest, the seed's own load, is not measured yet: a guest needs a server \
             that gives it the image. QEMU's own block layer inside the guest's emulator would \
             measure QEMU twice.",
        );
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
    if bench.options.quick { 0.15 } else { 1.0 }
}

/// Runs a cell with as many requests as a probe of `make` finds.
fn measure(
    bench: &Bench,
    depth: u64,
    make: &dyn Fn(u64) -> Vec<Contender>,
) -> Result<(u64, Vec<Series>)> {
    let probed = probe(
        bench,
        depth * 64,
        depth,
        u64::MAX / 2,
        run_seconds(bench),
        make,
    )
    .ok_or_else(|| Error::new("neither QEMU nor zebu can do it here"))?;
    let mut contenders = make(probed.count);
    if bench.options.quick {
        // The slower of QEMU's two engines is left out.
        contenders.remove(1 - probed.quicker(0, 1));
    }
    let all = bench.alternate(&Cell {
        contenders,
        inputs: vec![],
        judge: None,
    });
    Ok((probed.count, all))
}

fn note_failures(section: &mut Section, label: &str, all: &[Series]) {
    for s in all.iter().filter(|s| !s.ok()) {
        let why = s.failure.clone().unwrap_or_default();
        section.note(format!("{label}: {} is left out: {why}", s.label()));
    }
}

fn sizes(ground: &Ground<'_>, section: &mut Section) -> Vec<Measured> {
    let mut measured = Vec::new();
    for pattern in patterns(ground.bench.options.quick) {
        let sizes = SIZES.into_iter().filter(|n| *n < ground.tables);
        for tables in sizes.chain([ground.tables]) {
            let label = format!("{tables} tables, {}", pattern.name());
            let make = |count| ground.contenders(tables, pattern, count);
            match measure(ground.bench, pattern.depth, &make) {
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

/// A row a size of the cache, IOPS and CPU.
fn table(ground: &Ground<'_>, section: &mut Section, measured: &[Measured]) {
    for depth in [32, 1] {
        let patterns: Vec<Pattern> = patterns(false)
            .into_iter()
            .filter(|p| p.depth == depth)
            .collect();
        let title = format!("4 KiB requests with an L2 cache of N tables, {depth} in flight: IOPS");
        let mut heads = vec!["tables in the cache".to_string()];
        for p in &patterns {
            let what = p.name();
            heads.extend([format!("{what}: QEMU"), "zebu".into(), "ratio".into()]);
        }
        heads.push("zebu: CPU µs a random read".into());
        let mut table = Table {
            title: title.clone(),
            heads,
            rows: Vec::new(),
        };
        let mut chart = Chart::new(&title, "random reads a second, more is better");
        let mut sizes: Vec<u64> = measured.iter().map(|m| m.tables).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for tables in sizes {
            let find = |p: &Pattern| {
                measured
                    .iter()
                    .find(|m| m.tables == tables && m.pattern == *p)
            };
            let mut row = vec![match tables == ground.tables {
                true => format!("all {tables}"),
                false => tables.to_string(),
            }];
            for p in &patterns {
                let of = |name: &str| find(p).map_or(f64::NAN, |m| m.rate(name));
                let (qemu, zebu) = (of("QEMU"), of("zebu"));
                row.extend([rate(qemu), rate(zebu), units::ratio(zebu / qemu)]);
            }
            let random = find(&patterns[0]);
            let cpu = random.and_then(|m| {
                let s = series::fastest(&m.all, "zebu")?;
                Some(s.cpu_median() / m.count as f64 * 1e6)
            });
            row.push(cpu.map_or("—".into(), |c| format!("{c:.1}")));
            if let Some(m) = random {
                chart.group(
                    &row[0],
                    ["QEMU", "zebu"].map(|n| (n.to_string(), m.rate(n))),
                );
            }
            if row.iter().skip(1).any(|c| c != "—") {
                table.rows.push(row);
            }
        }
        if !table.rows.is_empty() {
            let limit = limit(ground, section, &patterns, table.heads.len());
            table.rows.extend(limit);
        }
        section.table(table, Some(chart));
    }
}

/// The row of fio, on a raw file with the same bytes.
fn limit(
    ground: &Ground<'_>,
    section: &mut Section,
    patterns: &[Pattern],
    columns: usize,
) -> Option<Vec<String>> {
    let fio = ground.bench.peers.fio.as_ref()?;
    let file = match filled::raw(ground.bench, ground.size) {
        Ok(file) => file,
        Err(e) => {
            section.note(format!("the limit is left out: {e}"));
            return None;
        }
    };
    let mut row = vec!["limit: fio, raw file".to_string()];
    for p in patterns {
        let make = |count| {
            vec![fio.contender(&Job {
                engine: "native",
                random: p.random,
                write: p.write,
                block: BLOCK,
                depth: p.depth as u32,
                count,
                file: &file,
                size: ground.size,
                laid_out: true,
            })]
        };
        let count = probe(
            ground.bench,
            p.depth * 64,
            p.depth,
            u64::MAX / 2,
            run_seconds(ground.bench),
            &make,
        );
        let figure = count.map_or(f64::NAN, |probed| {
            let all = ground.bench.alternate(&Cell {
                contenders: make(probed.count),
                inputs: vec![],
                judge: None,
            });
            series::fastest(&all, "fio").map_or(f64::NAN, |s| probed.count as f64 / s.median())
        });
        row.extend([rate(figure), "—".into(), "—".into()]);
    }
    row.resize(columns, "—".into());
    Some(row)
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

/// Nanoseconds of one map step.
struct Costs {
    /// Where everything is in the cache, over the whole disk.
    hit: f64,
    /// Where the table has to be read from the device.
    miss: f64,
}

/// Measures the map step inside the library.
fn cost_of_a_look_up(ground: &Ground<'_>, section: &mut Section) -> Costs {
    let mut costs = Costs {
        hit: f64::NAN,
        miss: f64::NAN,
    };
    let said = std::env::current_exe()
        .context(|| "own path".into())
        .and_then(|own| {
            let mut line = command([own.with_file_name("zebu-map-cost")]);
            line.push(ground.image.clone().into());
            child::run(&line, &ground.bench.scratch())
        });
    let text = match said {
        Ok(outcome) => outcome.stdout,
        Err(e) => {
            section.note(format!("the cost of a hit is left out: {e}"));
            return costs;
        }
    };
    let title = "One map step inside the library";
    let mut table = Table::new(title, &["case", "nanoseconds"]);
    let mut chart = Chart::new(title, "nanoseconds, less is better");
    for (case, nanoseconds) in look_ups(&text) {
        match case {
            "hit, slices of the whole disk" => costs.hit = nanoseconds,
            "miss, table on the device" => costs.miss = nanoseconds,
            _ => {}
        }
        chart.group(case, [("zebu".to_string(), nanoseconds)]);
        table.say(vec![case.into(), format!("{nanoseconds:.0}")]);
    }
    section.method(
        "The map step (`Image::extent`, default slices) is measured in a loop inside a program of its \
         own, `zebu-map-cost`: 5 million hits, 20,000 misses, the median of five rounds. A miss has \
         room for one slice.",
    );
    section.table(table, Some(chart));
    costs
}

/// The lines of zebu-map-cost: a case, a tab, nanoseconds.
fn look_ups(text: &str) -> impl Iterator<Item = (&str, f64)> {
    text.lines().filter_map(|line| {
        let (case, nanoseconds) = line.split_once('\t')?;
        Some((case, nanoseconds.parse().ok()?))
    })
}

/// Entries of the cache that are whole tables of 64 KiB, or parts of them.
fn slices(bench: &Bench, section: &mut Section) -> Result<()> {
    let image = big::preallocated(bench, TIB)?;
    let title = "Slices against whole tables: a cache of 1 MiB";
    section.method(
        "Slices: reads of a 1 TiB image with clusters of 64 KiB and all its tables (2048 of 64 KiB), \
         whose clusters are holes of the file, which are read without the device: what is left is \
         the cost of the tables. The cache has 1 MiB, in entries of 4 KiB to a whole table.",
    );
    let mut table = Table::new(
        title,
        &[
            "entry",
            "random reads: QEMU",
            "zebu",
            "ratio",
            "sequential reads: QEMU",
            "zebu ",
            "ratio ",
        ],
    );
    let mut chart = Chart::new(title, "random reads a second, more is better");
    for entry in [4 * KIB, 16 * KIB, 64 * KIB] {
        let mut row = vec![units::size(entry)];
        for random in [true, false] {
            let pattern = Pattern {
                random,
                write: false,
                depth: 32,
            };
            let make = |count| contenders(bench, &image, TIB, (MIB, entry), pattern, count);
            let label = format!("entries of {}, {}", units::size(entry), pattern.name());
            let (count, all) = measure(bench, pattern.depth, &make)?;
            note_failures(section, &label, &all);
            let of = |name: &str| {
                series::fastest(&all, name).map_or(f64::NAN, |s| count as f64 / s.median())
            };
            let (qemu, zebu) = (of("QEMU"), of("zebu"));
            row.extend([rate(qemu), rate(zebu), units::ratio(zebu / qemu)]);
            if random {
                chart.group(&row[0], [("QEMU".into(), qemu), ("zebu".into(), zebu)]);
            }
        }
        table.say(row);
    }
    section.table(table, Some(chart));
    Ok(())
}

fn verdicts(section: &mut Section, measured: &[Measured], hit: f64) {
    section.verdict(Verdict::new("P4", "a hit", Bound::AtMost(HIT), hit).unit(" ns"));
    let slowest = measured
        .iter()
        .filter(|m| m.ratio().is_finite())
        .min_by(|a, b| a.ratio().total_cmp(&b.ratio()));
    section.verdict(Verdict::new(
        "P4",
        slowest.map_or("against QEMU".into(), |m| {
            format!(
                "the slowest cell against QEMU: {} tables, {}",
                m.tables,
                m.pattern.name()
            )
        }),
        Bound::AtLeast(1.3),
        slowest.map_or(f64::NAN, Measured::ratio),
    ));
    let step = answers::worst_step(measured);
    section.verdict(Verdict::new(
        "P4",
        step.as_ref()
            .map_or("a larger cache against the next smaller one".into(), |s| {
                format!(
                    "{} tables against {}, {}",
                    s.larger,
                    s.smaller,
                    s.pattern.name()
                )
            }),
        Bound::AtLeast(NO_SLOWER),
        step.map_or(f64::NAN, |s| s.ratio),
    ));
}

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
    fn the_lines_of_the_loop_are_read() {
        let text = "hit, one slice\t12.5\nnoise\nmiss, table on the device\t60000.0\n";
        let all: Vec<_> = look_ups(text).collect();
        assert_eq!(
            all,
            [
                ("hit, one slice", 12.5),
                ("miss, table on the device", 60000.0)
            ]
        );
    }

    #[test]
    fn quick_patterns_are_columns_of_the_table() {
        let all = patterns(false);
        assert_eq!(all.len(), 8);
        assert!(patterns(true).iter().all(|p| all.contains(p)));
    }
}
