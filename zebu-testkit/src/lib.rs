//! What the tests of all crates share: random numbers and the seeds of generated cases (here), what tests of the
//! library need ([`library`]), and what tests of the program need ([`program`]).
//!
//! A test that generates its cases takes their seeds from [`cases()`] (or [`work`], if it counts
//! something else than seeds), and so knows these variables:
//!
//! | variable       | meaning                                                              |
//! |----------------|----------------------------------------------------------------------|
//! | `ZEBU_SEED`    | the first seed; the next ones count up                               |
//! | `ZEBU_CASES`   | how many cases, of what the test counts                              |
//! | `ZEBU_SECONDS` | instead: new cases for this time                                     |
//! | `ZEBU_ONLY`    | only those of this name: a workload, a rule, an engine, a command    |
//! | `ZEBU_ALL`     | also what is left out or ends at the first failure, to save time     |
//! | `ZEBU_PART`    | which of the cases run of which one in a few does                    |
//! | `ZEBU_TRACE`   | print each step                                                      |
//! | `ZEBU_KEEP`    | keep the folder of a failed case, and do not look for a shorter case |
//!
//! A failure prints the seed that repeats it.

// Helpers whose names say what they do; each test uses a part of them.
#![allow(missing_docs, clippy::new_without_default)]

mod cases;
pub mod library;
#[cfg(feature = "program")]
pub mod program;
mod rng;
mod words;
mod written;

use std::path::{Path, PathBuf};

pub use cases::{Cases, all, are_usual, cases, is_only, keep, only, part, spread, trace, work};
pub use rng::Rng;
pub use words::newest_words;
pub use written::{WRITTEN, Written, is_leak};

/// The folder of what cargo builds with one profile: `target/debug`, where the test runs in `deps`.
pub fn built() -> PathBuf {
    let test = std::env::current_exe().expect("the test's file");
    let deps = test.parent().expect("a folder");
    deps.parent().expect("a folder").into()
}

/// The folder for temporary files on a disk, `target/tmp`.
pub fn temporary() -> PathBuf {
    let folder = built().with_file_name("tmp");
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    folder
}

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}
