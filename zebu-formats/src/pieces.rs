//! Metadata that a driver reads when they are first needed, and keeps up to a bound.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::cache::Cache;
use super::table::check_in_file;
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// Bytes of a piece at most.
pub(super) const PIECE: u64 = 4096;
/// Bytes that are kept of an image at most.
const KEPT: u64 = 8 << 20;

/// Entries of a piece of a table.
const PER_PIECE: u64 = PIECE / 8;

/// A table in a file, of entries of 8 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    /// Its name, for errors.
    pub what: &'static str,
    /// Its offset in bytes.
    pub start: u64,
    /// Its number of entries.
    pub count: u64,
}

/// The entries of a table from some index on, as far as a piece of it has them.
#[derive(Debug)]
pub(super) struct Entries {
    piece: Arc<Vec<u8>>,
    bytes: Range<usize>,
}

impl Table {
    /// The offset of the piece with the entry of this index, the bytes of the table in it, and the
    /// offset of the entry in it.
    fn place(&self, index: u64) -> (u64, u64, u64) {
        let first = index - index % PER_PIECE;
        let bytes = (self.count - first).min(PER_PIECE) * 8;
        (self.start + first * 8, bytes, (index - first) * 8)
    }
}

impl Deref for Entries {
    type Target = [[u8; 8]];

    fn deref(&self) -> &Self::Target {
        self.piece[self.bytes.clone()].as_chunks().0
    }
}

/// Pieces of a file's metadata, by their offset.
#[derive(Debug)]
pub(super) struct Pieces {
    file: Arc<dyn Storage>,
    cache: Arc<Cache<Vec<u8>>>,
}

impl Pieces {
    /// Of `file`, of which nothing is read yet.
    pub(super) fn new(file: Arc<dyn Storage>) -> Self {
        Pieces {
            file,
            cache: Arc::new(Cache::new((KEPT / PIECE) as usize)),
        }
    }

    /// The piece at `at`, if it is in memory and has `need` bytes. Does not allocate.
    pub(super) fn get(&self, at: u64, need: u64) -> Option<Arc<Vec<u8>>> {
        let piece = self.cache.get(at);
        piece.filter(|piece| piece.len() as u64 >= need)
    }

    /// The piece at `at`, of at least `need` bytes, which are at most [`PIECE`]. `what` they are is
    /// for the error if the file ends before that.
    pub(super) async fn load(
        &self,
        queue: &Queue,
        what: &str,
        at: u64,
        need: u64,
    ) -> Result<Arc<Vec<u8>>> {
        let file_len = self.file.len()?;
        check_in_file(what, at, need, file_len)?;
        // The same for each user of the offset, so that a piece in the cache serves all.
        let length = (file_len - at).min(PIECE) as usize;
        let (file, cache) = (self.file.clone(), self.cache.clone());
        // A task of the queue, since other requests may wait for it, too.
        let loading = queue.begin(|queue| async move {
            let load = async || {
                let bytes = storage::read_vec(&*file, &queue, at, length).await?;
                Ok::<_, Error>(bytes)
            };
            cache.get_or_load(at, load).await
        });
        loading.await
    }

    /// The entries of a table from `index` on, which it has, if they are in memory: at least one.
    /// Does not allocate.
    pub(super) fn entries(&self, table: &Table, index: u64) -> Option<Entries> {
        let (at, bytes, from) = table.place(index);
        let piece = self.get(at, bytes)?;
        let bytes = from as usize..bytes as usize;
        Some(Entries { piece, bytes })
    }

    /// [`Pieces::entries`] with I/O.
    pub(super) async fn load_entries(
        &self,
        queue: &Queue,
        table: &Table,
        index: u64,
    ) -> Result<Entries> {
        let (at, bytes, from) = table.place(index);
        let piece = self.load(queue, table.what, at, bytes).await?;
        let bytes = from as usize..bytes as usize;
        Ok(Entries { piece, bytes })
    }
}
