//! OpenVMM: `DiskIo`, a disk behind its NVMe, SCSI and IDE devices.
//!
//! A request lends the guest's memory to its future, which may be dropped while the I/O goes on, so
//! data are copied.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};

use zebu::{ErrorKind, Preallocation, Remote, Zeroing};

use shape::{DiskError, DiskIo, RequestBuffers, UnmapBehavior};

/// What the trait looks like, from `vm/devices/storage/disk_backend/src/lib.rs` and
/// `scsi_buffers/src/lib.rs` of OpenVMM (MIT, 2026). It also wants `Inspect`, which its derive
/// macro gives; errors that no disk of zebu has, persistent reservations and ejection, which have
/// defaults, are left out.
pub mod shape {
    use std::future::Future;
    use std::io;
    use std::sync::Mutex;

    /// Why a request failed.
    #[derive(Debug)]
    pub enum DiskError {
        /// It is not inside the disk.
        IllegalBlock,
        /// It is no whole number of sectors.
        InvalidInput,
        /// The disk failed.
        Io(io::Error),
        /// The guest's memory cannot be used.
        MemoryAccess(AccessError),
        /// The disk is only read.
        ReadOnly,
    }

    /// Of the guest's memory.
    #[derive(Debug)]
    pub struct AccessError;

    impl From<AccessError> for DiskError {
        fn from(error: AccessError) -> Self {
            DiskError::MemoryAccess(error)
        }
    }

    /// What a discarded sector reads as.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum UnmapBehavior {
        /// Anything.
        Unspecified,
        /// What it was.
        Ignored,
        /// Zeroes.
        Zeroes,
    }

    /// Writes to the guest's memory, one piece behind the other.
    pub trait MemoryWrite {
        /// The next piece.
        ///
        /// # Errors
        /// If it does not fit.
        fn write(&mut self, data: &[u8]) -> Result<(), AccessError>;
    }

    /// Reads the guest's memory, one piece behind the other.
    pub trait MemoryRead {
        /// The next piece.
        ///
        /// # Errors
        /// If there is not so much.
        fn read(&mut self, data: &mut [u8]) -> Result<&mut Self, AccessError>;
    }

    /// The memory of a request, here a range of memory that stands for the guest's.
    #[derive(Clone, Debug)]
    pub struct RequestBuffers<'a> {
        memory: &'a Mutex<Vec<u8>>,
        start: usize,
        length: usize,
    }

    struct Cursor<'a>(RequestBuffers<'a>);

    impl<'a> RequestBuffers<'a> {
        /// The range of the memory.
        pub fn new(memory: &'a Mutex<Vec<u8>>, start: usize, length: usize) -> Self {
            RequestBuffers {
                memory,
                start,
                length,
            }
        }

        /// In bytes.
        #[expect(clippy::len_without_is_empty, reason = "the adapter needs no more")]
        pub fn len(&self) -> usize {
            self.length
        }

        /// For reads of the disk.
        pub fn writer(&self) -> impl MemoryWrite + '_ {
            Cursor(self.clone())
        }

        /// For writes to the disk.
        pub fn reader(&self) -> impl MemoryRead + '_ {
            Cursor(self.clone())
        }
    }

    impl Cursor<'_> {
        fn next(&mut self, length: usize, copy: impl FnOnce(&mut [u8])) -> Result<(), AccessError> {
            let buffers = &mut self.0;
            let mut memory = buffers.memory.lock().map_err(|_| AccessError)?;
            let end = buffers.start + length;
            let piece = memory.get_mut(buffers.start..end).ok_or(AccessError)?;
            copy(piece);
            buffers.start = end;
            Ok(())
        }
    }

    impl MemoryWrite for Cursor<'_> {
        fn write(&mut self, data: &[u8]) -> Result<(), AccessError> {
            self.next(data.len(), |piece| piece.copy_from_slice(data))
        }
    }

    impl MemoryRead for Cursor<'_> {
        fn read(&mut self, data: &mut [u8]) -> Result<&mut Self, AccessError> {
            self.next(data.len(), |piece| data.copy_from_slice(piece))?;
            Ok(self)
        }
    }

    /// A disk. Requests outside of it are errors, whatever the guest asks.
    #[expect(missing_docs, reason = "the names say it")]
    pub trait DiskIo: 'static + Send + Sync {
        fn disk_type(&self) -> &str;
        fn sector_count(&self) -> u64;
        fn sector_size(&self) -> u32;
        fn disk_id(&self) -> Option<[u8; 16]>;
        fn physical_sector_size(&self) -> u32;
        /// Whether writes with `fua` are durable at their end.
        fn is_fua_respected(&self) -> bool;
        fn is_read_only(&self) -> bool;
        fn unmap(
            &self,
            sector: u64,
            count: u64,
            block_level_only: bool,
        ) -> impl Future<Output = Result<(), DiskError>> + Send;
        fn unmap_behavior(&self) -> UnmapBehavior;
        /// In sectors.
        fn optimal_unmap_sectors(&self) -> u32 {
            1
        }
        fn read_vectored(
            &self,
            buffers: &RequestBuffers<'_>,
            sector: u64,
        ) -> impl Future<Output = Result<(), DiskError>> + Send;
        fn write_vectored(
            &self,
            buffers: &RequestBuffers<'_>,
            sector: u64,
            fua: bool,
        ) -> impl Future<Output = Result<(), DiskError>> + Send;
        fn sync_cache(&self) -> impl Future<Output = Result<(), DiskError>> + Send;
        /// Waits until the number of sectors is not this one.
        fn wait_resize(&self, sector_count: u64) -> impl Future<Output = u64> + Send {
            let _ = sector_count;
            std::future::pending()
        }
    }
}

