//! The header of an image that is not open as one.

use crate::Result;
use crate::format::Header;
use crate::storage::{self, Queue, Storage};

/// Reads the header of the image in `file`.
pub(in crate::jobs) async fn read_header(queue: &Queue, file: &dyn Storage) -> Result<Header> {
    let length = file.len()?;
    let start = storage::read_vec(file, queue, 0, length.min(512) as usize).await?;
    let size = Header::decode_fixed(&start)?.cluster_size();
    let bytes = storage::read_vec(file, queue, 0, length.min(size) as usize).await?;
    Ok(Header::decode(&bytes)?)
}

/// Writes it, durably.
pub(super) async fn write_header(queue: &Queue, file: &dyn Storage, header: &Header) -> Result<()> {
    storage::write_slice(file, queue, 0, &header.encode()?).await?;
    storage::flush(file, queue).await?;
    Ok(())
}
