//! The refcounts of a qcow2 file: which clusters are free, and which a snapshot holds, too.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use zebu::Result;
use zebu::internal::structures::{Geometry, RefcountBlock, RefcountTableEntry};
use zebu::qcow2::Image;
use zebu::storage::{self, Queue, Storage};

use super::{Clusters, FileMap};

/// Bytes of refcount blocks that are kept.
const MOST_KEPT: usize = 64 << 20;
/// Blocks that are read at most to count all clusters; of a longer file only a part is counted.
const MOST_COUNTED: u64 = 4096;
/// Bytes of the refcount table at most, as when an image is opened.
const MOST_TABLE: u64 = 8 << 20;

pub struct Refcounts {
    queue: Queue,
    file: Arc<dyn Storage>,
    geometry: Geometry,
    has_snapshots: bool,
    /// Offsets of the blocks; 0: all of its refcounts are 0.
    table: Vec<u64>,
    /// Blocks that were read, by index.
    blocks: HashMap<u64, Vec<u8>>,
}

impl Refcounts {
    pub async fn load(queue: &Queue, image: &Image) -> Result<Self> {
        let (header, geometry) = (image.header(), *image.geometry());
        let length = u64::from(header.refcount_table_clusters) << geometry.cluster_bits();
        let offset = header.refcount_table_offset;
        let bytes = read(queue, &**image.file(), offset, length.min(MOST_TABLE)).await?;
        let entries = bytes.as_chunks::<8>().0.iter();
        let block = |bytes: &[u8; 8]| {
            let entry = RefcountTableEntry::from_be_bytes(*bytes);
            // What is damaged is left to a check.
            let block = entry.block(&geometry).ok().flatten();
            block.map_or(0, |offset| offset.0)
        };
        Ok(Refcounts {
            queue: queue.clone(),
            file: image.file().clone(),
            geometry,
            has_snapshots: !image.snapshots().is_empty(),
            table: entries.map(block).collect(),
            blocks: HashMap::new(),
        })
    }

    /// How many bytes of `host` are in clusters that are used more than once.
    pub async fn shared(&mut self, host: Range<u64>) -> Result<u64> {
        if !self.has_snapshots {
            return Ok(0);
        }
        let (bits, size) = (self.geometry.cluster_bits(), self.geometry.cluster_size());
        let per_block = self.geometry.refcount_block_entries() as u64;
        let (mut at, mut shared) = (host.start, 0);
        while at < host.end {
            let cluster = at >> bits;
            let geometry = self.geometry;
            let block = RefcountBlock::new(self.block(cluster / per_block).await?, &geometry);
            let next = ((cluster << bits) + size).min(host.end);
            if block.get((cluster % per_block) as usize) > Some(1) {
                shared += next - at;
            }
            at = next;
        }
        Ok(shared)
    }

    /// Counts the clusters of the file, and notes in `map` which are used.
    pub async fn count(&mut self, mut map: Option<&mut FileMap>) -> Result<Clusters> {
        let mut counted = Clusters::default();
        let geometry = self.geometry;
        let file_len = self.file.len()?;
        let clusters = geometry.clusters_for(file_len);
        let per_block = geometry.refcount_block_entries() as u64;
        let blocks = clusters.div_ceil(per_block);
        // One block stands for so many.
        let step = blocks.div_ceil(MOST_COUNTED).max(1);
        for first in (0..blocks).step_by(step as usize) {
            let block = RefcountBlock::new(self.block(first).await?, &geometry);
            let start = first * per_block;
            let end = clusters.min(start + per_block * step);
            let mut at = start;
            while at < end {
                let entry = ((at - start) / step) as usize;
                let is_used = block.get(entry) > Some(0);
                let next = match is_used {
                    true => block.next_free(entry),
                    false => block.next_used(entry),
                };
                let next = next.map_or(end, |next| start + next as u64 * step).min(end);
                let range = at << geometry.cluster_bits()..next << geometry.cluster_bits();
                let range = range.start..range.end.min(file_len);
                match is_used {
                    true => counted.used += range.end - range.start,
                    false => counted.free += range.end - range.start,
                }
                if is_used && let Some(map) = &mut map {
                    map.use_bytes(range);
                }
                at = next.max(at + 1);
            }
        }
        Ok(counted)
    }

    /// A block; empty if there is none.
    async fn block(&mut self, index: u64) -> Result<&[u8]> {
        let at = usize::try_from(index).ok();
        let offset = at.and_then(|at| self.table.get(at)).copied().unwrap_or(0);
        if offset == 0 {
            return Ok(&[]);
        }
        let size = self.geometry.cluster_size();
        if !self.blocks.contains_key(&index) {
            if (self.blocks.len() + 1) * size as usize > MOST_KEPT {
                self.blocks.clear();
            }
            let block = read(&self.queue, &*self.file, offset, size).await?;
            self.blocks.insert(index, block);
        }
        Ok(&self.blocks[&index])
    }
}

/// The part of a range that is in the file.
async fn read(queue: &Queue, file: &dyn Storage, offset: u64, length: u64) -> Result<Vec<u8>> {
    let length = length.min(file.len()?.saturating_sub(offset));
    Ok(storage::read_vec(file, queue, offset, length as usize).await?)
}
