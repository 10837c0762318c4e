//! The places of all structures of a new image.
//!
//! Clusters are allocated in QEMU's order, so new images are equal byte for byte:
//!
//! - one cluster after the other;
//! - a refcount block directly behind the run that needs it, counting itself if it can;
//! - a full refcount table is replaced by one with half as many entries to spare, in an area of its
//!   own that begins at the first cluster of a block;
//! - preallocated data are allocated in one area.

use std::collections::BTreeMap;

use crate::drivers::qcow2::structures::{
    FormatError, Geometry, MAX_REFCOUNT_TABLE_BYTES, RefcountSpace,
};

/// The layout, in numbers of clusters. Clusters in `used` have refcount 1, all others 0.
#[derive(Debug)]
pub(super) struct Layout {
    /// First cluster of the L1 table; 0 if there is none.
    pub l1: u64,
    /// The L2 tables, in the order of the disk; empty without preallocation.
    pub l2: Vec<u64>,
    /// The first data cluster of each L2 table; empty with a data file.
    pub data: Vec<u64>,
    /// First cluster of the refcount table, and how many it has.
    pub table: u64,
    pub table_clusters: u64,
    /// The refcount blocks by index; 0 where there is none.
    pub blocks: Vec<u64>,
    /// Clusters in use: start and end of ranges that do not touch.
    pub used: BTreeMap<u64, u64>,
    /// The start of the area of preallocated data.
    pub area: Option<u64>,
    /// Where the search for free clusters starts.
    next: u64,
    per_block: u64,
    per_table_cluster: u64,
}

/// A refcount block was added during the search, which starts again.
struct Again;

impl Layout {
    /// Header, refcount table, the first refcount block and the L1 table.
    pub fn new(geometry: &Geometry) -> Result<Self, FormatError> {
        let mut layout = Layout {
            l1: 0,
            l2: Vec::new(),
            data: Vec::new(),
            table: 1,
            table_clusters: 1,
            blocks: vec![2],
            used: BTreeMap::from([(0, 3)]),
            area: None,
            next: 3,
            per_block: geometry.refcount_block_entries() as u64,
            per_table_cluster: geometry.cluster_size() / 8,
        };
        let l1_clusters = geometry.clusters_for(geometry.l1_entries() * 8);
        if l1_clusters > 0 {
            layout.l1 = layout.allocate(l1_clusters)?;
        }
        Ok(layout)
    }

    /// Adds an L2 table and its data for each part of the disk, in order.
    pub fn add_metadata(&mut self, geometry: &Geometry) -> Result<(), FormatError> {
        for clusters in data_of_tables(geometry) {
            let l2 = self.allocate(1)?;
            self.l2.push(l2);
            if !geometry.has_data_file() {
                let data = self.allocate(clusters)?;
                self.data.push(data);
            }
        }
        Ok(())
    }

    /// Adds refcount blocks for data and L2 tables, then all data in one area, then the tables.
    pub fn add_area(&mut self, geometry: &Geometry) -> Result<(), FormatError> {
        let clusters = geometry.guest_clusters();
        let start = self.end();
        let old = (self.table, self.table_clusters);
        let data = self.add_refcounts(start, clusters + geometry.l1_entries(), false)?;
        self.mark(data, clusters);
        self.area = Some(data);
        self.release(old);
        self.next = self.next.min(old.0);
        let mut first = data;
        for clusters in data_of_tables(geometry) {
            self.data.push(first);
            first += clusters;
            let l2 = self.allocate(1)?;
            self.l2.push(l2);
        }
        Ok(())
    }

    /// The end of the last cluster in use.
    pub fn end(&self) -> u64 {
        self.used.last_key_value().map_or(0, |(_, end)| *end)
    }

    /// Allocates `count` contiguous clusters.
    pub fn allocate(&mut self, count: u64) -> Result<u64, FormatError> {
        loop {
            let start = self.find(count);
            self.next = start + count;
            match self.claim(start, count)? {
                Ok(()) => return Ok(start),
                Err(Again) => self.next = self.next.min(start),
            }
        }
    }

    /// The first `count` free contiguous clusters.
    fn find(&self, count: u64) -> u64 {
        let mut at = self.next;
        if let Some((_, end)) = self.used.range(..=at).next_back() {
            at = at.max(*end);
        }
        for (start, end) in self.used.range(at..) {
            if start - at >= count {
                break;
            }
            at = *end;
        }
        at
    }

