//! Seed 001, P2: each engine against fio with the same engine.

use super::Experiment;
use crate::bench::{Bench, Requests, scattering_step};
use crate::error::Result;
use crate::inputs::filled;
use crate::measure::{Program, Series};
use crate::peers::fio::Job;
use crate::results::{self, Group, Ratio, Row, Scale, Unit};
use crate::units::{self, KIB, MIB};
use std::path::{Path, PathBuf};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "engines",
    title: "Engines against fio",
    run,
};

const ENGINES: [&str; 3] = ["threads", "native", "io_uring"];
/// A share of fio's rate that zebu must reach.
const OF_FIO: f64 = 0.9;
/// The first probe has at least so many requests, to outlast the start of the programs.
const LEAST_PROBE: u64 = 1024;
const LARGE: u64 = 20 * MIB;

/// The image, and where in its file the data of its `size` bytes begin.
struct Place {
    image: PathBuf,
    start: u64,
    size: u64,
}

/// One kind of request.
#[derive(Clone, Copy)]
struct Task {
    engine: &'static str,
    depth: u32,
    block: u64,
    random: bool,
    write: bool,
}

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    let size = bench.options.size;
    let (image, start) = filled::qcow2_in_one_piece(bench, size)?;
    let place = Place { image, start, size };
    to.about = format!(
        "`bench -t none -i ENGINE` on a full qcow2 image of {}. The limit is fio with O_DIRECT \
         and the same engine on the part of the same file where the data lie: to fio a raw \
         file. zebu must reach 0.9 of it. A request that is alone in flight is executed by \
         zebu's own thread (`preadv`, `pwritev`), whatever the engine.",
        units::size(size)
    );
    let mut small =
        Group::new("4 KiB at random", Unit::Requests, Ratio::SpeedOfFio).drawn(Scale::Relative);
    for write in [false, true] {
        for depth in [1, 32] {
            for engine in ENGINES {
                let block = 4 * KIB;
                let task = Task {
                    engine,
                    depth,
                    block,
                    random: true,
                    write,
                };
                let label = format!("{engine}, {}, {depth} in flight", way(write));
                let (count, all) = measure(bench, &place, task);
                let row = Row::new(&label, Some(OF_FIO), &all, |s| count as f64 / s);
                to.add(&mut small, row, &all);
            }
        }
    }
    let title = "In order, one in flight, native";
    let mut large = Group::new(title, Unit::Throughput, Ratio::Speed);
    for write in [true, false] {
        for block in [16 * KIB, 64 * KIB, 256 * KIB, LARGE] {
            let engine = "native";
            let task = Task {
                engine,
                depth: 1,
                block,
                random: false,
                write,
            };
            let label = format!("{} {}", units::size(block), way(write));
            let (count, all) = measure(bench, &place, task);
            let mib = (count * block) as f64 / MIB as f64;
            to.add(&mut large, Row::new(&label, None, &all, |s| mib / s), &all);
        }
    }
    to.groups.extend([small, large]);
    Ok(())
}

fn way(write: bool) -> &'static str {
    if write { "write" } else { "read" }
}

fn measure(bench: &Bench, place: &Place, task: Task) -> (u64, Vec<Series>) {
    let depth = u64::from(task.depth);
    let requests = Requests {
        depth,
        first: match task.block {
            LARGE => 4,
            _ => (64 * depth).max(LEAST_PROBE),
        },
        most: match task.random {
            true => u64::MAX / 2,
            // Once through the image, so that fio and bench end at the same place.
            false => place.size / task.block,
        },
        make: &|count| programs(bench, place, task, count),
    };
    bench.measure_requests(&requests, &[], None)
}

fn programs(bench: &Bench, place: &Place, task: Task, count: u64) -> Vec<Program> {
    let Task {
        engine,
        depth,
        block,
        random,
        write,
    } = task;
    let mut verb = format!("bench -c {count} -d {depth} -f qcow2 -t none -s {block}");
    if random {
        verb += &format!(" -S {}", scattering_step(place.size, block));
    }
    if write {
        verb += " -w --pattern 255";
    }
    let flags = format!("-i {engine}");
    let file: &[&Path] = &[&place.image];
    let job = Job {
        engine,
        random,
        write,
        block,
        depth,
        count,
        file: &place.image,
        start: place.start,
        size: place.size,
    };
    let mut all = vec![
        bench.qemu(&verb, &flags, file),
        bench.zebu(&verb, &flags, file),
    ];
    all.extend(bench.peers.fio.iter().map(|fio| fio.run(&job)));
    all
}
