//! A new disk that is one piece of its file.

use std::sync::Arc;

use crate::Result;
use crate::storage::{self, Iov, Queue, Storage};

/// A new disk, whose bytes start at an offset of its file.
#[derive(Debug)]
pub(crate) struct Linear {
    file: Arc<dyn Storage>,
    start: u64,
}

impl Linear {
    /// The disk in `start..end` of `file`, which reads as zeroes. The file ends at `end`.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) async fn begin(
        queue: &Queue,
        file: Arc<dyn Storage>,
        start: u64,
        end: u64,
    ) -> Result<Self> {
        storage::set_len(&*file, queue, end).await?;
        if file.is_device() {
            storage::zero_range(&*file, queue, start, end - start).await?;
        }
        Ok(Linear { file, start })
    }

    /// Writes data at `offset` of the disk.
    pub(crate) async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        Ok(storage::write(&*self.file, queue, self.start + offset, iov).await?)
    }
}
