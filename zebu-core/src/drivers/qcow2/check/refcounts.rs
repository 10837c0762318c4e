//! The refcounts that the image stores, and how they compare with the
//! references that were counted.

use super::cells::Cells;
use super::{Check, CheckMessage, Metadata, Reader, Use, Writable};
use crate::Result;
use crate::drivers::qcow2::structures::{
    COPIED, Geometry, MAX_REFCOUNT_TABLE_BYTES, OFFSET_MASK, RefcountBlock,
};

/// Bits of a refcount table entry that are the block's offset.
const BLOCK_MASK: u64 = !0x1ff;
/// Clusters without a known refcount that are reported one by one.
const UNKNOWN_REPORTED: u64 = 65536;

/// What the image stores.
pub(super) struct StoredRefcounts {
    geometry: Geometry,
    /// The refcount table.
    table: Vec<u64>,
    /// Clusters of the file whose refcount is exactly one.
    ones: Cells,
}

/// Which differences are repaired as they are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fix {
    /// Refcounts above the references.
    pub(super) leaks: bool,
    /// Refcounts below them.
    pub(super) errors: bool,
}

impl Fix {
    pub(super) const NOTHING: Fix = Fix {
        leaks: false,
        errors: false,
    };
    pub(super) const LEAKS: Fix = Fix {
        leaks: true,
        errors: false,
    };
    pub(super) const ALL: Fix = Fix {
        leaks: true,
        errors: true,
    };
}

/// Where a refcount block is, according to the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    /// Nowhere: all its refcounts are 0.
    None,
    At(u64),
    /// Where none can be.
    Unaligned(u64),
}

impl StoredRefcounts {
    /// Reads the table and the blocks, and keeps what copied flags are compared with.
    pub(super) async fn load(reader: &Reader, metadata: &Metadata) -> Result<Self> {
        let geometry = metadata.geometry;
        let header = &metadata.header;
        let bytes = u64::from(header.refcount_table_clusters) << geometry.cluster_bits();
        let bytes = bytes.min(MAX_REFCOUNT_TABLE_BYTES);
        let mut table = Vec::new();
        let mut numbers = reader.numbers(header.refcount_table_offset, bytes / 8);
        loop {
            let piece = numbers.next().await?;
            if piece.is_empty() {
                break;
            }
            table.extend(piece);
        }
        // What lies after the end of the file is 0.
        table.resize((bytes / 8) as usize, 0);
        let clusters = geometry.clusters_for(metadata.file.len()?);
        let mut stored = StoredRefcounts {
            geometry,
            table,
            ones: Cells::new(clusters, 0),
        };
        stored.load_ones(reader).await?;
        Ok(stored)
    }

    async fn load_ones(&mut self, reader: &Reader) -> Result<()> {
        let clusters = self.ones.len();
        let per_block = self.geometry.refcount_block_entries() as u64;
        let places: Vec<(u64, u64)> = (0..clusters.div_ceil(per_block))
            .filter_map(|index| match self.block(index) {
                Block::At(offset) => Some((index, offset)),
                _ => None,
            })
            .collect();
        let offsets = places.iter().map(|place| place.1);
        let mut blocks = reader.ahead(offsets, self.geometry.cluster_size() as usize);
        for (index, _) in &places {
            let Some(bytes) = blocks.next().await? else {
                break;
            };
            let first = index * per_block;
            let mut eight = 0;
            // A block has at least 64 entries.
            for_each_refcount(bytes, &self.geometry, |entry, refcount| {
                eight |= u8::from(refcount == 1) << (entry & 7);
                if entry & 7 == 7 {
                    self.ones.set_eight(first + entry - 7, eight);
                    eight = 0;
                }
            });
        }
        Ok(())
    }

