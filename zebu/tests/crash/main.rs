//! Guards against a power cut that leaves an inconsistent image, loses flushed data or shows data
//! that were not written.
//!
//! - `disk`: a disk that records all operations;
//! - `states`: the states that a power cut may leave;
//! - `workloads`: the requests and changes;
//! - `judge`: the conditions that each state must meet; `bitmaps`: those of bitmaps;
//! - `faults`: each operation fails in turn, and the session continues;
//! - `new_images`: images of formats that are filled once;
//! - `damaged`: a change fails because of damage, and the session continues;
//! - `breaks`: each rule of the order is broken, which must be detected.
//!
//! | variable              | meaning                                           |
//! |-----------------------|---------------------------------------------------|
//! | `ZEBU_CRASH_STATES`   | the least number of states of each workload       |
//! | `ZEBU_CRASH_WORKLOAD` | only this one                                     |
//! | `ZEBU_CRASH_SEED`     | the first seed                                    |
//! | `ZEBU_DAMAGED_SEEDS`  | damaged images                                    |
//!
//! A failure prints the seed that repeats it. (`queues`, `commit`, `rebase` and `convert` have
//! threads, whose schedule differs in each run.)

#[path = "../common/allowed_flags.rs"]
mod allowed_flags;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/dirty.rs"]
mod dirty;

mod bitmaps;
#[cfg(debug_assertions)]
mod breaks;
mod damaged;
mod disk;
mod faults;
mod judge;
mod new_images;
mod states;
mod workloads;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{PrintOnPanic, Rng, Watchdog, cases, number, progress};
use judge::{Expected, Judge, Verdict};
use states::Cutter;
use workloads::{Dice, Workload};
use zebu::storage::{EngineKind, Queue, QueueOptions};

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

/// Verifies at least `states` states of a workload.
fn look(workload: Workload, states: usize, effort: Effort) -> Tally {
    let mut tally = Tally::default();
    let first = number("ZEBU_CRASH_SEED").unwrap_or(1);
    for seed in first.. {
        let name = format!(
            "ZEBU_CRASH_WORKLOAD={} ZEBU_CRASH_SEED={seed}",
            workload.name
        );
        let _note = PrintOnPanic(name.clone());
        let _watchdog = Watchdog::new(&name);
        tally.add(run(workload, seed, effort).unwrap_or_else(|what| panic!("{what}")));
        if tally.states * workload.weight >= states {
            break;
        }
    }
    tally
}

/// Verifies states of all workloads, and prints a table.
fn verify_all(states: usize, effort: Effort) -> Tally {
    let states = number("ZEBU_CRASH_STATES").map_or(states, |n| n as usize);
    let only = std::env::var("ZEBU_CRASH_WORKLOAD").ok();
    let wanted = |w: &&Workload| only.as_deref().is_none_or(|only| only == w.name);
    let chosen: Vec<_> = workloads::ALL.iter().filter(wanted).collect();
    assert!(!chosen.is_empty(), "{only:?} is no workload");
    let next = AtomicUsize::new(0);
    let rows = Mutex::new(Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(workload) = chosen.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let tally = look(**workload, states, effort);
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
    cases(all.states as u64, "states after a power cut");
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
    let tally = verify_all(10_000, effort);
    let is_part = ["STATES", "WORKLOAD"].map(|n| std::env::var_os(format!("ZEBU_CRASH_{n}")));
    assert!(tally.states >= 100_000 || is_part.iter().any(Option::is_some));
}
