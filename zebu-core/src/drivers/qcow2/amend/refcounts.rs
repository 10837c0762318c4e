//! Another width of refcounts.
//!
//! The new refcount blocks and their table are written behind everything else, in unused space.
//! Then the header points to them, in one write. So the image is consistent at every moment.

use std::collections::{BTreeSet, HashSet};

use super::header::write_header;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::structures::{
    Geometry, Header, MAX_REFCOUNT_TABLE_BYTES, RefcountBlock, RefcountSpace, RefcountTableEntry,
};
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// Gives the image in `file`, which nothing else uses, refcounts of `1 << order` bits. `header` is
/// the one in the file, before and after.
pub(super) async fn change_width(
    queue: &Queue,
    file: &dyn Storage,
    header: &mut Header,
    order: u32,
) -> Result<()> {
    if header.refcount_order == order {
        return Ok(());
    }
    let old = OldRefcounts::read(queue, file, header).await?;
    let mut new_header = header.clone();
    new_header.refcount_order = order;
    let geometry = Geometry::new(&new_header)?;
    let used = old.survey(&geometry).await?;
    let length = match file.is_device() {
        true => 0,
        false => file.len()?,
    };
    let start = geometry.clusters_for(length).max(used.end);
    let place = NewTables::new(&geometry, used.blocks, start)?;
    place.place(queue, file).await?;
    place.write(queue, file, old).await?;
    if !is_broken(Rule::WidthBeforeHeader) {
        storage::flush(file, queue).await?;
    }
    new_header.refcount_table_offset = place.at(place.table());
    new_header.refcount_table_clusters = place.table_clusters as u32; // At most 8 MiB.
    write_header(queue, file, header, &mut new_header).await?;
    *header = new_header;
    Ok(())
}

/// Refuses refcounts of `1 << order` bits if they are too narrow for the existing ones.
pub(super) async fn check_width(
    queue: &Queue,
    file: &dyn Storage,
    header: &Header,
    order: u32,
) -> Result<()> {
    if order >= header.refcount_order {
        return Ok(());
    }
    let mut new_header = header.clone();
    new_header.refcount_order = order;
    let refcounts = OldRefcounts::read(queue, file, header).await?;
    refcounts.survey(&Geometry::new(&new_header)?).await?;
    Ok(())
}

/// Where in the image in `file` the last cluster that is in use ends, in bytes.
pub(super) async fn used_end(queue: &Queue, file: &dyn Storage, header: &Header) -> Result<u64> {
    let refcounts = OldRefcounts::read(queue, file, header).await?;
    let used = refcounts.survey(&refcounts.geometry).await?;
    Ok(used.end << header.cluster_bits)
}

/// The existing refcounts, read in order.
struct OldRefcounts<'a> {
    queue: &'a Queue,
    file: &'a dyn Storage,
    geometry: Geometry,
    /// Where the blocks are; 0 where there is none.
    blocks: Vec<u64>,
    /// The clusters of the blocks and of the table, which become free.
    own: HashSet<u64>,
    /// Number and bytes of the block that was read last.
    last: (Option<u64>, Vec<u8>),
}

/// What is in use.
struct Used {
    /// Behind the last cluster.
    end: u64,
    /// Numbers of the new blocks that have something to count.
    blocks: BTreeSet<u64>,
}

impl<'a> OldRefcounts<'a> {
    async fn read(queue: &'a Queue, file: &'a dyn Storage, header: &Header) -> Result<Self> {
        let geometry = Geometry::new(header)?;
        let size = geometry.cluster_size();
        let clusters = u64::from(header.refcount_table_clusters);
        let start = header.refcount_table_offset;
        // At most 8 MiB.
        let table = storage::read_vec(file, queue, start, (clusters * size) as usize).await?;
        let length = file.len()?;
        let mut blocks = Vec::new();
        for (index, entry) in table.as_chunks::<8>().0.iter().enumerate() {
            let entry = RefcountTableEntry::from_be_bytes(*entry).without_reserved();
            let block = entry
                .block(&geometry)
                .map_err(|e| e.at("refcount table entry", index as u64))?;
            let block = block.map_or(0, |b| b.0);
            if block >= length {
                // Read as zeroes, it would free the clusters that it counts.
                return Err(Error::Refused(format!(
                    "Refcount block {index:#x} at {block:#x} is past the end of the file"
                )));
            }
            blocks.push(block);
        }
        let first = start / size;
        let own = (first..first + clusters)
            .chain(blocks.iter().filter(|b| **b != 0).map(|b| b / size))
            .collect();
        Ok(OldRefcounts {
            queue,
            file,
            geometry,
            blocks,
            own,
            last: (None, Vec::new()),
        })
    }

    fn per_block(&self) -> u64 {
        self.geometry.refcount_block_entries() as u64
    }