    /// The offsets of the refcount blocks, without invalid ones.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> {
        let places = (0..self.table.len() as u64).map(|index| self.block(index));
        places.filter_map(|block| match block {
            Block::At(offset) => Some(offset),
            _ => None,
        })
    }

    /// The refcount block for a cluster, if it has one.
    pub(super) fn block_of(&self, cluster: u64) -> Option<u64> {
        match self.block(cluster >> self.geometry.refcount_block_bits()) {
            Block::At(offset) => Some(offset),
            _ => None,
        }
    }

    fn block(&self, index: u64) -> Block {
        let entry = usize::try_from(index).ok().and_then(|i| self.table.get(i));
        let offset = entry.copied().unwrap_or(0) & BLOCK_MASK;
        if offset == 0 {
            Block::None
        } else if self.geometry.offset_in_cluster(offset) != 0 {
            Block::Unaligned(offset)
        } else {
            Block::At(offset)
        }
    }

    /// Whether the copied flag of an L1 entry agrees with the refcount of the L2 table; no I/O.
    pub(super) fn agrees(&self, entry: u64) -> bool {
        let offset = entry & OFFSET_MASK;
        let one = self.ones.get(offset >> self.geometry.cluster_bits()) != 0;
        offset == 0 || one == (entry & COPIED != 0)
    }

    /// The same for L2 entries with `count` host clusters in a row.
    pub(super) fn agrees_run(&self, entry: u64, count: u64) -> bool {
        let first = (entry & OFFSET_MASK) >> self.geometry.cluster_bits();
        self.ones.all(first, count, entry & COPIED != 0)
    }

    /// The same for one L2 entry with a host cluster.
    #[inline]
    pub(super) fn agrees_data(&self, entry: u64) -> bool {
        let host = entry & OFFSET_MASK;
        let one = self.geometry.has_data_file()
            || self.ones.get(host >> self.geometry.cluster_bits()) != 0;
        one == (entry & COPIED != 0)
    }

    /// For refcounts of single clusters.
    pub(super) fn lookup(&self, reader: &Reader) -> Lookup<'_> {
        Lookup {
            stored: self,
            reader: reader.clone(),
            block: None,
        }
    }
}

/// Refcounts of single clusters; the last block is kept.
pub(super) struct Lookup<'a> {
    stored: &'a StoredRefcounts,
    reader: Reader,
    block: Option<(u64, Vec<u8>)>,
}

impl Lookup<'_> {
    /// The refcount of a cluster; `None` if it cannot be known.
    pub(super) async fn get(&mut self, cluster: u64) -> Result<Option<u64>> {
        let geometry = &self.stored.geometry;
        let per_block = geometry.refcount_block_bits();
        let offset = match self.stored.block(cluster >> per_block) {
            Block::None => return Ok(Some(0)),
            Block::Unaligned(_) => return Ok(None),
            Block::At(offset) => offset,
        };
        if self.block.as_ref().is_none_or(|(at, _)| *at != offset) {
            let bytes = self.reader.read(offset, geometry.cluster_size()).await?;
            self.block = Some((offset, bytes));
        }
        let index = (cluster & ((1 << per_block) - 1)) as usize;
        let bytes = self.block.as_ref().map_or(&[][..], |(_, bytes)| bytes);
        // What lies after the end of the file is 0.
        Ok(Some(
            RefcountBlock::new(bytes, geometry).get(index).unwrap_or(0),
        ))
    }
}

/// Calls `each` with the index and value of every refcount of a block.
#[inline]
fn for_each_refcount(bytes: &[u8], geometry: &Geometry, mut each: impl FnMut(u64, u64)) {
    if geometry.refcount_order() == 4 {
        for (index, value) in (0..).zip(bytes.as_chunks::<2>().0) {
            each(index, u64::from(u16::from_be_bytes(*value)));
        }
        return;
    }
    let block = RefcountBlock::new(bytes, geometry);
    for index in 0..block.entries() {
        each(index as u64, block.get(index).unwrap_or(0));
    }
}

