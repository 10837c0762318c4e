//! Changes of a whole device: its size, or that its content is dropped.

use super::device::Device;
use super::write::{Top, Zeroing};
use crate::broken::{Rule, is_broken};
use crate::format::MAX_L1_BYTES;
use crate::storage::named::NamedFile;
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// Bytes of the disk that are preallocated at a time.
const STEP: u64 = 64 << 20;

/// What is allocated ahead of being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// The mapping: every guest cluster has a host cluster, without data.
    Metadata,
    /// The mapping, and the space on the device of the file.
    Falloc,
    /// The mapping and the space, filled with zeroes.
    Full,
}

impl Preallocation {
    /// The name that options use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
        }
    }

    /// The mode of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Off, Self::Metadata, Self::Falloc, Self::Full]
            .into_iter()
            .find(|mode| mode.name() == name)
    }
}

/// The local file at the bottom of a storage, if there is one.
fn named_file(storage: &dyn Storage) -> Option<&dyn NamedFile> {
    storage
        .named_file()
        .or_else(|| storage.below().and_then(named_file))
}

impl Device {
    /// Gives the disk another size in bytes, a multiple of 512. What is behind a smaller end is
    /// lost. What a larger size adds reads as zeroes, and is preallocated according to
    /// `preallocation`; with a raw data file it is always mapped. Durable on return; of a raw image
    /// with the next flush.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the image cannot have this size, or if this preallocation is not
    /// supported. Those of [`Device::write`]. The disk then has its old size, and the space of a
    /// larger one is freed. After an error that makes every further write fail, the header may have
    /// either size.
    pub async fn resize(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        self.whole(async |device| device.resize_exclusive(queue, size, preallocation).await)
            .await
    }

    async fn resize_exclusive(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let old = self.size();
        if size < old && preallocation != Preallocation::Off {
            let text = match self.top().as_raw() {
                Some(_) => "Cannot use preallocation for shrinking files",
                None => "Preallocation can't be used for shrinking an image",
            };
            return Err(Error::Refused(text.into()));
        }
        if self.top().as_raw().is_none() && !size.is_multiple_of(512) {
            return Err(Error::Refused(
                "The new size must be a multiple of 512".into(),
            ));
        }
        match self.top_for_writing(0, 0)? {
            Top::Raw(_) => self.resize_raw(queue, size, preallocation).await,
            Top::Qcow2(_) if size < old => self.shrink(queue, size).await,
            Top::Qcow2(_) => self.grow(queue, size, preallocation).await,
        }
    }

    async fn resize_raw(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let old = self.size();
        let image = self.layers_mut()[0].image.other_mut();
        let Some(raw) = image.and_then(|image| image.as_raw_mut()) else {
            return Ok(());
        };
        if raw.is_fixed() {
            return Err(Error::Refused("Cannot resize fixed-size raw disks".into()));
        }
        let file = raw.storage().clone();
        if file.is_device() {
            return match size > old {
                true => Err(Error::Refused("Cannot grow device files".into())),
                false => Ok(()),
            };
        }
        if preallocation == Preallocation::Metadata {
            return Err(Error::Refused(
                "Unsupported preallocation mode: metadata".into(),
            ));
        }
        if let Some(file) = named_file(&*file) {
            file.lock_length()?;
        }
        let (end, at) = (raw.offset().saturating_add(size), raw.offset() + old);
        if size < old {
            // Before the file is shorter, so that this holds if the future is dropped meanwhile.
            self.set_raw_size(size);
        }
        if let Err(e) = storage::set_len(&*file, queue, end).await {
            self.set_raw_size(old);
            return Err(e.into());
        }
        if let Err(e) = preallocate(&*file, queue, at, size, old, preallocation).await {
            storage::set_len(&*file, queue, at).await?;
            return Err(e);
        }
        self.set_raw_size(size);
        Ok(())
    }

    fn set_raw_size(&mut self, size: u64) {
        let image = self.layers_mut()[0].image.other_mut();
        if let Some(raw) = image.and_then(|image| image.as_raw_mut()) {
            raw.set_size(size);
            let size = raw.size();
            self.set_size(size);
        }
    }

