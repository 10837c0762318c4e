//! Filters: nodes that requests pass through, over an image or over a file below one.
//!
//! | file | subject |
//! |---|---|
//! | `throttle.rs` `limits.rs` | requests wait, so that a group of nodes keeps to limits |
//! | `compress.rs` | what is written is compressed |
//! | `copy_on_read.rs` | what is read from behind an image is written into it |
//! | `preallocate.rs` | a file grows by large steps |
//! | `file.rs` | a filter over a file; over an image it is a part of the [`Device`](crate::Device) |
//!
//! A filter is a file here and a line below. It overrides what it changes of [`Filter`], all
//! else passes. Names, `json:`, `--image-opts`, `info`, locks and loops follow from its
//! [`FilterDriver`].

mod file;
mod limits;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::drivers::{Below, Changing, Clear};
use crate::spelling::OptionSet;
use crate::storage::{Iov, Queue};
pub(crate) use copy_on_read::CopyOnRead;
pub use file::FilteredFile;
pub use limits::{ThrottleBucket, ThrottleGroup, ThrottleGroups, ThrottleLimits};

/// Registers the filters.
macro_rules! filters {
    ($($module:ident,)+) => {
        $(mod $module;)+

        static FILTERS: &[&FilterDriver] = &[$(&$module::DRIVER,)+];
        /// The names of all filters.
        pub(crate) static NAMES: &[&str] = &[$($module::DRIVER.name,)+];
    };
}

filters! {
    throttle,
    compress,
    copy_on_read,
    preallocate,
}

/// How a filter is found, and made.
pub(crate) struct FilterDriver {
    /// QEMU's name of the driver.
    pub name: &'static str,
    /// Its options, besides `file` and those of all nodes.
    pub options: &'static [&'static str],
    /// Those of them that QEMU shows in the name of a node.
    pub shown: &'static [&'static str],
    /// Makes the filter. Options that it does not take out are ignored.
    pub open: fn(OpenFilter<'_>) -> Result<Arc<dyn Filter>, String>,
}

/// What a filter is made of.
pub(crate) struct OpenFilter<'a> {
    pub options: OptionSet,
    pub groups: &'a ThrottleGroups,
    /// Whether the node is open for writing.
    pub write: bool,
}

/// What a filter over an image lies on: the image, or another filter.
#[derive(Clone, Copy)]
pub struct Under<'a> {
    /// QEMU's name of its driver.
    pub name: &'a str,
    /// Whether it can have compressed clusters.
    pub can_compress: bool,
}

/// The filter of this name.
pub(crate) fn find(name: &str) -> Option<&'static FilterDriver> {
    FILTERS.iter().find(|driver| driver.name == name).copied()
}

/// A request on its way through a filter: its queue, and what lies below.
#[derive(Clone, Copy)]
pub struct Over<'a> {
    /// The queue that executes it.
    pub queue: &'a Queue,
    /// What lies below.
    pub below: &'a dyn Below,
}

/// A node that requests pass through.
///
/// Shared by any number of threads. A request may be dropped at any time, or not be polled any more:
/// no lock is held while a filter waits, and what other requests wait for is a guard that ends with
/// the future.
pub trait Filter: Debug + Send + Sync {
    /// Whether it can be over this, which an exchange of images below it asks, too.
    fn may_be_over(&self, _below: Under<'_>) -> Result<(), String> {
        Ok(())
    }

    /// Whether what a filter over it writes compressed passes.
    fn passes_compressed(&self) -> bool {
        true
    }

    /// Whether it is of use only over an image that is written.
    fn needs_writing(&self) -> bool {
        false
    }

    /// The unit of its requests over a file, in bytes (a power of two). What is not aligned is read and
    /// written in whole units.
    fn unit(&self) -> usize {
        1
    }

    /// Whether what reads as zeroes below a file does so above.
    fn keeps_zeroes(&self) -> bool {
        true
    }

    /// The length of a file, of that below it.
    fn length(&self, below: u64) -> u64 {
        below
    }

    /// [`Below::read`] through the filter. The other methods have the names and meaning of [`Below`]'s, too.
    fn read<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        over.below.read(over.queue, offset, iov)
    }

    /// [`Below::write`].
    fn write<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        over.below.write(over.queue, offset, iov)
    }

    /// [`Below::write_compressed`].
    fn write_compressed<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        over.below.write_compressed(over.queue, offset, iov)
    }

    /// [`Below::write_packed`].
    fn write_packed<'a>(
        &'a self,
        over: Over<'a>,
        clusters: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> Changing<'a> {
        over.below.write_packed(over.queue, clusters, data)
    }

    /// [`Below::clear`].
    fn clear<'a>(&'a self, over: Over<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        over.below.clear(over.queue, range, how)
    }

    /// [`Below::flush`].
    fn flush<'a>(&'a self, over: Over<'a>) -> Changing<'a> {
        over.below.flush(over.queue)
    }

    /// Only called over a file.
    fn set_len<'a>(&'a self, over: Over<'a>, length: u64) -> Changing<'a> {
        over.below.set_len(over.queue, length)
    }

    /// Only called over a file.
    fn allocate<'a>(&'a self, over: Over<'a>, range: Range<u64>) -> Changing<'a> {
        over.below.allocate(over.queue, range)
    }

    /// Ends its use, before that of what is below, after a flush. Only called if it was open for
    /// writing, and no request is in flight.
    fn close<'a>(&'a self, _over: Over<'a>) -> Changing<'a> {
        Box::pin(std::future::ready(Ok(())))
    }
}
