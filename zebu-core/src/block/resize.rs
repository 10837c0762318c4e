//! Changes of a whole device: its size, or that its content is dropped.

use super::device::{Device, Resizing};
use super::filtered::Rest;
use super::read::over;
use crate::Result;
use crate::drivers::{Below, Clear, Preallocation};
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
        let device = Resizing(self);
        device.0.resize_image(queue, 0, size, preallocation).await
    }

    /// Gives an image of the chain another size. What that adds reads as zeroes above the filters over it.
    pub(super) async fn resize_image(
        &mut self,
        queue: &Queue,
        depth: usize,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let (layers, behind) = self.layers.split_at_mut(depth + 1);
        let (image, behind) = (&mut layers[depth].image, Rest::below(behind));
        let old = image.size();
        let resized = image.resize(over(queue, &behind), size, preallocation);
        resized.await?;
        let rest = self.codes_over(depth);
        if size <= old || rest.keeps_bytes() {
            return Ok(());
        }
        let added = async {
            rest.clear(queue, old..size, Clear::Zero).await?;
            rest.flush(queue).await
        };
        let Err(error) = added.await else {
            return Ok(());
        };
        let back = Box::pin(self.resize_image(queue, depth, old, Preallocation::Off));
        let _ = back.await;
        Err(error)
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
