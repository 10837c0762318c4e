//! The tables that a repair may write. A damaged image may name one cluster as an L2 table and as
//! data: a change of the table would destroy the data.

use super::super::RepairWriter;
use super::super::uses::{Use, Uses};
use crate::Result;
use crate::drivers::qcow2::structures::Geometry;

/// The tables that may be changed, and the writer.
pub(in super::super) struct Writable {
    pub(in super::super) writer: RepairWriter,
    /// Entries of the L2 table that was looked at last that are to be zeroed:
    /// where, and what they become.
    pub(in super::super) zeroed: Vec<(u64, u64)>,
    geometry: Geometry,
    /// The uses of the clusters before anything is written.
    uses: Uses,
    /// Clusters that are referred to and not in the file: first and end of
    /// each run.
    outside: Vec<(u64, u64)>,
    /// Whether entries may be zeroed.
    zero: bool,
}

impl Writable {
    pub(super) fn new(geometry: &Geometry, uses: Uses, writer: &RepairWriter, zero: bool) -> Self {
        Writable {
            writer: writer.clone(),
            zeroed: Vec::new(),
            geometry: *geometry,
            uses,
            outside: Vec::new(),
            zero,
        }
    }

    /// Records a region past the end of the file. If the file grows, it must not be allocated: the
    /// image has references to it.
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

    /// Clusters that the image has references to and that the file lacks: first and end of each run.
    pub(super) fn outside(&self) -> &[(u64, u64)] {
        &self.outside
    }

    /// Whether all references are to clusters of the file.
    pub(in super::super) fn has_nothing_outside(&self) -> bool {
        self.outside.is_empty()
    }

    /// Clusters that a repair must not allocate although they have no counted references. `blocks`
    /// are the offsets of the stored refcount blocks.
    pub(super) fn reserved(self, blocks: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
        let bits = self.geometry.cluster_bits();
        let mut reserved = self.outside;
        // Blocks that are not counted, because their entry is damaged, are
        // what the image goes by until the header names others.
        reserved.extend(blocks.map(|at| (at >> bits, (at >> bits) + 1)));
        reserved
    }

    /// Whether the L2 table at `offset` has no other use.
    pub(in super::super) fn may_change_l2(&self, offset: u64) -> bool {
        self.geometry.offset_in_cluster(offset) == 0 && self.uses.is_only(Use::L2Table, offset)
    }

    /// Whether its entries may be zeroed.
    pub(in super::super) fn may_zero(&self, offset: u64) -> bool {
        self.zero && self.may_change_l2(offset)
    }

    /// Whether the entry of the active L1 table at `offset` has no other use.
    pub(in super::super) fn may_flag_l1(&self, offset: u64) -> bool {
        self.uses.is_only(Use::L1Table, offset)
    }

    /// Writes the entries that are to be zeroed.
    pub(in super::super) async fn write_zeroed(&mut self) -> Result<()> {
        for (offset, desc) in self.zeroed.drain(..) {
            self.writer.write(offset, &desc.to_be_bytes()).await?;
        }
        Ok(())
    }
}
