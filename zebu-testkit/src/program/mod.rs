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
pub mod answer;
pub mod bytes;
pub mod documented;
pub mod files;
pub mod guest;
#[cfg(feature = "vhost")]
pub mod hostile_vhost;
pub mod io_language;
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
pub mod stopping;
pub mod store;
pub mod terminal;
pub mod tls;
#[cfg(feature = "vhost")]
pub mod vhost;
pub mod vmdk;
pub mod web;

use std::time::Duration;

pub use crate::{Cases, all as all_cases, cases, part, spread};
pub use answer::{Answer, assert_same_answer, comparable, compare_answers};
pub use lab::{Held, Lab, Limits};
pub use loop_device::Loop;
pub use programs::{beyond_qemu, peer, program, testing_qemu};
pub use recipe::QCOW2_OPTIONS;
pub use rng::Rng;

/// These cases, from the one of this index on.
pub fn rotated<T, const N: usize>(mut cases: [T; N], first: usize) -> [T; N] {
    cases.rotate_left(first % N);
    cases
}

/// No command of the tests may run longer than this.
pub const TIME_LIMIT: Duration = Duration::from_secs(120);