    /// The new size is durable first, so that no crash leaves the old size with its tail missing.
    /// Mappings behind the end cost space until they are dropped, at the latest by
    /// [`Device::grow`].
    async fn shrink(&mut self, queue: &Queue, size: u64) -> Result<()> {
        let image = self.own_image()?;
        image.check_resize()?;
        // Damage that prevents dropping the tail is an error before anything changes.
        let kept = size.next_multiple_of(image.geometry().cluster_size());
        image.check_unmap(kept)?;
        image.announce(queue, 0..0).await?;
        image.store_sizes(queue).await?;
        image.finish_writing(queue).await?;
        if is_broken(Rule::SizeBeforeTail) {
            image.unmap_from(queue, kept).await?;
        }
        image.set_size(queue, size).await?;
        self.set_size(size);
        if let Err(error) = self.drop_tail(queue).await {
            tracing::warn!("the space behind the new end of the disk is not freed: {error}");
        }
        Ok(())
    }

    /// Frees what is behind the end of the disk.
    async fn drop_tail(&mut self, queue: &Queue) -> Result<()> {
        let size = self.size();
        let kept = self.last_cluster_end()?;
        // QEMU does not zero the rest of the last cluster when it makes the disk
        // larger.
        let emptied = self.empty(queue, size, kept).await;
        let image = self.own_image()?;
        image.unmap_from(queue, kept).await?;
        if image.header().has_data_file() && !image.data().is_device() {
            image.shorten_data_file(queue, size).await?;
        }
        emptied
    }

    /// The new part is prepared behind the end of the disk, where no read reaches it. The size
    /// changes last.
    async fn grow(&mut self, queue: &Queue, size: u64, preallocation: Preallocation) -> Result<()> {
        let image = self.own_image()?;
        image.check_resize()?;
        let entries = image.geometry().l1_entries_for(size);
        if size > i64::MAX as u64 || entries * 8 > MAX_L1_BYTES {
            let error = Error::os(libc::EFBIG);
            return Err(error.during("Failed to grow the L1 table"));
        }
        // A raw data file is the disk. All of it is mapped, so that a crash that loses new mappings
        // does not hide its data.
        let preallocation = match preallocation {
            Preallocation::Off if image.header().is_data_file_raw() => Preallocation::Metadata,
            other => other,
        };
        image.announce(queue, 0..0).await?;
        image.store_sizes(queue).await?;
        let data_len = match image.header().has_data_file() {
            true => Some(image.data().len()?),
            false => None,
        };
        if image.data().is_device() && data_len.is_some_and(|length| length < size) {
            return Err(Error::Refused("Cannot grow device files".into()));
        }
        let mut result = self.add_tail(queue, size, data_len, preallocation).await;
        if result.is_ok() {
            result = self.own_image()?.set_size(queue, size).await;
        }
        if result.is_ok() {
            self.set_size(size);
        } else {
            // What cannot be freed costs space; the next growth frees it.
            let _ = self.drop_added(queue, data_len).await;
        }
        result
    }

