//! Guards against an image that a power cut makes inconsistent, against data
//! that were flushed and are not there afterwards, and against data that
//! nobody wrote.
//!
//! - `disk`: a disk that remembers what was done to it;
//! - `states`: everything that a power cut may leave of that;
//! - `workloads`: what is done;
//! - `judge`: what must hold of each state;
//! - `faults`: each operation fails in turn, and the session goes on;
//! - `damaged`: damage makes a change fail, and the session goes on;
//! - `breaks`: the rules of the order, broken one by one: each is noticed.
//!
//! | variable              | meaning                                           |
//! |-----------------------|---------------------------------------------------|
//! | `ZEBU_CRASH_STATES`   | states of each workload, at least                 |
//! | `ZEBU_CRASH_WORKLOAD` | only this one                                     |
//! | `ZEBU_CRASH_SEED`     | the first seed                                    |
//! | `ZEBU_DAMAGED_SEEDS`  | damaged images                                    |
//!
//! A failure says the seed that makes it again. (With `queues`, `commit`,
//! `rebase` and `convert` threads meet differently each time.)

#[path = "../common/mod.rs"]
mod common;

#[cfg(zebu_break)]
mod breaks;
mod damaged;
mod disk;
mod faults;
mod judge;
mod states;
mod workloads;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Rng, Sayer, Watchdog, cases, progress};
use judge::{Expected, Judge, Verdict};
use states::Cutter;
use workloads::{Dice, Workload};
use zebu::storage::{EngineKind, Queue, QueueOptions};

/// How states are looked at.
#[derive(Clone, Copy)]
struct Effort {
    /// Random states of each moment with many.
    samples: usize,
    /// One state in so many is written to.
    more: u64,
    /// One state in so many is shown to QEMU.
    qemu: u64,
}

/// What was looked at.
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

/// Does a workload, and looks at what power cuts may leave of it.
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

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect(name))
}

/// Looks at `states` states of a workload at least.
fn look(workload: Workload, states: usize, effort: Effort) -> Tally {
    let mut tally = Tally::default();
    let first = number("ZEBU_CRASH_SEED").unwrap_or(1);
    for seed in first.. {
        let name = format!(
            "ZEBU_CRASH_WORKLOAD={} ZEBU_CRASH_SEED={seed}",
            workload.name
        );
        let _sayer = Sayer(name.clone());
        let _watchdog = Watchdog::new(&name);
        tally.add(run(workload, seed, effort).unwrap_or_else(|what| panic!("{what}")));
        if tally.states * workload.weight >= states {
            break;
        }
    }
    tally
}

/// Looks at all workloads, and prints a table.
fn look_at_all(states: usize, effort: Effort) -> Tally {
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
    println!("workload              runs   states  written to  shown to QEMU");
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
    println!("{} written to, {} shown to QEMU", all.written, all.qemu);
    all
}

#[test]
fn at_any_moment() {
    let effort = Effort {
        samples: 2,
        more: 16,
        qemu: 200,
    };
    look_at_all(600, effort);
}

#[test]
#[ignore = "slow"]
fn at_any_moment_a_hundred_thousand_times() {
    let effort = Effort {
        samples: 4,
        more: 16,
        qemu: 400,
    };
    let tally = look_at_all(10_000, effort);
    let is_part = ["STATES", "WORKLOAD"].map(|n| std::env::var_os(format!("ZEBU_CRASH_{n}")));
    assert!(tally.states >= 100_000 || is_part.iter().any(Option::is_some));
}
