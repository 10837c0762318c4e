//! What an image lies on.

use std::ops::Range;

use super::{BoxFuture, unsupported};
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

/// How the content of a range is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// It reads as zeroes, and stays allocated.
    Zero,
    /// It reads as zeroes. Its space may be freed.
    Unmap,
    /// What the others do need not be done: it is found out whether zeroes are made without data,
    /// of a range that begins and ends with a zero unit, or with what is zero. If not, it fails with
    /// `EOPNOTSUPP` and nothing has changed.
    Quickly,
    /// It is not needed any more: whole units are freed.
    Discard,
}

/// A change on its way.
pub type Changing<'a> = BoxFuture<'a, Result<()>>;

/// What an image or a filter lies on, as one disk.
///
/// Requests of the node above are its requests, too: nothing below changes place meanwhile. What lies
/// below an image is only read. The rest is for filters, whose requests are inside of the disk and not
/// empty.
pub trait Below {
    /// Size of that disk in bytes.
    fn size(&self) -> u64;

    /// Fills `iov` with the bytes from `offset` on, inside of the disk.
    fn read<'a>(&'a self, queue: &'a Queue, offset: u64, iov: &'a Iov)
    -> BoxFuture<'a, Result<()>>;

    /// Whether a range, inside of the disk, reads as zeroes by the metadata alone.
    fn is_zero<'a>(&'a self, queue: &'a Queue, range: Range<u64>) -> BoxFuture<'a, Result<bool>>;

    /// The unit of allocation in bytes, if there is one.
    fn cluster_size(&self) -> Option<u64> {
        None
    }

    /// The unit in which a range is the image's own or left to its backing file, in bytes.
    fn unit(&self) -> u64 {
        1
    }

    /// Whether the start of a range is the image's own, not left to its backing file, and for how many
    /// bytes of the range that holds.
    fn is_own<'a>(
        &'a self,
        _queue: &'a Queue,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<(bool, u64)>> {
        Box::pin(std::future::ready(Ok((true, range.end - range.start))))
    }

    /// Writes `iov` from `offset` on. That of a file may reach past its end.
    fn write<'a>(&'a self, _queue: &'a Queue, _offset: u64, _iov: &'a Iov) -> Changing<'a> {
        unsupported()
    }

    /// See [`Device::write_compressed`](crate::Device::write_compressed).
    fn write_compressed<'a>(
        &'a self,
        _queue: &'a Queue,
        _offset: u64,
        _iov: &'a Iov,
    ) -> Changing<'a> {
        unsupported()
    }

    /// See [`Device::write_packed`](crate::Device::write_packed).
    fn write_packed<'a>(
        &'a self,
        _queue: &'a Queue,
        _clusters: &'a [(u64, Range<usize>)],
        _data: &'a [u8],
    ) -> Changing<'a> {
        unsupported()
    }

    /// Takes the content of a range away. Here [`Clear::Quickly`] does it, if it can.
    fn clear<'a>(&'a self, _queue: &'a Queue, _range: Range<u64>, _how: Clear) -> Changing<'a> {
        unsupported()
    }

    /// Makes durable what had ended before the call.
    fn flush<'a>(&'a self, _queue: &'a Queue) -> Changing<'a> {
        unsupported()
    }

    /// Gives a file another length. New bytes read as zeroes.
    fn set_len<'a>(&'a self, _queue: &'a Queue, _length: u64) -> Changing<'a> {
        unsupported()
    }

    /// Allocates space in a file, which becomes longer if it ends before the range does.
    fn allocate<'a>(&'a self, _queue: &'a Queue, _range: Range<u64>) -> Changing<'a> {
        unsupported()
    }
}
