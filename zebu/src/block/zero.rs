//! Zeroes and discards.

use super::device::Device;
use super::write::{Top, Zeroing};
use crate::Result;
use crate::drivers::qcow2::{Announced, Image};
use crate::storage::{self, Queue};

/// Bytes of zeroes that are written as data at a time.
const PIECE: u64 = storage::ZEROES as u64;

impl Device {
    /// Makes a range read as zeroes. They are written as data only where the format has no other
    /// way.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    pub async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        zeroing: Zeroing,
    ) -> Result<()> {
        let top = self.top_for_writing(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let unmap = zeroing == Zeroing::Unmap && self.discards();
        match top {
            Top::Raw(raw) => {
                let _pass = Box::pin(raw.zero_start(queue, offset, length)).await?;
                let (file, at) = (&**raw.storage(), raw.offset() + offset);
                match unmap {
                    true => storage::punch_hole(file, queue, at, length).await?,
                    false => storage::zero_range(file, queue, at, length).await?,
                }
                Ok(())
            }
            Top::Qcow2(image) => {
                let result = self.zero_image(queue, image, offset, length, unmap).await;
                self.changed(queue, image, result).await
            }
        }
    }

    async fn zero_image(
        &self,
        queue: &Queue,
        image: &Image,
        offset: u64,
        length: u64,
        unmap: bool,
    ) -> Result<()> {
        let unit = image.geometry().subcluster_size();
        let end = offset + length;
        // A range that ends with the disk may as well end with the cluster.
        let whole_end = match end == self.size() {
            true => end.next_multiple_of(unit),
            false => end & !(unit - 1),
        };
        let whole = offset.next_multiple_of(unit)..whole_end;
        if whole.start >= end {
            return self.zero_part(queue, image, offset, end).await;
        }
        if offset < whole.start {
            self.zero_part(queue, image, offset, whole.start).await?;
        }
        if whole.start < whole.end {
            self.zero_whole(queue, image, whole.start, whole.end, unmap)
                .await?;
        }
        if whole.end < end {
            self.zero_part(queue, image, whole.end, end).await?;
        }
        Ok(())
    }

    /// Zeroes a part of one subcluster. If all of the subcluster reads as zeroes,
    /// it becomes a zero subcluster, which does not depend on the backing file.
    async fn zero_part(&self, queue: &Queue, image: &Image, start: u64, end: u64) -> Result<()> {
        let unit = image.geometry().subcluster_size();
        let whole = start & !(unit - 1);
        let announced = image.announce(queue, start..end).await?;
        if !image.header().is_data_file_raw() {
            let change = announced.change(queue, whole, unit).await?;
            let to = (whole + unit).min(self.size());
            if self.reads_as_zero(queue, whole..to).await?
                && change.zero(queue, whole, unit, false).await? == unit
            {
                return Ok(());
            }
        }
        self.write_zero_data(queue, image, announced, start, end)
            .await
    }

    /// Zeroes whole subclusters.
    async fn zero_whole(
        &self,
        queue: &Queue,
        image: &Image,
        start: u64,
        end: u64,
        unmap: bool,
    ) -> Result<()> {
        let cluster_size = image.geometry().cluster_size();
        let announced = image.announce(queue, start..end).await?;
        if image.header().is_data_file_raw() {
            return self.zero_raw_data(queue, image, start, end, unmap).await;
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
                    2 if self.has_backing(image) => at + length,
                    _ => end.min(cluster + cluster_size),
                };
                self.write_zero_data(queue, image, announced, at + done, to)
                    .await?;
                length = to - at;
            }
            at += length;
        }
        Ok(())
    }

    /// Zeroes a range of a raw external data file. The mapping stays: what it calls data is zero in
    /// the file now, and the rest was zero before. So file and disk are equal at every instant,
    /// also for concurrent writes.
    async fn zero_raw_data(
        &self,
        queue: &Queue,
        image: &Image,
        start: u64,
        end: u64,
        unmap: bool,
    ) -> Result<()> {
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
    async fn write_zero_data(
        &self,
        queue: &Queue,
        image: &Image,
        announced: Announced<'_>,
        start: u64,
        end: u64,
    ) -> Result<()> {
        let end = end.min(self.size());
        let may_stay = match image.geometry().version() {
            2 => !self.has_backing(image),
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
                self.reads_as_zero(queue, at..at + length).await?
            };
            if !is_zero {
                let piece = storage::zeroes(length as usize);
                self.write_image(queue, image, at, &piece).await?;
            }
            at += length;
        }
        Ok(())
    }

    /// Whether the top image has a backing file, opened or not.
    pub(super) fn has_backing(&self, image: &Image) -> bool {
        self.layers().len() > 1 || image.header().backing_file().is_some()
    }

    /// Frees the whole clusters inside a range, whose content is not needed any more. They read as
    /// zeroes from now on (a raw image on a server: as the server defines it). The rest of the
    /// range stays. Does nothing unless the device was opened with
    /// [`OpenOptions::discard`](super::OpenOptions::discard).
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    pub async fn discard(&self, queue: &Queue, offset: u64, length: u64) -> Result<()> {
        let top = self.top_for_writing(offset, length)?;
        if length == 0 || !self.discards() {
            return Ok(());
        }
        match top {
            Top::Raw(raw) => {
                let _pass = Box::pin(raw.zero_start(queue, offset, length)).await?;
                let (file, at) = (&**raw.storage(), raw.offset() + offset);
                Ok(storage::discard(file, queue, at, length).await?)
            }
            Top::Qcow2(image) => {
                let result = self.discard_image(queue, image, offset, length).await;
                self.changed(queue, image, result).await
            }
        }
    }

    async fn discard_image(
        &self,
        queue: &Queue,
        image: &Image,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        let cluster_size = image.geometry().cluster_size();
        let has_backing = self.has_backing(image);
        if image.geometry().version() < 3 && has_backing {
            // Version 2 cannot hide the data of the backing file.
            return Ok(());
        }
        let end = match offset + length == self.size() {
            true => self.size().next_multiple_of(cluster_size),
            false => (offset + length) & !(cluster_size - 1),
        };
        let announced = image.announce(queue, offset..offset + length).await?;
        let mut at = offset.next_multiple_of(cluster_size);
        if image.header().is_data_file_raw() {
            return match at < end {
                true => self.zero_raw_data(queue, image, at, end, true).await,
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
fn is_plain(extent: &crate::drivers::qcow2::Extent) -> bool {
    matches!(
        extent.mapping,
        crate::drivers::qcow2::Mapping::Unallocated { host: None }
    )
}
