//! Rebuild of all refcounts: new blocks and a new table in free clusters, which are counted, too.
//! The old structures do not change until the header names the new ones, and are free afterwards.

use std::collections::BTreeMap;

use super::super::counts::Counts;
use super::Repair;
use crate::drivers::qcow2::structures::{Geometry, MAX_REFCOUNT_TABLE_BYTES, RefcountBlock};
use crate::{Error, Result};

/// The places of the new structures.
struct Plan {
    /// Clusters of the blocks, by their index in the table.
    blocks: BTreeMap<u64, u64>,
    /// First cluster of the table.
    table: u64,
    /// Clusters of the table.
    table_clusters: u64,
}

impl Repair<'_> {
    /// Writes the counts, with those of the new structures, as the refcounts of the image.
    pub(super) async fn rebuild(&mut self, counts: &mut Counts) -> Result<()> {
        let plan = Plan::new(&self.metadata.geometry, counts)?;
        self.write_blocks(&plan, counts).await?;
        self.write_table(&plan).await?;
        self.writer.barrier().await?;
        let offset = plan.table << self.metadata.geometry.cluster_bits();
        // At most 8 MiB.
        let clusters = plan.table_clusters as u32;
        self.switch_refcount_table(offset, clusters).await
    }

    async fn write_blocks(&self, plan: &Plan, counts: &Counts) -> Result<()> {
        let geometry = &self.metadata.geometry;
        let per_block = geometry.refcount_block_entries();
        for (index, cluster) in &plan.blocks {
            let mut bytes = vec![0; geometry.cluster_size() as usize];
            let mut block = RefcountBlock::new(&mut bytes[..], geometry);
            for (entry, cluster) in (0..per_block).zip(index * per_block as u64..) {
                let count = counts.get(cluster);
                if count != 0 {
                    block.set(entry, count)?;
                }
            }
            let offset = cluster << geometry.cluster_bits();
            self.writer.write(offset, &bytes).await?;
        }
        Ok(())
    }

    async fn write_table(&self, plan: &Plan) -> Result<()> {
        let geometry = &self.metadata.geometry;
        let mut bytes =
            crate::storage::zeroed((plan.table_clusters << geometry.cluster_bits()) as usize)?;
        let (entries, _) = bytes.as_chunks_mut::<8>();
        for (index, cluster) in &plan.blocks {
            if let Some(entry) = entries.get_mut(*index as usize) {
                *entry = (cluster << geometry.cluster_bits()).to_be_bytes();
            }
        }
        let offset = plan.table << geometry.cluster_bits();
        self.writer.write(offset, &bytes).await
    }
}

impl Plan {
    /// Finds free clusters, and counts them.
    fn new(geometry: &Geometry, counts: &mut Counts) -> Result<Plan> {
        let mut blocks = BTreeMap::new();
        place_blocks(&mut blocks, geometry, counts)?;
        let mut table_clusters = table_clusters(&blocks, geometry)?;
        loop {
            let table = counts.find_free(0, table_clusters)?;
            counts.take(table, table_clusters);
            // The table may lie where no block was needed before.
            place_blocks(&mut blocks, geometry, counts)?;
            let needed = self::table_clusters(&blocks, geometry)?;
            if needed <= table_clusters {
                return Ok(Plan {
                    blocks,
                    table,
                    table_clusters,
                });
            }
            counts.release(table, table_clusters);
            table_clusters = needed;
        }
    }
}

/// Finds a cluster for each block that is needed and has none. A block lies
/// after the start of what it counts, so that it needs none before it.
fn place_blocks(
    blocks: &mut BTreeMap<u64, u64>,
    geometry: &Geometry,
    counts: &mut Counts,
) -> Result<()> {
    let per_block = geometry.refcount_block_entries() as u64;
    let (mut index, mut free_from) = (0, 0);
    // Blocks after the end of the file move the end.
    while index * per_block < counts.end() {
        let first = index * per_block;
        let is_used = |cluster| counts.get(cluster) != 0;
        if !blocks.contains_key(&index) && (first..first + per_block).any(is_used) {
            // None is free between the start of the last search and its find.
            let cluster = counts.find_free(first.max(free_from), 1)?;
            counts.take(cluster, 1);
            free_from = cluster + 1;
            blocks.insert(index, cluster);
        }
        index += 1;
    }
    Ok(())
}

fn table_clusters(blocks: &BTreeMap<u64, u64>, geometry: &Geometry) -> Result<u64> {
    let entries = blocks.keys().next_back().map_or(0, |last| last + 1);
    if entries > MAX_REFCOUNT_TABLE_BYTES / 8 {
        let text = "The refcount table would be too large";
        return Err(Error::Refused(text.into()));
    }
    Ok(geometry.clusters_for(entries * 8))
}
