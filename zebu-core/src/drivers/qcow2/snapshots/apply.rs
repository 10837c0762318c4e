//! Going back to a snapshot.

use super::super::allocation::frees::Freed;
use super::super::map::table::L1Table;
use super::super::{Image, SnapshotName};
use super::view::View;
use crate::drivers::qcow2::structures::L1Entry;
use crate::storage::Queue;
use crate::{Error, Result};

impl Image {
    /// Makes the active disk what it was when a snapshot was taken, its size
    /// too; the snapshot stays. Durable on return; after an error the disk is as
    /// before.
    pub(crate) async fn snapshot_apply(
        &mut self,
        queue: &Queue,
        name: &SnapshotName,
    ) -> Result<()> {
        self.begin_snapshots(queue).await?;
        let Some(index) = name.position(&self.snapshots) else {
            return Err(Error::os(libc::ENOENT));
        };
        let snapshot = self.snapshots[index].clone();
        let View { size, mut l1 } = self.snapshot_view(queue, &snapshot, &self.geometry).await?;
        self.check_snapshot_l1(&snapshot, &l1)?;
        self.check_new_size(size)?;
        // What is replaced must be known to be freed as a whole.
        self.check_l1(&self.l1, 0)?;
        self.check_references(queue, &self.l1).await?;
        if size != self.size() {
            self.store_sizes(queue).await?;
        }
        // All of the disk counts as written.
        self.announce(queue, 0..u64::MAX).await?;
        if size != self.size() {
            self.open_all_bitmaps(queue).await?;
        }
        let entries = self.geometry.l1_entries_for(size);
        // The snapshot keeps its VM state. In the active table it would be data of a larger disk.
        for index in entries..l1.len() as u64 {
            l1.set(index, L1Entry::UNALLOCATED);
        }
        self.raise(queue, &l1).await?;
        l1.share();
        let result = match self.prepare_l1(queue, &l1).await {
            Ok(place) => self.switch_l1(queue, &mut l1, place, size).await,
            Err(error) => Err(error),
        };
        if result.is_err() {
            // What cannot be undone costs space.
            let _ = self.undo_apply(queue, &l1).await;
        }
        result
    }

    /// Refuses a size that the disk cannot get.
    fn check_new_size(&self, size: u64) -> Result<()> {
        let refuse = |why: &str| Err(Error::Refused(why.into()));
        if size == self.size() {
            return Ok(());
        }
        if !size.is_multiple_of(512) {
            return refuse("The new size must be a multiple of 512");
        }
        if self.geometry.version() < 3 {
            return refuse("Can't resize a v2 image which has snapshots");
        }
        Ok(())
    }

    /// Writes the active L1 table that is to be, durably, with flags as they
    /// must be; where it is.
    async fn prepare_l1(&mut self, queue: &Queue, l1: &L1Table) -> Result<Freed> {
        // Refcounts first: what is written next depends on them.
        self.commit(queue, true).await?;
        // The snapshot keeps all of it.
        self.clear_copied(queue, l1).await?;
        let place = self.write_new(queue, l1.encode_shared()).await?;
        match self.commit(queue, true).await {
            Ok(()) => Ok(place),
            Err(error) => {
                self.writer()?.free_at_commit(place);
                Err(error)
            }
        }
    }

    async fn undo_apply(&mut self, queue: &Queue, l1: &L1Table) -> Result<()> {
        self.writer()?.check()?;
        self.lower(queue, l1, u64::MAX).await?;
        self.finish_writing(queue).await
    }

    /// Makes an L1 table on the disk the active one, and frees what only the
    /// one before had.
    async fn switch_l1(
        &mut self,
        queue: &Queue,
        l1: &mut L1Table,
        place: Freed,
        size: u64,
    ) -> Result<()> {
        let punch = self.writer()?.options.punch_snapshot;
        let old_place = self.reference(self.l1_offset(), self.l1.len() as u64 * 8, punch);
        let resized = size != self.size();
        let entries = l1.len() as u32;
        let host = place.first * self.geometry.cluster_size();
        self.switch_header(queue, place, |header| {
            header.l1_offset = host;
            header.l1_size = entries;
            if resized {
                header.size = size;
            }
        })
        .await?;
        std::mem::swap(&mut self.l1, l1);
        self.geometry = self.geometry.with_virtual_size(size);
        self.resize_bitmaps()?;
        self.slices.clear();
        let freed = self.free_replaced(queue, l1, old_place, punch).await;
        self.log_not_freed(freed);
        Ok(())
    }

    /// Frees what only the disk before had: its L1 table, in `place`, and what
    /// that leads to.
    async fn free_replaced(
        &self,
        queue: &Queue,
        l1: &L1Table,
        place: Freed,
        punch: bool,
    ) -> Result<()> {
        self.protect_tables(self.writer()?);
        self.release(queue, l1, punch).await?;
        self.release_one(queue, place).await?;
        self.finish_writing(queue).await
    }
}
