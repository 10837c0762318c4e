//! New raw images.

use std::sync::Arc;

use crate::codec;
use crate::drivers::{
    BoxFuture, Filling, ImagePlan, Making, NewImage, PlanRequest, Preallocation, check_inside,
    refused, too_large,
};
use crate::storage::{self, Iov, LockRequest, Queue, Storage};
use crate::{Error, Result};

/// A new image that can be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub size: u64,
    pub preallocation: Preallocation,
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let size = request.size.checked_next_multiple_of(512);
    let size = size.filter(|size| *size <= i64::MAX as u64);
    Ok(Box::new(Plan {
        size: size.ok_or_else(|| refused("Could not resize file: Invalid argument"))?,
        preallocation: request.options.file_preallocation()?,
    }))
}

impl Plan {
    /// Gives the file, which was emptied, its size and its space.
    pub(crate) async fn write(&self, making: &Making<'_>, file: &dyn Storage) -> Result<()> {
        storage::set_len(file, making.queue, self.size).await?;
        making.report.plan(self.size);
        match self.preallocation {
            // The content of a device is that of the image.
            Preallocation::Off => Ok(()),
            _ => making.allocate(file, 0, self.size).await,
        }
    }
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.size
    }

    fn alignment(&self) -> u64 {
        1 << 20
    }

    fn filling(&self) -> Filling {
        Filling::Raw
    }

    fn lock(&self) -> LockRequest {
        LockRequest::CREATE
    }

    fn shows_file(&self) -> bool {
        self.preallocation == Preallocation::Off
    }

    fn compression(&self) -> Option<codec::Compression> {
        None
    }

    /// It has none.
    fn mark(&self) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let [file] = <[_; 1]>::try_from(files).expect("the image's own file");
            let making = Making {
                queue,
                report: &(),
                preallocation: self.preallocation,
            };
            let written = self.write(&making, &*file).await;
            written.map_err(|e| match e.errno() {
                libc::EFBIG => too_large("The image size is too large for file format 'raw'"),
                _ if file.is_device() => e,
                _ => e.during("Could not resize file"),
            })?;
            let size = self.size;
            Ok(Box::new(NewRaw { file, size }) as Box<dyn NewImage>)
        })
    }
}

/// A raw image that is being filled.
#[derive(Debug)]
struct NewRaw {
    file: Arc<dyn Storage>,
    size: u64,
}

impl NewImage for NewRaw {
    fn has_order(&self) -> bool {
        false
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_inside(offset, &iov, self.size)?;
            Ok(storage::write(&*self.file, queue, offset, &iov).await?)
        })
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            storage::flush(&*self.file, queue)
                .await
                .map_err(Error::from)
        })
    }
}
