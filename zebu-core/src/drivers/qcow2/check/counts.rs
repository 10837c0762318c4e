//! The number of references to each cluster of the file.

use std::collections::HashMap;

use super::cells::Cells;
use crate::drivers::qcow2::structures::Geometry;
use crate::{Error, Result};

/// Reference counts for all clusters of the file. A counter is as wide as a refcount of the image,
/// but at most eight bits; higher counts are in a map.
pub(super) struct Counts {
    cells: Cells,
    /// Counts that do not fit into a cell. The cell has its highest value then.
    large: HashMap<u64, u64>,
    /// The highest refcount that the image can store.
    max: u64,
    file_len: u64,
    cluster_size: u64,
    /// Clusters that must not be allocated although they have no references: first and end of
    /// each run, in order, without overlaps.
    avoid: Vec<(u64, u64)>,
    /// The first cluster past the end of the file that something refers to.
    lost: u64,
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
            avoid: Vec::new(),
            lost: u64::MAX,
        }
    }

    /// Whether a region begins after the end of the file, or ends a cluster or more after it. The
    /// last cluster need not be complete.
    pub(super) fn is_outside(&self, offset: u64, length: u64) -> bool {
        let end = offset.checked_add(length);
        offset >= self.file_len || end.is_none_or(|end| end >= self.file_len + self.cluster_size)
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

    /// Adds references to neighbouring clusters, up to the first whose count may not fit into its
    /// cell ([`Counts::add`] does that). Returns the number of clusters.
    pub(super) fn add_run(&mut self, first: u64, count: u64, times: u64) -> u64 {
        let limit = u64::from(u8::MAX).saturating_sub(times) as u8;
        let Ok(times) = u8::try_from(times) else {
            return 0;
        };
        let cells = self.cells.bytes_mut(first).iter_mut();
        let mut added = 0;
        for cell in cells.take(count as usize) {
            if *cell >= limit {
                break;
            }
            *cell += times;
            added += 1;
        }
        added
    }

    /// The number of clusters from `first` on whose count equals the stored 16-bit refcount, and
    /// how many of them there are up to the last one in use. Large counts end the run.
    pub(super) fn same_run(&self, first: u64, stored: &[[u8; 2]]) -> (usize, usize) {
        let (mut same, mut used) = (0, 0);
        for (cell, stored) in self.cells.bytes(first).iter().zip(stored) {
            let stored = u16::from_be_bytes(*stored);
            if stored != u16::from(*cell) || *cell == u8::MAX {
                break;
            }
            same += 1;
            if stored != 0 {
                used = same;
            }
        }
        (same, used)
    }

    /// Adds references to a cluster. Returns how many of them the image cannot store.
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

/// Free clusters for the new structures of a repair.
impl Counts {
    /// The number of counters: the clusters of the file and one more, or up to the last cluster
    /// taken.
    pub(super) fn end(&self) -> u64 {
        self.cells.len()
    }

    /// Notes clusters that something refers to and that the file lacks: it must not grow over them.
    pub(super) fn lacks(&mut self, runs: &[(u64, u64)]) {
        let first = runs.iter().map(|(first, _)| *first).min();
        self.lost = self.lost.min(first.unwrap_or(u64::MAX));
    }

    /// Excludes runs of clusters from [`Counts::find_free`].
    pub(super) fn avoid(&mut self, mut runs: Vec<(u64, u64)>) {
        runs.append(&mut self.avoid);
        runs.sort_unstable();
        for (first, end) in runs {
            match self.avoid.last_mut() {
                Some(last) if first <= last.1 => last.1 = last.1.max(end),
                _ => self.avoid.push((first, end)),
            }
        }
    }

    /// The first run of `clusters` clusters without references at `from` or later, in the file or
    /// after its end.
    ///
    /// # Errors
    /// If the file would grow over clusters that something refers to: data that were cut off would
    /// read as zeroes.
    pub(super) fn find_free(&self, from: u64, clusters: u64) -> Result<u64> {
        let mut from = from;
        loop {
            let first = self.find_unused(from, clusters);
            let next = self.avoid.partition_point(|run| run.1 <= first);
            match self.avoid.get(next) {
                Some((start, end)) if *start < first + clusters => from = *end,
                _ if first + clusters > self.lost => {
                    let text = "The image is truncated: with the new refcounts of a repair the \
                                data that it lacks would read as zeroes";
                    return Err(Error::Refused(text.into()));
                }
                _ => return Ok(first),
            }
        }
    }

    fn find_unused(&self, from: u64, clusters: u64) -> u64 {
        let mut first = from;
        let mut at = from;
        while at < self.end() && at - first < clusters {
            if self.get(at) != 0 {
                first = at + 1;
            }
            at += 1;
        }
        first
    }

    /// Sets the count of some free clusters to one.
    pub(super) fn take(&mut self, first: u64, clusters: u64) {
        self.cells.grow(first + clusters);
        for cluster in first..first + clusters {
            self.cells.set(cluster, 1);
        }
    }

    /// Sets it back to zero.
    pub(super) fn release(&mut self, first: u64, clusters: u64) {
        for cluster in first..first + clusters {
            self.cells.set(cluster, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::qcow2::structures::Header;

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
    fn runs() {
        let mut counts = counts(4);
        assert_eq!(counts.add(4, 254), 0);
        assert_eq!(counts.add_run(1, 9, 1), 3);
        assert_eq!(counts.get(3), 1);
        assert_eq!(counts.get(4), 254);
        let stored = [[0, 0], [0, 1], [0, 1], [0, 1], [0, 254], [0, 0], [0, 1]];
        assert_eq!(counts.same_run(0, &stored), (6, 5));
        assert_eq!(counts.add_run(1, 1, 300), 0);
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
    fn free_clusters_are_in_holes_or_after_the_end() {
        let mut counts = counts(4);
        for cluster in [0, 1, 3, 6] {
            counts.add(cluster, 1);
        }
        assert_eq!(counts.find_free(0, 1).unwrap(), 2);
        assert_eq!(counts.find_free(0, 2).unwrap(), 4);
        assert_eq!(counts.find_free(3, 1).unwrap(), 4);
        assert_eq!(counts.find_free(0, 100).unwrap(), 7);
        assert_eq!(counts.find_free(500, 1).unwrap(), 500);
        counts.take(7, 100);
        assert_eq!((counts.end(), counts.get(106)), (107, 1));
        assert_eq!(counts.find_free(5, 2).unwrap(), 107);
        counts.release(7, 100);
        assert_eq!(counts.get(106), 0);
        counts.avoid(vec![(20, 30), (4, 5)]);
        counts.avoid(vec![(25, 40), (60, 61)]);
        assert_eq!(counts.find_free(4, 1).unwrap(), 5);
        assert_eq!(counts.find_free(7, 13).unwrap(), 7);
        assert_eq!(counts.find_free(7, 14).unwrap(), 40);
        assert_eq!(counts.find_free(7, 21).unwrap(), 61);
    }

    #[test]
    fn regions_may_end_in_the_last_cluster() {
        let counts = counts(4);
        assert!(!counts.is_outside((10 << 16) - 1, 0xffff));
        assert!(counts.is_outside(10 << 16, 0x10000));
        assert!(counts.is_outside(u64::MAX, 2));
        assert!(counts.is_outside(10 << 16, 8));
    }
}
