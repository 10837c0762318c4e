//! P3: seed 002. 4 KiB writes into an empty image: cluster sizes, subclusters, a backing file.

mod after;
mod tables;

use super::Experiment;
use super::requests::{SystemCalls, probe, scattering_step};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::inputs::filled;
use crate::inputs::fs_image::allocated;
use crate::measure::child::command;
use crate::measure::{Cell, Contender, Series, series};
use crate::peers::fio::Job;
use crate::peers::qemu::done;
use crate::report::Section;
use crate::report::machine::free_space;
use crate::units::{self, GIB, KIB, MIB};
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Size of the image without a backing file, as in the seed.
const EMPTY: u64 = 40 * GIB;
/// The step that was used on it before: odd in blocks of 4 KiB, and through the whole disk.
const EMPTY_STEP: u64 = 205_066_240;
const BLOCK: u64 = 4 * KIB;
/// Clusters have 32 subclusters of at least 512 bytes.
const SUBCLUSTERS: u64 = 32;
const LEAST_EXTENDED: u64 = 16 * KIB;
/// What one run may take on the disk.
const MOST_SPACE: u64 = 8 * GIB;
const CLUSTERS: [u64; 10] = [
    4 * KIB,
    8 * KIB,
    16 * KIB,
    32 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    2 * MIB,
];
const QUICK_CLUSTERS: [u64; 4] = [4 * KIB, 16 * KIB, 64 * KIB, 2 * MIB];

/// How an image is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    cluster: u64,
    extended: bool,
}

impl Layout {
    /// As a row of the seed: the cluster size, and that of a subcluster in brackets.
    fn name(self) -> String {
        match self.extended {
            true => format!(
                "{} ({})",
                units::size(self.cluster),
                units::size(self.cluster / SUBCLUSTERS)
            ),
            false => units::size(self.cluster),
        }
    }

    /// Arguments of `create` for it.
    fn options(self) -> String {
        let extended = if self.extended { "on" } else { "off" };
        format!("cluster_size={},extended_l2={extended}", self.cluster)
    }
}

/// What a cell measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Task {
    layout: Layout,
    /// Whether there is a fully populated backing file.
    backed: bool,
    /// Requests in flight.
    depth: u64,
    /// Bytes of a request.
    block: u64,
    /// QEMU initialises new clusters by writing to them, not by fallocate.
    written: bool,
}

impl Task {
    fn label(self) -> String {
        format!(
            "{}{}, {} in flight, {}{}",
            self.layout.name(),
            if self.layout.extended {
                ""
            } else {
                ", no subclusters"
            },
            self.depth,
            if self.backed { "backed" } else { "empty" },
            match (self.block, self.written) {
                (BLOCK, false) => String::new(),
                (BLOCK, true) => ", QEMU without fallocate".into(),
                (block, _) => format!(", {} requests", units::size(block)),
            }
        )
    }
}

/// A task, measured.
struct Measured {
    task: Task,
    count: u64,
    all: Vec<Series>,
    /// What the image took on the disk after a run, by program.
    space: HashMap<String, u64>,
}

impl Measured {
    fn of(&self, name: &str) -> Option<&Series> {
        series::fastest(&self.all, name)
    }

    fn rate(&self, name: &str) -> f64 {
        self.of(name)
            .map_or(f64::NAN, |s| self.count as f64 / s.median())
    }

    /// How many times as fast as QEMU's better engine zebu is.
    fn ratio(&self) -> f64 {
        self.rate("zebu") / self.rate("QEMU")
    }
}

/// The experiment `subclusters`.
pub struct Subclusters;

impl Experiment for Subclusters {
    fn name(&self) -> &'static str {
        "subclusters"
    }

    fn about(&self) -> &'static str {
        "4 KiB writes into an empty image, cluster sizes and subclusters (seed 002, P3)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let ground = Ground::new(bench)?;
        tables::method(section, &ground);
        let mut measured = Vec::new();
        for task in tasks(bench.options.quick) {
            match measure(&ground, task) {
                Ok(cell) => {
                    tables::say(&cell);
                    measured.push(cell);
                }
                Err(e) => section.note(format!("{} is left out: {e}", task.label())),
            }
        }
        let limits = limits(&ground, section);
        tables::all(section, &measured, &limits);
        system_calls(&ground, section);
        after::random_fill(bench, section)
    }
}

