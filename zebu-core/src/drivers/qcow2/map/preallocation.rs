//! Whether clusters may be allocated in the metadata that the file has no
//! data for.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::Result;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::{RefcountBlock, RefcountTableEntry};
use crate::storage::{self, Queue};

/// What is known already.
#[derive(Debug, Default)]
pub(crate) struct Known(AtomicU8);

impl Image {
    /// As [`Image::is_preallocated`] if that is known.
    pub(in crate::drivers::qcow2) fn known_preallocation(&self) -> Option<bool> {
        match self.preallocated.0.load(Ordering::Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Whether clearly more clusters are in use by the metadata than the file system has blocks
    /// for, so that holes of the file matter. QEMU's rule: a tenth more, and at least two clusters.
    pub(crate) async fn is_preallocated(&self, queue: &Queue) -> Result<bool> {
        if let Some(known) = self.known_preallocation() {
            return Ok(known);
        }
        let found = self.find_preallocation(queue).await?;
        self.preallocated
            .0
            .store(1 + found as u8, Ordering::Relaxed);
        Ok(found)
    }

    async fn find_preallocation(&self, queue: &Queue) -> Result<bool> {
        let cluster_size = self.geometry.cluster_size();
        let clusters = self.file.len()?.div_ceil(cluster_size);
        // Unknown length: preallocation was not requested.
        let Ok(real) = self.file.allocated() else {
            return Ok(false);
        };
        let real = real / cluster_size;
        let enough = (real * 10 / 9).max(real + 2);
        if clusters < enough {
            return Ok(false);
        }
        let in_block = self.geometry.refcount_block_entries() as u64;
        let mut used = 0;
        let in_table = u64::from(self.header.refcount_table_clusters) * (cluster_size / 8);
        for index in 0..clusters.div_ceil(in_block).min(in_table) {
            let Some(block) = self.refcount_block(queue, index).await? else {
                continue;
            };
            let view = RefcountBlock::new(&block, &self.geometry);
            let count = (clusters - index * in_block).min(in_block) as usize;
            used += (0..count)
                .filter(|i| view.get(*i).is_some_and(|n| n > 0))
                .count() as u64;
            if used >= enough {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The bytes of refcount block `index`, which is in the table, if it is there and
    /// inside the file.
    async fn refcount_block(&self, queue: &Queue, index: u64) -> Result<Option<Vec<u8>>> {
        let cluster_size = self.geometry.cluster_size();
        let at = self.header.refcount_table_offset + index * 8;
        let entry = storage::read_vec(&*self.file, queue, at, 8).await?;
        let entry = RefcountTableEntry::from_be_bytes(entry.try_into().unwrap_or_default());
        let Ok(Some(offset)) = entry.block(&self.geometry) else {
            return Ok(None);
        };
        if offset.0 >= self.file_len() {
            return Ok(None);
        }
        let block = storage::read_vec(&*self.file, queue, offset.0, cluster_size as usize).await?;
        Ok(Some(block))
    }
}
