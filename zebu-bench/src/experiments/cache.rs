//! Seed 003, P4: the cache of L2 tables, from one table to all, and what a hit costs.

use super::{Experiment, NOT_SLOWER};
use crate::bench::{Bench, Requests, scattering_step};
use crate::error::{Error, Result};
use crate::inputs::filled;
use crate::measure::{Program, Series};
use crate::results::{self, Figure, Group, Ratio, Row, Scale, Unit};
use crate::units::{self, KIB};
use std::path::{Path, PathBuf};
use std::time::Instant;
use zebu::block::{Device, Format, OpenOptions};
use zebu::names::Source;
use zebu::storage::{Queue, QueueOptions};

const BLOCK: u64 = 4 * KIB;
/// Small clusters make many tables: one of 4 KiB maps 2 MiB of the disk.
const TABLE: u64 = 4 * KIB;
const MAPPED_BY_TABLE: u64 = TABLE / 8 * TABLE;
/// Sizes of the cache in tables; all of them besides.
const SIZES: [u64; 3] = [1, 8, 64];
const DEPTH: u64 = 32;
/// A hit may cost this much, in nanoseconds.
const HIT: f64 = 200.0;
const HITS: u64 = 1_000_000;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "cache",
    title: "The cache of L2 tables",
    run,
};

/// One row.
#[derive(Clone, Copy)]
struct Task {
    tables: u64,
    random: bool,
    write: bool,
}

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    let size = bench.options.size;
    let image = filled::qcow2(bench, size, TABLE)?;
    let all_tables = size.div_ceil(MAPPED_BY_TABLE);
    to.about = format!(
        "A full image of {} with clusters of 4 KiB has {all_tables} L2 tables. 4 KiB requests \
         past the page cache, 32 in flight, with `l2-cache-size` for 1, 8, 64 or all tables. \
         A hit is one look-up inside the library.",
        units::size(size)
    );
    let title = "4 KiB requests by size of the cache";
    let mut group = Group::new(title, Unit::Requests, Ratio::Speed).drawn(Scale::Relative);
    for (random, write) in [(true, false), (true, true), (false, false), (false, true)] {
        let sizes = SIZES.into_iter().filter(|n| *n < all_tables);
        for tables in sizes.chain([all_tables]) {
            let task = Task {
                tables,
                random,
                write,
            };
            let label = format!(
                "{}, {} {}",
                if tables == all_tables {
                    "all".into()
                } else {
                    tables.to_string()
                },
                if random { "random" } else { "sequential" },
                if write { "write" } else { "read" },
            );
            let (count, all) = measure(bench, &image, size, task);
            let row = Row::new(&label, Some(NOT_SLOWER), &all, |s| count as f64 / s);
            to.add(&mut group, row, &all);
        }
    }
    to.groups.push(group);
    let mut hits = Group::new("A look-up in the cache", Unit::Nanoseconds, Ratio::None);
    let runs: zebu::Result<Vec<f64>> = (0..bench.options.runs).map(|_| hit(&image)).collect();
    let row = Row {
        label: "a hit, scattered over the whole disk".into(),
        bound: Some(HIT),
        figures: vec![Figure {
            program: "zebu".into(),
            flags: String::new(),
            runs: runs.map_err(|e| Error::new(format!("a hit: {e}")))?,
        }],
    };
    to.add(&mut hits, row, &[]);
    to.groups.push(hits);
    Ok(())
}

fn measure(bench: &Bench, image: &Path, size: u64, task: Task) -> (u64, Vec<Series>) {
    let requests = Requests {
        depth: DEPTH,
        first: DEPTH * 64,
        most: u64::MAX / 2,
        make: &|count| programs(bench, image, size, task, count),
    };
    bench.measure_requests(&requests, &[], None)
}

fn programs(bench: &Bench, image: &Path, size: u64, task: Task, count: u64) -> Vec<Program> {
    let mut verb = format!("bench -c {count} -d {DEPTH} -t none -s {BLOCK} --image-opts");
    if task.random {
        verb += &format!(" -S {}", scattering_step(size, BLOCK));
    }
    if task.write {
        verb += " -w --pattern 255";
    }
    let options = format!(
        "driver=qcow2,file.filename={},l2-cache-size={},l2-cache-entry-size={TABLE}",
        image.display().to_string().replace(',', ",,"),
        task.tables * TABLE,
    );
    let name: &[&Path] = &[&PathBuf::from(options)];
    vec![
        bench.qemu(&verb, "-n", name),
        bench.qemu(&verb, "-i io_uring", name),
        bench.zebu(&verb, "", name),
    ]
}

/// Nanoseconds of one look-up of a block whose table is in the cache.
fn hit(image: &Path) -> zebu::Result<f64> {
    let queue = Queue::new(QueueOptions::default())?;
    let options = OpenOptions::default()
        .format(Some(Format::QCOW2))
        .l2_cache_size(Some(u64::MAX));
    let source = Source::Name(image.into());
    let device = Device::open(&queue, &source, &options)?;
    let Some(image) = device.top().as_qcow2() else {
        return Err(zebu::Error::Refused("It is not a qcow2 image".into()));
    };
    let size = image.size();
    let step = scattering_step(size, BLOCK);
    let look_up = |count: u64| -> zebu::Result<()> {
        queue.block_on(async {
            let mut offset = 0;
            for _ in 0..count {
                std::hint::black_box(image.extent(&queue, offset, BLOCK).await?);
                offset = (offset + step) % size;
            }
            Ok(())
        })
    };
    // The first pass loads every table.
    look_up(size / BLOCK)?;
    let start = Instant::now();
    look_up(HITS)?;
    Ok(start.elapsed().as_nanos() as f64 / HITS as f64)
}