/// What all cells share.
struct Ground<'a> {
    bench: &'a Bench,
    /// The fully populated backing file and its size.
    base: PathBuf,
    base_size: u64,
    /// What one run may take on the disk.
    room: u64,
}

impl<'a> Ground<'a> {
    fn new(bench: &'a Bench) -> Result<Self> {
        let base_size = bench.filled_size();
        let base = filled::qcow2(bench, base_size)?;
        let room = MOST_SPACE.min(free_space(&bench.dir) / 4);
        if room < GIB {
            return Err(Error::new("there is less than 4 GiB of free space"));
        }
        Ok(Ground {
            bench,
            base,
            base_size,
            room,
        })
    }

    fn size(&self, task: Task) -> u64 {
        if task.backed { self.base_size } else { EMPTY }
    }

    fn step(&self, task: Task) -> u64 {
        match (task.backed, task.block) {
            (false, BLOCK) => EMPTY_STEP,
            _ => scattering_step(self.size(task), task.block),
        }
    }

    /// More writes than this would no longer go to new clusters, or take too much room.
    fn most(&self, task: Task) -> u64 {
        let cluster = task.layout.cluster.max(task.block);
        let room = self.room / cluster;
        match task.backed {
            true => room.min(self.base_size / cluster / 2),
            false => room.min(EMPTY / cluster / 2),
        }
    }

    /// QEMU with each of its two engines, and zebu as it comes, each with an image of its own.
    fn contenders(&self, task: Task, count: u64) -> Vec<Contender> {
        let verb = format!(
            "bench -c {count} -d {} -t none -s {} -S {} -w --pattern 1",
            task.depth,
            task.block,
            self.step(task)
        );
        let bench = self.bench;
        let image = |name: &str| bench.output(&format!("{name}.qcow2"));
        let qemu = image("qemu");
        let mut all = Vec::new();
        for engine in ["-n", "-i io_uring"] {
            all.push(match task.written {
                true => {
                    let verb = format!("{verb} --image-opts");
                    bench.qemu(&verb, engine, &[Path::new(&without_fallocate(&qemu))])
                }
                false => bench.qemu(&format!("{verb} -f qcow2"), engine, &[&qemu]),
            });
        }
        all.push(bench.zebu(&format!("{verb} -f qcow2"), "", &[&image("zebu")]));
        for contender in &mut all {
            let output = if contender.name == "zebu" {
                image("zebu")
            } else {
                qemu.clone()
            };
            contender.setup = vec![self.create(task, &output)];
            contender.output = Some(output);
        }
        all
    }

    /// The command that makes the empty image; QEMU's, for both programs.
    fn create(&self, task: Task, image: &Path) -> Vec<std::ffi::OsString> {
        let mut line = command([self.bench.peers.qemu.img.as_os_str()]);
        line.extend(command(["create", "-q", "-f", "qcow2", "-o"]));
        line.push(task.layout.options().into());
        if task.backed {
            line.extend(command(["-F", "qcow2", "-b"]));
            line.push(self.base.clone().into());
        }
        line.push(image.into());
        line.push(self.size(task).to_string().into());
        line
    }
}

/// QEMU's image behind a driver that says to each request for zeroes that it cannot do it, so that
/// QEMU writes them.
fn without_fallocate(image: &Path) -> String {
    format!(
        "driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={},\
         file.inject-error.0.event=none,file.inject-error.0.iotype=write-zeroes,\
         file.inject-error.0.errno={}",
        image.display().to_string().replace(',', ",,"),
        libc::EOPNOTSUPP
    )
}

