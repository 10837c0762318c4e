//! The block allocation table and the blocks of the sector bitmap. They are read in pieces, and a
//! bounded number of these is kept. The entries of an image that is written change in these pieces
//! (`commit.rs` writes them).

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::Result;
use crate::drivers::cache::Cache;
use crate::storage::{self, Queue, Storage};

/// Bytes of a piece.
pub(super) const PIECE: u64 = 64 << 10;
/// Bytes of pieces that are kept at most, unless they are in use.
pub(super) const MAX_BYTES: u64 = 16 << 20;

/// The words of a piece of the file. In a bitmap, bit 0 of a word is that of the first sector.
pub(super) type Piece = Vec<AtomicU64>;

/// The tables of an image.
#[derive(Debug)]
pub(super) struct Tables {
    file: Arc<dyn Storage>,
    /// By offset in the file, in pieces.
    pieces: Cache<Piece>,
}

impl Tables {
    /// Tables in `file`, of which at most `bytes` are kept.
    pub(super) fn new(file: Arc<dyn Storage>, bytes: u64) -> Arc<Self> {
        let pieces = bytes.div_ceil(PIECE) as usize;
        Arc::new(Tables {
            file,
            pieces: Cache::new(pieces),
        })
    }

    /// A piece, if it is kept.
    pub(super) fn get(&self, number: u64) -> Option<Arc<Piece>> {
        self.pieces.get(number)
    }

    /// Reads a piece unless it is kept. The read is a task: other requests wait for it, and it goes
    /// on if this one is not polled.
    pub(super) async fn load(self: &Arc<Self>, queue: &Queue, number: u64) -> Result<Arc<Piece>> {
        let tables = self.clone();
        let load = queue.begin(|queue| async move {
            let read = || tables.read_piece(&queue, number);
            tables.pieces.get_or_load(number, read).await
        });
        load.await
    }

    async fn read_piece(&self, queue: &Queue, number: u64) -> Result<Piece> {
        let words = self.read(queue, number * PIECE, PIECE).await?;
        Ok(words.into_iter().map(AtomicU64::new).collect())
    }

    /// The words of a part of the file.
    pub(super) async fn read(&self, queue: &Queue, offset: u64, bytes: u64) -> Result<Vec<u64>> {
        let bytes = storage::read_vec(&*self.file, queue, offset, bytes as usize).await?;
        let (words, _) = bytes.as_chunks();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
}
