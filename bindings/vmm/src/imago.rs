//! libkrun, which reads its disks by the crate imago: [`imago::Storage`].
//!
//! libkrun opens an image as `SyncFormatAccess<Box<dyn DynStorage>>`. Over this storage, imago's
//! `Raw` is any image that zebu opens: another format, a snapshot, one of untrusted origin, one
//! on a server.
//!
//! A request lends its memory to its future, which may be dropped while the I/O goes on, so data
//! are copied.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::PreallocateMode;
use imago::storage::drivers::CommonStorageHelper;
use tokio::sync::RwLock;
use zebu::{Preallocation, Queue, Remote, RemoteRequest, SharedDevice, Zeroing};

/// An image that zebu has open.
#[derive(Debug)]
pub struct Storage {
    remote: Remote,
    path: PathBuf,
    /// Is held for reading by changes of the content, until they have ended.
    changes: Arc<RwLock<()>>,
    helper: CommonStorageHelper,
}

impl Storage {
    /// Of an open image, with the name that `Display` shows.
    pub fn new(remote: Remote, path: impl AsRef<Path>) -> Storage {
        Storage {
            remote,
            path: path.as_ref().to_owned(),
            changes: Arc::default(),
            helper: CommonStorageHelper::default(),
        }
    }

    /// Starts a change of the content, and waits for it.
    async fn change<F>(
        &self,
        change: impl FnOnce(Queue, SharedDevice) -> F + Send + 'static,
    ) -> io::Result<()>
    where
        F: Future<Output = zebu::Result<()>> + 'static,
    {
        let under_way = self.changes.clone().read_owned().await;
        let request: RemoteRequest<()> = self.remote.run(|queue, device| async move {
            let result = change(queue, device).await;
            drop(under_way);
            result
        });
        request.await.map_err(crate::io_error)
    }

    async fn zero(&self, offset: u64, length: u64, zeroing: Zeroing) -> io::Result<()> {
        self.change(move |queue, device| async move {
            let device = device.enter().await?;
            device.write_zeroes(&queue, offset, length, zeroing).await
        })
        .await
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "zebu:{}", self.path.display())
    }
}

impl imago::Storage for Storage {
    fn size(&self) -> io::Result<u64> {
        let queue = Queue::new(Default::default())?;
        let device = queue.block_on(self.remote.device().enter());
        Ok(device.map_err(crate::io_error)?.size())
    }

    fn get_filename(&self) -> Option<PathBuf> {
        Some(self.path.clone())
    }

    async unsafe fn pure_readv(&self, mut memory: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let length = memory.len();
        let read = self.remote.run(move |queue, device| async move {
            let device = device.enter().await?;
            let mut data = zebu::Buffer::try_new(length as usize)?;
            // What lies behind the end reads as zeroes, which a new buffer holds.
            let inside = length.min(device.size().saturating_sub(offset)) as usize;
            let result;
            (data, result) = device.read_buffer(&queue, offset, data, inside).await;
            result.map(|()| data)
        });
        let data = read.await.map_err(crate::io_error)?;
        memory.copy_from_slice(&data);
        Ok(())
    }

    async unsafe fn pure_writev(&self, memory: IoVector<'_>, offset: u64) -> io::Result<()> {
        let length = memory.len() as usize;
        let mut data = zebu::Buffer::try_new(length)?;
        memory.copy_into_slice(&mut data);
        self.change(move |queue, device| async move {
            let device = device.enter().await?;
            device.write_buffer(&queue, offset, data, length).await.1
        })
        .await
    }