impl Check<'_> {
    /// Counts the refcount blocks themselves.
    pub(super) fn count_refcount_blocks(&mut self, stored: &StoredRefcounts) {
        let geometry = self.metadata.geometry;
        let clusters = geometry.clusters_for(self.file_len);
        for (index, entry) in stored.table.iter().copied().enumerate() {
            let offset = entry & BLOCK_MASK;
            let cluster = offset >> geometry.cluster_bits();
            if entry & !BLOCK_MASK != 0 {
                self.corrupt(CheckMessage::RefcountTableReserved { index }, 1);
                self.rebuild = true;
            } else if geometry.offset_in_cluster(offset) != 0 {
                self.corrupt(CheckMessage::RefcountBlockUnaligned { index }, 1);
                self.rebuild = true;
            } else if cluster >= clusters {
                self.corrupt(CheckMessage::RefcountBlockOutside { index }, 1);
                self.rebuild = true;
            } else if offset != 0 {
                // Not decided by the sum, which is too low if it does not fit a refcount.
                self.rebuild |= self.counts.get(cluster) != 0;
                self.count(Use::RefcountBlock, offset, geometry.cluster_size(), 1);
                self.rebuild |= !self.check_whole(Use::RefcountBlock, offset);
                let references = self.counts.get(cluster);
                if references != 1 {
                    let message = CheckMessage::RefcountBlockShared { index, references };
                    self.corrupt(message, 1);
                }
            }
        }
    }

    /// Compares the stored refcounts with the counted references, and corrects them as `fix` says.
    /// A repair of leaks also zeroes the refcounts of clusters past the end of the file; like
    /// QEMU, it does not report them.
    ///
    /// A repair lowers refcounts here: the caller has made the removal of references durable.
    pub(super) async fn compare(&mut self, stored: &StoredRefcounts, fix: Fix) -> Result<()> {
        let geometry = self.metadata.geometry;
        let mut end = geometry.clusters_for(self.file_len);
        if self.counts.get(end) != 0 {
            end += 1;
        }
        let per_block = geometry.refcount_block_entries() as u64;
        // Where something refers to clusters past the end, the file may have been cut off.
        let clear =
            fix.leaks && (self.writable.as_ref()).is_some_and(Writable::has_nothing_outside);
        let indices = match clear {
            true => 0..stored.table.len() as u64,
            false => 0..end.div_ceil(per_block),
        };
        let offsets: Vec<u64> = indices
            .clone()
            .filter_map(|index| match stored.block(index) {
                Block::At(offset) => Some(offset),
                _ => None,
            })
            .collect();
        let mut blocks = self
            .reader
            .ahead(offsets.into_iter(), geometry.cluster_size() as usize);
        let mut highest = 0;
        for index in indices {
            let first = index * per_block;
            let count = per_block.min(end.saturating_sub(first));
            match stored.block(index) {
                Block::None => {
                    for cluster in first..first + count {
                        // There is no block to write to.
                        self.compare_one(cluster, 0, Fix::NOTHING, &mut highest);
                    }
                }
                Block::Unaligned(offset) => self.unknown(index, offset, first, count),
                Block::At(offset) => {
                    let Some(bytes) = blocks.next().await? else {
                        break;
                    };
                    let mut repaired = Repaired::new(bytes, &geometry);
                    self.compare_block(&mut repaired, first, count, fix, &mut highest);
                    if clear {
                        repaired.clear_from(count);
                    }
                    if let (Some(bytes), Some(writable)) = (repaired.bytes, &self.writable) {
                        writable.writer.write(offset, &bytes).await?;
                    }
                }
            }
        }
        self.report.image_end_offset = (highest + 1) << geometry.cluster_bits();
        Ok(())
    }

    /// Compares `count` clusters from `first` on with their refcount block.
    fn compare_block(
        &mut self,
        repaired: &mut Repaired<'_>,
        first: u64,
        count: u64,
        fix: Fix,
        highest: &mut u64,
    ) {
        let geometry = self.metadata.geometry;
        let block = repaired.block;
        if geometry.refcount_order() != 4 {
            for_each_refcount(block, &geometry, |entry, refcount| {
                if entry < count
                    && let Some(new) = self.compare_one(first + entry, refcount, fix, highest)
                {
                    repaired.set(entry, new);
                }
            });
            return;
        }
        let (mut stored, _) = block.as_chunks::<2>();
        stored = &stored[..stored.len().min(count as usize)];
        let mut cluster = first;
        while let [refcount, ..] = stored {
            let (same, used) = self.counts.same_run(cluster, stored);
            if used != 0 {
                *highest = cluster + used as u64 - 1;
            }
            let mut done = same;
            if same == 0 {
                let refcount = u64::from(u16::from_be_bytes(*refcount));
                if let Some(new) = self.compare_one(cluster, refcount, fix, highest) {
                    repaired.set(cluster - first, new);
                }
                done = 1;
            }
            stored = &stored[done..];
            cluster += done as u64;
        }
    }

    /// Compares one cluster. Returns its new refcount if it is to be changed.
    #[inline]
    fn compare_one(
        &mut self,
        cluster: u64,
        refcount: u64,
        fix: Fix,
        highest: &mut u64,
    ) -> Option<u64> {
        let references = self.counts.get(cluster);
        if refcount == references {
            if refcount != 0 {
                *highest = cluster;
            }
            return None;
        }
        *highest = cluster;
        self.differs(cluster, refcount, references, fix)
    }

    fn differs(&mut self, cluster: u64, refcount: u64, references: u64, fix: Fix) -> Option<u64> {
        // A lost block reads as 0, and a cluster in use may have been allocated again.
        self.rebuild |= refcount == 0;
        let is_low = refcount < references;
        let message = match is_low {
            true => CheckMessage::TooLow {
                cluster,
                refcount,
                references,
            },
            false => CheckMessage::Leaked {
                cluster,
                refcount,
                references,
            },
        };
        let report = &mut self.report;
        let (fixed, found) = match is_low {
            true => (&mut report.corruptions_fixed, &mut report.corruptions),
            false => (&mut report.leaks_fixed, &mut report.leaks),
        };
        if (is_low && fix.errors) || (!is_low && fix.leaks) {
            *fixed += 1;
            (self.emit)(CheckMessage::Repairing(Box::new(message)));
            return Some(references);
        }
        *found += 1;
        (self.emit)(message);
        None
    }

    /// Reports `count` clusters whose refcount block has an invalid offset.
    fn unknown(&mut self, index: u64, offset: u64, first: u64, count: u64) {
        if self.report.check_errors == 0 {
            (self.emit)(CheckMessage::RefblockCorrupt { offset, index });
        }
        for cluster in first..first + count {
            if self.report.check_errors < UNKNOWN_REPORTED {
                (self.emit)(CheckMessage::NoRefcount { cluster });
            }
            self.report.check_errors += 1;
        }
    }
}

/// A copy of a refcount block, made when the first refcount is changed.
struct Repaired<'a> {
    block: &'a [u8],
    geometry: &'a Geometry,
    bytes: Option<Vec<u8>>,
}

impl<'a> Repaired<'a> {
    fn new(block: &'a [u8], geometry: &'a Geometry) -> Self {
        Repaired {
            block,
            geometry,
            bytes: None,
        }
    }

    fn set(&mut self, entry: u64, refcount: u64) {
        let bytes = self.bytes.get_or_insert_with(|| self.block.to_vec());
        // The entry is in the block, and counts end where refcounts do.
        let _ = RefcountBlock::new(&mut bytes[..], self.geometry).set(entry as usize, refcount);
    }

    /// Zeroes the refcounts from entry `first` on.
    fn clear_from(&mut self, first: u64) {
        let block = self.block;
        for_each_refcount(block, self.geometry, |entry, refcount| {
            if entry >= first && refcount != 0 {
                self.set(entry, 0);
            }
        });
    }
}
