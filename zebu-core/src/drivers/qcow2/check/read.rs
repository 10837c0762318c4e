//! Readahead of tables.

use std::sync::Arc;

use crate::Result;
use crate::storage::{self, Ahead, Queue, Storage};

/// Bytes of an L1 table (or another array of numbers) read at once.
pub(super) const PIECE: usize = 64 << 10;

/// Reads the file for one check.
#[derive(Clone)]
pub(super) struct Reader {
    queue: Queue,
    file: Arc<dyn Storage>,
    file_len: u64,
}

impl Reader {
    pub(super) fn new(queue: &Queue, file: &Arc<dyn Storage>, file_len: u64) -> Self {
        Reader {
            queue: queue.clone(),
            file: file.clone(),
            file_len,
        }
    }

    /// Bytes of a region that lie in the file.
    pub(super) fn inside(&self, offset: u64, length: u64) -> u64 {
        length.min(self.file_len.saturating_sub(offset))
    }

    /// Reads the part of a region that lies in the file. The caller bounds its length.
    pub(super) async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let length = self.inside(offset, length) as usize;
        Ok(storage::read_vec(&*self.file, &self.queue, offset, length).await?)
    }

    /// Reads tables of `size` bytes at these offsets, in order. Bytes after the end of the file
    /// are zero.
    pub(super) fn ahead<I: Iterator<Item = u64>>(&self, tables: I, size: usize) -> Ahead<I> {
        Ahead::new(&self.queue, &self.file, tables, size)
    }

    /// Reads an array of `entries` numbers in pieces, up to the end of the file.
    pub(super) fn numbers(
        &self,
        offset: u64,
        entries: u64,
    ) -> Numbers<impl Iterator<Item = u64> + use<>> {
        let bytes = self.inside(offset, entries.saturating_mul(8)) & !7;
        let pieces = bytes.div_ceil(PIECE as u64);
        let offsets = (0..pieces).map(move |n| offset + n * PIECE as u64);
        Numbers {
            pieces: self.ahead(offsets, PIECE),
            left: bytes as usize / 8,
        }
    }
}

/// Big-endian numbers of 64 bits, in pieces.
pub(super) struct Numbers<I: Iterator<Item = u64>> {
    pieces: Ahead<I>,
    left: usize,
}

impl<I: Iterator<Item = u64>> Numbers<I> {
    /// The next piece, empty after the last.
    pub(super) async fn next(&mut self) -> Result<Vec<u64>> {
        let Some(bytes) = self.pieces.next().await? else {
            return Ok(Vec::new());
        };
        let numbers: Vec<u64> = bytes
            .as_chunks::<8>()
            .0
            .iter()
            .take(self.left)
            .map(|b| u64::from_be_bytes(*b))
            .collect();
        self.left -= numbers.len();
        Ok(numbers)
    }
}
