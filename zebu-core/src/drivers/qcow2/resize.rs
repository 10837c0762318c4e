//! Changes of a whole image: another size, nothing in it. Only for a caller that
//! shares the image with no task.

use super::Image;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::structures::{Header, L1Entry, L2Entry};
use crate::offset::HostOffset;
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Image {
    /// Changes the header, on the disk durably and then here.
    pub(crate) async fn rewrite_header(
        &mut self,
        queue: &Queue,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        self.change_header(queue, change).await?;
        let header = self.writer()?.header().clone();
        self.geometry = self.geometry.with_version(header.version);
        self.header = header;
        self.protect_tables(self.writer()?);
        Ok(())
    }

    /// Gives the image an L1 table of at least `entries` entries, and makes it
    /// durable.
    pub(crate) async fn grow_l1(&mut self, queue: &Queue, entries: u64) -> Result<()> {
        if entries <= self.l1.len() as u64 {
            return Ok(());
        }
        let size = self.geometry.cluster_size();
        let (old, old_bytes) = (self.l1_offset(), self.l1.len() as u64 * 8);
        let bytes = (entries * 8).next_multiple_of(size);
        storage::event(&*self.file, storage::Event::L1GrowAllocTable);
        let table = self.allocate_contiguous(queue, bytes / size).await?;
        // What points to it is the header, so this must be durable first.
        self.finish_writing(queue).await?;
        let mut encoded = storage::zeroed(bytes as usize)?;
        self.l1.encode(0, &mut encoded);
        storage::event(&*self.file, storage::Event::L1GrowWriteTable);
        storage::write_slice(&*self.file, queue, table.0, &encoded).await?;
        if !is_broken(Rule::L1BeforeHeader) {
            self.flush_file(queue, &*self.file).await?;
        }
        storage::event(&*self.file, storage::Event::L1GrowActivateTable);
        self.rewrite_header(queue, |header| {
            header.l1_offset = table.0;
            header.l1_size = entries as u32;
        })
        .await?;
        self.l1.resize(entries as usize);
        if old_bytes > 0 {
            let freed = self.reference(old, old_bytes, true);
            self.writer()?.frees.push(freed);
        }
        Ok(())
    }

    /// Sets the size of the disk, in bytes, in the header and here. The L1
    /// table is large enough.
    pub(crate) async fn set_size(&mut self, queue: &Queue, bytes: u64) -> Result<()> {
        self.open_all_bitmaps(queue).await?;
        self.rewrite_header(queue, |header| header.size = bytes)
            .await?;
        self.geometry = self.geometry.with_virtual_size(bytes & !511);
        self.resize_bitmaps()
    }

    /// Unmaps every cluster from guest offset `from` (at a cluster boundary)
    /// on: afterwards they are as in a new image. After an error a part is done.
    pub(crate) async fn unmap_from(&mut self, queue: &Queue, from: u64) -> Result<()> {
        self.finish_writing(queue).await?;
        let coverage = self.geometry.l2_coverage();
        let is_there = |l1: &super::map::table::L1Table, index| l1.get(index).raw_offset().0 != 0;
        let entries = self.l1.len() as u64;
        if !(from / coverage..entries).any(|index| is_there(&self.l1, index)) {
            return Ok(());
        }
        self.check_unmap(from)?;
        // Whole tables first: no slice may be dirty when a table is dropped.
        for index in from.div_ceil(coverage)..entries {
            if is_there(&self.l1, index) {
                self.drop_table(queue, index).await?;
                self.write_back_if_needed(queue).await?;
            }
        }
        let end = from.next_multiple_of(coverage);
        let mut at = from;
        while at < end && is_there(&self.l1, from / coverage) {
            let slice = self.own_slice(queue, at).await?;
            let stop = at + self.to_slice_end(at);
            while at < stop {
                self.set_entry(&slice, at, L2Entry::UNALLOCATED, true)?;
                at += self.geometry.cluster_size();
            }
            self.write_back_if_needed(queue).await?;
        }
        self.finish_writing(queue).await
    }

    /// Refuses an image whose active L1 table is damaged, if what is unmapped from
    /// `from` on could be in use elsewhere. (A repair leaves an L2 table that two
    /// entries share, which writes copy; but dropped as a whole it would take along
    /// what the other entry still maps if its refcount is wrong.)
    pub(crate) fn check_unmap(&self, from: u64) -> Result<()> {
        self.check_l1(&self.l1, from.div_ceil(self.geometry.l2_coverage()))
    }

    /// Drops an L2 table and everything that it refers to. No slice is dirty.
    async fn drop_table(&self, queue: &Queue, index: u64) -> Result<()> {
        let writer = self.writer()?;
        let size = self.geometry.cluster_size();
        let entry = self.l1.get(index).without_reserved();
        let Some(table) = entry.l2_table(&self.geometry)? else {
            return Ok(());
        };
        let bytes = storage::read_vec(&*self.file, queue, table.0, size as usize).await?;
        writer
            .dirty
            .note_l1(index, || self.l1.set(index, L1Entry::UNALLOCATED));
        // At once: after an error midway they would be taken for those of the next table at this
        // place.
        self.slices.clear();
        for nth in 0..self.geometry.l2_entries() {
            let entry = L2Entry::read(&bytes, nth, &self.geometry).unwrap_or_default();
            let entry = entry.without_reserved(&self.geometry);
            if let Some(freed) = self.referred(entry, true) {
                writer.frees.push(freed);
            }
        }
        writer.frees.push(self.table_reference(table.0, true));
        Ok(())
    }

    /// Maps whole unallocated clusters to host clusters that read as zeroes, without writing data,
    /// and returns the host ranges. With `zero` the entries have the zero flag.
    pub(crate) async fn map_ahead(
        &self,
        queue: &Queue,
        guest: u64,
        length: u64,
        zero: bool,
    ) -> Result<Vec<(u64, u64)>> {
        let size = self.geometry.cluster_size();
        let mut places: Vec<(u64, u64)> = Vec::new();
        let _held = self.hold(guest, length).await?;
        let mut at = guest;
        while at < guest + length {
            let slice = self.own_slice(queue, at).await?;
            let limit = (guest + length - at).min(self.to_slice_end(at));
            let (host, clusters) = if self.geometry.has_data_file() {
                (HostOffset(at), limit / size)
            } else {
                let allocation = self.allocate(queue, limit / size).await?;
                let (host, clusters) = (allocation.host(), allocation.clusters());
                if !allocation.fresh {
                    storage::zero_range(&*self.file, queue, host.0, clusters * size).await?;
                }
                allocation.keep();
                (host, clusters)
            };
            for nth in 0..clusters {
                let host = HostOffset(host.0 + nth * size);
                let entry = match zero {
                    true => L2Entry::zero_allocated(host, true, &self.geometry)?,
                    false => L2Entry::data(host, true, &self.geometry)?,
                };
                self.set_entry(&slice, at + nth * size, entry, false)?;
            }
            at += clusters * size;
            match places.last_mut() {
                Some((start, length)) if *start + *length == host.0 => *length += clusters * size,
                _ => places.push((host.0, clusters * size)),
            }
        }
        Ok(places)
    }

    /// Refuses a change of size that the image's format or content forbids.
    pub(crate) fn check_resize(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Refused(why.into()));
        if self.geometry.version() < 3 && !self.snapshots.is_empty() {
            return refuse("Can't resize a v2 image which has snapshots");
        }
        Ok(())
    }
}
