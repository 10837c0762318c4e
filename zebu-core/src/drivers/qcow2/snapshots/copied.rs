//! Copied flags: whether the active disk alone refers to a cluster, so that it
//! may be written in place.

use super::super::Image;
use super::super::map::table::L1Table;
use super::references::Table;
use crate::Result;
use crate::drivers::qcow2::structures::{ClusterKind, L1Entry, L2Entry};
use crate::storage::{self, Queue};

/// Whole blocks of a table are written, of so many bytes.
const BLOCK: usize = 512;

impl Image {
    /// Clears the flags in the L2 tables of an L1 table, on the disk.
    pub(super) async fn clear_copied(&self, queue: &Queue, l1: &L1Table) -> Result<()> {
        let mut tables = self.tables(queue, Self::table_places(l1));
        while let Some(table) = tables.next().await? {
            let flags = (0..self.geometry.l2_entries()).map(|index| (index, false));
            self.write_copied(queue, &table, flags).await?;
        }
        self.slices.clear();
        Ok(())
    }

    /// Clears the flags in the active L1 table, in memory and with the next
    /// commit.
    pub(super) fn clear_copied_l1(&self) -> Result<()> {
        for index in 0..self.l1.len() as u64 {
            self.set_l1_entry(index, self.l1.get(index).with_copied(false))?;
        }
        Ok(())
    }

    /// Sets the flags of the active disk as the refcounts say, which are
    /// durable: of the L2 tables on the disk, of the L1 table with the next
    /// commit. What is damaged is left alone.
    pub(super) async fn set_copied(&self, queue: &Queue) -> Result<()> {
        if self.check_l1(&self.l1, 0).is_err() {
            return Ok(());
        }
        let size = self.geometry.cluster_size();
        // Of a table that a snapshot has too everything is the snapshot's too.
        let mut own = Vec::new();
        for (index, host) in Self::table_places(&self.l1) {
            let (refcount, _) = self.refcounts_alike(queue, host / size, 1).await?;
            let entry = self.l1.get(index).with_copied(refcount == 1);
            self.set_l1_entry(index, entry)?;
            if refcount == 1 {
                own.push((index, host));
            }
        }
        let mut tables = self.tables(queue, own.iter().copied());
        while let Some(table) = tables.next().await? {
            let flags = self.flags(queue, &table).await?;
            self.write_copied(queue, &table, flags.into_iter()).await?;
        }
        self.slices.clear();
        Ok(())
    }

    /// Sets an entry of the active L1 table, if it is another.
    fn set_l1_entry(&self, index: u64, entry: L1Entry) -> Result<()> {
        if self.l1.get(index) != entry {
            let set = || self.l1.set(index, entry);
            self.writer()?.dirty.note_l1(index, set);
        }
        Ok(())
    }

    /// The flags that the entries of an L2 table with host clusters should have.
    async fn flags(&self, queue: &Queue, table: &Table<'_>) -> Result<Vec<(usize, bool)>> {
        let cluster_bits = self.geometry.cluster_bits();
        let mut flags = Vec::new();
        // Entries side by side whose clusters are: the first, the cluster of
        // that, and how many.
        let mut run = (0, 0, 0);
        for index in 0..=self.geometry.l2_entries() {
            let cluster = self
                .own_cluster(table, index)
                .map(|host| host >> cluster_bits);
            let (first, start, count) = run;
            if count > 0 && cluster == Some(start + count) {
                run.2 += 1;
                continue;
            }
            let mut done = 0;
            while done < count {
                let (refcount, alike) = self
                    .refcounts_alike(queue, start + done, count - done)
                    .await?;
                let entries = (done..done + alike).map(|nth| first + nth as usize);
                flags.extend(entries.map(|entry| (entry, refcount == 1)));
                done += alike;
            }
            run = (index, cluster.unwrap_or(0), u64::from(cluster.is_some()));
        }
        Ok(flags)
    }

    /// The host cluster of an entry that has one to itself.
    fn own_cluster(&self, table: &Table<'_>, index: usize) -> Option<u64> {
        let entry = L2Entry::read(table.bytes, index, &self.geometry)?;
        let kind = entry.without_reserved(&self.geometry).kind(&self.geometry);
        match kind.ok()? {
            ClusterKind::Data { host } | ClusterKind::Zero { host: Some(host) } => Some(host.0),
            _ => None,
        }
    }

    /// Gives entries of an L2 table these flags, and writes what that changes.
    async fn write_copied(
        &self,
        queue: &Queue,
        table: &Table<'_>,
        flags: impl Iterator<Item = (usize, bool)>,
    ) -> Result<()> {
        let mut changed: Option<(Vec<u8>, usize)> = None;
        let mut last = 0;
        for (index, copied) in flags {
            let entry = L2Entry::read(table.bytes, index, &self.geometry).unwrap_or_default();
            if entry.copied() == copied {
                continue;
            }
            let (bytes, _) = changed.get_or_insert_with(|| (table.bytes.to_vec(), index));
            let fits = entry
                .with_copied(copied)
                .write(bytes, index, &self.geometry);
            debug_assert!(fits);
            last = index;
        }
        let Some((bytes, first)) = changed else {
            return Ok(());
        };
        let entry = self.geometry.l2_entry_size();
        let start = (first * entry) & !(BLOCK - 1);
        let end = ((last + 1) * entry).next_multiple_of(BLOCK);
        let place = table.host + start as u64;
        Ok(storage::write_slice(&*self.file, queue, place, &bytes[start..end]).await?)
    }
}