    /// Reads all refcounts: which clusters are in use, and whether each refcount fits the new
    /// width.
    async fn survey(&self, new: &Geometry) -> Result<Used> {
        let mut used = Used {
            end: 0,
            blocks: BTreeSet::new(),
        };
        let max = u64::MAX >> (64 - (1u32 << new.refcount_order()));
        let size = self.geometry.cluster_size();
        for (index, block) in (0..).zip(&self.blocks).filter(|(_, block)| **block != 0) {
            let bytes = storage::read_vec(self.file, self.queue, *block, size as usize).await?;
            let view = RefcountBlock::new(&bytes[..], &self.geometry);
            let mut next = view.next_used(0);
            while let Some(entry) = next {
                let cluster = index * self.per_block() + entry as u64;
                let refcount = view.get(entry).unwrap_or(0);
                if refcount > max {
                    return Err(Error::Refused(format!(
                        "Cannot decrease refcount entry width to {} bits: Cluster at offset \
                         {:#x} has a refcount of {refcount}",
                        1 << new.refcount_order(),
                        cluster * size
                    )));
                }
                used.end = cluster + 1;
                used.blocks
                    .insert(cluster / new.refcount_block_entries() as u64);
                next = view.next_used(entry + 1);
            }
        }
        Ok(used)
    }

    /// The clusters from `from` to `to` that are in use besides the refcounts
    /// themselves, with their refcounts. Called with rising ranges.
    async fn range(&mut self, from: u64, to: u64) -> Result<Vec<(u64, u64)>> {
        let mut found = Vec::new();
        let mut at = from;
        while at < to {
            let index = at / self.per_block();
            let end = to.min((index + 1) * self.per_block());
            if self.load(index).await? {
                let view = RefcountBlock::new(&self.last.1[..], &self.geometry);
                let first = index * self.per_block();
                let mut next = view.next_used((at - first) as usize);
                while let Some(entry) = next.filter(|entry| first + (*entry as u64) < end) {
                    let cluster = first + entry as u64;
                    let refcount = view.get(entry).unwrap_or(0);
                    let own = u64::from(self.own.contains(&cluster));
                    found.push((cluster, refcount.saturating_sub(own)));
                    next = view.next_used(entry + 1);
                }
            }
            at = end;
        }
        Ok(found)
    }

    /// Loads a block as the last one that was read; false if there is none.
    async fn load(&mut self, index: u64) -> Result<bool> {
        let place = usize::try_from(index).ok();
        let Some(offset) = place.and_then(|i| self.blocks.get(i)).filter(|b| **b != 0) else {
            return Ok(false);
        };
        if self.last.0 != Some(index) {
            let size = self.geometry.cluster_size() as usize;
            let bytes = storage::read_vec(self.file, self.queue, *offset, size).await?;
            self.last = (Some(index), bytes);
        }
        Ok(true)
    }
}

/// Where the new blocks and the new table go: one after the other.
struct NewTables<'a> {
    geometry: &'a Geometry,
    /// Numbers of the blocks.
    blocks: BTreeSet<u64>,
    /// First cluster.
    start: u64,
    table_clusters: u64,
}

impl<'a> NewTables<'a> {
    /// For blocks of these numbers and those that count the new ones.
    fn new(geometry: &'a Geometry, mut blocks: BTreeSet<u64>, start: u64) -> Result<Self> {
        let per_block = geometry.refcount_block_entries() as u64;
        // From this number on all are needed: nothing is in use from `start` on.
        let first = start / per_block;
        blocks.remove(&first);
        let others = start % per_block + blocks.len() as u64;
        let table = |more: u64| geometry.clusters_for((first + more) * 8);
        let space = RefcountSpace::counting(others, per_block, table);
        if space.table * geometry.cluster_size() > MAX_REFCOUNT_TABLE_BYTES {
            return Err(std::io::Error::from_raw_os_error(libc::EFBIG).into());
        }
        blocks.extend(first..first + space.blocks);
        Ok(NewTables {
            geometry,
            blocks,
            start,
            table_clusters: space.table,
        })
    }

    fn at(&self, cluster: u64) -> u64 {
        cluster << self.geometry.cluster_bits()
    }

    /// First cluster of the table.
    fn table(&self) -> u64 {
        self.start + self.blocks.len() as u64
    }

    fn end(&self) -> u64 {
        self.table() + self.table_clusters
    }

    async fn place(&self, queue: &Queue, file: &dyn Storage) -> Result<()> {
        let end = self.at(self.end());
        if file.is_device() && end > file.len()? {
            return Err(std::io::Error::from_raw_os_error(libc::ENOSPC).into());
        }
        if !file.is_device() {
            storage::set_len(file, queue, end).await?;
        }
        Ok(())
    }

    async fn write(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        mut old: OldRefcounts<'_>,
    ) -> Result<()> {
        let per_block = self.geometry.refcount_block_entries() as u64;
        let size = self.geometry.cluster_size() as usize;
        let mut table = vec![0; self.at(self.table_clusters) as usize]; // At most 8 MiB.
        for (index, cluster) in self.blocks.iter().copied().zip(self.start..) {
            let (first, last) = (index * per_block, (index + 1) * per_block);
            let mut block = RefcountBlock::new(vec![0; size], self.geometry);
            for (cluster, refcount) in old.range(first, last).await? {
                block.set((cluster - first) as usize, refcount)?;
            }
            for cluster in self.start.max(first)..self.end().min(last) {
                block.set((cluster - first) as usize, 1)?;
            }
            let at = self.at(cluster);
            storage::write_slice(file, queue, at, &block.into_inner()).await?;
            let entry = RefcountTableEntry::new(crate::offset::HostOffset(at), self.geometry)?;
            let place = index as usize * 8;
            table[place..place + 8].copy_from_slice(&entry.to_be_bytes());
        }
        storage::write_slice(file, queue, self.at(self.table()), &table).await?;
        Ok(())
    }
}
