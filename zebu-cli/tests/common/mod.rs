//! What the tests of the program share: the programs ([`programs`]), a folder for each test and
//! the commands that run in it ([`Lab`]), recipes that make images ([`recipe`]), and comparisons
//! of answers ([`answer`]).
//!
//! | variable         | meaning                                              |
//! |------------------|------------------------------------------------------|
//! | `ZEBU_QEMU_IMG`  | the qemu-img to compare with; else that on `PATH`    |
//! | `ZEBU_QEMU_IO`   | the qemu-io to compare with; else that on `PATH`     |
//! | `ZEBU_TEST_BIN`  | the program under test; else the `zebu` of cargo     |
//!
//! If `ZEBU_TEST_BIN` is a file called `qemu-img`, QEMU is tested against itself, which tests the
//! tests. Tests that demand more than QEMU does call [`beyond_qemu`] and are skipped then.

// Each test crate uses a part of this module.
#![allow(dead_code, unused_imports)]

pub mod answer;
pub mod bytes;
pub mod documented;
pub mod files;
pub mod guest;
pub mod lab;
pub mod loop_device;
pub mod nginx;
pub mod other_server;
pub mod pair;
pub mod programs;
pub mod recipe;
pub mod rng;
pub mod server;
pub mod sshd;
pub mod store;
pub mod terminal;
pub mod tls;
pub mod vhost;
pub mod vmdk;
pub mod web;

use std::time::Duration;

pub use answer::{Answer, assert_same_answer, comparable, compare_answers};
pub use lab::{Held, Lab, Limits};
pub use loop_device::Loop;
pub use programs::{beyond_qemu, peer, program, testing_qemu};
pub use recipe::QCOW2_OPTIONS;
pub use rng::Rng;

/// The number in an environment variable, if it is set.
pub fn env_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect(name))
}

/// Whether all cases of the tests are wanted, also the slowest: with `ZEBU_ALL`.
pub fn all_cases() -> bool {
    std::env::var_os("ZEBU_ALL").is_some()
}

/// One in `of` of a test's cases, or all with `ZEBU_ALL`: each has the options that the next one
/// has, in another combination. `ZEBU_PART` is the index of the first one.
pub fn part<T>(of: usize, cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let first = env_number("ZEBU_PART").unwrap_or(0) as usize;
    let (first, step) = if all_cases() {
        (0, 1)
    } else {
        (first % of, of)
    };
    cases.into_iter().skip(first).step_by(step)
}

/// These cases, from the one of this index on.
pub fn rotated<T, const N: usize>(mut cases: [T; N], first: usize) -> [T; N] {
    cases.rotate_left(first % N);
    cases
}

/// No command of the tests may run longer than this.
pub const TIME_LIMIT: Duration = Duration::from_secs(120);
