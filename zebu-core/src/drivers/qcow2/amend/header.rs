//! The header of an image that is not open as one.

use crate::Result;
use crate::drivers::qcow2::structures::Header;
use crate::storage::{self, Queue, Storage};

/// Reads the header of the image in `file`.
pub(super) async fn read_header(queue: &Queue, file: &dyn Storage) -> Result<Header> {
    let length = file.len()?;
    let start = storage::read_vec(file, queue, 0, length.min(512) as usize).await?;
    let size = Header::decode_fixed(&start)?.cluster_size();
    let bytes = storage::read_vec(file, queue, 0, length.min(size) as usize).await?;
    Ok(Header::decode(&bytes)?)
}

/// Writes `new` in the place of `old`, durably.
pub(super) async fn write_header(
    queue: &Queue,
    file: &dyn Storage,
    old: &Header,
    new: &mut Header,
) -> Result<()> {
    let length = new.replaced_len(old).min(file.len()?);
    let bytes = storage::read_vec(file, queue, 0, length as usize).await?;
    let replacement = new.replace(old, &bytes)?;
    if let Some((at, bytes)) = &replacement.before {
        storage::write_slice(file, queue, *at, bytes).await?;
        storage::flush(file, queue).await?;
    }
    storage::write_slice(file, queue, 0, &replacement.last).await?;
    storage::flush(file, queue).await?;
    Ok(())
}
