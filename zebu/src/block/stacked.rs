//! The disk of an image as the storage of another one: `file.driver=qcow2`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Device, Zeroing};
use crate::storage::{
    Alignment, Asking, CacheMode, Iov, OpKind, Queue, RemoteExtent, Started, Storage, StorageExtent,
};
use crate::{Error, Result};

/// The disk of an image. Of fixed size, and asked what it is made of, as an export.
#[derive(Debug)]
pub(super) struct Stacked {
    device: Arc<Device>,
    path: PathBuf,
}

impl Stacked {
    pub(super) fn new(device: Device) -> Self {
        Stacked {
            path: device.top().file().path().to_owned(),
            device: Arc::new(device),
        }
    }

    /// Closes the image, after the image above it.
    pub(super) async fn close(self, queue: &Queue) -> Result<()> {
        match Arc::try_unwrap(self.device) {
            Ok(device) => device.close(queue).await,
            // A forgotten request still refers to it.
            Err(device) => device.flush(queue).await,
        }
    }
}

async fn perform(
    device: &Device,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
    iov: Option<Iov>,
) -> Result<usize> {
    let inside = device.size().saturating_sub(offset).min(length);
    match (kind, iov) {
        (OpKind::Read, Some(iov)) => {
            let iov = iov.slice(0, inside as usize);
            device.read(queue, offset.min(device.size()), &iov).await?;
            return Ok(iov.len());
        }
        (_, Some(_)) if inside < length => {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC).into());
        }
        (_, Some(iov)) => {
            device.write(queue, offset, &iov).await?;
            return Ok(iov.len());
        }
        (OpKind::Flush, None) => device.flush(queue).await?,
        (_, None) if inside == 0 => {}
        // There is nothing to take the space of: the image does it as it is written.
        (OpKind::Allocate, None) => {}
        (OpKind::Discard, None) => device.discard(queue, offset, inside).await?,
        (OpKind::PunchHole, None) => {
            device
                .write_zeroes(queue, offset, inside, Zeroing::Unmap)
                .await?;
        }
        (OpKind::ZeroQuickly, None) => {
            device
                .write_zeroes_quickly(queue, offset, inside, Zeroing::Keep)
                .await?;
        }
        (_, None) => {
            device
                .write_zeroes(queue, offset, inside, Zeroing::Keep)
                .await?;
        }
    }
    Ok(0)
}

fn io_error(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        Error::Limit(limit) => io::Error::other(limit),
        error => io::Error::other(error),
    }
}

// SAFETY: the device uses the memory until its future, which holds the device, has
// ended or was dropped.
#[allow(unsafe_code)]
unsafe impl Storage for Stacked {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let (device, queue, iov) = (self.device.clone(), queue.for_itself(), memory.cloned());
        Started::later(async move {
            perform(&device, &queue, kind, offset, length, iov)
                .await
                .map_err(io_error)
        })
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.device.size())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        match length <= self.device.size() {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "Cannot grow the disk of an image that another one is in",
            )),
        }
    }

    fn allocated(&self) -> io::Result<u64> {
        self.device.top().file().allocated()
    }

    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn extent(&self, offset: u64) -> io::Result<StorageExtent> {
        Ok(StorageExtent {
            data: true,
            length: self.device.size().saturating_sub(offset),
        })
    }

    fn ask_extent(&self, queue: &Queue, offset: u64) -> Option<Asking> {
        let (device, queue) = (self.device.clone(), queue.for_itself());
        Some(Box::pin(async move {
            let length = device.size().saturating_sub(offset);
            if length == 0 {
                return Ok(RemoteExtent {
                    zero: true,
                    allocated: false,
                    length,
                });
            }
            let status = device.status(&queue, offset, length).await;
            let status = status.map_err(io_error)?;
            Ok(RemoteExtent {
                zero: status.zero,
                allocated: status.data,
                length: status.length,
            })
        }))
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn below(&self) -> Option<&dyn Storage> {
        Some(self.device.top().file())
    }

    fn cache_mode(&self) -> CacheMode {
        self.device.top().data().cache_mode()
    }

    fn is_device(&self) -> bool {
        true
    }
}
