//! A new snapshot table with what could be read of the old one.

use super::super::counts::Counts;
use super::super::refcounts::StoredRefcounts;
use super::{CheckMessage, Repair};
use crate::Result;
use crate::drivers::qcow2::structures::{RefcountBlock, Snapshot};
use crate::storage;

impl Repair<'_> {
    /// Writes a table of the remaining snapshots and frees the old one. Returns the number of
    /// copied flags that were wrong after that.
    pub(super) async fn rewrite_snapshots(
        &mut self,
        mut counts: Counts,
        stored: &StoredRefcounts,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<u64> {
        for snapshot in &mut self.metadata.snapshots.snapshots {
            let size = snapshot.size_in(&self.metadata.geometry);
            snapshot.set_extra(snapshot.vm_state_size(), size, snapshot.icount());
        }
        let table = Snapshot::encode_table(&self.metadata.snapshots.snapshots)?;
        let offset = match table.is_empty() {
            true => 0,
            false => self.write_snapshots(&table, &mut counts, stored).await?,
        };
        let count = self.metadata.snapshots.snapshots.len() as u32;
        self.switch_snapshot_table(offset, count).await?;
        self.metadata.snapshots.bytes = table.len() as u64;
        self.metadata.snapshots.errors = 0;
        let counted = self.free_leaks(&mut |_| {}).await?;
        let before = counted.report.corruptions_fixed;
        let counted = self.repair_copied(counted, emit).await?;
        Ok(counted.report.corruptions_fixed - before)
    }

    /// Writes the table to free clusters, and returns their offset.
    async fn write_snapshots(
        &mut self,
        table: &[u8],
        counts: &mut Counts,
        stored: &StoredRefcounts,
    ) -> Result<u64> {
        let geometry = self.metadata.geometry;
        let clusters = geometry.clusters_for(table.len() as u64);
        let first = counts.find_free(0, clusters)?;
        counts.take(first, clusters);
        if !self.count_in_blocks(first, clusters, stored).await? {
            self.rebuild(counts).await?;
        }
        let offset = first << geometry.cluster_bits();
        self.writer.write(offset, table).await?;
        self.writer.barrier().await?;
        Ok(offset)
    }

    /// Makes the refcounts of free clusters 1, durably, in the blocks that are
    /// there. If one is missing nothing changes, and the answer is false.
    async fn count_in_blocks(
        &self,
        first: u64,
        clusters: u64,
        stored: &StoredRefcounts,
    ) -> Result<bool> {
        let geometry = &self.metadata.geometry;
        let end = first + clusters;
        let per_block = geometry.refcount_block_entries() as u64;
        let parts = || {
            (first / per_block..end.div_ceil(per_block)).map(|index| {
                let start = index * per_block;
                let entries = first.max(start) - start..end.min(start + per_block) - start;
                (stored.block_of(start), entries)
            })
        };
        if parts().any(|(block, _)| block.is_none()) {
            return Ok(false);
        }
        for (block, entries) in parts() {
            let offset = block.unwrap_or_default();
            let length = geometry.cluster_size() as usize;
            let file = &*self.metadata.file;
            let mut bytes = storage::read_vec(file, &self.queue, offset, length).await?;
            let mut block = RefcountBlock::new(&mut bytes[..], geometry);
            for entry in entries {
                block.set(entry as usize, 1)?;
            }
            self.writer.write(offset, &bytes).await?;
        }
        self.writer.barrier().await?;
        Ok(true)
    }
}
