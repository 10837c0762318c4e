//! Changes of a whole device: its size, or its content dropped.

use super::Format;
use super::device::{Device, LayerImage};
use super::whole::end_whole;
use super::write::Zeroing;
use crate::format::MAX_L1_BYTES;
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// Bytes of the disk that are preallocated in one go.
const STEP: u64 = 64 << 20;

/// What is allocated ahead of being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// The mapping: every guest cluster has a host cluster, without data.
    Metadata,
    /// The mapping, and the space on the device.
    Falloc,
    /// The same, and zeroes are written.
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

impl Device {
    /// Gives the disk another size in bytes, a multiple of 512. What is behind
    /// a smaller one is lost; what a larger one adds reads as zeroes, and is
    /// preallocated as asked. Durable on return.
    ///
    /// After an error the disk has the size that [`Device::size`] says.
    pub async fn resize(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        self.top_for_writing(0, 0)?;
        let whole = self.begin_whole().await;
        let result = self.resize_alone(queue, size, preallocation).await;
        end_whole(whole);
        result
    }

    async fn resize_alone(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let old = self.size();
        if size < old && preallocation != Preallocation::Off {
            let text = match self.top().format() {
                Format::Raw => "Cannot use preallocation for shrinking files",
                Format::Qcow2 => "Preallocation can't be used for shrinking an image",
            };
            return Err(Error::Refused(text.into()));
        }
        if self.top().format() == Format::Qcow2 && !size.is_multiple_of(512) {
            return Err(Error::Refused(
                "The new size must be a multiple of 512".into(),
            ));
        }
        match &self.top().image {
            LayerImage::Raw(_) => self.resize_raw(queue, size, preallocation).await?,
            LayerImage::Qcow2(_) if size < old => self.shrink(queue, size).await?,
            LayerImage::Qcow2(_) => self.grow(queue, size, preallocation).await?,
        }
        self.flush(queue).await
    }

    async fn resize_raw(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let old = self.size();
        let LayerImage::Raw(raw) = &mut self.layers_mut()[0].image else {
            return Ok(());
        };
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
        file.set_len(raw.offset() + size)?;
        let at = raw.offset() + old;
        if let Err(e) = preallocate(&*file, queue, at, size, old, preallocation).await {
            file.set_len(at)?;
            return Err(e);
        }
        raw.set_size(size);
        self.set_size(size);
        Ok(())
    }

    async fn shrink(&mut self, queue: &Queue, size: u64) -> Result<()> {
        self.own_image()?.check_resize()?;
        let cluster_size = self.own_image()?.geometry().cluster_size();
        let kept = size.next_multiple_of(cluster_size);
        // The rest of the last cluster must not come back when the disk grows.
        let rest = kept.min(self.size());
        if size < rest {
            self.write_zeroes(queue, size, rest - size, Zeroing::Keep)
                .await?;
        }
        // What is cut off must not show a longer backing file's data while the
        // disk is as large as before. (Version 2 cannot say that it is zero.)
        let below = self.layers().get(1).map_or(0, |layer| layer.size());
        let old = self.size();
        let hides = kept < below.min(old) && self.own_image()?.geometry().version() >= 3;
        if hides {
            self.write_zeroes(queue, kept, old - kept, Zeroing::Keep)
                .await?;
        }
        let image = self.own_image()?;
        image.announce(queue).await?;
        if hides {
            image.finish_writing(queue).await?;
            image.set_size(queue, size).await?;
            self.set_size(size);
        }
        let image = self.own_image()?;
        image.unmap_from(queue, kept).await?;
        if !hides {
            image.set_size(queue, size).await?;
        }
        if image.header().has_data_file() && !image.data().is_device() {
            image.data().set_len(size)?;
        }
        self.set_size(size);
        Ok(())
    }

    async fn grow(&mut self, queue: &Queue, size: u64, preallocation: Preallocation) -> Result<()> {
        let old = self.size();
        let below = self.layers().get(1).map_or(0, |layer| layer.size());
        let image = self.own_image()?;
        image.check_resize()?;
        let cluster_size = image.geometry().cluster_size();
        let entries = image.geometry().l1_entries_for(size);
        if size > i64::MAX as u64 || entries * 8 > MAX_L1_BYTES {
            let error = Error::Io(std::io::Error::from_raw_os_error(libc::EFBIG));
            return Err(error.during("Failed to grow the L1 table"));
        }
        image.announce(queue).await?;
        image.finish_writing(queue).await?;
        // VM state that nobody saved lies behind the end of the disk.
        image
            .unmap_from(queue, old.next_multiple_of(cluster_size))
            .await?;
        image.grow_l1(queue, entries).await?;
        if image.header().has_data_file() && !image.data().is_device() {
            let data = image.data().clone();
            data.set_len(data.len()?.max(size))?;
        }
        // The new part must not show a longer backing file's data, at no time.
        let hidden = below.min(size);
        if old < hidden {
            self.hide(queue, old, hidden).await?;
        }
        let image = self.own_image()?;
        image.finish_writing(queue).await?;
        image.set_size(queue, size).await?;
        self.set_size(size);
        self.preallocate_image(queue, old, size, preallocation)
            .await
    }

    /// Makes what is behind the end of the disk read as zeroes.
    async fn hide(&mut self, queue: &Queue, start: u64, end: u64) -> Result<()> {
        let cluster_size = self.own_image()?.geometry().cluster_size();
        let whole = start.next_multiple_of(cluster_size);
        let to = end.next_multiple_of(cluster_size);
        // With the size of then, so that all of it is inside.
        let before = self.size();
        self.set_size(to.max(before));
        let result = self
            .write_zeroes(queue, start, whole.min(end) - start, Zeroing::Keep)
            .await;
        let result = match result {
            Ok(()) if whole < to => {
                self.write_zeroes(queue, whole, to - whole, Zeroing::Keep)
                    .await
            }
            other => other,
        };
        self.set_size(before);
        result
    }

    /// Allocates what is unallocated of a range.
    async fn preallocate_image(
        &mut self,
        queue: &Queue,
        start: u64,
        end: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        if preallocation == Preallocation::Off {
            return Ok(());
        }
        let image = self.own_image()?;
        let cluster_size = image.geometry().cluster_size();
        let mut at = start.next_multiple_of(cluster_size);
        let end = end.next_multiple_of(cluster_size);
        while at < end {
            image.relieve(queue).await?;
            let extent = image.extent(queue, at, STEP.min(end - at)).await?;
            let is_free = matches!(
                extent.mapping,
                crate::image::Mapping::Unallocated { host: None }
            );
            if is_free {
                let data = &**image.data();
                for (host, length) in image.map_ahead(queue, at, extent.length).await? {
                    preallocate(data, queue, host, length, 0, preallocation).await?;
                }
            }
            at += extent.length;
        }
        Ok(())
    }

    /// Forgets the content of the top image: everything is unallocated
    /// afterwards, and shows the backing file. Durable on return.
    pub async fn make_empty(&mut self, queue: &Queue) -> Result<()> {
        self.top_for_writing(0, 0)?;
        let whole = self.begin_whole().await;
        let result = self.empty_alone(queue).await;
        end_whole(whole);
        result
    }

    async fn empty_alone(&mut self, queue: &Queue) -> Result<()> {
        let image = self.own_image()?;
        if image.header().is_data_file_raw() {
            // There is nothing behind such an image, and its data file is the
            // disk: what is empty there is zero.
            let size = self.size();
            self.write_zeroes(queue, 0, size, Zeroing::Unmap).await?;
            return self.flush(queue).await;
        }
        image.announce(queue).await?;
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
