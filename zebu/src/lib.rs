//! zebu: a qcow2 engine.
//!
//! An image becomes a block device that many threads can drive with many
//! requests in flight. The rooms of the library, each knowing only the ones
//! below it, are described in `docs/design.md`.
//!
//! A process whose files may not be longer than a limit (`RLIMIT_FSIZE`,
//! `ulimit -f`) should ignore `SIGXFSZ`, as the program `zebu` does: a write past
//! the limit is then the error `EFBIG` of the request that it belongs to.
//! Otherwise the kernel ends the process.
#![deny(unsafe_code)]

pub mod block;
#[cfg(not(zebu_break))]
mod broken;
#[cfg(zebu_break)]
#[doc(hidden)]
pub mod broken;
pub mod codec;
pub mod drivers;
mod error;
pub mod format;
pub mod jobs;
#[cfg(feature = "nbd")]
pub mod nbd;
mod statistics;
pub mod storage;
pub mod tls;

pub use drivers::qcow2 as image;
pub use error::{Error, LimitExceeded, Result, strerror};
pub use statistics::Statistics;

/// Locks a mutex, also one whose holder panicked: what these hold is right at every moment.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// The README's example is compiled as a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
