//! What happens on a flush: the order in which blocks, the header's count and the map reach the disk.
//!
//! 1. The changed sectors of the map are copied: the blocks that they lead to are written.
//! 2. The header gets the count of blocks, those of the copy among them.
//! 3. The file is made durable: blocks and count.
//! 4. The copied sectors are written, and made durable.
//!
//! So no map on the disk leads to a block that is not there, and the count is never below a place
//! that the map has: QEMU would give that place to another block. A power cut between 3 and 4 leaves
//! a count that is too high, which costs the space of these blocks, and which a check of QEMU calls a
//! mismatch (QEMU itself leaves that, too). The next session sets it right.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::dirty::PIECE;
use super::write::Writer;
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::{BoxFuture, Commits, Committed};
use crate::storage::{self, Queue};

/// Where the count of blocks is in the header.
const COUNT_AT: u64 = 0x184;

impl Committed for Writer {
    fn commits(&self) -> &Commits {
        &self.commits
    }

    fn commit<'a>(&'a self, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let file = &*self.image.file;
            if self.is_settled() {
                return self.commits.flush_file(queue, file).await;
            }
            let dirty = crate::lock(&self.dirty).pieces.clone();
            let runs = self.copy(&dirty);
            let late = is_broken(Rule::CountBeforeMap);
            if !late {
                self.write_count(queue).await?;
            }
            if !is_broken(Rule::BlocksBeforeMap) {
                self.commits.flush_file(queue, file).await?;
            }
            for (at, bytes) in runs {
                storage::write_slice(file, queue, at, &bytes).await?;
            }
            self.commits.flush_file(queue, file).await?;
            if late {
                self.write_count(queue).await?;
            }
            crate::lock(&self.dirty).clean(&dirty);
            Ok(())
        })
    }
}

impl Writer {
    /// Whether map and count are on the disk as they are in memory.
    pub(super) fn is_settled(&self) -> bool {
        let count = self.image.count.load(Ordering::SeqCst);
        crate::lock(&self.dirty).is_empty() && count == self.used_end.load(Ordering::SeqCst)
    }

    /// Writes the count of blocks, if the header has another one.
    async fn write_count(&self, queue: &Queue) -> Result<()> {
        // Of the blocks that the copied map leads to, or more.
        let count = self.used_end.load(Ordering::SeqCst);
        if count != self.image.count.load(Ordering::SeqCst) {
            let bytes = count.to_le_bytes();
            storage::write_slice(&*self.image.file, queue, COUNT_AT, &bytes).await?;
            self.image.count.store(count, Ordering::SeqCst);
        }
        Ok(())
    }

    /// The bytes of sectors of the map, and where they go: neighbours together.
    fn copy(&self, dirty: &BTreeMap<u64, u64>) -> Vec<(u64, Vec<u8>)> {
        let map = &self.image.map;
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for piece in dirty.keys() {
            let first = piece * PIECE;
            let end = (first + PIECE).min(map.len() as u64);
            let entries = &map[first as usize..end as usize];
            let bytes = entries
                .iter()
                .flat_map(|entry| entry.load(Ordering::Acquire).to_le_bytes());
            let at = self.image.header.map_offset + first * 4;
            match runs.last_mut() {
                Some((start, run)) if *start + run.len() as u64 == at => run.extend(bytes),
                _ => runs.push((at, bytes.collect())),
            }
        }
        runs
    }
}
