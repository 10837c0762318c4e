//! Changes of a whole device: its size, or that its content is dropped.

use super::device::{Device, Resizing};
use super::read::over;
use super::write::Zeroing;
use crate::Result;
use crate::drivers::Preallocation;
use crate::storage::Queue;

impl Device {
    /// Gives the disk another size in bytes, a multiple of 512. What is behind a smaller end is
    /// lost. What a larger size adds reads as zeroes, and is preallocated according to
    /// `preallocation`; with a raw data file it is always mapped. Durable on return; of a raw image
    /// with the next flush.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused) if the image cannot have this size, or if this
    /// preallocation is not supported. Those of [`Device::write`]. The disk then has its old size,
    /// and the space of a larger one is freed. After an error that makes every further write fail, the header may have
    /// either size.
    pub async fn resize(
        &mut self,
        queue: &Queue,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        self.top_for_writing(0, 0)?;
        let _hooked = self.hooked(queue, size..self.size().max(size)).await?;
        let old = self.size();
        {
            let device = Resizing(self);
            let (image, below) = device.0.top_mut();
            image
                .resize(over(queue, &below), size, preallocation)
                .await?;
        }
        if old < size && !self.keeps_bytes() {
            // What is zero below is not above.
            let added = self.zero_range(queue, old, size - old, Zeroing::Keep);
            added.await?;
            return self.flush(queue).await;
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
        self.top_for_writing(0, 0)?;
        let _hooked = self.hooked(queue, 0..self.size()).await?;
        let unmap = self.discards();
        let (image, below) = self.top_mut();
        image.make_empty(over(queue, &below), unmap).await
    }
}
