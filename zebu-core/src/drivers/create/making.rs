//! The first steps of a new image: what its file held is gone, and space is taken.

use crate::Result;
use crate::drivers::Preallocation;
use crate::progress::Report;
use crate::storage::{self, Queue, Storage};

/// Bytes of zeroes that are written between two reports of progress.
const ZEROES: u64 = 64 << 20;

/// How a new file is written.
#[derive(Clone, Copy)]
pub struct Making<'a> {
    /// What executes the requests.
    pub queue: &'a Queue,
    /// Where progress is told.
    pub report: &'a dyn Report,
    /// What is allocated beforehand.
    pub preallocation: Preallocation,
}

impl Making<'_> {
    /// Takes the space of a range, and makes it read as zeroes: what is new of a file does so by
    /// itself, and a device has any content. There the mode makes no other difference.
    ///
    /// # Errors
    /// Those of the storage.
    pub async fn allocate(&self, file: &dyn Storage, offset: u64, length: u64) -> Result<()> {
        let (queue, end) = (self.queue, offset + length);
        let is_full = self.preallocation == Preallocation::Full;
        if length == 0 {
            return Ok(());
        }
        if is_full || file.is_device() {
            for at in (offset..end).step_by(ZEROES as usize) {
                let length = ZEROES.min(end - at);
                match is_full {
                    true => storage::write_zeroes(file, queue, at, length).await?,
                    false => storage::zero_range(file, queue, at, length).await?,
                }
                self.report.add(length)?;
            }
        } else if self.preallocation == Preallocation::Falloc {
            storage::allocate(file, queue, offset, length).await?;
        }
        Ok(())
    }
}

/// Takes from a file what it held. With a mark it is at any moment what it was, or an image that is not
/// finished; durably on return, so that nothing that follows is taken for more than that.
pub async fn begin_file(queue: &Queue, file: &dyn Storage, mark: Option<&[u8]>) -> Result<()> {
    let mark = mark.unwrap_or_default();
    if !mark.is_empty() {
        storage::write_slice(file, queue, 0, mark).await?;
    }
    if !file.is_device() {
        storage::set_len(file, queue, mark.len() as u64).await?;
    }
    if !mark.is_empty() {
        storage::flush(file, queue).await?;
    }
    Ok(())
}