const SECTOR: u64 = 512;

/// A disk.
#[derive(Debug)]
pub struct Disk {
    remote: Remote,
    sectors: AtomicU64,
    is_read_only: bool,
    /// Bytes of a cluster.
    cluster: u64,
    /// Of [`DiskIo::wait_resize`].
    waiting: Mutex<Vec<Waker>>,
}

fn disk_error(error: zebu::Error) -> DiskError {
    match error.kind() {
        ErrorKind::OutOfRange => DiskError::IllegalBlock,
        ErrorKind::NotPermitted => DiskError::ReadOnly,
        _ => DiskError::Io(crate::io_error(error)),
    }
}

impl Disk {
    /// Of an open image. A part of a sector at its end is not shown.
    ///
    /// # Errors
    /// If the image is closed.
    pub async fn new(remote: Remote) -> zebu::Result<Disk> {
        let device = remote.device().enter().await?;
        let (size, is_read_only) = (device.size(), !device.is_writable());
        let cluster = device.top().cluster_size().unwrap_or(SECTOR);
        drop(device);
        Ok(Disk {
            remote,
            sectors: AtomicU64::new(size / SECTOR),
            is_read_only,
            cluster,
            waiting: Mutex::default(),
        })
    }

    /// Changes the number of sectors.
    ///
    /// # Errors
    /// Those of [`zebu::SharedDevice::resize`], and EFBIG if the size has no 64 bits.
    pub async fn resize(&self, sectors: u64) -> zebu::Result<()> {
        let too_large = || std::io::Error::from_raw_os_error(libc::EFBIG);
        let size = sectors.checked_mul(SECTOR).ok_or_else(too_large)?;
        let resize = self.remote.run(move |queue, device| async move {
            let mode = Preallocation::Off;
            device.resize(&queue, size, mode).await
        });
        resize.await?;
        self.sectors.store(sectors, Ordering::Release);
        let mut waiting = self.waiting.lock().unwrap_or_else(|e| e.into_inner());
        waiting.drain(..).for_each(Waker::wake);
        Ok(())
    }

    /// The offset in bytes of a range that is inside the disk.
    fn offset(&self, sector: u64, count: u64) -> Result<u64, DiskError> {
        match sector.checked_add(count) {
            Some(end) if end <= self.sector_count() => Ok(sector * SECTOR),
            _ => Err(DiskError::IllegalBlock),
        }
    }

    /// The same for the sectors of the buffers.
    fn offset_of(&self, sector: u64, buffers: &RequestBuffers<'_>) -> Result<u64, DiskError> {
        let length = buffers.len() as u64;
        match length.is_multiple_of(SECTOR) {
            true => self.offset(sector, length / SECTOR),
            false => Err(DiskError::InvalidInput),
        }
    }
}

impl DiskIo for Disk {
    fn disk_type(&self) -> &str {
        "zebu"
    }

    fn sector_count(&self) -> u64 {
        self.sectors.load(Ordering::Acquire)
    }

    fn sector_size(&self) -> u32 {
        SECTOR as u32
    }

    fn disk_id(&self) -> Option<[u8; 16]> {
        None
    }

    fn physical_sector_size(&self) -> u32 {
        4096
    }

    fn is_fua_respected(&self) -> bool {
        true
    }

    fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    async fn unmap(&self, sector: u64, count: u64, _block_only: bool) -> Result<(), DiskError> {
        let offset = self.offset(sector, count)?;
        let zeroes = self
            .remote
            .write_zeroes(offset, count * SECTOR, Zeroing::Unmap);
        zeroes.await.map_err(disk_error)
    }

    fn unmap_behavior(&self) -> UnmapBehavior {
        match self.is_read_only {
            true => UnmapBehavior::Ignored,
            false => UnmapBehavior::Zeroes,
        }
    }

