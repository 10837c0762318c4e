//! A larger refcount table.
//!
//! The new table and the refcount blocks that count it lie behind everything
//! that the old one can count, so that space cannot be allocated otherwise. All of
//! it is durable before the header points to it.

use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::{MAX_REFCOUNT_TABLE_BYTES, RefcountBlock, RefcountSpace};
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// Where a larger table goes, in clusters.
struct Area {
    /// The first cluster; the blocks come first, then the table.
    start: u64,
    blocks: u64,
    table: u64,
}

impl Image {
    /// Makes the refcount table so long that it has entry `index`, if it is
    /// not yet.
    pub(crate) async fn grow_refcount_table(&self, queue: &Queue, index: u64) -> Result<()> {
        self.as_task(queue, async move |image, queue| {
            image.grow_table_to(queue, index).await
        })
        .await
    }

    async fn grow_table_to(&self, queue: &Queue, index: u64) -> Result<()> {
        let writer = self.writer()?;
        let _pass = writer.commits.gate.enter().await;
        if index < writer.refcounts.table_len() {
            return Ok(());
        }
        let size = self.geometry.cluster_size();
        let per_block = self.geometry.refcount_block_entries() as u64;
        // Entries of new blocks are not among these: the next commit writes
        // them into the new table.
        let (old_offset, mut entries) = writer.refcounts.table();
        let old = entries.len() as u64;
        let area = self.area(old)?;
        let end = area.start + area.blocks + area.table;
        let (from, to) = (area.start * size, end * size);
        writer.protected.check(from, to - from)?;
        self.lengthen(queue, to).await?;

        let mut bytes = storage::zeroed((to - from) as usize)?;
        let (blocks, table) = bytes.split_at_mut((area.blocks * size) as usize);
        for (nth, block) in (0..).zip(blocks.chunks_exact_mut(size as usize)) {
            let first = area.start + nth * per_block;
            let mut view = RefcountBlock::new(block, &self.geometry);
            for entry in 0..end.saturating_sub(first).min(per_block) {
                view.set(entry as usize, 1)?;
            }
        }
        let new: Vec<(u64, u64)> = (0..area.blocks)
            .map(|nth| (old + nth, (area.start + nth) * size))
            .collect();
        entries.extend(new.iter().map(|(_, offset)| *offset));
        for (place, entry) in table.chunks_exact_mut(8).zip(&entries) {
            place.copy_from_slice(&entry.to_be_bytes());
        }
        storage::event(&*self.file, storage::Event::RefblockAllocWriteTable);
        storage::write_slice(&*self.file, queue, from, &bytes).await?;
        if !is_broken(Rule::RefcountTableBeforeHeader) {
            self.flush_file(queue, &*self.file).await?;
        }

        storage::event(&*self.file, storage::Event::RefblockAllocSwitchTable);
        let offset = (area.start + area.blocks) * size;
        self.change_header(queue, |header| {
            header.refcount_table_offset = offset;
            header.refcount_table_clusters = area.table as u32;
        })
        .await?;
        let places = offset..offset + area.table * size;
        writer.protected.set("refcount table", places);
        for (_, block) in &new {
            writer.protected.add_table(*block, "refcount block");
        }
        let entries = area.table * size / 8;
        writer.refcounts.grown(offset, entries, &new, end);
        let freed = self.reference(old_offset, old * 8, writer.options.punch_other);
        writer.frees.push(freed);
        Ok(())
    }

    /// Where the table goes that follows one of `old` entries.
    fn area(&self, old: u64) -> Result<Area> {
        let size = self.geometry.cluster_size();
        let per_block = self.geometry.refcount_block_entries() as u64;
        let most = MAX_REFCOUNT_TABLE_BYTES / size;
        let need = |blocks: u64| ((old + blocks) * 8).div_ceil(size);
        // Half as large again, so that it seldom happens.
        let table = |blocks| (old * 12).div_ceil(size).min(most).max(need(blocks));
        let space = RefcountSpace::counting(0, per_block, table);
        match space.table > most {
            true => Err(Error::os(libc::EFBIG)),
            false => Ok(Area {
                start: old * per_block,
                blocks: space.blocks,
                table: space.table,
            }),
        }
    }
}
