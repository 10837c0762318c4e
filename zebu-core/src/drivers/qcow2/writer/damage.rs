//! Damage of the tables that makes every change a danger to other data: such an image is not written.

use std::collections::BTreeSet;

use crate::drivers::inflate;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::{ClusterKind, CompressedCluster, L1Entry, L2Entry};
use crate::offset::HostOffset;
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// Bytes that are inflated to see whether compressed data are whole that reach past the end of the file.
const MOST_INFLATED: u64 = 1 << 30;

impl Image {
    /// Refuses an image with damage that makes every change a danger to other data.
    pub(crate) async fn refuse_damage(&self, queue: &Queue) -> Result<()> {
        if let Some(flaw) = self.writer()?.flaw() {
            return Err(flaw);
        }
        self.refuse_cut_tables(queue).await?;
        // The header's cluster has one reference. If its refcount is another, the
        // place or the width of refcounts is wrong, and clusters in use may seem to
        // be free.
        let (refcount, _) = self.refcounts_alike(queue, 0, 1).await?;
        match refcount {
            1 => Ok(()),
            _ => Err(Error::Refused(format!(
                "The refcounts are damaged: that of the header is {refcount}"
            ))),
        }
    }

    /// Refuses an image with a refcount block, an L2 table or a mapped cluster that is past the end
    /// of the file. Once the file has grown over it, it would read as zeroes: clusters in use as
    /// free, data as unallocated or zero.
    async fn refuse_cut_tables(&self, queue: &Queue) -> Result<()> {
        let refcounts = &self.writer()?.refcounts;
        for offset in refcounts.block_offsets() {
            self.refuse_cut_table("A refcount block", offset)?;
        }
        let mut tables = BTreeSet::new();
        for index in 0..self.l1.len() as u64 {
            let entry: L1Entry = self.l1.get(index);
            if let Ok(Some(table)) = entry.without_reserved().l2_table(&self.geometry) {
                self.refuse_cut_table("An L2 table", table.0)?;
                tables.insert(table.0);
            }
        }
        // More is read only where the refcounts say that something is missing, which may also be
        // clusters that a crash has left without a mapping.
        if !self.counts_past_end(queue).await? {
            return Ok(());
        }
        match self.snapshot_tables(queue).await {
            // Where they make no sense, a change of snapshots is refused anyway.
            Err(Error::Format(_)) => {}
            inactive => {
                for offset in inactive?.into_keys() {
                    self.refuse_cut_table("An L2 table of a snapshot", offset)?;
                    tables.insert(offset);
                }
            }
        }
        let mut inflated = BTreeSet::new();
        for table in tables {
            self.refuse_cut_data(queue, table, &mut inflated).await?;
        }
        Ok(())
    }

    /// Refuses an L2 table that maps data past the end of the file. Of compressed data the file may
    /// lack a part, if they can be read without it. `inflated` has the offsets of
    /// those that were looked at: many entries of a damaged image may refer to one.
    async fn refuse_cut_data(
        &self,
        queue: &Queue,
        table: u64,
        inflated: &mut BTreeSet<HostOffset>,
    ) -> Result<()> {
        let size = self.geometry.cluster_size();
        let bytes = storage::read_vec(&*self.file, queue, table, size as usize).await?;
        for index in 0..self.geometry.l2_entries() {
            let entry = L2Entry::read(&bytes, index, &self.geometry).unwrap_or_default();
            let entry = entry.without_reserved(&self.geometry);
            let (host, is_there) = match entry.kind(&self.geometry) {
                Ok(ClusterKind::Data { host }) if !self.geometry.has_data_file() => {
                    (host, !self.is_past_end(host.0)?)
                }
                Ok(ClusterKind::Compressed(cluster)) => (
                    cluster.offset,
                    self.has_compressed(queue, cluster, inflated).await?,
                ),
                _ => continue,
            };
            if !is_there {
                return Err(Error::Refused(format!(
                    "The image is truncated: data at {:#x} are past the end of the file",
                    host.0
                )));
            }
        }
        Ok(())
    }

    /// Whether the file has the data of a compressed cluster, by its length or by inflating them.
    /// All that are inflated end with the file, so the offset tells them apart.
    async fn has_compressed(
        &self,
        queue: &Queue,
        cluster: CompressedCluster,
        inflated: &mut BTreeSet<HostOffset>,
    ) -> Result<bool> {
        let declared = self.compressed_data(cluster);
        match self.check_compressed(0, declared) {
            Ok(there) if there == declared || inflated.contains(&there.host) => Ok(true),
            // What is that much can only be meant to take time.
            Ok(_) if inflated.len() as u64 >= MOST_INFLATED >> self.geometry.cluster_bits() => {
                Ok(false)
            }
            Ok(there) => {
                inflated.insert(there.host);
                match inflate(queue, &*self.file, 0, there).await {
                    Err(Error::Compressed { .. }) => Ok(false),
                    result => result.map(|_| true),
                }
            }
            Err(Error::Corrupt { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn refuse_cut_table(&self, name: &str, offset: u64) -> Result<()> {
        let last = offset.saturating_add(self.geometry.cluster_size() - 1);
        match self.is_past_end(last)? {
            false => Ok(()),
            true => Err(Error::Refused(format!(
                "{name} at {offset:#x} is past the end of the file"
            ))),
        }
    }

    /// Whether a cluster that is not wholly inside the file has references, by the refcounts.
    async fn counts_past_end(&self, queue: &Queue) -> Result<bool> {
        let (_, table) = self.writer()?.refcounts.table();
        let end = table.len() as u64 * self.geometry.refcount_block_entries() as u64;
        let mut cluster = self.file_len() / self.geometry.cluster_size();
        while cluster < end {
            let (refcount, count) = self.refcounts_alike(queue, cluster, end - cluster).await?;
            if refcount > 0 {
                return Ok(true);
            }
            cluster += count;
        }
        Ok(false)
    }
}
