//! Whether clusters belong to one bitmap alone. They are freed when it is stored or removed, so damage
//! must not name those of something else.

use std::collections::BTreeSet;
use std::ops::Range;

use super::Directory;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::Writer;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::allocation::protect::BITMAP_DIRECTORY;
use crate::drivers::qcow2::structures::{BitmapCluster, BitmapEntry, FormatError, L2Entry};
use crate::storage::{Ahead, Queue};
use crate::{Error, Result};

/// A range of the file, in bytes, and the bitmap that has it.
type OwnedRange = (Range<u64>, usize);

impl Image {
    /// For each bitmap of a directory, whether its table is valid and its clusters are its own: they
    /// have one reference, are in no other bitmap, and no other structure in memory is there. Whether
    /// the disk maps one of them is not looked up: that takes all L2 tables.
    pub(super) async fn owned_bitmaps(
        &self,
        queue: &Queue,
        directory: &Directory,
    ) -> Result<Vec<bool>> {
        let table_bytes = |entry: &BitmapEntry| u64::from(entry.table_size) * 8;
        let bytes: u64 = directory.entries.iter().map(table_bytes).sum();
        if bytes > self.file.len()? {
            return Ok(vec![false; directory.entries.len()]);
        }
        let mut owned = Vec::new();
        let mut places: Vec<OwnedRange> = Vec::new();
        for (index, entry) in directory.entries.iter().enumerate() {
            let first = places.len();
            let found = match self.bitmap_places(queue, entry, index, &mut places).await {
                Err(Error::Format(_)) => false,
                found => found.map(|()| true)?,
            };
            let mut is_single = found;
            for (place, _) in &places[first..] {
                is_single = is_single && self.has_one_reference(queue, place).await?;
            }
            owned.push(is_single);
        }
        places.sort_unstable_by_key(|(place, _)| place.start);
        let mut last: OwnedRange = (0..0, 0);
        for (place, index) in places {
            if place.start < last.0.end {
                (owned[index], owned[last.1]) = (false, false);
            }
            if place.end > last.0.end {
                last = (place, index);
            }
        }
        Ok(owned)
    }

    /// Notes where the directory is, which is changed in place.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if its clusters are not its own, as [`Image::owned_bitmaps`] says.
    pub(super) async fn protect_bitmap_directory(
        &self,
        queue: &Queue,
        writer: &Writer,
        directory: &Directory,
    ) -> Result<()> {
        let Range { start, end } = directory.place();
        let clusters = start..end.next_multiple_of(self.geometry.cluster_size());
        // It may be noted already, by an attempt that failed later.
        writer.protected.set(BITMAP_DIRECTORY, 0..0);
        if !self.has_one_reference(queue, &clusters).await? {
            return Err(FormatError::BitmapDirectoryBroken("its clusters are not its own").into());
        }
        writer.protected.set(BITMAP_DIRECTORY, start..end);
        Ok(())
    }

    /// Whether the disk or a snapshot maps one of these clusters, which are distinct. All L2 tables
    /// are read, from the file: nothing is dirty.
    ///
    /// # Errors
    ///
    /// If a table of the mapping is damaged or cannot be read.
    pub(super) async fn is_mapped(&self, queue: &Queue, places: &[Freed]) -> Result<bool> {
        let mut places = places.to_vec();
        places.sort_unstable_by_key(|place| place.first);
        let is_one = |used: Freed| {
            let next = places.partition_point(|place| place.first + place.count <= used.first);
            let place = places.get(next);
            place.is_some_and(|place| place.first < used.first + used.count)
        };
        let mut tables: BTreeSet<u64> = self.snapshot_tables(queue).await?.into_keys().collect();
        for index in 0..self.l1.len() as u64 {
            let table = self.l1.get(index).without_reserved();
            tables.extend(table.l2_table(&self.geometry)?.map(|host| host.0));
        }
        let size = self.geometry.cluster_size();
        let mut ahead = Ahead::new(queue, &self.file, tables.iter().copied(), size as usize);
        for table in &tables {
            let bytes = ahead.next().await?.unwrap_or_default();
            let entries = (0..self.geometry.l2_entries()).filter_map(|index| {
                let entry = L2Entry::read(bytes, index, &self.geometry)?;
                self.referred(entry.without_reserved(&self.geometry), false)
            });
            if is_one(self.reference(*table, size, false)) || entries.into_iter().any(is_one) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Adds the clusters of a bitmap to `places`.
    async fn bitmap_places(
        &self,
        queue: &Queue,
        entry: &BitmapEntry,
        index: usize,
        places: &mut Vec<OwnedRange>,
    ) -> Result<()> {
        let table = self.read_bitmap_table(queue, entry).await?;
        let size = self.geometry.cluster_size();
        let end = entry.table_offset + table.len() as u64 * 8;
        places.push((entry.table_offset..end.next_multiple_of(size), index));
        for entry in &table {
            let BitmapCluster::Stored { host } = entry.kind(&self.geometry)? else {
                continue;
            };
            match places.last_mut() {
                Some((last, _)) if last.end == host.0 => last.end += size,
                _ => places.push((host.0..host.0 + size, index)),
            }
        }
        Ok(())
    }

    /// Whether every cluster of a range has one reference, and no structure in memory is there.
    async fn has_one_reference(&self, queue: &Queue, range: &Range<u64>) -> Result<bool> {
        let size = self.geometry.cluster_size();
        if range.end > self.file.len()?.next_multiple_of(size)
            || !self.writer()?.protected.may_be_free(range.clone())
        {
            return Ok(false);
        }
        let (mut at, end) = (range.start / size, range.end / size);
        while at < end {
            let (refcount, count) = self.refcounts_alike(queue, at, end - at).await?;
            if refcount != 1 {
                return Ok(false);
            }
            at += count;
        }
        Ok(true)
    }
}
