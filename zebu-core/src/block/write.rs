//! Changing a device: write, flush, close.

use std::io::IoSlice;
use std::sync::Arc;

use super::DetectZeroes;
use super::device::{Device, Layer};
use super::read::{Chain, over};
use crate::drivers::{AfterClose, AnyImage, Below};
use crate::storage::{self, Iov, OwnedBuffer, Queue};
use crate::{Error, Result};

/// What becomes of the space of a range that is written with zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Zeroing {
    /// It stays allocated.
    #[default]
    Keep,
    /// It may be freed, if the device was opened with
    /// [`OpenOptions::discard`](super::OpenOptions::discard).
    Unmap,
}

impl Device {
    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.top().write.is_some()
    }

    /// The top image, for a change of a range.
    pub(super) fn top_for_writing(&self, offset: u64, length: u64) -> Result<&AnyImage> {
        if !self.is_writable() {
            // The error number of a file that is open for reading.
            return Err(Error::os(libc::EPERM));
        }
        self.check_range(offset, length)?;
        Ok(&self.top().image)
    }

    /// Writes `iov` to the disk from `offset` on. Reads that begin after it has returned see it. It
    /// is durable after the next [`Device::flush`], or at once with a write-through
    /// [`CacheMode`](crate::CacheMode).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the range is not inside the disk. `EPERM` if the device is not open
    /// for writing. [`Error::Corrupt`] if metadata are damaged, after which the image is not
    /// written any more. [`Error::Io`] of a file, for example `ENOSPC`. The write may be repeated
    /// then; until it succeeds, the content of the range is old, new or mixed.
    pub async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let length = iov.len() as u64;
        self.top_for_writing(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        if !self.hooks.is_empty() {
            // Rare, and would make the futures of all writes larger.
            return Box::pin(async {
                let _hooked = self.hooked(queue, offset..offset + length).await?;
                self.write_range(queue, offset, iov).await
            })
            .await;
        }
        self.write_range(queue, offset, iov).await
    }

    /// [`Device::write`] of a range that is inside the disk and not empty. Hooks were told.
    async fn write_range(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let length = iov.len() as u64;
        match self.detect_zeroes() {
            DetectZeroes::Off => {}
            _ if !iov.is_zero() => {}
            detect => {
                let zeroing = match detect {
                    DetectZeroes::Unmap => Zeroing::Unmap,
                    _ => Zeroing::Keep,
                };
                return Box::pin(self.zero_range(queue, offset, length, zeroing)).await;
            }
        }
        if self.has_filters {
            return self.filtered().write(queue, offset, iov).await;
        }
        self.chain().write_image(queue, offset, iov).await
    }

    /// Makes every change durable that had ended before the call.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a file cannot be flushed. Data may be lost then: from now on an image with
    /// tables refuses writes, and every flush of a raw image fails unless its I/O is direct.
    pub async fn flush(&self, queue: &Queue) -> Result<()> {
        if !self.is_writable() {
            return Ok(());
        }
        self.top_for_writing(0, 0)?;
        self.filtered().flush(queue).await
    }

    /// Makes everything durable and ends the use of the device. A device that is dropped instead
    /// leaves a consistent image, but changes since the last flush may be lost, and clusters may
    /// leak. Does nothing for a device that is not open for writing.
    ///
    /// # Errors
    ///
    /// Those of [`Device::flush`]: the first one. All images are closed nevertheless.
    pub async fn close(self, queue: &Queue) -> Result<()> {
        self.close_then(queue, None).await
    }

    /// [`Device::close`], and then the `last` step, if nothing has failed. The image's file stays open,
    /// and locked, until then.
    pub(crate) async fn close_then(
        mut self,
        queue: &Queue,
        last: Option<AfterClose<'_>>,
    ) -> Result<()> {
        let mut result = self.close_layers(queue).await;
        if let (Ok(()), Some(step)) = (&result, last) {
            result = self.top().image.after_close(queue, step).await;
        }
        let layers = self.layers.iter_mut();
        let nested: Vec<_> = layers
            .flat_map(|layer| std::mem::take(&mut layer.nested))
            .collect();
        drop(self);
        for device in nested {
            let closed = match Arc::try_unwrap(device) {
                Ok(device) => Box::pin(device.close(queue)).await,
                // A forgotten request, or a file that is kept for its lock, still refers to it.
                Err(device) => device.flush(queue).await,
            };
            result = result.and(closed);
        }
        result
    }

    async fn close_layers(&mut self, queue: &Queue) -> Result<()> {
        self.flush(queue).await?;
        let filters = self.close_filters(queue).await;
        let (image, below) = self.top_mut();
        let mut result = filters.and(image.close(over(queue, &below)).await);
        for depth in 1..self.layers.len() {
            let closed = self.close_below(queue, depth).await;
            result = result.and(closed);
        }
        // Filters over their files end after the images.
        let written = self.layers.iter().filter(|layer| layer.write.is_some());
        for file in written.flat_map(Layer::storages) {
            result = result.and(storage::end(&*file, queue).await.map_err(Into::into));
        }
        result
    }

    /// Writes the first `length` bytes of a buffer, which comes back with the result.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`]. [`Error::Refused`] if `length` exceeds the buffer.
    pub async fn write_buffer<B: OwnedBuffer>(
        &self,
        queue: &Queue,
        offset: u64,
        mut buffer: B,
        length: usize,
    ) -> (B, Result<()>) {
        // SAFETY: the buffer lives in this future until the write has ended;
        // a dropped future waits for that before it drops the buffer.
        #[allow(unsafe_code)]
        let iov = unsafe { buffer.first(length) };
        let result = match iov {
            Ok(iov) => self.write(queue, offset, &iov).await,
            Err(e) => Err(e),
        };
        (buffer, result)
    }

    /// Writes `buffers`, one after the other, to the disk from `offset` on. Blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn write_vectored_blocking(
        &self,
        queue: &Queue,
        offset: u64,
        buffers: &[IoSlice<'_>],
    ) -> Result<()> {
        let segment = |b: &IoSlice<'_>| (b.as_ptr().cast_mut(), b.len());
        let segments: Vec<_> = buffers.iter().map(segment).collect();
        // SAFETY: `buffers` are borrowed until the write, waited for here, has ended; a write
        // only reads the memory.
        #[allow(unsafe_code)]
        let iov = unsafe { Iov::from_segments(&segments) };
        queue.block_on(self.write(queue, offset, &iov))
    }

    /// Writes `bytes` to the disk from `offset` on. Blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn write_blocking(&self, queue: &Queue, offset: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: `bytes` is borrowed until the write, waited for here, has
        // ended; a write only reads the memory.
        #[allow(unsafe_code)]
        let iov = unsafe { Iov::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) };
        queue.block_on(self.write(queue, offset, &iov))
    }
}

impl Chain<'_> {
    /// Writes below the filters of the first image.
    #[inline]
    pub(super) async fn write_image(self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let (image, length) = (&self.first().image, iov.len() as u64);
        {
            let _stay = image.enter();
            // Most writes go to one place.
            if let Some((storage, host)) = image.in_place(offset, length) {
                let storage = &**image.storage(storage);
                return Ok(storage::write(storage, queue, host.0, iov).await?);
            }
        }
        let below = self.behind();
        image.write(over(queue, &below), offset, iov).await
    }
}
