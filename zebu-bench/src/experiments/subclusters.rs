//! Seed 002, P3: 4 KiB writes that allocate, over cluster sizes, with and without subclusters and
//! a backing file.

use super::{Experiment, NOT_SLOWER};
use crate::bench::{Bench, Requests, scattering_step};
use crate::error::{Error, Result};
use crate::inputs::filled;
use crate::measure::child::command;
use crate::measure::{Program, Series};
use crate::peers::qemu::done;
use crate::report::machine::free_space;
use crate::results::{self, Group, Ratio, Row, Scale, Unit};
use crate::units::{self, GIB, KIB, MIB};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

const BLOCK: u64 = 4 * KIB;
const SUBCLUSTERS: u64 = 32;
const LEAST_EXTENDED: u64 = 16 * KIB;
/// Size of the image without a backing file, as in the seed.
const EMPTY: u64 = 40 * GIB;
/// What one run may take on the disk.
const MOST_SPACE: u64 = 8 * GIB;
/// What the mean over all rows of a table must reach.
const MEAN: f64 = 2.0;

/// The cluster sizes of the seed's table.
const CLUSTERS: [u64; 8] = [
    2 * MIB,
    MIB,
    512 * KIB,
    256 * KIB,
    128 * KIB,
    64 * KIB,
    32 * KIB,
    4 * KIB,
];
/// Those without a backing file: the largest, the usual one, the smallest.
const EMPTY_CLUSTERS: [u64; 4] = [2 * MIB, 512 * KIB, 64 * KIB, 4 * KIB];

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "subclusters",
    title: "4 KiB writes that allocate",
    run,
};

/// One row.
#[derive(Clone, Copy)]
struct Task {
    cluster: u64,
    extended: bool,
    backed: bool,
    depth: u64,
}

impl Task {
    fn label(self) -> String {
        let cluster = units::size(self.cluster);
        let one = if self.depth == 1 { ", 1 in flight" } else { "" };
        match self.extended {
            true => format!(
                "{cluster} ({}){one}",
                units::size(self.cluster / SUBCLUSTERS)
            ),
            false => format!("{cluster}{one}"),
        }
    }
}

fn tasks(backed: bool) -> Vec<Task> {
    let clusters: &[u64] = if backed { &CLUSTERS } else { &EMPTY_CLUSTERS };
    let both = |&cluster: &u64| {
        [true, false].map(|extended| Task {
            cluster,
            extended,
            backed,
            depth: 32,
        })
    };
    let mut all: Vec<Task> = clusters.iter().flat_map(both).collect();
    all.extend(both(&(64 * KIB)).map(|task| Task { depth: 1, ..task }));
    all.retain(|t| !t.extended || t.cluster >= LEAST_EXTENDED);
    all
}

fn run(bench: &Bench, to: &mut results::Experiment) -> Result<()> {
    let base_size = bench.options.size;
    let place = Place {
        bench,
        base: filled::qcow2_in_one_piece(bench, base_size)?.0,
        base_size,
        space: MOST_SPACE.min(free_space(&bench.dir) / 4),
    };
    if place.space < GIB {
        return Err(Error::new("there is less than 4 GiB of free space"));
    }
    to.about = format!(
        "Random 4 KiB writes into a new image (`bench -w -t none`, 32 in flight): rows are \
         cluster sizes, with 32 subclusters where their size stands in brackets. Over a full \
         backing file of {}, from which the rest of each cluster is copied, and without one \
         (40G). qemu-img checks every image once.",
        units::size(base_size)
    );
    for (backed, title) in [
        (true, "Over a backing file"),
        (false, "Without a backing file"),
    ] {
        let mut group = Group::new(title, Unit::Requests, Ratio::Speed).with_mean(MEAN);
        if backed {
            group = group.drawn(Scale::Relative);
        }
        for task in tasks(backed) {
            let (count, all) = measure(&place, task);
            let figure = |s: f64| count as f64 / s;
            let row = Row::new(&task.label(), Some(NOT_SLOWER), &all, figure);
            to.add(&mut group, row, &all);
        }
        to.groups.push(group);
    }
    Ok(())
}

/// What all rows share.
struct Place<'a> {
    bench: &'a Bench,
    /// The full backing file and its size.
    base: PathBuf,
    base_size: u64,
    /// What one run may take on the disk.
    space: u64,
}

impl Place<'_> {
    fn size(&self, task: Task) -> u64 {
        if task.backed { self.base_size } else { EMPTY }
    }

    /// QEMU with each of its two engines, and zebu as it comes, each with an image of its own.
    fn programs(&self, task: Task, count: u64) -> Vec<Program> {
        let verb = format!(
            "bench -f qcow2 -c {count} -d {} -t none -s {BLOCK} -S {} -w --pattern 1",
            task.depth,
            scattering_step(self.size(task), BLOCK)
        );
        let bench = self.bench;
        let (qemu, zebu) = (bench.output("qemu.qcow2"), bench.output("zebu.qcow2"));
        let one = |mut program: Program, output: &Path| {
            program.setup = vec![self.create(task, output)];
            program.output = Some(output.to_owned());
            program
        };
        vec![
            one(bench.qemu(&verb, "-n", &[&qemu]), &qemu),
            one(bench.qemu(&verb, "-i io_uring", &[&qemu]), &qemu),
            one(bench.zebu(&verb, "", &[&zebu]), &zebu),
        ]
    }

    /// The command that makes the empty image; QEMU's, for both programs.
    fn create(&self, task: Task, image: &Path) -> Vec<OsString> {
        let extended = if task.extended { "on" } else { "off" };
        let mut line = command([self.bench.peers.qemu.img.as_os_str()]);
        line.extend(command(["create", "-q", "-f", "qcow2", "-o"]));
        line.push(format!("cluster_size={},extended_l2={extended}", task.cluster).into());
        if task.backed {
            line.extend(command(["-F", "qcow2", "-b"]));
            line.push(self.base.clone().into());
        }
        line.push(image.into());
        line.push(self.size(task).to_string().into());
        line
    }
}

fn measure(place: &Place<'_>, task: Task) -> (u64, Vec<Series>) {
    let bench = place.bench;
    let requests = Requests {
        depth: task.depth,
        first: task.depth * 4,
        // More writes would no longer go to new clusters, or take too much space.
        most: (place.space / task.cluster).min(place.size(task) / task.cluster / 2),
        make: &|count| place.programs(task, count),
    };
    let judge = |p: &Program| {
        let output = p.output.as_ref().ok_or_else(|| Error::new("no output"))?;
        let mut check = Command::new(&bench.peers.qemu.img);
        check.args(["check", "-q", "-f", "qcow2"]).arg(output);
        done(check)
    };
    bench.measure_requests(&requests, &[], Some(&judge))
}
