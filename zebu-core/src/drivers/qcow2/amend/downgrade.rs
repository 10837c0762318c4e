//! Zero clusters in the terms of version 2: clusters full of zeroes, or unallocated ones where no
//! backing file shows through.
//!
//! The tables of snapshots have zero clusters too. A new cluster in a table of several snapshots is
//! counted for each of them.

use std::collections::BTreeMap;

use crate::Result;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::structures::{ClusterKind, Geometry, L1Entry, L2Entry};
use crate::offset::HostOffset;
use crate::storage::{self, Queue};

/// A zero cluster, and where it has a host cluster.
fn zero_cluster(entry: L2Entry, geometry: &Geometry) -> Option<Option<HostOffset>> {
    match entry.without_reserved(geometry).kind(geometry) {
        Ok(ClusterKind::Zero { host }) => Some(host),
        _ => None,
    }
}

impl Image {
    /// Replaces all zero clusters. Only for images without subclusters and
    /// external data file, and when no request is in flight.
    pub(crate) async fn expand_zeroes(&self, queue: &Queue, has_backing: bool) -> Result<()> {
        for index in 0..self.l1.len() as u64 {
            if self.l1.get(index).raw_offset().0 != 0 {
                self.expand_active(queue, index, has_backing).await?;
            }
        }
        // From here on the disk has all of the active tables.
        self.finish_writing(queue).await?;
        for (table, references) in self.snapshot_tables(queue).await? {
            self.expand_inactive(queue, table, references, has_backing)
                .await?;
        }
        self.finish_writing(queue).await
    }

    /// What the active disk has in one L2 table.
    async fn expand_active(&self, queue: &Queue, index: u64, has_backing: bool) -> Result<()> {
        let coverage = self.geometry.l2_coverage();
        let cluster_size = self.geometry.cluster_size();
        let (start, end) = (index * coverage, (index + 1) * coverage);
        let mut guest = start;
        while guest < end {
            let slice = self.slice(queue, guest).await?;
            if zero_cluster(self.entry(&slice, guest), &self.geometry).is_some() {
                self.expand_cluster(queue, guest, has_backing).await?;
            }
            guest += cluster_size;
        }
        Ok(())
    }

    async fn expand_cluster(&self, queue: &Queue, guest: u64, has_backing: bool) -> Result<()> {
        self.write_back_if_needed(queue).await?;
        let slice = self.own_slice(queue, guest).await?;
        let old = self.entry(&slice, guest);
        let Some(host) = zero_cluster(old, &self.geometry) else {
            return Ok(());
        };
        if host.is_none() && !has_backing {
            return self.set_entry(&slice, guest, L2Entry::UNALLOCATED, false);
        }
        let size = self.geometry.cluster_size();
        // A host cluster that a snapshot shares may hold the snapshot's data.
        if let Some(host) = host.filter(|_| old.copied()) {
            self.check_data_write(host, size)?;
            storage::write_zeroes(&**self.data(), queue, host.0, size).await?;
            let new = L2Entry::data(host, true, &self.geometry)?;
            return self.set_entry(&slice, guest, new, false);
        }
        let allocation = self.allocate(queue, 1).await?;
        let host = allocation.host();
        if !allocation.fresh {
            storage::write_zeroes(&**self.data(), queue, host.0, size).await?;
        }
        let new = L2Entry::data(host, true, &self.geometry)?;
        self.set_entry(&slice, guest, new, false)?;
        allocation.keep();
        Ok(())
    }

    /// The L2 tables of the snapshots, and how many snapshots have each.
    pub(in crate::drivers::qcow2) async fn snapshot_tables(
        &self,
        queue: &Queue,
    ) -> Result<BTreeMap<u64, u64>> {
        let mut tables = BTreeMap::new();
        for snapshot in &self.snapshots {
            snapshot.check_l1(self.geometry.cluster_size())?;
            let length = snapshot.l1_size as usize * 8; // At most 32 MiB.
            let bytes = storage::read_vec(&*self.file, queue, snapshot.l1_offset, length).await?;
            for entry in bytes.as_chunks::<8>().0 {
                let entry = L1Entry::from_be_bytes(*entry).without_reserved();
                if let Some(table) = entry.l2_table(&self.geometry)? {
                    *tables.entry(table.0).or_insert(0) += 1;
                }
            }
        }
        Ok(tables)
    }

    /// What the table at `table` has, to which only snapshots refer if it has
    /// zero clusters at all: those of the active disk are gone.
    async fn expand_inactive(
        &self,
        queue: &Queue,
        table: u64,
        references: u64,
        has_backing: bool,
    ) -> Result<()> {
        let size = self.geometry.cluster_size();
        let mut bytes = storage::read_vec(&*self.file, queue, table, size as usize).await?;
        let mut dropped: Vec<Freed> = Vec::new();
        let mut changed = false;
        for index in 0..self.geometry.l2_entries() {
            let entry = L2Entry::read(&bytes, index, &self.geometry).unwrap_or_default();
            let Some(host) = zero_cluster(entry, &self.geometry) else {
                continue;
            };
            let new = match has_backing {
                true => self.zeroes_for(queue, references).await?,
                false => L2Entry::UNALLOCATED,
            };
            if let Some(host) = host {
                let each = self.reference(host.0, 1, false);
                dropped.extend((0..references).map(|_| each));
            }
            changed |= new.write(&mut bytes, index, &self.geometry);
        }
        if !changed {
            return Ok(());
        }
        // The clusters are counted, and durable, before the table has them.
        self.finish_writing(queue).await?;
        storage::write_slice(&*self.file, queue, table, &bytes).await?;
        self.flush_file(queue, &*self.file).await?;
        let writer = self.writer()?;
        for freed in dropped {
            writer.frees.push(freed);
        }
        Ok(())
    }

    /// An entry for a new cluster of zeroes that so many snapshots have.
    async fn zeroes_for(&self, queue: &Queue, references: u64) -> Result<L2Entry> {
        let allocation = self.allocate(queue, 1).await?;
        let host = allocation.host();
        let size = self.geometry.cluster_size();
        if !allocation.fresh {
            storage::write_zeroes(&**self.data(), queue, host.0, size).await?;
        }
        let more = references.saturating_sub(1) as i64;
        self.change_refcounts(queue, host.0 / size, 1, more).await?;
        let entry = L2Entry::data(host, references == 1, &self.geometry)?;
        allocation.keep();
        Ok(entry)
    }
}
