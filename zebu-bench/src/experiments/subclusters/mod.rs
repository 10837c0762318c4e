//! P3: seed 002. 4 KiB writes into an empty image: cluster sizes, subclusters, a backing file.

mod after;
mod limits;
mod tables;
mod task;

use super::Experiment;
use super::requests::{probe, scattering_step};
use crate::bench::Bench;
use crate::error::{Error, Result};
use crate::inputs::filled;
use crate::inputs::fs_image::allocated;
use crate::measure::child::command;
use crate::measure::{Cell, Contender, Series, series};
use crate::peers::qemu::done;
use crate::report::Section;
use crate::report::machine::free_space;
use crate::units::GIB;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use task::{BLOCK, Task};

/// Size of the image without a backing file, as in the seed.
const EMPTY: u64 = 40 * GIB;
/// The step that was used on it before: odd in blocks of 4 KiB, and through the whole disk.
const EMPTY_STEP: u64 = 205_066_240;
/// What one run may take on the disk.
const MOST_SPACE: u64 = 8 * GIB;
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
        for task in task::all(bench.options.quick) {
            match measure(&ground, task) {
                Ok(cell) => {
                    tables::say(&cell);
                    measured.push(cell);
                }
                Err(e) => section.note(format!("{} is left out: {e}", task.label())),
            }
        }
        let limits = limits::of_fio(&ground, section);
        tables::all(section, &measured, &limits);
        limits::system_calls(&ground, section);
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

/// How long a run should last, roughly. With one in flight the programs are close to each other.
fn run_seconds(bench: &Bench, depth: u64) -> f64 {
    bench.seconds(if depth == 1 { 0.3 } else { 0.1 }, 1.0)
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
        run_seconds(bench, task.depth),
        &make,
    )
    .ok_or_else(|| Error::new("neither QEMU nor zebu can do it here"))?;
    let mut contenders = make(probed.count);
    if bench.options.quick {
        // The slower of QEMU's two engines is left out.
        contenders.remove(1 - probed.quicker(0, 1));
    }
    let space = RefCell::new(HashMap::new());
    let cell = Cell {
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
    };
    let all = bench.alternate_requests(task.depth, &cell);
    drop(cell);
    Ok(Measured {
        task,
        count: probed.count,
        all,
        space: space.take(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_path_is_escaped() {
        let options = without_fallocate(Path::new("/a,b/x.qcow2"));
        assert!(options.contains("file.image.filename=/a,,b/x.qcow2,"));
    }
}