    async unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero(offset, length, Zeroing::Unmap).await
    }

    async unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero(offset, length, Zeroing::Keep).await
    }

    async unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.change(move |queue, device| async move {
            device.enter().await?.discard(&queue, offset, length).await
        })
        .await
    }

    async fn flush(&self) -> io::Result<()> {
        // Nothing is held back that `sync` does not write.
        Ok(())
    }

    async fn sync(&self) -> io::Result<()> {
        self.remote.flush().await.map_err(crate::io_error)
    }

    async fn settle_writes(&self) -> io::Result<()> {
        // The lock is fair: it waits for all that came before, and for nothing that comes later.
        drop(self.changes.write().await);
        Ok(())
    }

    async unsafe fn invalidate_cache(&self) -> io::Result<()> {
        // The image is locked, so what is cached is valid.
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    async fn resize(&self, new_size: u64, mode: PreallocateMode) -> io::Result<()> {
        let mode = match mode {
            // What is new reads as zeroes in any image.
            PreallocateMode::None | PreallocateMode::Zero => Preallocation::Off,
            PreallocateMode::Allocate => Preallocation::Falloc,
            PreallocateMode::WriteData => Preallocation::Full,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        self.change(move |queue, device| async move {
            let is_smaller = new_size < device.enter().await?.size();
            let mode = if is_smaller { Preallocation::Off } else { mode };
            device.resize(&queue, new_size, mode).await
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;
    use futures::future::join_all;
    use imago::raw::Raw;
    use imago::{DynStorage, Storage as _, StorageExt, SyncFormatAccess};

    use super::*;
    use crate::tests::{SIZE, new_image, pattern};

    fn storage(directory: &tempfile::TempDir) -> Storage {
        let path = directory.path().join("a.qcow2");
        Storage::new(new_image(&path), &path)
    }

    #[test]
    fn as_libkrun_uses_it() {
        let directory = tempfile::tempdir().unwrap();
        let storage: Box<dyn DynStorage> = Box::new(storage(&directory));
        let raw = Raw::open_image_sync(storage, true).unwrap();
        let mut disk = SyncFormatAccess::new(raw).unwrap();
        assert_eq!(disk.size(), SIZE);
        disk.write(&pattern(1, 100_000)[..], 12345).unwrap();
        let mut bytes = vec![0; 100_000];
        disk.read(&mut bytes[..], 12345).unwrap();
        assert_eq!(bytes, pattern(1, 100_000));
        disk.write_zeroes(12345, 5000).unwrap();
        disk.discard_to_zero(65536, 4096).unwrap();
        disk.discard_to_any(1 << 20, 65536).unwrap();
        disk.flush().unwrap();
        disk.sync().unwrap();
        disk.read(&mut bytes[..], 12345).unwrap();
        assert_eq!(bytes[..5000], [0; 5000]);
        let hole = 65536 - 12345..65536 - 12345 + 4096;
        assert_eq!(bytes[hole.clone()], [0; 4096]);
        let expected = pattern(1, 100_000);
        assert_eq!(bytes[5000..hole.start], expected[5000..hole.start]);
        assert_eq!(bytes[hole.end..], expected[hole.end..]);
    }

    #[test]
    fn many_requests_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let storage = storage(&directory);
        let pieces: Vec<_> = (0..128).map(|number| pattern(number, 4096)).collect();
        block_on(async {
            let at = |number: usize| number as u64 * 12288;
            let writes = pieces.iter().enumerate();
            let writes = writes.map(|(number, piece)| storage.write(&piece[..], at(number)));
            for written in join_all(writes).await {
                written.unwrap();
            }
            storage.sync().await.unwrap();
            let mut read = vec![vec![0; 4096]; 128];
            let reads = read.iter_mut().enumerate();
            let reads = reads.map(|(number, piece)| storage.read(&mut piece[..], at(number)));
            for result in join_all(reads).await {
                result.unwrap();
            }
            assert_eq!(read, pieces);
        });
    }

    #[test]
    fn a_write_goes_on_when_its_future_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let storage = storage(&directory);
        let piece = pattern(3, 1 << 20);
        block_on(async {
            let mut write = Box::pin(storage.write(&piece[..], 0));
            // The first poll sends it.
            let _ = futures::poll!(write.as_mut());
            drop(write);
            storage.settle_writes().await.unwrap();
            let mut read = vec![0; 1 << 20];
            storage.read(&mut read[..], 0).await.unwrap();
            assert_eq!(read, piece);
        });
    }

    #[test]
    fn the_end_of_the_disk() {
        let directory = tempfile::tempdir().unwrap();
        let storage = storage(&directory);
        assert_eq!(
            storage.to_string(),
            format!("zebu:{}", storage.path.display())
        );
        block_on(async {
            let mut bytes = vec![9; 1024];
            storage.read(&mut bytes[..], SIZE - 512).await.unwrap();
            assert_eq!(bytes, [0; 1024]);
            assert!(storage.write(&bytes[..], SIZE - 512).await.is_err());
            storage
                .resize(2 * SIZE, PreallocateMode::None)
                .await
                .unwrap();
            storage.write(&bytes[..], SIZE - 512).await.unwrap();
        });
        assert_eq!(storage.size().unwrap(), 2 * SIZE);
    }
}
