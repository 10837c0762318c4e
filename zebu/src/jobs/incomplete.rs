//! An image whose making has failed in the middle must not be taken for a whole one.

use crate::Result;
use crate::format::{INCOMPLETE_VERSION, MAGIC};
use crate::storage::{self, Queue, Storage};

/// Marks the qcow2 image in `file`, which is closed, as one that is not whole: its header gets
/// a version that no program reads, and that zebu knows. It is still recognized as qcow2, so
/// nobody takes it for a raw disk. A file with anything else stays as it is. Blocks.
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
