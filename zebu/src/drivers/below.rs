//! What an image lies on.

use std::ops::Range;

use super::BoxFuture;
use crate::Result;
use crate::storage::{Iov, Queue};

/// Where a request runs: on the caller's queue, and over what the image lies on.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The queue.
    pub queue: &'a Queue,
    /// The images below, if there are some.
    pub below: Option<&'a dyn Below>,
}

/// A change on its way.
pub type Changing<'a> = BoxFuture<'a, Result<()>>;

/// The images below another one in a chain, as one disk.
///
/// Requests of the image above are its requests, too: nothing below changes place meanwhile.
pub trait Below {
    /// Size of that disk in bytes.
    fn size(&self) -> u64;

    /// Fills `iov` with the bytes from `offset` on, inside of the disk.
    fn read<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov)
    -> BoxFuture<'a, Result<()>>;

    /// Whether a range, inside of the disk, reads as zeroes by the metadata alone.
    fn is_zero<'a>(&'a self, queue: &'a Queue, range: Range<u64>) -> BoxFuture<'a, Result<bool>>;
}
