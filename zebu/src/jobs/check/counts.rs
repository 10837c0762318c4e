//! The references to each cluster of the file, as they are counted.

use std::collections::HashMap;

use super::cells::Cells;
use crate::format::Geometry;

/// Reference counts for every cluster of the file: as many bits as the image
/// has for one, at most eight, and the few counts above that in a map.
pub(super) struct Counts {
    cells: Cells,
    /// Counts that the cells cannot hold, which are at their largest then.
    large: HashMap<u64, u64>,
    /// What the image can store for a cluster.
    max: u64,
    file_len: u64,
    cluster_size: u64,
}

impl Counts {
    pub(super) fn new(geometry: &Geometry, file_len: u64) -> Self {
        // A region may end up to a cluster after the end of the file.
        let clusters = geometry.clusters_for(file_len) + 1;
        Counts {
            cells: Cells::new(clusters, geometry.refcount_order().min(3)),
            large: HashMap::new(),
            max: geometry.refcount_max(),
            file_len,
            cluster_size: geometry.cluster_size(),
        }
    }

    /// Whether a region ends a cluster or more after the end of the file:
    /// less is a last cluster that was not written to its end.
    pub(super) fn is_outside(&self, offset: u64, length: u64) -> bool {
        offset
            .checked_add(length)
            .is_none_or(|end| end >= self.file_len + self.cluster_size)
    }

    /// References to a cluster.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        let small = self.cells.get(cluster);
        if small == self.cells.max()
            && let Some(count) = self.large.get(&cluster)
        {
            return *count;
        }
        u64::from(small)
    }

    /// Adds references to a cluster; says how many of them the image has no
    /// way to store.
    pub(super) fn add(&mut self, cluster: u64, times: u64) -> u64 {
        let small = self.cells.get(cluster);
        let sum = u64::from(small).saturating_add(times);
        if sum < u64::from(self.cells.max()) {
            self.cells.set(cluster, sum as u8);
            return 0;
        }
        let wanted = self.get(cluster).saturating_add(times);
        let count = wanted.min(self.max);
        self.cells
            .set(cluster, count.min(u64::from(self.cells.max())) as u8);
        if count > u64::from(self.cells.max()) {
            self.large.insert(cluster, count);
        }
        wanted - count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Header;

    fn counts(order: u32) -> Counts {
        let mut header = Header::new(16, 1 << 30);
        header.refcount_order = order;
        Counts::new(&Geometry::new(&header).unwrap(), 10 << 16)
    }

    #[test]
    fn counts_above_a_byte() {
        let mut counts = counts(4);
        for n in 1..=1000 {
            assert_eq!(counts.add(3, 1), 0);
            assert_eq!(counts.get(3), n);
        }
        assert_eq!(counts.add(3, 70_000), 71_000 - 65_535);
        assert_eq!(counts.get(3), 65_535);
        assert_eq!(counts.get(2), 0);
        assert_eq!(counts.get(4), 0);
    }

    #[test]
    fn narrow_counts_overflow() {
        let mut counts = counts(0);
        assert_eq!(counts.add(1, 1), 0);
        assert_eq!(counts.add(1, 1), 1);
        assert_eq!(counts.get(1), 1);
        assert_eq!(counts.get(0), 0);
        assert_eq!(counts.add(0, 3), 2);
    }

    #[test]
    fn regions_may_end_in_the_last_cluster() {
        let counts = counts(4);
        assert!(!counts.is_outside(10 << 16, 0xffff));
        assert!(counts.is_outside(10 << 16, 0x10000));
        assert!(counts.is_outside(u64::MAX, 2));
    }
}
