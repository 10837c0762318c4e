//! Guards against data that are lost, misplaced or invented by any order of reads, writes, zeroes,
//! discards, flushes and reopenings of any kind of image, and against inconsistent images.
//!
//! Each run makes a random image, executes random requests, and compares the data with plain
//! memory. At each reopening QEMU checks and reads the image.
//!
//! With `ZEBU_TRACE` each request of one thread is printed.

mod bitmaps;
#[cfg(debug_assertions)]
mod changed_bytes;
mod disk;
mod exchanges;
mod filters;
mod interop;
mod many_threads;
mod one_thread;
mod setup;
mod step;

use zebu_testkit::library::{self as common, dirty, driven, ledger, load};

use std::path::Path;
use std::sync::LazyLock;

use common::{Rng, Watchdog, cases, progress, work};
use zebu::storage::EngineKind;

/// Prints a line if `ZEBU_TRACE` is set.
pub fn trace(line: impl FnOnce() -> String) {
    static WANTED: LazyLock<bool> = LazyLock::new(zebu_testkit::trace);
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
fn each_seed(name: &str, steps: u64, run: fn(u64, &Path, &[EngineKind]) -> usize) {
    let engines = common::engines();
    let mut seeds = work(steps, format!("requests ({name})"));
    while let Some(seed) = seeds.next() {
        let _watchdog = Watchdog::new(&format!("{name}, seed {seed}"));
        trace(|| format!("{name}, seed {seed}"));
        progress();
        seeds.add(run(seed, folder(seed).path(), &engines) as u64);
    }
}

#[test]
fn one_thread() {
    each_seed("one_thread", 2000, one_thread::run);
}

/// The filter that they have is one of debug builds.
#[cfg(debug_assertions)]
#[test]
fn filters_that_change_bytes() {
    each_seed("filters_that_change_bytes", 1500, changed_bytes::run);
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
    // All kinds for each seed.
    let mut seeds = cases(1, "requests (every_kind_of_image)");
    while let Some(seed) = seeds.next() {
        for (nth, kind) in (0..).zip(interop::kinds()) {
            let seed = 100 * seed + nth;
            let _watchdog = Watchdog::new(&format!("seed {seed}: {kind:?}"));
            let steps = one_thread::run_on(kind, Rng::new(seed), folder(seed).path(), &engines);
            seeds.add(steps as u64);
        }
    }
}
