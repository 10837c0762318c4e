//! Writing bitmaps.
//!
//! While a bitmap is marked as in use nothing relies on what the disk has of it. So its bits and its
//! table go to new clusters, and the directory is changed in place:
//! 1. bits and table are written, durably, and so are their refcounts;
//! 2. the entry refers to the new table. Should the machine stop between its offset and its size, the
//!    size is that of the smaller table, so the entry does not reach past the end of either;
//! 3. the flag `in_use` is cleared, with which the size becomes valid;
//! 4. the old clusters are freed.

use std::sync::atomic::Ordering;

use super::{Bitmaps, Directory};
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::Bits;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::Writer;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::structures::{BITMAP_IN_USE, BitmapCluster, BitmapTableEntry};
use crate::storage::{self, Queue};

/// Bytes of bits that are written at once.
const PIECE: u64 = 1 << 20;

/// A bitmap in new clusters.
struct New {
    /// In the directory.
    index: usize,
    table_offset: u64,
    table_size: u32,
    clusters: Vec<Freed>,
}

/// New clusters of bitmaps, to which nothing refers. They are freed on drop, and bits that were
/// taken for stored are changed again.
struct Storing<'a> {
    writer: &'a Writer,
    bitmaps: &'a Bitmaps,
    places: Vec<Freed>,
    new: Vec<New>,
    /// Some of the bitmaps whose bits were looked at.
    taken: Vec<usize>,
}

impl Storing<'_> {
    /// The table size of a bitmap as it will be.
    fn size(&self, directory: &Directory, index: usize) -> u32 {
        let new = self.new.iter().find(|new| new.index == index);
        new.map_or(directory.entries[index].table_size, |new| new.table_size)
    }
}

impl Drop for Storing<'_> {
    fn drop(&mut self) {
        for place in self.places.drain(..) {
            self.writer.free_at_commit(place);
        }
        for index in self.taken.drain(..) {
            if let Some(loaded) = self.bitmaps.loaded(index) {
                loaded.bits.stored(false);
            }
        }
    }
}

impl Image {
    /// Stores all bitmaps in memory and marks them as consistent, durably. The next change of the
    /// disk announces itself anew, and marks the enabled ones as in use. The caller has passed the
    /// gate of metadata, or is alone.
    ///
    /// # Errors
    ///
    /// If anything cannot be written. The bitmaps stay in memory and are marked as in use.
    pub(in crate::drivers::qcow2) async fn store_bitmaps(&self, queue: &Queue) -> Result<()> {
        let writer = self.writer()?;
        let Some(bitmaps) = writer.bitmaps.get().filter(|bitmaps| bitmaps.is_open()) else {
            return Ok(());
        };
        // First: a request that finds it set has set its bits, so the store below sees them.
        if !is_broken(Rule::AnnouncedAnew) {
            writer.announced.store(false, Ordering::SeqCst);
        }
        let mut directory = bitmaps.directory().clone();
        let entries = directory.entries.iter().enumerate();
        let open: Vec<usize> = entries
            .filter(|(index, entry)| entry.in_use() && bitmaps.loaded(*index).is_some())
            .map(|(index, _)| index)
            .collect();
        let mut storing = Storing {
            writer,
            bitmaps,
            places: Vec::new(),
            new: Vec::new(),
            taken: Vec::new(),
        };
        for index in &open {
            let Some(loaded) = bitmaps.loaded(*index).filter(|l| l.bits.is_changed()) else {
                continue;
            };
            loaded.bits.stored(true);
            storing.taken.push(*index);
            let first = storing.places.len();
            let (table_offset, table_size) = self
                .write_bits(queue, &loaded.bits, &mut storing.places)
                .await?;
            storing.new.push(New {
                index: *index,
                table_offset,
                table_size,
                clusters: storing.places[first..].to_vec(),
            });
        }
        if !storing.new.is_empty() {
            if !is_broken(Rule::BitsBeforeFlag) {
                self.commit(queue, true).await?;
            }
            // After an error it is not known which table the disk refers to: neither is freed.
            storing.places.clear();
            let smaller = |new: &&New| new.table_size < directory.entries[new.index].table_size;
            let shrinking: Vec<usize> = storing
                .new
                .iter()
                .filter(smaller)
                .map(|n| n.index)
                .collect();
            self.write_size_and_flags(queue, &directory, &shrinking, |index, entry| {
                (storing.size(&directory, index), entry.flags)
            })
            .await?;
            let offsets = storing.new.iter().map(|new| (new.index, new.table_offset));
            self.write_table_offsets(queue, &directory, &offsets.collect::<Vec<_>>())
                .await?;
        }
        self.write_size_and_flags(queue, &directory, &open, |index, entry| {
            (
                storing.size(&directory, index),
                entry.flags & !BITMAP_IN_USE,
            )
        })
        .await?;
        if is_broken(Rule::AnnouncedAnew) {
            writer.announced.store(false, Ordering::SeqCst);
        }
        storing.taken.clear();
        let mut old = Vec::new();
        for new in std::mem::take(&mut storing.new) {
            let entry = &mut directory.entries[new.index];
            (entry.table_offset, entry.table_size) = (new.table_offset, new.table_size);
            if let Some(loaded) = bitmaps.loaded(new.index) {
                let mut clusters = crate::lock(&loaded.clusters);
                old.extend(std::mem::replace(&mut *clusters, new.clusters));
            }
        }
        for index in open {
            directory.entries[index].flags &= !BITMAP_IN_USE;
        }
        *bitmaps.directory() = directory;
        for place in old {
            writer.free_at_commit(place.punched());
        }
        Ok(())
    }

