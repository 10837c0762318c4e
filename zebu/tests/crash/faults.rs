//! Guards against an error that is not reported, that leaves an image inconsistent, or that makes a
//! request hang.
//!
//! Each workload is repeated, and each time another operation of the disk fails: with an error, or
//! by a short transfer. Then:
//! - a request that succeeds is complete; the range of a write that failed reads as before or as
//!   after it; a failed change of the whole image has not happened;
//! - the session continues, and the failed change is retried: nothing else fails, unless a flush or
//!   the header write failed, after which no write succeeds;
//! - a flush fails only if data may be lost;
//! - the image is consistent, also after a power cut at that moment or later.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::faulty::{libc_eio, libc_enospc};
use zebu_testkit::is_only;

use crate::common::{PrintOnPanic, Rng, Watchdog, cases, progress};
use crate::disk::{Failure, Fault, Time};
use crate::judge::{Expected, Judge};
use crate::queue;
use crate::states::Cutter;
use crate::workloads::{self, Dice, History, Workload};

/// Power cuts after a failure, besides those at the end.
const CUTS: usize = 3;

const FAILURES: [Failure; 3] = [Failure::Error(5), Failure::Error(28), Failure::Short];

fn do_workload(workload: Workload, seed: u64, fault: Option<Fault>) -> History {
    let mut dice = Dice {
        rng: Rng::new(seed),
        fault,
    };
    (workload.run)(&queue(), &mut dice)
}

/// Runs a workload with a fault, and verifies the result.
fn fail(workload: Workload, seed: u64, fault: Fault) -> Result<bool, String> {
    let mut history = do_workload(workload, seed, Some(fault));
    history.layout.flags_stay = history.disk.failed();
    let mut rng = Rng::new(seed);
    let queue = queue();
    let log = history.disk.log().clone();
    let mut cutter = Cutter::new(&history.files, &log);
    let mut expected = Expected::new(history.before.clone(), &history.events);
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge {
        queue: &queue,
        layout: &history.layout,
        folder: folder.path(),
    };
    let mut verdict = Ok(());
    let mut later = Cutter::moments(&log);
    later.retain(|time| *time > history.disk.failed_at());
    later.sort_unstable();
    let some = (0..later.len().min(CUTS)).map(|_| rng.pick(&later));
    let mut moments: Vec<Time> = some.collect();
    moments.sort_unstable();
    // At the end, the second time without the operations that are not durable.
    moments.extend([history.disk.now(); 2]);
    for moment in moments {
        expected.advance(moment);
        cutter.cut(moment, &mut rng, 1, |state, rng| {
            if verdict.is_ok() {
                let (more, qemu) = (rng.one_in(4), rng.one_in(500));
                verdict = judge.judge(state, &expected, rng, more, qemu);
                if let Err(what) = &mut verdict {
                    *what = format!("time {moment}: {what}");
                }
            }
        });
    }
    verdict.map(|()| history.disk.failed())
}

/// Runs a workload once for every `step`th of its operations, which fails. Returns the number of
/// failures, or a description of what is wrong.
pub fn try_workload(workload: Workload, seed: u64, step: u64) -> Result<usize, String> {
    let operations = do_workload(workload, seed, None).disk.operations();
    let mut count = 0;
    for nth in (1 + seed % step..=operations).step_by(step as usize) {
        let how = FAILURES[(nth + seed) as usize % FAILURES.len()];
        let fault = Fault { nth, how };
        let name = format!("{}, seed {seed}, {fault:?}", workload.name);
        let _note = PrintOnPanic(name.clone());
        let _watchdog = Watchdog::new(&name);
        let failed = fail(workload, seed, fault).map_err(|e| format!("{name}: {e}"))?;
        progress();
        count += usize::from(failed || how == Failure::Short);
    }
    Ok(count)
}

fn try_all(seeds: u64, step: u64) {
    assert_eq!(FAILURES[0], Failure::Error(libc_eio()));
    assert_eq!(FAILURES[1], Failure::Error(libc_enospc()));
    let wanted = |w: &&Workload| is_only(w.name);
    let chosen: Vec<_> = workloads::ALL.iter().filter(wanted).collect();
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(workload) = chosen.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let what = format!("operations failed (ZEBU_ONLY={})", workload.name);
                    let mut seeds = cases(seeds, what).share(cores, chosen.len());
                    while let Some(seed) = seeds.next() {
                        let step = step * workload.weight as u64;
                        let tried = try_workload(**workload, seed, step);
                        seeds.add(tried.unwrap_or_else(|what| panic!("{what}")) as u64);
                    }
                }
            });
        }
    });
}

#[test]
fn some_operations_fail() {
    try_all(1, 7);
}

#[test]
#[ignore = "slow"]
fn each_operation_fails_in_turn() {
    try_all(5, 1);
}
