//! A new disk that is one piece of its file.

use std::ops::Range;
use std::sync::Arc;

use super::check_inside;
use crate::Result;
use crate::storage::{self, Iov, Queue, Storage};

/// A new disk, whose bytes start at an offset of its file.
#[derive(Debug)]
pub(crate) struct Linear {
    file: Arc<dyn Storage>,
    /// Where in the file the disk is.
    disk: Range<u64>,
}

impl Linear {
    /// The disk in a range of `file`, which ends at `end`. It reads as zeroes from the start of
    /// the disk on.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) async fn begin(
        queue: &Queue,
        file: Arc<dyn Storage>,
        disk: Range<u64>,
        end: u64,
    ) -> Result<Self> {
        storage::set_len(&*file, queue, end).await?;
        if file.is_device() {
            storage::zero_range(&*file, queue, disk.start, end - disk.start).await?;
        }
        Ok(Linear { file, disk })
    }

    /// Writes data at `offset` of the disk.
    pub(crate) async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        check_inside(offset, iov, self.disk.end - self.disk.start)?;
        Ok(storage::write(&*self.file, queue, self.disk.start + offset, iov).await?)
    }
}
