//! Tables of any length, written in pieces.

use crate::Result;
use crate::storage::{self, Queue, Storage};

/// Bytes that are written at a time.
const PIECE: usize = 1 << 20;

/// Writes the entries of a table at `offset`, one after the other.
///
/// # Errors
/// Those of [`storage::write_slice`].
pub async fn write_table<const N: usize>(
    file: &dyn Storage,
    queue: &Queue,
    mut offset: u64,
    entries: impl Iterator<Item = [u8; N]>,
) -> Result<()> {
    let mut piece = Vec::with_capacity(PIECE);
    let mut entries = entries.peekable();
    while entries.peek().is_some() {
        piece.clear();
        piece.extend(entries.by_ref().take(PIECE / N).flatten());
        storage::write_slice(file, queue, offset, &piece).await?;
        offset += piece.len() as u64;
    }
    Ok(())
}
