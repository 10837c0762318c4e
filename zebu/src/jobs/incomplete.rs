//! Marks a new image that was not finished, so that no program takes it for a complete one.

use crate::Result;
use crate::format::{INCOMPLETE_VERSION, MAGIC};
use crate::storage::{self, Queue, Storage};

/// Marks the qcow2 image in `file`, which is closed, as incomplete: its header gets a version
/// that no program opens, and that zebu reports as incomplete. Format probing still finds
/// qcow2, not a raw disk. A file of another format is not changed. Waits for the I/O.
///
/// # Errors
/// If the file cannot be read or written.
pub fn mark_incomplete(queue: &Queue, file: &dyn Storage) -> Result<()> {
    queue.block_on(async {
        let magic = MAGIC.to_be_bytes();
        if storage::read_vec(file, queue, 0, magic.len()).await? == magic {
            let version = INCOMPLETE_VERSION.to_be_bytes();
            storage::write_slice(file, queue, magic.len() as u64, &version).await?;
            storage::flush(file, queue).await?;
        }
        Ok(())
    })
}
