//! The disk of an image as the storage of another one: `file.driver=qcow2`.

use std::io;
use std::sync::Arc;

use super::{Device, Zeroing};
use crate::storage::{Alignment, Iov, OpKind, Properties, Queue, Started, Storage, StorageExtent};
use crate::{Error, Result};

/// The disk of an image. Its size is fixed, and its status is found asynchronously, as of an
/// export.
#[derive(Debug)]
pub(super) struct Stacked {
    device: Arc<Device>,
    properties: Properties,
}

impl Stacked {
    pub(super) fn new(device: Arc<Device>) -> Self {
        Stacked {
            properties: Properties {
                path: device.top().file().path().to_owned(),
                cache: device.top().data().cache_mode(),
                alignment: Alignment::NONE,
                is_device: true,
                is_remote: true,
                is_stacked: true,
                is_in_image: true,
                is_coded: device.top().data().properties().is_coded,
            },
            device,
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
        (OpKind::Extent, Some(iov)) => {
            let length = device.size().saturating_sub(offset);
            let status = device.status(queue, offset, length).await?;
            let extent = StorageExtent {
                zero: status.zero,
                allocated: status.data,
                length: status.length,
            };
            return Ok(extent.put(&iov));
        }
        (_, Some(_)) if inside < length => {
            return Err(Error::os(libc::ENOSPC));
        }
        (_, Some(iov)) => {
            device.write(queue, offset, &iov).await?;
            return Ok(iov.len());
        }
        (OpKind::Flush, None) => device.flush(queue).await?,
        (_, None) if inside == 0 => {}
        // The image allocates space when it is written.
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
        if kind == OpKind::SetLength {
            let error = "Cannot grow the disk of an image that another one is in";
            return Started::fixed_length(self.device.size(), length, error);
        }
        let (device, queue, iov) = (
            self.device.clone(),
            queue.for_image_below(),
            memory.cloned(),
        );
        Started::later(async move {
            perform(&device, &queue, kind, offset, length, iov)
                .await
                .map_err(io_error)
        })
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.device.size())
    }

    fn allocated(&self) -> io::Result<u64> {
        self.device.top().file().allocated()
    }

    fn below(&self) -> Option<&dyn Storage> {
        Some(self.device.top().file())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a queue that cannot end because a flush in the image below waits for
    //! another one.
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::super::{Format, OpenOptions};
    use super::*;
    use crate::jobs::{CreateQcow2, create_qcow2};
    use crate::storage::{EngineKind, OpenFile, QueueOptions, open_file};

    #[test]
    fn a_queue_ends_while_its_flush_waits_for_another_queue() {
        for format in [Format::RAW, Format::QCOW2] {
            let [one, other] = [(); 2].map(|()| {
                let options = QueueOptions {
                    engine: EngineKind::Threads,
                    ..QueueOptions::default()
                };
                Queue::new(options).unwrap()
            });
            let file = tempfile::NamedTempFile::new().unwrap();
            let how = OpenFile {
                write: true,
                ..OpenFile::default()
            };
            let file = open_file(file.path(), how).unwrap();
            let size = 16 << 20;
            let options = CreateQcow2 {
                size,
                ..CreateQcow2::default()
            };
            one.block_on(create_qcow2(&one, &*file, None, &options, |_| {}))
                .unwrap();
            let write = OpenOptions {
                write: true,
                ..OpenOptions::default()
            };
            let below = Device::from_storage(&one, file, &write).unwrap();
            let below = Arc::new(below);
            let stacked: Arc<dyn Storage> = Arc::new(Stacked::new(below.clone()));
            if format == Format::QCOW2 {
                let options = CreateQcow2 {
                    size: 1 << 20,
                    ..CreateQcow2::default()
                };
                one.block_on(create_qcow2(&one, &*stacked, None, &options, |_| {}))
                    .unwrap();
            }
            let above = OpenOptions {
                format: Some(format),
                ..write
            };
            let above = Device::from_storage(&one, stacked, &above).unwrap();
            above.write_blocking(&one, 0, &[1; 4096]).unwrap();

            let mut context = Context::from_waker(Waker::noop());
            {
                let mut begun = pin!(below.flush(&other));
                assert!(begun.as_mut().poll(&mut context).is_pending());
                let mut waits = Box::pin(above.flush(&one));
                assert!(waits.as_mut().poll(&mut context).is_pending());
                drop(waits);
                // The other queue is not driven meanwhile.
                drop(one);
                other.block_on(begun).unwrap();
            }
            above.write_blocking(&other, 8192, &[2; 4096]).unwrap();
            other.block_on(above.flush(&other)).unwrap();
            let mut bytes = [0; 4096];
            above.read_blocking(&other, 0, &mut bytes).unwrap();
            assert_eq!(bytes, [1; 4096]);
        }
    }

    /// A change of the header of which only a part is on the disk would refuse all later writes.
    #[test]
    fn a_change_of_the_header_outlives_its_request() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let make = |file: &dyn Storage, size| {
            let options = CreateQcow2 {
                size,
                ..CreateQcow2::default()
            };
            let made = create_qcow2(&queue, file, None, &options, |_| {});
            queue.block_on(made).unwrap();
        };
        let write = OpenOptions {
            write: true,
            ..OpenOptions::default()
        };
        for polls in 0.. {
            let file = tempfile::NamedTempFile::new().unwrap();
            let how = OpenFile {
                write: true,
                ..OpenFile::default()
            };
            let file = open_file(file.path(), how).unwrap();
            make(&*file, 16 << 20);
            let below = Device::from_storage(&queue, file, &write).unwrap();
            let stacked: Arc<dyn Storage> = Arc::new(Stacked::new(Arc::new(below)));
            make(&*stacked, 1 << 20);
            // An autoclear bit that nobody knows, which the first write clears.
            let bit = crate::storage::write_slice(&*stacked, &queue, 88, &[0x80]);
            queue.block_on(bit).unwrap();
            let above = Device::from_storage(&queue, stacked, &write).unwrap();
            let mut over = false;
            {
                let mut dropped = pin!(above.write_buffer(&queue, 0, vec![1; 4096], 4096));
                let mut left = polls;
                queue.block_on(std::future::poll_fn(|context| {
                    over = dropped.as_mut().poll(context).is_ready();
                    left -= 1;
                    match over || left < 0 {
                        true => std::task::Poll::Ready(()),
                        false => std::task::Poll::Pending,
                    }
                }));
            }
            queue.block_on(queue.drain());
            above.write_blocking(&queue, 8192, &[2; 4096]).unwrap();
            queue.block_on(above.close(&queue)).unwrap();
            if over {
                assert!(polls > 2, "{polls}");
                return;
            }
        }
    }
}
