//! zebu and QEMU change one image in turn. Each run makes a random image over random backing files and
//! executes random steps (`steps.rs`) with both programs on real files. After each step both programs
//! read everything, which is compared with plain memory (`world.rs`), and both check the image.
//!
//! | variable                | meaning                                          |
//! |-------------------------|--------------------------------------------------|
//! | `ZEBU_SESSIONS_STEPS`   | at least so many steps                           |
//! | `ZEBU_SESSIONS_SECONDS` | or: run for this time                            |
//! | `ZEBU_SESSIONS_SEED`    | the first run's seed; the next ones count up     |
//! | `ZEBU_SESSIONS_TRACE`   | print each command                               |
//! | `ZEBU_SESSIONS_WHOLE`   | do not shorten the list of steps of a failure    |
//! | `ZEBU_SESSIONS_TARGETS` | steps of `targets.rs` in a test of their own     |
//!
//! A failed run prints its seed and the commands of the shortest list of steps that fails.

mod bitmaps;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../../zebu/tests/common/dirty.rs"]
mod dirty;
mod found;
mod limited;
mod make;
mod program;
mod refused;
mod steps;
mod targets;
mod world;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{Rng, bytes, env_number};
use program::Shell;
use world::World;

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
            if std::env::var_os("ZEBU_SESSIONS_KEEP").is_some() {
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
    let wanted = env_number("ZEBU_SESSIONS_STEPS").unwrap_or(80) as usize;
    let seconds = env_number("ZEBU_SESSIONS_SECONDS");
    let first = env_number("ZEBU_SESSIONS_SEED").unwrap_or(1);
    let begun = Instant::now();
    let (mut done, mut seed) = (0, first);
    while match seconds {
        Some(seconds) => begun.elapsed().as_secs() < seconds,
        None => done < wanted,
    } {
        let mut rng = Rng::new(seed ^ 0x5e55_1045);
        let steps: Vec<u64> = (0..4 + rng.below(14)).map(|_| rng.next()).collect();
        match run(seed, World::step, &steps) {
            Ok(count) => done += count,
            Err(failure) => {
                let total = done + failure.done;
                eprintln!(
                    "seed {seed} failed after {total} steps, {} s in all: {}",
                    begun.elapsed().as_secs(),
                    failure.why
                );
                let failure = match std::env::var_os("ZEBU_SESSIONS_WHOLE") {
                    Some(_) => failure,
                    None => shrink(seed, steps, failure),
                };
                panic!(
                    "ZEBU_SESSIONS_SEED={seed} ZEBU_SESSIONS_STEPS=1\n{}\n{}",
                    failure.log.join("\n"),
                    failure.why
                );
            }
        }
        seed += 1;
    }
    println!("seeds {first} to {}", seed - 1);
    println!("cases: {done} steps");
}

/// The steps of `targets.rs` alone, four on each image.
#[test]
fn targets_that_the_source_reads() {
    let wanted = env_number("ZEBU_SESSIONS_TARGETS").unwrap_or(16);
    let first = env_number("ZEBU_SESSIONS_SEED").unwrap_or(1);
    for nth in 0..wanted.div_ceil(4) {
        let seed = first + nth;
        let mut rng = Rng::new(seed ^ 0x5e55_1045);
        let seeds: Vec<u64> = (0..4).map(|_| rng.next()).collect();
        if let Err(Failure { done, why, log }) = run(seed, World::onto_what_is_read, &seeds) {
            let done = 4 * nth as usize + done;
            panic!("seed {seed}, after {done} steps: {}\n{why}", log.join("\n"));
        }
    }
    println!("cases: {wanted} steps");
}

/// Snapshots and what they must outlive, eight steps on each image.
#[test]
fn snapshots_over_other_sizes_and_backing_files() {
    let wanted = env_number("ZEBU_SESSIONS_SNAPSHOTS").unwrap_or(24);
    let first = env_number("ZEBU_SESSIONS_SEED").unwrap_or(1);
    for nth in 0..wanted.div_ceil(8) {
        let seed = first + nth;
        let mut rng = Rng::new(seed ^ 0x5e55_1045);
        let seeds: Vec<u64> = (0..8).map(|_| rng.next()).collect();
        if let Err(Failure { done, why, log }) = run(seed, World::around_snapshots, &seeds) {
            let done = 8 * nth as usize + done;
            panic!("seed {seed}, after {done} steps: {}\n{why}", log.join("\n"));
        }
    }
    println!("cases: {wanted} steps");
}
