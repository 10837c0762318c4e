//! zebu and QEMU change one image in turn. Each run makes a random image over random backing files and
//! executes random steps (`steps.rs`) with both programs on real files. After each step both programs
//! read everything, which is compared with plain memory (`world.rs`), and both check the image.
//!
//! A failed run prints its seed and the commands of the shortest list of steps that fails.

mod bitmaps;
mod chain;
mod exchange;
mod filters;
mod found;
mod limited;
mod make;
mod program;
mod refused;
mod session;
mod snapshots;
mod steps;
mod targets;
mod views;
mod world;
mod written;

use zebu_testkit::library::dirty;
use zebu_testkit::program::{self as common};

use std::path::Path;
use std::time::{Duration, Instant};

use common::{Cases, Rng, bytes};
use program::Shell;
use world::World;
use zebu_testkit::work;

/// A failed run: the number of steps, the reason, and the commands.
struct Failure {
    done: usize,
    why: String,
    log: Vec<String>,
}

/// One random step.
type Step = fn(&mut World, &mut Shell, &mut Rng) -> Result<(), String>;

/// Executes steps, each with its seed, on a new image.
fn run(seed: u64, step: Step, seeds: &[u64]) -> Result<usize, Failure> {
    let place = match seed % 4 {
        0 => Path::new("/dev/shm"),
        _ => Path::new(env!("CARGO_TARGET_TMPDIR")),
    };
    // Parts of absolute names.
    let prefix =
        bytes::os([".tmp", "a b", "c,d:", "e\u{e0ff}", "f\u{e0e2}\u{e082}"][seed as usize % 5]);
    let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(place);
    let folder = folder.expect("a temporary folder");
    let mut shell = Shell::new(folder.path());
    let mut done = 0;
    let mut all = || {
        let mut rng = Rng::new(seed);
        let mut world = World::new(&mut shell, &mut rng)?;
        world.verify(&mut shell, &mut rng)?;
        for seed in seeds {
            done += 1;
            let mut rng = Rng::new(*seed);
            step(&mut world, &mut shell, &mut rng)?;
            world.verify(&mut shell, &mut rng)?;
        }
        world.verify_bases(&mut shell)
    };
    match all() {
        Ok(()) => Ok(done),
        Err(why) => {
            if zebu_testkit::keep() {
                eprintln!("kept: {}", folder.keep().display());
            }
            Err(Failure {
                done,
                why,
                log: shell.log,
            })
        }
    }
}

/// The shortest failing list of steps that was found within 90 s.
fn shrink(seed: u64, mut steps: Vec<u64>, mut failure: Failure) -> Failure {
    let end = Instant::now() + Duration::from_secs(90);
    steps.truncate(failure.done);
    let mut size = steps.len();
    while size > 0 {
        let mut at = 0;
        while at < steps.len() && Instant::now() < end {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + size).min(steps.len()));
            match run(seed, World::step, &fewer) {
                Ok(_) => at += size,
                Err(f) => {
                    fewer.truncate(f.done);
                    steps = fewer;
                    failure = f;
                }
            }
        }
        size /= 2;
    }
    failure
}

#[test]
fn sessions() {
    let begun = Instant::now();
    let mut seeds = work(80, "steps of zebu and QEMU in turn");
    while let Some(seed) = seeds.next() {
        let mut rng = Rng::new(seed ^ 0x5e55_1045);
        let steps: Vec<u64> = (0..4 + rng.below(14)).map(|_| rng.next()).collect();
        match run(seed, World::step, &steps) {
            Ok(count) => seeds.add(count as u64),
            Err(failure) => {
                let total = seeds.done() + failure.done as u64;
                eprintln!(
                    "seed {seed} failed after {total} steps, {} s in all: {}",
                    begun.elapsed().as_secs(),
                    failure.why
                );
                let failure = match zebu_testkit::keep() {
                    true => failure,
                    false => shrink(seed, steps, failure),
                };
                panic!("{}\n{}", failure.log.join("\n"), failure.why);
            }
        }
    }
}

/// Runs so many steps on each of some images.
fn alone(step: Step, steps: usize, mut seeds: Cases) {
    while let Some(seed) = seeds.next() {
        let mut rng = Rng::new(seed ^ 0x5e55_1045);
        let list: Vec<u64> = (0..steps).map(|_| rng.next()).collect();
        if let Err(Failure { done, why, log }) = run(seed, step, &list) {
            let done = seeds.done() as usize + done;
            panic!("after {done} steps: {}\n{why}", log.join("\n"));
        }
        seeds.add(steps as u64);
    }
}

/// The steps of `targets.rs` alone.
#[test]
fn targets_that_the_source_reads() {
    let seeds = work(16, "steps onto what is read");
    alone(World::onto_what_is_read, 4, seeds);
}

/// Snapshots and what they must outlive.
#[test]
fn snapshots_over_other_sizes_and_backing_files() {
    alone(
        World::around_snapshots,
        8,
        work(24, "steps around snapshots"),
    );
}