    /// Marks clusters as used, if all of them have a refcount block.
    fn claim(&mut self, start: u64, count: u64) -> Result<Result<(), Again>, FormatError> {
        for index in start / self.per_block..=(start + count - 1) / self.per_block {
            if self.block(index) == 0 {
                self.add_block(index, start.max(index * self.per_block))?;
                return Ok(Err(Again));
            }
        }
        self.mark(start, count);
        Ok(Ok(()))
    }

    fn block(&self, index: u64) -> u64 {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        self.blocks.get(index).copied().unwrap_or(0)
    }

    fn set_block(&mut self, index: u64, cluster: u64) {
        let index = index as usize; // Below the limit of the table.
        if self.blocks.len() <= index {
            self.blocks.resize(index + 1, 0);
        }
        self.blocks[index] = cluster;
    }

    /// Adds a refcount block for `cluster`, or for the cluster that the block would be in.
    fn add_block(&mut self, index: u64, cluster: u64) -> Result<(), FormatError> {
        let block = self.find(1);
        self.next = block + 1;
        if block / self.per_block == index {
            self.mark(block, 1);
        } else if let Err(Again) = self.claim(block, 1)? {
            self.next = block;
            return Ok(());
        }
        if index < self.table_clusters * self.per_table_cluster {
            self.set_block(index, block);
            return Ok(());
        }
        check_table_size(index, self.per_table_cluster)?;
        self.set_block(index, block);
        let old = (self.table, self.table_clusters);
        let start = (cluster + 1).max(block).div_ceil(self.per_block) * self.per_block;
        self.add_refcounts(start, 0, true)?;
        self.release(old);
        Ok(())
    }

    /// Adds a new refcount table at `start`, behind the blocks for itself and for `more` clusters
    /// after it. Returns where these begin.
    fn add_refcounts(&mut self, start: u64, more: u64, spare: bool) -> Result<u64, FormatError> {
        let table_of = |blocks: u64| {
            let entries = if spare { blocks + blocks / 2 } else { blocks };
            entries.div_ceil(self.per_table_cluster)
        };
        // As if the blocks for what precedes were new, too.
        let space = RefcountSpace::counting(start + more, self.per_block, table_of);
        let (blocks, table_clusters) = (space.blocks, space.table);
        check_table_size(
            (table_clusters * self.per_table_cluster).saturating_sub(1),
            self.per_table_cluster,
        )?;
        let mut at = start;
        for index in start / self.per_block..blocks {
            if self.block(index) == 0 {
                self.set_block(index, at);
                at += 1;
            }
        }
        self.table = at;
        self.table_clusters = table_clusters;
        at += table_clusters;
        self.mark(start, at - start);
        Ok(at)
    }

    fn mark(&mut self, start: u64, count: u64) {
        if count == 0 {
            return;
        }
        let (mut from, mut to) = (start, start + count);
        if let Some((before, end)) = self.used.range(..=start).next_back()
            && *end >= start
        {
            (from, to) = (*before, to.max(*end));
        }
        if let Some(end) = self.used.remove(&to) {
            to = end;
        }
        self.used.insert(from, to);
    }

    fn release(&mut self, (start, count): (u64, u64)) {
        let Some((from, to)) = self.used.range(..=start).next_back() else {
            return;
        };
        let (from, to) = (*from, *to);
        self.used.remove(&from);
        if from < start {
            self.used.insert(from, start);
        }
        if start + count < to {
            self.used.insert(start + count, to);
        }
    }
}

fn check_table_size(last_index: u64, per_cluster: u64) -> Result<(), FormatError> {
    let clusters = last_index / per_cluster + 1;
    if clusters * per_cluster * 8 > MAX_REFCOUNT_TABLE_BYTES {
        return Err(FormatError::TableTooLarge("Reference count table"));
    }
    Ok(())
}

/// Data clusters of each L2 table.
pub(super) fn data_of_tables(geometry: &Geometry) -> impl Iterator<Item = u64> + use<> {
    let per_table = geometry.l2_entries() as u64;
    let clusters = geometry.guest_clusters();
    (0..geometry.l1_entries()).map(move |i| (clusters - i * per_table).min(per_table))
}
