//! Space in the file for metadata, taken before anything is changed: on a file
//! system that is full, the request that needs a new table fails, and not the
//! flush that brings to the disk what others have written already.
//!
//! What is on the disk has its space, but for pieces of tables that another
//! program left as holes, and where the file system cannot take space ahead.

use std::ops::Range;
use std::sync::Mutex;

use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::allocation::refcounts::Run;
use crate::lock;
use crate::storage::{self, Queue, Storage};

/// Tables of at least so many bytes have their space taken one by one.
const LARGE: u64 = 16 << 10;
/// Smaller ones map so little that every other write would wait for it: with
/// the first of them this many bytes are taken.
const AHEAD: u64 = 1 << 20;
/// Bytes of a piece of an L1 or refcount table that are written together.
const PIECE: u64 = 4096;

/// Bytes that a disk writes as a whole.
const SECTOR: u64 = 512;

/// The range of the file that was taken for small tables last.
#[derive(Debug, Default)]
pub(crate) struct Ahead(Mutex<Range<u64>>);

impl Ahead {
    fn has(&self, range: &Range<u64>) -> bool {
        let ahead = lock(&self.0);
        ahead.start <= range.start && range.end <= ahead.end
    }

    fn set(&self, range: Range<u64>) {
        *lock(&self.0) = range;
    }
}

/// Takes the space of a range; whether the file can do that.
async fn take(file: &dyn Storage, queue: &Queue, range: &Range<u64>) -> Result<bool> {
    let length = range.end - range.start;
    match storage::allocate(file, queue, range.start, length).await {
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        result => Ok(result.map(|()| true)?),
    }
}

impl Image {
    /// Makes the cluster of a new L2 table, inside the file, read as zeroes,
    /// and takes its space. `fresh`: it reads as zeroes already.
    pub(in crate::drivers::qcow2) async fn reserve_table(
        &self,
        queue: &Queue,
        table: u64,
        fresh: bool,
    ) -> Result<()> {
        if is_broken(Rule::TableIsWhole) {
            return Ok(());
        }
        let size = self.geometry.cluster_size();
        let range = table..table + size;
        let is_taken = match (fresh, size < LARGE) {
            (true, true) => self.take_ahead(queue, &range).await?,
            (true, false) => take(&*self.file, queue, &range).await?,
            (false, _) => false,
        };
        if is_taken {
            return Ok(());
        }
        Ok(storage::write_zeroes(&*self.file, queue, table, size).await?)
    }

    /// Takes the space of a small table and of what follows it.
    async fn take_ahead(&self, queue: &Queue, table: &Range<u64>) -> Result<bool> {
        let ahead = &self.writer()?.ahead;
        if ahead.has(table) {
            return Ok(true);
        }
        let more = table.start..(table.start + AHEAD).min(self.file_len()).max(table.end);
        match take(&*self.file, queue, &more).await {
            Ok(true) => {
                ahead.set(more);
                return Ok(true);
            }
            // Without `fallocate` it is left to the file system: a write of
            // zeroes for every other write would be too much.
            Ok(false) => return Ok(true),
            Err(_) if more.end > table.end => {}
            Err(e) => return Err(e),
        }
        // There may be space for the table alone.
        take(&*self.file, queue, table).await.map(|_| true)
    }

    /// Takes the space of new refcount blocks, and of their entries in the
    /// table.
    pub(in crate::drivers::qcow2) async fn reserve_refcount_blocks(
        &self,
        queue: &Queue,
        blocks: Run,
    ) -> Result<()> {
        let writer = self.writer()?;
        let size = self.geometry.cluster_size();
        let range = blocks.first * size..(blocks.first + blocks.count) * size;
        self.lengthen(queue, range.end).await?;
        take(&*self.file, queue, &range).await?;
        for piece in writer.refcounts.empty_pieces(blocks, self.table_piece()) {
            take(&*self.file, queue, &piece).await?;
        }
        writer.refcounts.note_space(blocks);
        Ok(())
    }

    /// Takes the space of the piece of the L1 table with entry `index`, unless
    /// there is something in it: then it was written.
    pub(in crate::drivers::qcow2) async fn reserve_l1_entries(
        &self,
        queue: &Queue,
        index: u64,
    ) -> Result<()> {
        let piece = self.l1_piece(index);
        let entries = piece.start / 8..(piece.end / 8).min(self.l1.len() as u64);
        if (entries.into_iter()).any(|entry| self.l1.get(entry).raw_offset().0 != 0) {
            return Ok(());
        }
        let table = self.l1_offset();
        take(
            &*self.file,
            queue,
            &(table + piece.start..table + piece.end),
        )
        .await?;
        Ok(())
    }

    /// The bytes of the L1 table that are written together with entry `index`. They end with the
    /// sector in which the table ends: what follows may be a hole of the file, without space.
    pub(in crate::drivers::qcow2) fn l1_piece(&self, index: u64) -> Range<u64> {
        let piece = self.table_piece();
        let start = index * 8 / piece * piece;
        let end = (self.l1.len() as u64 * 8).next_multiple_of(SECTOR);
        start..(start + piece).min(end)
    }

    /// Bytes of a piece of an L1 or refcount table: inside the table's
    /// clusters.
    pub(in crate::drivers::qcow2) fn table_piece(&self) -> u64 {
        PIECE.min(self.geometry.cluster_size())
    }
}