/// Everything that is measured, in the order of the tables.
fn tasks(quick: bool) -> Vec<Task> {
    let clusters: &[u64] = if quick { &QUICK_CLUSTERS } else { &CLUSTERS };
    let layouts = |clusters: &[u64]| {
        clusters
            .iter()
            .flat_map(|&cluster| [false, true].map(|extended| Layout { cluster, extended }))
            .filter(|l| !l.extended || l.cluster >= LEAST_EXTENDED)
            .collect::<Vec<_>>()
    };
    let mut tasks = Vec::new();
    for backed in [true, false] {
        for depth in [32, 1] {
            // With --quick one write at a time is measured at the default cluster size only.
            let clusters = if quick && depth == 1 {
                &[64 * KIB][..]
            } else {
                clusters
            };
            tasks.extend(layouts(clusters).into_iter().map(|layout| Task {
                layout,
                backed,
                depth,
                block: BLOCK,
                written: false,
            }));
        }
    }
    let empty = |layout| Task {
        layout,
        backed: false,
        depth: 32,
        block: BLOCK,
        written: false,
    };
    let written = if quick {
        &[64 * KIB, 2 * MIB][..]
    } else {
        clusters
    };
    tasks.extend(layouts(written).into_iter().map(|layout| Task {
        written: true,
        ..empty(layout)
    }));
    for block in [8 * KIB, 16 * KIB, 32 * KIB] {
        for backed in [true, false] {
            if quick && backed {
                continue;
            }
            tasks.extend(layouts(&[64 * KIB]).into_iter().map(|layout| Task {
                block,
                backed,
                ..empty(layout)
            }));
        }
    }
    tasks
}

/// How long a run should last, roughly.
fn run_seconds(bench: &Bench) -> f64 {
    if bench.options.quick { 0.15 } else { 1.0 }
}

fn measure(ground: &Ground<'_>, task: Task) -> Result<Measured> {
    let bench = ground.bench;
    let make = |count| ground.contenders(task, count);
    let first = task.depth * 4;
    let probed = probe(
        bench,
        first,
        task.depth,
        ground.most(task),
        run_seconds(bench),
        &make,
    )
    .ok_or_else(|| Error::new("neither QEMU nor zebu can do it here"))?;
    let mut contenders = make(probed.count);
    if bench.options.quick {
        // The slower of QEMU's two engines is left out.
        contenders.remove(1 - probed.quicker(0, 1));
    }
    let space = RefCell::new(HashMap::new());
    let all = bench.alternate(&Cell {
        contenders,
        inputs: vec![],
        judge: Some(Box::new(|c: &Contender, _: &_| {
            let output = c.output.as_ref().ok_or_else(|| Error::new("no output"))?;
            let mut check = Command::new(&bench.peers.qemu.img);
            check.args(["check", "-q", "-f", "qcow2"]).arg(output);
            done(check)?;
            space
                .borrow_mut()
                .insert(c.name.clone(), allocated(output)?);
            Ok(())
        })),
    });
    Ok(Measured {
        task,
        count: probed.count,
        all,
        space: space.take(),
    })
}

/// Rates of fio on a raw file: (requests in flight, into a hole, over data).
fn limits(ground: &Ground<'_>, section: &mut Section) -> Vec<(u64, f64, f64)> {
    let bench = ground.bench;
    let Some(fio) = &bench.peers.fio else {
        return Vec::new();
    };
    let mut rates = Vec::new();
    for depth in [32u64, 1] {
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
                run_seconds(bench),
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
fn system_calls(ground: &Ground<'_>, section: &mut Section) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_size_is_measured_with_and_without_subclusters() {
        let tasks = tasks(false);
        for cluster in CLUSTERS {
            let of = |extended, backed| {
                tasks.iter().any(|t| {
                    t.layout == Layout { cluster, extended } && t.backed == backed && t.depth == 32
                })
            };
            assert!(of(false, true) && of(false, false));
            assert_eq!(of(true, true), cluster >= LEAST_EXTENDED);
        }
        for (i, task) in tasks.iter().enumerate() {
            assert!(!tasks[..i].contains(task), "{task:?} twice");
        }
        let quick = super::tasks(true);
        assert!(quick.len() < tasks.len() && quick.iter().all(|t| tasks.contains(t)));
    }

    #[test]
    fn rows_are_named_as_in_the_seed() {
        let layout = |cluster, extended| Layout { cluster, extended };
        assert_eq!(layout(2 * MIB, true).name(), "2M (64K)");
        assert_eq!(layout(16 * KIB, true).name(), "16K (512)");
        assert_eq!(layout(4 * KIB, false).name(), "4K");
    }

    #[test]
    fn a_comma_in_a_path_is_escaped() {
        let options = without_fallocate(Path::new("/a,b/x.qcow2"));
        assert!(options.contains("file.image.filename=/a,,b/x.qcow2,"));
    }
}
