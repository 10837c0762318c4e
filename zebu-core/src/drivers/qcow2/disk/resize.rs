//! Changes of the whole disk: another size, no content. Only for a caller that shares the image
//! with no task.

use super::Disk;
use crate::broken::{Rule, is_broken};
use crate::drivers::preallocate::preallocate;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::MAX_L1_BYTES;
use crate::drivers::{Context, Preallocation};
use crate::storage::{self, Iov, Queue};
use crate::{Error, Result};

/// Bytes of the disk that are preallocated at a time.
const STEP: u64 = 64 << 20;

impl Image {
    /// Gives the disk another size in bytes.
    pub(crate) async fn resize(
        &mut self,
        context: Context<'_>,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let old = self.size();
        if size < old && preallocation != Preallocation::Off {
            let text = "Preallocation can't be used for shrinking an image";
            return Err(Error::Refused(text.into()));
        }
        if !size.is_multiple_of(512) {
            return Err(Error::Refused(
                "The new size must be a multiple of 512".into(),
            ));
        }
        match size < old {
            true => self.shrink(context, size).await,
            false => self.grow(context, size, preallocation).await,
        }
    }

    /// The new size is durable first, so that no crash leaves the old size with its tail missing.
    /// Mappings behind the end cost space until they are dropped, at the latest by
    /// [`Image::grow`].
    async fn shrink(&mut self, context: Context<'_>, size: u64) -> Result<()> {
        let queue = context.queue;
        self.check_resize()?;
        // Damage that prevents dropping the tail is an error before anything changes.
        let kept = size.next_multiple_of(self.geometry().cluster_size());
        self.check_unmap(kept)?;
        self.announce(queue, 0..0).await?;
        self.store_sizes(queue).await?;
        self.finish_writing(queue).await?;
        if is_broken(Rule::SizeBeforeTail) {
            self.unmap_from(queue, kept).await?;
        }
        self.set_size(queue, size).await?;
        if let Err(error) = self.drop_tail(context).await {
            tracing::warn!("the space behind the new end of the disk is not freed: {error}");
        }
        Ok(())
    }

    /// Frees what is behind the end of the disk.
    async fn drop_tail(&mut self, context: Context<'_>) -> Result<()> {
        let queue = context.queue;
        let size = self.size();
        let kept = self.last_cluster_end();
        // QEMU does not zero the rest of the last cluster when it makes the disk
        // larger.
        let emptied = self.empty(context, size, kept).await;
        self.unmap_from(queue, kept).await?;
        if self.header().has_data_file() && !self.data().is_device() {
            self.shorten_data_file(queue, size).await?;
        }
        emptied
    }

    /// The new part is prepared behind the end of the disk, where no read reaches it. The size
    /// changes last.
    async fn grow(
        &mut self,
        context: Context<'_>,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let queue = context.queue;
        self.check_resize()?;
        let entries = self.geometry().l1_entries_for(size);
        if size > i64::MAX as u64 || entries * 8 > MAX_L1_BYTES {
            let error = Error::os(libc::EFBIG);
            return Err(error.during("Failed to grow the L1 table"));
        }
        // A raw data file is the disk. All of it is mapped, so that a crash that loses new mappings
        // does not hide its data.
        let preallocation = match preallocation {
            Preallocation::Off if self.header().is_data_file_raw() => Preallocation::Metadata,
            other => other,
        };
        self.announce(queue, 0..0).await?;
        self.store_sizes(queue).await?;
        let data_len = match self.header().has_data_file() {
            true => Some(self.data().len()?),
            false => None,
        };
        if self.data().is_device() && data_len.is_some_and(|length| length < size) {
            return Err(Error::Refused("Cannot grow device files".into()));
        }
        let adding = self.add_tail(context, size, data_len, preallocation);
        let mut result = adding.await;
        if result.is_ok() {
            result = self.set_size(queue, size).await;
        }
        if result.is_err() {
            // What cannot be freed costs space; the next growth frees it.
            let _ = self.drop_added(queue, data_len).await;
        }
        result
    }

    /// Everything of a larger size but the size itself, durably. `data_len` is
    /// the length of an external data file.
    async fn add_tail(
        &mut self,
        context: Context<'_>,
        size: u64,
        data_len: Option<u64>,
        preallocation: Preallocation,
    ) -> Result<()> {
        let queue = context.queue;
        let old = self.size();
        let size_below = context.below.map_or(0, |below| below.size());
        let kept = self.last_cluster_end();
        // VM state outside of snapshots is behind the end, and what an interrupted shrink left.
        self.unmap_from(queue, kept).await?;
        let entries = self.geometry().l1_entries_for(size);
        self.grow_l1(queue, entries).await?;
        let is_device = data_len.is_some() && self.data().is_device();
        if let Some(length) = data_len {
            let data = self.data().clone();
            // Where all is mapped the file ends with a cluster, as in QEMU.
            let end = match preallocation {
                Preallocation::Off => size,
                _ if is_device => size,
                _ => size.next_multiple_of(self.geometry().cluster_size()),
            };
            let stale = length.min(end).saturating_sub(old);
            if stale > 0 {
                storage::zero_range(&*data, queue, old, stale).await?;
            }
            if !is_device && length < end {
                storage::set_len(&*data, queue, end).await?;
            }
        }
        if preallocation == Preallocation::Off {
            // The content of a longer backing file must not appear there.
            let hidden = size_below.min(size);
            self.empty(context, old, kept).await?;
            self.empty(context, kept, hidden).await?;
        } else {
            let end = match is_device {
                true => kept.min(size),
                false => kept,
            };
            self.write_behind(context, old, end).await?;
            let zero = size_below > old
                && preallocation == Preallocation::Metadata
                && self.geometry().version() >= 3;
            self.preallocate_image(queue, kept, size, preallocation, zero)
                .await?;
        }
        self.finish_writing(queue).await
    }

