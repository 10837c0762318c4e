//! What a conversion writes to.

use std::ops::Range;
use std::sync::Arc;

use super::ZERO_BLOCK;
use crate::block::{BitmapInfo, Device, DirtyBits, Zeroing};
use crate::codec::Compression;
use crate::drivers::AnyImage;
use crate::drivers::qcow2::Image;
use crate::storage::{self, Iov, Queue, Storage};
use crate::{Error, Result};

/// Where a conversion goes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Target {
    /// The bytes of a raw image: a file, a block device, memory.
    Raw(Arc<dyn Storage>),
    /// An image that is open for writing.
    Image(Device),
}

impl Target {
    /// The file of the qcow2 image that it is.
    pub fn qcow2_file(&self) -> Option<Arc<dyn Storage>> {
        self.qcow2().map(|image| image.file().clone())
    }

    /// The qcow2 image that it is.
    fn qcow2(&self) -> Option<&Image> {
        self.image()?.as_qcow2()
    }

    /// The image that it is.
    fn image(&self) -> Option<&AnyImage> {
        match self {
            Target::Image(device) => Some(&device.top().image),
            Target::Raw(_) => None,
        }
    }

    /// The unit of its allocation in bytes, 1 if it has none.
    pub(super) fn cluster_size(&self) -> u64 {
        self.image()
            .and_then(|image| image.cluster_size())
            .unwrap_or(1)
    }

    /// The unit that must be zero as a whole to be left out, in bytes.
    pub(super) fn zero_unit(&self) -> u64 {
        self.image().map_or(1, |image| image.zero_unit())
    }

    /// Blocks in which zeroes are looked for, in bytes.
    pub(super) fn zero_block(&self, sparse: u64) -> u64 {
        self.zero_unit().max(sparse.clamp(1, ZERO_BLOCK))
    }

    /// How it compresses, if it can.
    pub(super) fn compression(&self) -> Option<Compression> {
        self.qcow2()
            .filter(|image| !image.header().has_data_file())
            .map(Image::compression)
    }

    /// Whether data are placed in the order of the writes.
    pub(super) fn has_order(&self) -> bool {
        self.qcow2().is_some()
    }

    /// Loads the mapping of a range, so that a write to it starts without waiting for that.
    pub(super) async fn look_up(&self, queue: &Queue, range: &Range<u64>) -> Result<()> {
        let Target::Image(device) = self else {
            return Ok(());
        };
        let mut at = range.start;
        while at < range.end {
            at += device.status(queue, at, range.end - at).await?.length;
        }
        Ok(())
    }

    pub(super) async fn write(&self, queue: &Queue, offset: u64, iov: Iov) -> Result<()> {
        match self {
            Target::Raw(storage) => Ok(storage::write(&**storage, queue, offset, &iov).await?),
            Target::Image(device) => device.write(queue, offset, &iov).await,
        }
    }

    /// Makes a range zero; with `allocate` it keeps or gets its space.
    pub(super) async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        allocate: bool,
    ) -> Result<()> {
        match self {
            Target::Raw(storage) if allocate => {
                Ok(storage::zero_range(&**storage, queue, offset, length).await?)
            }
            Target::Raw(storage) => {
                Ok(storage::punch_hole(&**storage, queue, offset, length).await?)
            }
            Target::Image(device) => {
                let zeroing = match allocate {
                    true => Zeroing::Keep,
                    false => Zeroing::Unmap,
                };
                device.write_zeroes(queue, offset, length, zeroing).await
            }
        }
    }

    /// Stores compressed clusters: where each starts on the disk, and where in
    /// `data` it is.
    pub(super) async fn write_packed(
        &self,
        queue: &Queue,
        clusters: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        match self {
            Target::Image(device) => device.write_packed(queue, clusters, data).await,
            Target::Raw(_) => unreachable!("a raw target has no compressed clusters"),
        }
    }

    /// Adds bitmaps.
    pub(super) async fn add_bitmaps(
        &mut self,
        queue: &Queue,
        bitmaps: &[(BitmapInfo, DirtyBits)],
    ) -> Result<()> {
        let Target::Image(device) = self else {
            return match bitmaps {
                [] => Ok(()),
                _ => Err(Error::Refused("raw images have no bitmaps".into())),
            };
        };
        for (bitmap, bits) in bitmaps {
            let (name, granularity) = (&bitmap.name, Some(bits.granularity()));
            device
                .bitmap_add(queue, name, granularity, bitmap.enabled)
                .await?;
            device.bitmap_merge(queue, name, bits).await?;
        }
        Ok(())
    }

    /// Makes everything durable.
    pub(super) async fn close(self, queue: &Queue) -> Result<()> {
        match self {
            Target::Raw(storage) => Ok(storage::flush(&*storage, queue).await?),
            Target::Image(device) => device.close(queue).await,
        }
    }
}
