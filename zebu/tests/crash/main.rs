//! Guards against a power cut that leaves an inconsistent image, loses flushed data or shows data
//! that were not written.
//!
//! - `disk`: a disk that records all operations;
//! - `states`: the states that a power cut may leave;
//! - `workloads`: the requests and changes; `spread`: disks of which only parts are used;
//! - `judge`: the conditions that each state must meet; `bitmaps`: those of bitmaps;
//! - `faults`: each operation fails in turn, and the session continues;
//! - `new_images`: images of formats that are filled once;
//! - `damaged`: a change fails because of damage, and the session continues;
//! - `breaks`: each rule of the order is broken, which must be detected.
//!
//! `ZEBU_ONLY` is the name of a workload. `ZEBU_CASES` is the least number of states of each one.
//!
//! A failure prints the seed that repeats it. (`queues`, `commit`, `rebase` and `convert` have
//! threads, whose schedule differs in each run.)

mod bitmaps;
#[cfg(debug_assertions)]
mod breaks;
mod damaged;
mod faults;
mod judge;
mod new_images;
mod spread;
mod states;
mod workloads;

use zebu_testkit::library::{self as common, allowed_flags, dirty, disk};

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Cases, Rng, Watchdog, counted, progress, work};
use judge::{Expected, Judge, Verdict};
use states::Cutter;
use workloads::{Dice, Workload};
use zebu::storage::{EngineKind, Queue, QueueOptions};
use zebu_testkit::{is_only, only};

/// How thoroughly states are verified.
#[derive(Clone, Copy)]
struct Effort {
    /// Random states of a moment that has many.
    samples: usize,
    /// One state in this many is written to.
    more: u64,
    /// One state in this many is verified by QEMU.
    qemu: u64,
}

/// The numbers of states that were verified.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    runs: usize,
    states: usize,
    written: usize,
    qemu: usize,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.runs += other.runs;
        self.states += other.states;
        self.written += other.written;
        self.qemu += other.qemu;
    }
}

fn queue() -> Queue {
    let options = QueueOptions::default().engine(EngineKind::Threads);
    Queue::new(options).unwrap()
}

/// Runs a workload, and verifies the states that power cuts may leave.
fn run(workload: Workload, seed: u64, effort: Effort) -> Result<Tally, String> {
    let mut dice = Dice {
        rng: Rng::new(seed),
        fault: None,
    };
    let queue = queue();
    let history = (workload.run)(&queue, &mut dice);
    let mut rng = dice.rng;
    let log = history.disk.log().clone();
    let mut moments = Cutter::moments(&log);
    moments.extend(history.events.iter().map(|event| event.ended));
    moments.push(0);
    moments.sort_unstable();
    let mut tally = Tally {
        runs: 1,
        ..Tally::default()
    };
    let mut cutter = Cutter::new(&history.files, &log);
    let mut expected = Expected::new(history.before.clone(), &history.events);
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge {
        queue: &queue,
        layout: &history.layout,
        folder: folder.path(),
    };
    let mut verdict: Verdict = Ok(());
    for moment in moments {
        expected.advance(moment);
        cutter.cut(moment, &mut rng, effort.samples, |state, rng| {
            if verdict.is_err() {
                return;
            }
            let (more, qemu) = (rng.one_in(effort.more), rng.one_in(effort.qemu));
            tally.states += 1;
            progress();
            tally.written += usize::from(more);
            tally.qemu += usize::from(qemu);
            verdict = judge.judge(state, &expected, rng, more, qemu);
            if let Err(what) = &mut verdict {
                *what = format!("{}, seed {seed}, time {moment}: {what}", workload.name);
            }
        });
    }
    verdict.map(|()| tally)
}

/// Verifies states of a workload, each of which counts as `weight`.
fn look(workload: Workload, mut seeds: Cases, effort: Effort) -> Tally {
    let mut tally = Tally::default();
    while let Some(seed) = seeds.next() {
        let _watchdog = Watchdog::new(&format!("{}, seed {seed}", workload.name));
        let of_seed = run(workload, seed, effort).unwrap_or_else(|what| panic!("{what}"));
        seeds.add((of_seed.states * workload.weight) as u64);
        tally.add(of_seed);
    }
    tally
}

/// Verifies states of all workloads, and prints a table.
fn verify_all(states: u64, effort: Effort) -> Tally {
    let wanted = |w: &&Workload| is_only(w.name);
    let chosen: Vec<_> = workloads::ALL.iter().filter(wanted).collect();
    assert!(!chosen.is_empty(), "{:?} is no workload", only());
    let next = AtomicUsize::new(0);
    let rows = Mutex::new(Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(workload) = chosen.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let what = format!("states, by weight (ZEBU_ONLY={})", workload.name);
                    let seeds = work(states, what).share(cores, chosen.len());
                    let tally = look(**workload, seeds, effort);
                    rows.lock().unwrap().push((workload.name, tally));
                }
            });
        }
    });
    let mut all = Tally::default();
    println!("workload              runs   states  written to       to QEMU");
    for (name, tally) in rows.into_inner().unwrap() {
        let Tally {
            runs,
            states,
            written,
            qemu,
        } = tally;
        println!("{name:20} {runs:5} {states:8} {written:11} {qemu:14}");
        all.add(tally);
    }
    counted(all.states as u64, "states after a power cut");
    println!("{} written to, {} verified by QEMU", all.written, all.qemu);
    all
}

#[test]
fn at_any_moment() {
    let effort = Effort {
        samples: 2,
        more: 16,
        qemu: 200,
    };
    verify_all(1200, effort);
}

#[test]
#[ignore = "slow"]
fn at_any_moment_a_hundred_thousand_times() {
    let effort = Effort {
        samples: 4,
        more: 16,
        qemu: 400,
    };
    verify_all(10_000, effort);
}