    /// Frees what a larger size would have added.
    async fn drop_added(&mut self, queue: &Queue, data_len: Option<u64>) -> Result<()> {
        let kept = self.last_cluster_end();
        // Fails if the header write failed: either size may be on the disk.
        self.unmap_from(queue, kept).await?;
        match data_len {
            Some(length) if !self.data().is_device() => self.shorten_data_file(queue, length).await,
            _ => Ok(()),
        }
    }

    /// Where the last cluster of the disk ends.
    fn last_cluster_end(&self) -> u64 {
        self.size().next_multiple_of(self.geometry().cluster_size())
    }

    /// Makes a range behind the end of the disk read as zeroes: either a part of
    /// the last cluster, unless it does already, or whole clusters.
    async fn empty(&self, context: Context<'_>, start: u64, end: u64) -> Result<()> {
        let queue = context.queue;
        if start >= end {
            return Ok(());
        }
        let cluster_size = self.geometry().cluster_size();
        let whole = start.is_multiple_of(cluster_size);
        let end = match whole {
            true => end.next_multiple_of(cluster_size),
            false => end,
        };
        let disk = self.disk_to(end.next_multiple_of(cluster_size), context);
        if !whole && disk.reads_as_zero(start..end).await? {
            return Ok(());
        }
        let result = disk.zero(start, end - start, false).await;
        self.changed(queue, result).await
    }

    /// The disk with a range behind its end.
    fn disk_to<'a>(&'a self, end: u64, context: Context<'a>) -> Disk<'a> {
        let disk = self.disk(context);
        Disk {
            size: end.max(disk.size),
            ..disk
        }
    }

    /// Writes zeroes to a part of a cluster behind the end of the disk, so that
    /// it is allocated.
    async fn write_behind(&self, context: Context<'_>, start: u64, end: u64) -> Result<()> {
        let queue = context.queue;
        if start >= end {
            return Ok(());
        }
        let length = (end - start) as usize;
        let mut buffer = queue.buffer(length);
        buffer[..length].fill(0);
        // SAFETY: the buffer lives until the write, awaited here, has ended.
        #[allow(unsafe_code)]
        let zeroes = unsafe { buffer.iov() }.slice(0, length);
        self.disk_to(end, context).write(start, &zeroes).await
    }

    /// Allocates a range of whole clusters that are unallocated. With `zero` their entries have the
    /// zero flag, which QEMU sets over a longer backing file.
    async fn preallocate_image(
        &mut self,
        queue: &Queue,
        start: u64,
        end: u64,
        preallocation: Preallocation,
        zero: bool,
    ) -> Result<()> {
        // A device as data file may end with the disk.
        let file_end = match self.header().has_data_file() && self.data().is_device() {
            true => end,
            false => u64::MAX,
        };
        let end = end.next_multiple_of(self.geometry().cluster_size());
        let mut at = start;
        while at < end {
            self.write_back_if_needed(queue).await?;
            let length = STEP.min(end - at);
            let data = &**self.data();
            for (host, length) in self.map_ahead(queue, at, length, zero).await? {
                let length = length.min(file_end.saturating_sub(host));
                match self.header().is_encrypted() {
                    // What is only allocated does not read as zeroes.
                    true => storage::write_zeroes(data, queue, host, length).await?,
                    false => preallocate(data, queue, host, length, 0, preallocation).await?,
                }
            }
            at += length;
        }
        Ok(())
    }

    /// Drops the content of the image. With `unmap` the space of a raw data file may be freed.
    pub(crate) async fn make_empty(&mut self, context: Context<'_>, unmap: bool) -> Result<()> {
        let queue = context.queue;
        if self.header().is_data_file_raw() {
            // Such an image has no backing file, and its data file is the disk: what is empty is
            // zero.
            if self.size() > 0 {
                let disk = self.disk(context);
                let result = disk.zero(0, self.size(), unmap).await;
                self.changed(queue, result).await?;
            }
            return self.flush(queue).await;
        }
        storage::event(&**self.file(), storage::Event::EmptyImagePrepare);
        self.announce(queue, 0..u64::MAX).await?;
        self.unmap_from(queue, 0).await?;
        self.flush(queue).await
    }

    /// Makes the L1 table long enough for VM state up to guest offset `end`.
    pub(crate) async fn reach_vm_state(&mut self, queue: &Queue, end: u64) -> Result<()> {
        if self.geometry().has_data_file() {
            let text = "The VM state cannot be in an external data file";
            return Err(Error::Refused(text.into()));
        }
        let entries = self.geometry().l1_entries_for(end);
        if entries * 8 > MAX_L1_BYTES {
            return Err(Error::os(libc::EFBIG));
        }
        self.announce(queue, 0..0).await?;
        self.grow_l1(queue, entries).await
    }

    /// Writes to the VM state, from guest offset `offset` on.
    pub(crate) async fn write_vm_state(
        &self,
        context: Context<'_>,
        offset: u64,
        iov: &Iov,
    ) -> Result<()> {
        storage::event(&**self.file(), storage::Event::VmstateSave);
        let result = self.disk(context).write(offset, iov).await;
        self.changed(context.queue, result).await
    }
}
