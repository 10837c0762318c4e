//! The uses of each cluster of the file. A repair writes only to tables with a single use, and
//! stops where it cannot be decided which of two uses is right.

use super::cells::Cells;
use crate::drivers::qcow2::structures::Geometry;

/// The use of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// The header.
    Header,
    /// An L1 table, of the disk or of a snapshot.
    L1Table,
    /// An L2 table.
    L2Table,
    /// Data of the guest, compressed or not.
    Data,
    /// The snapshot table.
    SnapshotTable,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// The encryption header.
    Encryption,
    /// Bitmaps, their tables or their directory.
    Bitmaps,
}

impl Use {
    const ALL: [Use; 9] = [
        Use::Header,
        Use::L1Table,
        Use::L2Table,
        Use::Data,
        Use::SnapshotTable,
        Use::RefcountTable,
        Use::RefcountBlock,
        Use::Encryption,
        Use::Bitmaps,
    ];

    /// Its name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Use::Header => "header",
            Use::L1Table => "L1 table",
            Use::L2Table => "L2 table",
            Use::Data => "data cluster",
            Use::SnapshotTable => "snapshot table",
            Use::RefcountTable => "refcount table",
            Use::RefcountBlock => "refcount block",
            Use::Encryption => "encryption header",
            Use::Bitmaps => "bitmap",
        }
    }

    /// Whether several references may lead to the same cluster.
    fn is_shared(self) -> bool {
        matches!(self, Use::L2Table | Use::Data | Use::Bitmaps)
    }

    /// Whether all other metadata depend on it, and nothing in the file is a copy of it.
    fn is_root(self) -> bool {
        matches!(self, Use::Header | Use::L1Table | Use::SnapshotTable)
    }

    /// Whether it can be rebuilt, in another place, from the other metadata.
    fn is_redundant(self) -> bool {
        matches!(self, Use::RefcountTable | Use::RefcountBlock)
    }

    /// Its rank: redundant structures have the lowest, roots the highest.
    fn importance(self) -> u8 {
        match () {
            () if self.is_root() => 2,
            () if self.is_redundant() => 0,
            () => 1,
        }
    }
}

/// A cluster with two uses of which one must be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Conflict {
    pub(super) offset: u64,
    pub(super) uses: [Use; 2],
}

/// The uses of the clusters of the file.
pub(super) struct Uses {
    cluster_bits: u32,
    /// 0: none; else the number of the most important use plus 1, with [`OTHERS`] if
    /// it is not the only one.
    cells: Cells,
    conflict: Option<Conflict>,
}

/// Set for a cluster with several uses.
const OTHERS: u8 = 0x80;

impl Uses {
    pub(super) fn new(geometry: &Geometry, file_len: u64) -> Self {
        Uses {
            cluster_bits: geometry.cluster_bits(),
            cells: Cells::new(geometry.clusters_for(file_len), 3),
            conflict: None,
        }
    }

    /// Notes a reference to the clusters from `first` to before `end`.
    pub(super) fn note(&mut self, what: Use, first: u64, end: u64) {
        let code = what as u8 + 1;
        for cluster in first..end.min(self.cells.len()) {
            let before = self.cells.get(cluster);
            if before == 0 {
                self.cells.set(cluster, code);
                continue;
            }
            if before == code && what.is_shared() {
                continue;
            }
            let other = Use::ALL[usize::from(before & !OTHERS) - 1];
            self.clash(cluster, what, other);
            let kept = match what.importance() > other.importance() {
                true => what,
                false => other,
            };
            self.cells.set(cluster, (kept as u8 + 1) | OTHERS);
        }
    }

    /// Adds the use `what` to a cluster whose highest use so far is `other`.
    fn clash(&mut self, cluster: u64, what: Use, other: Use) {
        let redundant = what.is_redundant() || other.is_redundant();
        if !redundant && (what.is_root() || other.is_root()) {
            self.conflict.get_or_insert(Conflict {
                offset: cluster << self.cluster_bits,
                uses: [other, what],
            });
        }
    }

    /// The first cluster with the header or a table that all other metadata depend on,
    /// and a second use: either of the two references may be damaged.
    pub(super) fn conflict(&self) -> Option<Conflict> {
        self.conflict
    }

    /// Whether `what` is the only use of the cluster at `offset`.
    pub(super) fn is_only(&self, what: Use, offset: u64) -> bool {
        self.cells.get(offset >> self.cluster_bits) == what as u8 + 1
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a repair that continues although a cluster with an essential table has another
    //! use, too.
    use super::*;

    fn conflict(uses: &[Use]) -> Option<[Use; 2]> {
        let mut noted = Uses {
            cluster_bits: 16,
            cells: Cells::new(8, 3),
            conflict: None,
        };
        uses.iter().for_each(|what| noted.note(*what, 3, 4));
        assert_eq!(noted.is_only(uses[0], 3 << 16), uses.len() == 1);
        noted.conflict().map(|conflict| conflict.uses)
    }

    #[test]
    fn a_root_stays_known_among_several_uses() {
        use Use::{Data, Header, L1Table, RefcountBlock};
        assert_eq!(conflict(&[L1Table]), None);
        assert_eq!(conflict(&[L1Table, RefcountBlock]), None);
        let found = Some([L1Table, Data]);
        assert_eq!(conflict(&[L1Table, RefcountBlock, Data]), found);
        assert_eq!(conflict(&[RefcountBlock, L1Table, Data]), found);
        let found = Some([Data, L1Table]);
        assert_eq!(conflict(&[RefcountBlock, Data, L1Table]), found);
        assert_eq!(conflict(&[Data, RefcountBlock, L1Table]), found);
        let found = Some([Header, Data]);
        assert_eq!(conflict(&[Header, Data, L1Table]), found);
        assert_eq!(conflict(&[Header, RefcountBlock, Data]), found);
        assert_eq!(conflict(&[Header, RefcountBlock]), None);
    }
}
