//! The disk of an image, as requests change it: with what lies below.
//!
//! - `write`, then `fill`: what is written, with what it leaves of the old content; `zero`: no content;
//! - `compress`, `pack`: compressed clusters, of one request or packed by a job;
//! - `resize`: changes of the whole disk.

mod compress;
mod fill;
mod pack;
mod resize;
mod write;
mod zero;

use std::ops::Range;

use super::Image;
use crate::drivers::{Below, Context, Mapping};
use crate::storage::Queue;
use crate::{Error, Result};

/// A disk that is changed.
#[derive(Clone, Copy)]
pub(super) struct Disk<'a> {
    image: &'a Image,
    queue: &'a Queue,
    /// Size in bytes: that of the image, unless it is being resized.
    size: u64,
    below: Option<&'a dyn Below>,
}

impl Image {
    /// Its disk, for a change.
    pub(super) fn disk<'a>(&'a self, context: Context<'a>) -> Disk<'a> {
        Disk {
            image: self,
            queue: context.queue,
            size: self.size(),
            below: context.below,
        }
    }

    /// Marks the image if the result of a change shows that it is corrupt.
    pub(crate) async fn mark_if_corrupt(&self, queue: &Queue, result: Result<()>) -> Result<()> {
        if result.as_ref().is_err_and(Error::shows_corruption) {
            self.mark_corrupt(queue).await?;
        }
        result
    }

    /// After a change: the image is marked if it was found to be corrupt, and the mapping is made
    /// durable in a write-through mode.
    pub(super) async fn changed(&self, queue: &Queue, result: Result<()>) -> Result<()> {
        self.mark_if_corrupt(queue, result).await?;
        match self.file.cache_mode().is_write_through() {
            true => self.flush(queue).await,
            false => Ok(()),
        }
    }
}

impl<'a> Disk<'a> {
    /// Whether the image has a backing file, opened or not.
    fn has_backing(&self) -> bool {
        self.below.is_some() || self.image.header.backing_file().is_some()
    }

    /// What shows from `offset` on where the image maps nothing, and how many of the `length` bytes
    /// it has. Nothing shows past the end of a shorter backing file. Past the end of this disk, a
    /// longer one is not part of it: a write to the last cluster must not copy that.
    fn shown(&self, offset: u64, length: u64) -> Option<(&'a dyn Below, u64)> {
        let below = self.below?;
        let end = below.size().min(self.size);
        (offset < end).then(|| (below, length.min(end - offset)))
    }

    /// Whether a range reads as zeroes by the metadata alone. It may reach past the end of the
    /// disk.
    async fn reads_as_zero(&self, range: Range<u64>) -> Result<bool> {
        let mut at = range.start;
        while at < range.end {
            let extent = self.image.extent(self.queue, at, range.end - at).await?;
            let is_zero = match extent.mapping {
                Mapping::Zero { .. } => true,
                Mapping::Unallocated { .. } => match self.shown(at, extent.length) {
                    Some((below, length)) => below.is_zero(self.queue, at..at + length).await?,
                    None => true,
                },
                _ => false,
            };
            if !is_zero {
                return Ok(false);
            }
            at += extent.length;
        }
        Ok(true)
    }
}