    /// Everything of a larger size but the size itself, durably. `data_len` is
    /// the length of an external data file.
    async fn add_tail(
        &mut self,
        queue: &Queue,
        size: u64,
        data_len: Option<u64>,
        preallocation: Preallocation,
    ) -> Result<()> {
        let old = self.size();
        let below = self.layers().get(1).map_or(0, |layer| layer.size());
        let kept = self.last_cluster_end()?;
        let image = self.own_image()?;
        // VM state outside of snapshots is behind the end, and what an interrupted shrink left.
        image.unmap_from(queue, kept).await?;
        image
            .grow_l1(queue, image.geometry().l1_entries_for(size))
            .await?;
        let is_device = data_len.is_some() && image.data().is_device();
        if let Some(length) = data_len {
            let data = image.data().clone();
            // Where all is mapped the file ends with a cluster, as in QEMU.
            let end = match preallocation {
                Preallocation::Off => size,
                _ if is_device => size,
                _ => size.next_multiple_of(image.geometry().cluster_size()),
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
            let hidden = below.min(size);
            self.empty(queue, old, kept).await?;
            self.empty(queue, kept, hidden).await?;
        } else {
            let end = match is_device {
                true => kept.min(size),
                false => kept,
            };
            self.write_behind(queue, old, end).await?;
            let zero = below > old
                && preallocation == Preallocation::Metadata
                && self.own_image()?.geometry().version() >= 3;
            self.preallocate_image(queue, kept, size, preallocation, zero)
                .await?;
        }
        self.own_image()?.finish_writing(queue).await
    }

    /// Frees what a larger size would have added.
    async fn drop_added(&mut self, queue: &Queue, data_len: Option<u64>) -> Result<()> {
        let kept = self.last_cluster_end()?;
        let image = self.own_image()?;
        // Fails if the header write failed: either size may be on the disk.
        image.unmap_from(queue, kept).await?;
        match data_len {
            Some(length) if !image.data().is_device() => {
                image.shorten_data_file(queue, length).await
            }
            _ => Ok(()),
        }
    }

    /// Where the last cluster of the disk ends.
    fn last_cluster_end(&mut self) -> Result<u64> {
        let size = self.size();
        let cluster_size = self.own_image()?.geometry().cluster_size();
        Ok(size.next_multiple_of(cluster_size))
    }

    /// Makes a range behind the end of the disk read as zeroes: either a part of
    /// the last cluster, unless it does already, or whole clusters.
    async fn empty(&mut self, queue: &Queue, start: u64, end: u64) -> Result<()> {
        if start >= end {
            return Ok(());
        }
        let size = self.size();
        let cluster_size = self.own_image()?.geometry().cluster_size();
        let whole = start.is_multiple_of(cluster_size);
        let end = match whole {
            true => end.next_multiple_of(cluster_size),
            false => end,
        };
        // The range must be inside the disk.
        let device = self.with_size(end.next_multiple_of(cluster_size).max(size));
        let result = match whole {
            true => Ok(false),
            false => device.reads_as_zero(queue, start..end).await,
        };
        let result = match result {
            Ok(false) => {
                device
                    .write_zeroes(queue, start, end - start, Zeroing::Keep)
                    .await
            }
            other => other.map(drop),
        };
        drop(device);
        self.wait_for_tasks().await;
        result
    }

    /// Writes zeroes to a part of a cluster behind the end of the disk, so that
    /// it is allocated.
    async fn write_behind(&mut self, queue: &Queue, start: u64, end: u64) -> Result<()> {
        if start >= end {
            return Ok(());
        }
        let size = self.size();
        let length = (end - start) as usize;
        let mut buffer = queue.buffer(length);
        buffer[..length].fill(0);
        // SAFETY: the buffer lives until the write, awaited here, has ended.
        #[allow(unsafe_code)]
        let zeroes = unsafe { buffer.iov() }.slice(0, length);
        let device = self.with_size(end.max(size));
        let result = match device.top().as_qcow2() {
            Some(image) => device.write_image(queue, image, start, &zeroes).await,
            None => Ok(()),
        };
        drop(device);
        self.wait_for_tasks().await;
        result
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
        let image = self.own_image()?;
        // A device as data file may end with the disk.
        let file_end = match image.header().has_data_file() && image.data().is_device() {
            true => end,
            false => u64::MAX,
        };
        let end = end.next_multiple_of(image.geometry().cluster_size());
        let mut at = start;
        while at < end {
            image.write_back_if_needed(queue).await?;
            let length = STEP.min(end - at);
            let data = &**image.data();
            for (host, length) in image.map_ahead(queue, at, length, zero).await? {
                let length = length.min(file_end.saturating_sub(host));
                preallocate(data, queue, host, length, 0, preallocation).await?;
            }
            at += length;
        }
        Ok(())
    }

    /// Drops the content of the top image: all of it is unallocated then, and shows the backing
    /// file. Durable on return.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`], and `ENOTSUP` for formats without backing files.
    pub async fn make_empty(&mut self, queue: &Queue) -> Result<()> {
        self.whole(async |device| device.empty_exclusive(queue).await)
            .await
    }

    async fn empty_exclusive(&mut self, queue: &Queue) -> Result<()> {
        let image = self.own_image()?;
        if image.header().is_data_file_raw() {
            // Such an image has no backing file, and its data file is the disk: what is empty is
            // zero.
            let size = self.size();
            self.write_zeroes(queue, 0, size, Zeroing::Unmap).await?;
            return self.flush(queue).await;
        }
        storage::event(&**image.file(), storage::Event::EmptyImagePrepare);
        image.announce(queue, 0..u64::MAX).await?;
        image.unmap_from(queue, 0).await?;
        self.flush(queue).await
    }
}

/// Takes the space of `length - skip` bytes, or writes zeroes there.
async fn preallocate(
    file: &dyn storage::Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
    skip: u64,
    mode: Preallocation,
) -> Result<()> {
    let length = length.saturating_sub(skip);
    match mode {
        _ if length == 0 => {}
        Preallocation::Off | Preallocation::Metadata => {}
        Preallocation::Falloc if file.is_device() => {}
        Preallocation::Falloc => storage::allocate(file, queue, offset, length).await?,
        Preallocation::Full => storage::write_zeroes(file, queue, offset, length).await?,
    }
    Ok(())
}
