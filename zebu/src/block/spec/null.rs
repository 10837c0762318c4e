//! A file that stores nothing, as it is described.

use std::time::Duration;

/// A file that stores nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullSpec {
    /// `null-co` or `null-aio`, which are the same here.
    pub driver: &'static str,
    /// `size` in bytes.
    pub size: u64,
    /// `latency-ns`: how long a request takes.
    pub latency: Duration,
    /// `read-zeroes`: it is known to be zero.
    pub read_zeroes: bool,
    /// What QEMU shows of it, as members of a JSON object.
    pub(crate) shown: Vec<(String, String)>,
}