    fn optimal_unmap_sectors(&self) -> u32 {
        (self.cluster / SECTOR).try_into().unwrap_or(1)
    }

    async fn read_vectored(
        &self,
        buffers: &RequestBuffers<'_>,
        sector: u64,
    ) -> Result<(), DiskError> {
        use shape::MemoryWrite;
        let offset = self.offset_of(sector, buffers)?;
        let data = self.remote.read(offset, buffers.len()).await;
        buffers.writer().write(&data.map_err(disk_error)?)?;
        Ok(())
    }

    async fn write_vectored(
        &self,
        buffers: &RequestBuffers<'_>,
        sector: u64,
        fua: bool,
    ) -> Result<(), DiskError> {
        use shape::MemoryRead;
        let offset = self.offset_of(sector, buffers)?;
        let mut data = zebu::Buffer::new(buffers.len());
        buffers.reader().read(&mut data)?;
        let written = self.remote.write(offset, data).await;
        written.map_err(disk_error)?;
        match fua {
            true => self.sync_cache().await,
            false => Ok(()),
        }
    }

    async fn sync_cache(&self) -> Result<(), DiskError> {
        self.remote.flush().await.map_err(disk_error)
    }

    async fn wait_resize(&self, sector_count: u64) -> u64 {
        std::future::poll_fn(|context| {
            // Under the lock, so that no change is missed.
            let mut waiting = self.waiting.lock().unwrap_or_else(|e| e.into_inner());
            let now = self.sector_count();
            if now != sector_count {
                return Poll::Ready(now);
            }
            waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;
    use futures::future::{join, join_all};

    use super::*;
    use crate::tests::{SIZE, new_image, pattern};

    fn disk(directory: &tempfile::TempDir) -> Disk {
        block_on(Disk::new(new_image(&directory.path().join("a.qcow2")))).unwrap()
    }

    #[test]
    fn many_requests_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let disk = disk(&directory);
        let content: Vec<u8> = (0..128).flat_map(|number| pattern(number, 4096)).collect();
        let memory = Mutex::new(content.clone());
        let buffers = |number: usize| RequestBuffers::new(&memory, number * 4096, 4096);
        let requests: Vec<_> = (0..128).map(buffers).collect();
        block_on(async {
            let writes = requests.iter().enumerate();
            let writes = writes.map(|(n, b)| disk.write_vectored(b, n as u64 * 24, n == 127));
            for result in join_all(writes).await {
                result.unwrap();
            }
            disk.sync_cache().await.unwrap();
            memory.lock().unwrap().fill(0);
            let reads = requests.iter().enumerate();
            let reads = reads.map(|(n, b)| disk.read_vectored(b, n as u64 * 24));
            for result in join_all(reads).await {
                result.unwrap();
            }
            assert!(*memory.lock().unwrap() == content);
            disk.unmap(0, 4, false).await.unwrap();
            disk.read_vectored(&requests[0], 0).await.unwrap();
        });
        let memory = memory.lock().unwrap();
        assert_eq!(memory[..2048], [0; 2048]);
        assert_eq!(memory[2048..4096], content[2048..4096]);
    }

    #[test]
    fn a_guest_cannot_leave_the_disk() {
        let directory = tempfile::tempdir().unwrap();
        let disk = disk(&directory);
        let memory = Mutex::new(vec![1; 4096]);
        let sectors = SIZE / SECTOR;
        assert_eq!(disk.sector_count(), sectors);
        block_on(async {
            for sector in [sectors - 7, sectors, u64::MAX] {
                let buffers = RequestBuffers::new(&memory, 0, 4096);
                let read = disk.read_vectored(&buffers, sector).await;
                assert!(matches!(read, Err(DiskError::IllegalBlock)));
                let write = disk.write_vectored(&buffers, sector, false).await;
                assert!(matches!(write, Err(DiskError::IllegalBlock)));
                let unmap = disk.unmap(sector, 8, false).await;
                assert!(matches!(unmap, Err(DiskError::IllegalBlock)));
            }
            let odd = RequestBuffers::new(&memory, 0, 100);
            let write = disk.write_vectored(&odd, 0, false).await;
            assert!(matches!(write, Err(DiskError::InvalidInput)));
            let outside = RequestBuffers::new(&memory, 4096, 512);
            let write = disk.write_vectored(&outside, 0, false).await;
            assert!(matches!(write, Err(DiskError::MemoryAccess(_))));
        });
    }

    #[test]
    fn a_new_size_wakes_the_front_end() {
        let directory = tempfile::tempdir().unwrap();
        let disk = disk(&directory);
        let sectors = disk.sector_count();
        let (woken, resized) = block_on(join(disk.wait_resize(sectors), disk.resize(2 * sectors)));
        resized.unwrap();
        assert_eq!(woken, 2 * sectors);
    }
}
