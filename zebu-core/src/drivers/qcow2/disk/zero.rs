//! Zeroes and discards.

use super::Disk;
use crate::Result;
use crate::drivers::qcow2::writer::Announced;
use crate::drivers::qcow2::{Extent, Mapping};
use crate::storage;

/// Bytes of zeroes that are written as data at a time.
const PIECE: u64 = storage::ZEROES as u64;

impl Disk<'_> {
    /// Makes a range read as zeroes.
    pub(crate) async fn zero(&self, offset: u64, length: u64, unmap: bool) -> Result<()> {
        let image = self.image;
        let unit = image.geometry().subcluster_size();
        let end = offset + length;
        // A range that ends with the disk may as well end with the cluster.
        let whole_end = match end == self.size {
            true => end.next_multiple_of(unit),
            false => end & !(unit - 1),
        };
        let whole = offset.next_multiple_of(unit)..whole_end;
        if whole.start >= end {
            return self.zero_part(offset, end).await;
        }
        if offset < whole.start {
            self.zero_part(offset, whole.start).await?;
        }
        if whole.start < whole.end {
            self.zero_whole(whole.start, whole.end, unmap).await?;
        }
        if whole.end < end {
            self.zero_part(whole.end, end).await?;
        }
        Ok(())
    }

    /// Zeroes a part of one subcluster. If all of the subcluster reads as zeroes,
    /// it becomes a zero subcluster, which does not depend on the backing file.
    async fn zero_part(&self, start: u64, end: u64) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let unit = image.geometry().subcluster_size();
        let whole = start & !(unit - 1);
        let announced = image.announce(queue, start..end).await?;
        if !image.header().is_data_file_raw() {
            let change = announced.change(queue, whole, unit).await?;
            let to = (whole + unit).min(self.size);
            if self.reads_as_zero(whole..to).await?
                && change.zero(queue, whole, unit, false).await? == unit
            {
                return Ok(());
            }
        }
        self.write_zero_data(announced, start, end).await
    }

    /// Zeroes whole subclusters.
    async fn zero_whole(&self, start: u64, end: u64, unmap: bool) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let cluster_size = image.geometry().cluster_size();
        let announced = image.announce(queue, start..end).await?;
        if image.header().is_data_file_raw() {
            return self.zero_raw_data(start, end, unmap).await;
        }
        let mut at = start;
        while at < end {
            // A slice at a time: other requests need not wait for the whole range.
            let mut length = (end - at).min(image.to_slice_end(at));
            let done = {
                let change = announced.change(queue, at, length).await?;
                change.zero(queue, at, length, unmap).await?
            };
            if done < length {
                // This cluster cannot be marked as zero. In version 2 none can: all are written
                // together, so that they follow each other in the file too.
                let cluster = (at + done) & !(cluster_size - 1);
                let to = match image.geometry().version() {
                    2 if self.has_backing() => at + length,
                    _ => end.min(cluster + cluster_size),
                };
                self.write_zero_data(announced, at + done, to).await?;
                length = to - at;
            }
            at += length;
        }
        Ok(())
    }

    /// Zeroes a range of a raw external data file. The mapping stays: what it calls data is zero in
    /// the file now, and the rest was zero before. So file and disk are equal at every instant,
    /// also for concurrent writes.
    async fn zero_raw_data(&self, start: u64, end: u64, unmap: bool) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let data = &**image.data();
        let inside = data.len()?.min(end).saturating_sub(start);
        if inside > 0 {
            match unmap {
                true => storage::punch_hole(data, queue, start, inside).await?,
                false => storage::zero_range(data, queue, start, inside).await?,
            }
        }
        Ok(())
    }

    /// Writes zeroes as data, except where the range reads as zeroes already and
    /// cannot read as anything else with another backing file.
    async fn write_zero_data(&self, announced: Announced<'_>, start: u64, end: u64) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let end = end.min(self.size);
        let may_stay = match image.geometry().version() {
            2 => !self.has_backing(),
            // Otherwise `zero_part` has set zero flags wherever it could.
            _ => image.header().is_data_file_raw(),
        };
        let mut at = start;
        while at < end {
            let length = PIECE.min(end - at);
            let is_zero = may_stay && {
                // A concurrent write that fills a cluster may make older data visible that are on
                // their way to the same host cluster.
                let _change = announced.change(queue, at, length).await?;
                self.reads_as_zero(at..at + length).await?
            };
            if !is_zero {
                let piece = storage::zeroes(length as usize);
                self.write(at, &piece).await?;
            }
            at += length;
        }
        Ok(())
    }

    /// Frees the whole clusters inside a range.
    pub(crate) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let cluster_size = image.geometry().cluster_size();
        let has_backing = self.has_backing();
        if image.geometry().version() < 3 && has_backing {
            // Version 2 cannot hide the data of the backing file.
            return Ok(());
        }
        let end = match offset + length == self.size {
            true => self.size.next_multiple_of(cluster_size),
            false => (offset + length) & !(cluster_size - 1),
        };
        let announced = image.announce(queue, offset..offset + length).await?;
        let mut at = offset.next_multiple_of(cluster_size);
        if image.header().is_data_file_raw() {
            return match at < end {
                true => self.zero_raw_data(at, end, true).await,
                false => Ok(()),
            };
        }
        while at < end {
            let extent = {
                let _stay = image.enter();
                image.extent(queue, at, end - at).await?
            };
            if !has_backing && is_plain(&extent) {
                // Nothing to drop, perhaps not even a table.
                at += extent.length;
                continue;
            }
            let length = (end - at).min(image.to_slice_end(at));
            let change = announced.change(queue, at, length).await?;
            if image.geometry().has_data_file() {
                let data = &**image.data();
                let inside = data.len()?.saturating_sub(at).min(length);
                if inside > 0 {
                    storage::punch_hole(data, queue, at, inside).await?;
                }
            }
            change.drop_clusters(queue, at, length, has_backing).await?;
            at += length;
        }
        Ok(())
    }
}

/// Whether an extent is unallocated and has no preallocated space.
fn is_plain(extent: &Extent) -> bool {
    matches!(extent.mapping, Mapping::Unallocated { host: None })
}