    /// Writes bits and their table to new clusters, to which nothing refers yet: offset and entries
    /// of the table. All clusters are added to `places`, also after an error.
    pub(super) async fn write_bits(
        &self,
        queue: &Queue,
        bits: &Bits,
        places: &mut Vec<Freed>,
    ) -> Result<(u64, u32)> {
        let size = self.geometry.cluster_size();
        let per_cluster = size * 8;
        let mut table = Vec::new();
        let mut stored = Vec::new();
        let mut first = 0;
        while first < bits.len() {
            let length = per_cluster.min(bits.len() - first);
            table.push(match bits.run(first, length) {
                (false, count) if count == length => BitmapTableEntry::ZEROS,
                (true, count) if count == per_cluster => BitmapTableEntry::ONES,
                _ => {
                    stored.push(table.len());
                    BitmapTableEntry::ZEROS
                }
            });
            first += length;
        }
        let mut rest = &stored[..];
        while !rest.is_empty() {
            let want = (rest.len() as u64).min((PIECE / size).max(1));
            let allocation = self.allocate(queue, want).await?;
            let (host, count) = (allocation.host(), allocation.clusters());
            places.push(self.reference(host.0, count * size, false));
            allocation.keep();
            let (now, later) = rest.split_at(count as usize);
            rest = later;
            let mut bytes = vec![0; (count * size) as usize];
            let clusters = bytes.chunks_exact_mut(size as usize);
            for ((nth, index), cluster) in (0..).zip(now).zip(clusters) {
                bits.encode(*index as u64 * per_cluster, cluster);
                let host = crate::offset::HostOffset(host.0 + nth * size);
                table[*index] = BitmapTableEntry::stored(host, &self.geometry)?;
            }
            storage::write_slice(&*self.file, queue, host.0, &bytes).await?;
        }
        let mut bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let clusters = self.geometry.clusters_for(bytes.len() as u64);
        let host = self.allocate_contiguous(queue, clusters).await?;
        places.push(self.reference(host.0, clusters * size, false));
        bytes.resize((clusters * size) as usize, 0);
        storage::write_slice(&*self.file, queue, host.0, &bytes).await?;
        Ok((host.0, table.len() as u32))
    }

    /// The clusters of a table and of the bits that it refers to.
    pub(super) fn bitmap_clusters(
        &self,
        table_offset: u64,
        table: &[BitmapTableEntry],
    ) -> Vec<Freed> {
        let mut places = vec![self.reference(table_offset, table.len() as u64 * 8, false)];
        for entry in table {
            let Ok(BitmapCluster::Stored { host }) = entry.kind(&self.geometry) else {
                continue;
            };
            let place = self.reference(host.0, self.geometry.cluster_size(), false);
            match places.last_mut() {
                Some(last) if last.first + last.count == place.first => last.count += place.count,
                _ => places.push(place),
            }
        }
        places
    }
}
