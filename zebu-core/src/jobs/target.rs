//! What a conversion or a copy writes to.

use std::ops::Range;
use std::sync::Arc;

use super::out_stream::OutStream;
use crate::block::{BitmapInfo, Device, DirtyBits, Zeroing};
use crate::drivers::stream::Packing;
use crate::drivers::{AfterClose, NewImage};
use crate::storage::{self, Iov, Queue, Storage};
use crate::{Error, Result};

/// Bytes of zeroes that are written at a time.
const ZEROES: u64 = storage::ZEROES as u64;

/// Where a conversion or a copy goes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Target {
    /// The bytes of a raw image: a file, a block device, memory.
    Raw(Arc<dyn Storage>),
    /// An image that is open for writing.
    Image(Device),
    /// An image that is filled, and finished by the job ([`begin_image`](super::begin_image)).
    New(Box<dyn NewImage>),
    /// An image that is written in order
    /// ([`convert_to_stream`](super::convert_to_stream)).
    #[doc(hidden)]
    Stream(OutStream),
}

impl Target {
    /// Whether what is not written of it shows its backing file as that is.
    pub(super) fn shows_backing(&self) -> bool {
        match self {
            Target::Image(device) => device.keeps_bytes(),
            _ => true,
        }
    }

    /// Whether what is not written of it reads as zeroes; None: the options of the job tell.
    pub(super) fn reads_as_zeroes(&self) -> Option<bool> {
        match self {
            Target::New(image) => Some(!image.is_filled_whole()),
            _ => None,
        }
    }

    /// The device that it is.
    pub(super) fn device(&self) -> Option<&Device> {
        match self {
            Target::Image(device) => Some(device),
            Target::Raw(_) | Target::New(_) | Target::Stream(_) => None,
        }
    }

    /// The unit that one worker writes to at a time, in bytes; 1 if there is none.
    pub(super) fn cluster_size(&self) -> u64 {
        let size = match self {
            Target::Raw(_) => None,
            Target::Image(device) => device.top().image.cluster_size(),
            // What is stored as it is may be written in any parts.
            Target::New(image) => image.zlib_block(),
            Target::Stream(stream) => Some(stream.cluster_size()),
        };
        size.unwrap_or(1)
    }

    /// The unit that must be zero as a whole to be left out, in bytes.
    pub(super) fn zero_unit(&self) -> u64 {
        match self {
            Target::Stream(stream) => stream.cluster_size(),
            _ => self
                .device()
                .map_or(1, |device| device.top().image.zero_unit()),
        }
    }

    /// How it compresses, if it can.
    pub(super) fn packing(&self) -> Option<Packing> {
        match self {
            Target::Raw(_) => None,
            Target::Image(device) => device.packing(),
            Target::New(image) => image.zlib_block().map(|_| Packing::Zlib),
            Target::Stream(stream) => stream.packing(),
        }
    }

    /// Whether data are placed in the order of the writes.
    pub(super) fn has_order(&self) -> bool {
        match self {
            Target::Raw(_) => false,
            Target::Image(device) => device.top().cluster_size().is_some(),
            // Compressed data may have any order, but that of the disk serves readers best.
            Target::New(image) => image.has_order() || image.zlib_block().is_some(),
            Target::Stream(_) => true,
        }
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
            Target::New(image) => image.write(queue, offset, iov).await,
            // A conversion hands over its buffers.
            Target::Stream(_) => Err(Error::Refused("A stream is not written in parts".into())),
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
            // Of compressed blocks, what is not written is zero. So are the gaps of a stream.
            Target::New(image) if image.zlib_block().is_some() => Ok(()),
            Target::Stream(_) => Ok(()),
            Target::New(image) => write_zeroes(&**image, queue, offset, length).await,
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
            Target::New(image) => image.write_packed(queue, clusters, data).await,
            Target::Stream(stream) => stream.write_packed(clusters, data),
            Target::Raw(_) => unreachable!("a raw target has no compressed clusters"),
        }
    }

    /// Ends writes that wait for the reader of a stream.
    pub(super) fn stop(&self) {
        if let Target::Stream(stream) = self {
            stream.stop();
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
                _ => Err(Error::Refused("The target cannot have bitmaps".into())),
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

    /// Makes everything durable, after which a new image is a whole one if `is_filled`. Otherwise it
    /// stays one that is not finished.
    pub(super) async fn close(self, queue: &Queue, is_filled: bool) -> Result<()> {
        match self {
            Target::Raw(storage) => storage::flush(&*storage, queue).await?,
            Target::Image(device) => {
                let last = is_filled.then_some(AfterClose::FinishNew);
                device.close_then(queue, last).await?;
            }
            Target::New(image) if is_filled => image.finish(queue).await?,
            Target::Stream(stream) if is_filled => stream.finish()?,
            Target::New(_) | Target::Stream(_) => {}
        }
        Ok(())
    }
}

/// Writes zeroes as data, so that they take their space.
async fn write_zeroes(image: &dyn NewImage, queue: &Queue, offset: u64, length: u64) -> Result<()> {
    let mut done = 0;
    while done < length {
        let count = (length - done).min(ZEROES) as usize;
        let part = storage::zeroes(count);
        image.write(queue, offset + done, part).await?;
        done += count as u64;
    }
    Ok(())
}
