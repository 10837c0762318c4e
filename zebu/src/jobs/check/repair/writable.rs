//! Which tables a repair may write to. An image may name the same cluster as
//! an L2 table and as its header: changing the one would break the other.

use super::super::cells::Cells;
use super::super::refcounts::StoredRefcounts;
use super::super::{Check, Writer};
use crate::Result;
use crate::format::{Geometry, Header};

/// The tables that may be changed, and the means.
pub(in super::super) struct Writable {
    pub(in super::super) writer: Writer,
    /// Entries of the L2 table that was looked at last that are to be zeroed:
    /// where, and what they become.
    pub(in super::super) zeroed: Vec<(u64, u64)>,
    geometry: Geometry,
    /// Clusters of metadata other than L2 tables: 0 if there is none, 1 for
    /// one structure, 2 for more.
    uses: Cells,
    /// Clusters that are referred to and not in the file: first and end of
    /// each run.
    outside: Vec<(u64, u64)>,
    /// Whether entries may be zeroed.
    zero: bool,
    /// Whether the structures were too many to be looked at.
    unknown: bool,
}

impl Writable {
    pub(super) fn new(
        check: &Check<'_>,
        stored: &StoredRefcounts,
        writer: &Writer,
        zero: bool,
    ) -> Self {
        let geometry = check.metadata.geometry;
        let mut writable = Writable {
            writer: writer.clone(),
            zeroed: Vec::new(),
            geometry,
            uses: Cells::new(geometry.clusters_for(check.file_len), 1),
            outside: Vec::new(),
            zero,
            unknown: false,
        };
        writable.add_header(&check.metadata.header);
        let snapshots = &check.metadata.snapshots;
        let start = check.metadata.header.snapshots_offset;
        writable.add(start, snapshots.bytes);
        for block in stored.blocks() {
            writable.add(block, geometry.cluster_size());
        }
        let l1_tables = snapshots.snapshots.iter().map(|snapshot| {
            let bytes = u64::from(snapshot.l1_size) * 8;
            (snapshot.l1_offset, bytes)
        });
        let inside = |(offset, bytes)| check.reader.inside(offset, bytes);
        // Tables that overlap may be many and each as long as the file.
        writable.unknown = l1_tables.clone().map(inside).sum::<u64>() > check.file_len;
        if !writable.unknown {
            l1_tables.for_each(|(offset, bytes)| writable.add(offset, bytes));
        }
        writable
    }

    fn add_header(&mut self, header: &Header) {
        self.add(0, header.cluster_size());
        self.add(header.l1_offset, u64::from(header.l1_size) * 8);
        let table = u64::from(header.refcount_table_clusters) << self.geometry.cluster_bits();
        self.add(header.refcount_table_offset, table);
        if let Some(crypto) = header.extensions.crypto() {
            self.add(crypto.offset, crypto.length);
        }
        if let Some(bitmaps) = header.extensions.bitmaps() {
            self.add(bitmaps.directory_offset, bitmaps.directory_size);
        }
    }

    /// Notes a region that ends after the end of the file: should the file
    /// grow, what is written there must not be what the image refers to.
    pub(in super::super) fn add_outside(&mut self, offset: u64, length: u64) {
        let bits = self.geometry.cluster_bits();
        let first = offset >> bits;
        let end = ((offset.saturating_add(length) - 1) >> bits) + 1;
        // A file that was cut off lacks clusters in order.
        match self.outside.last_mut() {
            Some(last) if last.0 <= first && first <= last.1 => last.1 = last.1.max(end),
            _ => self.outside.push((first, end)),
        }
    }

    /// What is not free, though nothing in the file is known to refer to it:
    /// all that a repair must not overwrite.
    pub(super) fn reserved(self, stored: &StoredRefcounts) -> Vec<(u64, u64)> {
        let bits = self.geometry.cluster_bits();
        let mut reserved = self.outside;
        // Blocks that are not counted, because their entry is damaged, are
        // what the image goes by until the header names others.
        reserved.extend(stored.blocks().map(|at| (at >> bits, (at >> bits) + 1)));
        reserved
    }

    /// Marks what of a structure lies in the file.
    fn add(&mut self, offset: u64, length: u64) {
        let bits = self.geometry.cluster_bits();
        let end = offset.saturating_add(length).div_ceil(1 << bits);
        for cluster in offset >> bits..end.min(self.uses.len()) {
            self.uses.set(cluster, (self.uses.get(cluster) + 1).min(2));
        }
    }

    fn uses(&self, offset: u64) -> Option<u8> {
        let cluster = offset >> self.geometry.cluster_bits();
        (!self.unknown && cluster < self.uses.len()).then(|| self.uses.get(cluster))
    }

    /// Whether the L2 table at `offset` is nothing else, too.
    pub(in super::super) fn may_change_l2(&self, offset: u64) -> bool {
        self.geometry.offset_in_cluster(offset) == 0 && self.uses(offset) == Some(0)
    }

    /// Whether its entries may be zeroed.
    pub(in super::super) fn may_zero(&self, offset: u64) -> bool {
        self.zero && self.may_change_l2(offset)
    }

    /// Whether the entry of the active L1 table at `offset` is nothing else.
    pub(in super::super) fn may_flag_l1(&self, offset: u64) -> bool {
        self.uses(offset) == Some(1)
    }

    /// Writes the entries that are to be zeroed.
    pub(in super::super) async fn write_zeroed(&mut self) -> Result<()> {
        for (offset, desc) in self.zeroed.drain(..) {
            self.writer.write(offset, &desc.to_be_bytes()).await?;
        }
        Ok(())
    }
}
