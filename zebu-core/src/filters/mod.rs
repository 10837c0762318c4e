//! Filters: nodes that requests pass through, over an image or over a file below one.
//!
//! | file | subject |
//! |---|---|
//! | `throttle.rs` `limits.rs` | requests wait, so that a group of nodes keeps to limits |
//! | `compress.rs` | what is written is compressed |
//! | `copy_on_read.rs` | what is read from behind an image is written into it |
//! | `preallocate.rs` | a file grows by large steps |
//! | `code.rs` | filters that change bytes by a [`Code`] |
//! | `xor.rs` | of debug builds: such a filter, for tests |
//! | `file.rs` | a filter over a file; over an image it is a part of the [`Device`](crate::Device) |
//!
//! A filter is a file here and a line below. Names, `json:`, `--image-opts`, `info`, locks and loops follow
//! from its [`FilterDriver`]; what is known of the bytes (what is zero, where they are stored, whether
//! compressed data may pass) from its [`Filter::content`]. The smallest one that passes all on:
//!
//! ```ignore
//! pub(super) const DRIVER: FilterDriver = FilterDriver {
//!     name: "pass",
//!     shown: &[],
//!     open: |_| Ok(Arc::new(Pass)),
//! };
//!
//! #[derive(Debug)]
//! struct Pass;
//!
//! impl Filter for Pass {
//!     fn content(&self) -> Content<'_> {
//!         Content::Kept
//!     }
//! }
//! ```
//!
//! It overrides what it changes of a request (`throttle.rs`). One that changes bytes answers
//! [`Content::Coded`] and overrides nothing (`xor.rs`).

mod code;
mod file;
mod limits;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::Error;
use crate::drivers::{Below, Changing, Clear, unsupported};
use crate::spelling::OptionSet;
use crate::storage::{Iov, Queue};
use code::How;
pub(crate) use code::write_zeroes;
pub use code::{Code, Content};
pub(crate) use copy_on_read::CopyOnRead;
pub use file::FilteredFile;
pub use limits::{ThrottleBucket, ThrottleGroup, ThrottleGroups, ThrottleLimits};

/// Registers the filters.
macro_rules! filters {
    ($($(#[$when:meta])? $module:ident,)+) => {
        $($(#[$when])? mod $module;)+

        static FILTERS: &[&FilterDriver] = &[$($(#[$when])? &$module::DRIVER,)+];
        /// The names of all filters.
        pub(crate) static NAMES: &[&str] = &[$($(#[$when])? $module::DRIVER.name,)+];
    };
}

filters! {
    throttle,
    compress,
    copy_on_read,
    preallocate,
    #[cfg(debug_assertions)] xor,
}

/// How a filter is found, and made.
pub(crate) struct FilterDriver {
    /// QEMU's name of the driver.
    pub name: &'static str,
    /// Those of its options that are in the name of a node. QEMU leaves some out, so that the name opens another
    /// one.
    pub shown: &'static [&'static str],
    /// Makes the filter. Options that it does not take out are refused.
    pub open: fn(OpenFilter<'_>) -> Result<Arc<dyn Filter>, String>,
}

/// What a filter is made of.
pub(crate) struct OpenFilter<'a> {
    /// Those besides `file` and what all nodes have.
    pub options: &'a mut OptionSet,
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

    /// What becomes of the bytes that pass. All that is known without reading them follows from it.
    fn content(&self) -> Content<'_> {
        Content::Changed
    }

    /// Whether [`Filter::write_compressed`] is supported.
    fn passes_compressed(&self) -> bool {
        !matches!(self.content(), Content::Changed)
    }

    /// Whether it is of use only over an image that is written.
    fn needs_writing(&self) -> bool {
        false
    }

    /// The length of a file, of that below it.
    fn length(&self, below: u64) -> u64 {
        below
    }

    /// [`Below::read`] through the filter. The other methods have the names and meaning of [`Below`]'s, too.
    fn read<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        match self.content() {
            Content::Coded(code) => code::pass(code, over, offset, iov, How::Read),
            _ => over.below.read(over.queue, offset, iov),
        }
    }

    /// [`Below::write`].
    fn write<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        match self.content() {
            Content::Coded(code) => code::pass(code, over, offset, iov, How::Write),
            _ => over.below.write(over.queue, offset, iov),
        }
    }

    /// [`Below::write_compressed`].
    fn write_compressed<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        match self.content() {
            Content::Kept => over.below.write_compressed(over.queue, offset, iov),
            Content::Coded(code) => code::pass(code, over, offset, iov, How::WriteCompressed),
            Content::Changed => unsupported(),
        }
    }

    /// [`Below::write_packed`]. Only called where all filters keep bytes.
    fn write_packed<'a>(
        &'a self,
        over: Over<'a>,
        clusters: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> Changing<'a> {
        match self.content() {
            Content::Kept => over.below.write_packed(over.queue, clusters, data),
            _ => unsupported(),
        }
    }

    /// [`Below::clear`]. `EOPNOTSUPP`: zeroes are written by [`Filter::write`], and nothing is discarded.
    fn clear<'a>(&'a self, over: Over<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        match self.content() {
            Content::Kept => over.below.clear(over.queue, range, how),
            _ => Box::pin(std::future::ready(Err(Error::os(libc::EOPNOTSUPP)))),
        }
    }

    /// [`Below::flush`].
    fn flush<'a>(&'a self, over: Over<'a>) -> Changing<'a> {
        over.below.flush(over.queue)
    }

    /// Only called over a file. If bytes are changed, what a larger length adds is there.
    fn set_len<'a>(&'a self, over: Over<'a>, length: u64) -> Changing<'a> {
        over.below.set_len(over.queue, length)
    }

    /// Only called over a file. If bytes are changed, the file has the range.
    fn allocate<'a>(&'a self, over: Over<'a>, range: Range<u64>) -> Changing<'a> {
        over.below.allocate(over.queue, range)
    }

    /// Ends its use, before that of what is below, after a flush. Only called if it was open for
    /// writing, and no request is in flight.
    fn close<'a>(&'a self, _over: Over<'a>) -> Changing<'a> {
        Box::pin(std::future::ready(Ok(())))
    }
}
