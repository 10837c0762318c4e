//! Guards against data that are lost, misplaced or invented by any order of reads, writes, zeroes,
//! discards, flushes and reopenings of any kind of image, and against inconsistent images.
//!
//! Each run makes a random image, executes random requests, and compares the data with plain
//! memory. At each reopening QEMU checks and reads the image.
//!
//! | variable           | meaning                                             |
//! |--------------------|-----------------------------------------------------|
//! | `ZEBU_MODEL_STEPS` | requests to make at least; the last run is finished |
//! | `ZEBU_MODEL_SEED`  | the first run's seed; the next ones count up        |
//! | `ZEBU_MODEL_TRACE` | print each request of one thread                    |
//!
//! A failing run prints its seed; `ZEBU_MODEL_STEPS=1` with that seed repeats it.

mod bitmaps;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/dirty.rs"]
mod dirty;
mod disk;
#[path = "../common/driven.rs"]
mod driven;
mod interop;
#[path = "../common/ledger.rs"]
mod ledger;
#[path = "../common/load.rs"]
mod load;
mod many_threads;
mod one_thread;
mod setup;
mod step;

use std::path::Path;
use std::sync::LazyLock;

use common::{PrintOnPanic, Rng, Watchdog, cases, number, progress};
use zebu::storage::EngineKind;

/// Prints a line if `ZEBU_MODEL_TRACE` is set.
pub fn trace(line: impl FnOnce() -> String) {
    static WANTED: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os("ZEBU_MODEL_TRACE").is_some());
    if *WANTED {
        eprintln!("{}", line());
    }
}

/// A folder for one run: half of them are on a disk, which has direct I/O, half on tmpfs, which is
/// faster.
fn folder(seed: u64) -> tempfile::TempDir {
    let place = match seed % 2 {
        0 => Path::new(env!("CARGO_TARGET_TMPDIR")),
        _ => Path::new("/dev/shm"),
    };
    let folder = tempfile::tempdir_in(place).or_else(|_| tempfile::tempdir());
    folder.expect("a temporary folder")
}

/// Calls `run` with one seed after another until there were enough steps.
fn each_seed(name: &str, steps: usize, run: fn(u64, &Path, &[EngineKind]) -> usize) {
    let steps = number("ZEBU_MODEL_STEPS").map_or(steps, |n| n as usize);
    let first = number("ZEBU_MODEL_SEED").unwrap_or(1);
    let engines = common::engines();
    let (mut done, mut seed) = (0, first);
    while done < steps {
        let again = format!("ZEBU_MODEL_SEED={seed} ZEBU_MODEL_STEPS=1 cargo test {name}");
        let _note = PrintOnPanic(again.clone());
        let _watchdog = Watchdog::new(&again);
        trace(|| format!("{name}, seed {seed}"));
        progress();
        done += run(seed, folder(seed).path(), &engines);
        seed += 1;
    }
    println!("seeds {first} to {}", seed - 1);
    cases(done as u64, "requests");
}

#[test]
fn one_thread() {
    each_seed("one_thread", 2000, one_thread::run);
}

#[test]
fn many_threads() {
    each_seed("many_threads", 4000, many_threads::run);
}

#[test]
fn every_kind_of_image() {
    let engines = common::engines();
    let kinds = interop::kinds();
    assert!(kinds.len() > 20);
    let mut steps = 0;
    for (seed, kind) in (number("ZEBU_MODEL_SEED").unwrap_or(1)..).zip(kinds) {
        let what = format!("seed {seed}: {kind:?}");
        let _note = PrintOnPanic(what.clone());
        let _watchdog = Watchdog::new(&what);
        steps += one_thread::run_on(kind, Rng::new(seed), folder(seed).path(), &engines);
    }
    cases(steps as u64, "requests");
}
