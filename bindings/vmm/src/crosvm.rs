//! crosvm: `DiskFile`, a disk for any thread, and `AsyncDisk`, the same on the executor of its
//! block device.
//!
//! Requests hold a reference to the guest's memory, so nothing is copied.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use zebu::{Iov, Preallocation, Queue, Remote, Zeroing};

use shape::{
    AsRawDescriptors, AsyncDisk, BackingMemory, DiskFile, DiskGetLen, Error, Executor,
    FileAllocate, FileSetLen, MemRegion, RawDescriptor, Result, ToAsyncDisk,
};

/// What the traits look like, from `disk/src/disk.rs` and `cros_async/src/mem.rs` of crosvm
/// (BSD-3-Clause, 2026). `DiskFile` also wants `FileReadWriteAtVolatile`; only sparse disks,
/// which are a format of their own, are read by it.
pub mod shape {
    use std::fmt::Debug;
    use std::io;
    use std::sync::Arc;

    use async_trait::async_trait;
    pub use vm_memory::VolatileSlice;

    /// The descriptor of a file.
    pub type RawDescriptor = std::os::fd::RawFd;

    /// Why a request failed.
    #[derive(Debug)]
    #[expect(missing_docs, reason = "the names say it")]
    pub enum Error {
        GuestMemory(String),
        IoFdatasync(io::Error),
        IoFsync(io::Error),
        PunchHole(io::Error),
        ReadingData(io::Error),
        WriteZeroes(io::Error),
        WritingData(io::Error),
    }

    /// The result of a request.
    pub type Result<T> = std::result::Result<T, Error>;

    /// The executor that polls the futures of an `AsyncDisk`.
    #[derive(Debug)]
    pub struct Executor;

    /// A range of a [`BackingMemory`].
    #[derive(Clone, Copy, Debug)]
    pub struct MemRegion {
        /// In bytes.
        pub offset: u64,
        /// In bytes.
        pub len: usize,
    }

    /// The ranges of a request.
    pub type MemRegionIter<'a> = std::iter::Copied<std::slice::Iter<'a, MemRegion>>;

    /// The guest's memory.
    ///
    /// # Safety
    /// It may be changed at any time without harm, and stays where it is.
    pub unsafe trait BackingMemory {
        /// The range.
        ///
        /// # Errors
        /// If it is not inside.
        fn get_volatile_slice(
            &self,
            range: MemRegion,
        ) -> std::result::Result<VolatileSlice<'_>, String>;
    }

    /// Its length.
    pub trait DiskGetLen {
        /// In bytes.
        ///
        /// # Errors
        /// If it is not known.
        fn get_len(&self) -> io::Result<u64>;
    }

    /// Changes its length.
    pub trait FileSetLen {
        /// In bytes.
        ///
        /// # Errors
        /// If it cannot be changed.
        fn set_len(&self, length: u64) -> io::Result<()>;
    }

    /// Reserves space.
    pub trait FileAllocate {
        /// For a range in bytes.
        ///
        /// # Errors
        /// If there is none.
        fn allocate(&mut self, offset: u64, length: u64) -> io::Result<()>;
    }

    /// The descriptors that a sandbox leaves open.
    pub trait AsRawDescriptors {
        /// All of them.
        fn as_raw_descriptors(&self) -> Vec<RawDescriptor>;
    }

    /// A disk for any thread.
    pub trait DiskFile:
        FileSetLen + DiskGetLen + ToAsyncDisk + Send + AsRawDescriptors + Debug
    {
        /// The same disk once more.
        ///
        /// # Errors
        /// If that is not supported.
        fn try_clone(&self) -> io::Result<Box<dyn DiskFile>>;
    }

    /// A disk that can be used by an executor.
    pub trait ToAsyncDisk: AsRawDescriptors + DiskGetLen + Send {
        /// The disk for the executor.
        ///
        /// # Errors
        /// If it has no room.
        fn to_async_disk(self: Box<Self>, executor: &Executor) -> Result<Box<dyn AsyncDisk>>;
    }

    /// A disk on an executor.
    #[async_trait(?Send)]
    #[expect(missing_docs, reason = "the names say it")]
    pub trait AsyncDisk: DiskGetLen + FileSetLen + FileAllocate {
        fn into_inner(self: Box<Self>) -> Box<dyn DiskFile>;
        async fn fsync(&self) -> Result<()>;
        async fn fdatasync(&self) -> Result<()>;
        /// Returns the bytes read.
        async fn read_to_mem<'a>(
            &'a self,
            file_offset: u64,
            mem: Arc<dyn BackingMemory + Send + Sync>,
            mem_offsets: MemRegionIter<'a>,
        ) -> Result<usize>;
        /// Returns the bytes written.
        async fn write_from_mem<'a>(
            &'a self,
            file_offset: u64,
            mem: Arc<dyn BackingMemory + Send + Sync>,
            mem_offsets: MemRegionIter<'a>,
        ) -> Result<usize>;
        async fn punch_hole(&self, file_offset: u64, length: u64) -> Result<()>;
        async fn write_zeroes_at(&self, file_offset: u64, length: u64) -> Result<()>;
    }
}

/// A disk: both traits have the same threads.
#[derive(Clone, Debug)]
pub struct Disk(Arc<Remote>);

type Memory = Arc<dyn BackingMemory + Send + Sync>;

#[derive(Clone, Copy, Debug)]
enum Direction {
    Read,
    Write,
}

impl Disk {
    /// Of an open image.
    pub fn new(remote: Remote) -> Disk {
        Disk(Arc::new(remote))
    }

    /// Reads or writes the regions of the memory, which stays as long as the request.
    async fn transfer(
        &self,
        direction: Direction,
        offset: u64,
        memory: Memory,
        regions: Vec<MemRegion>,
    ) -> Result<zebu::Result<usize>> {
        // So that an error of the memory is none of the disk.
        for region in &regions {
            memory
                .get_volatile_slice(*region)
                .map_err(Error::GuestMemory)?;
        }
        let request = self.0.run(move |queue, device| async move {
            let device = device.enter().await?;
            let segments: Vec<_> = regions
                .iter()
                .filter_map(|region| memory.get_volatile_slice(*region).ok())
                .map(|slice| (slice.ptr_guard_mut().as_ptr(), slice.len()))
                .collect();
            // SAFETY: the memory outlives this future, and may be changed at any time.
            let iov = unsafe { Iov::from_segments(&segments) }.shared();
            match direction {
                Direction::Read => device.read(&queue, offset, &iov).await?,
                Direction::Write => device.write(&queue, offset, &iov).await?,
            }
            Ok(iov.len())
        });
        Ok(request.await)
    }

    /// Waits for a request, on a thread that may wait.
    fn wait<T>(&self, request: impl Future<Output = zebu::Result<T>>) -> io::Result<T> {
        let queue = Queue::new(Default::default())?;
        queue.block_on(request).map_err(crate::io_error)
    }
}

impl DiskGetLen for Disk {
    fn get_len(&self) -> io::Result<u64> {
        self.wait(async { Ok(self.0.device().enter().await?.size()) })
    }
}

impl FileSetLen for Disk {
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.wait(self.0.run(move |queue, device| async move {
            device.resize(&queue, length, Preallocation::Off).await
        }))
    }
}

impl FileAllocate for Disk {
    fn allocate(&mut self, _offset: u64, _length: u64) -> io::Result<()> {
        // Clusters are allocated when they are written.
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl AsRawDescriptors for Disk {
    fn as_raw_descriptors(&self) -> Vec<RawDescriptor> {
        use std::os::fd::{AsFd, AsRawFd};
        let files = self.wait(async {
            let device = self.0.device().enter().await?;
            let storages = device.all_layers().flat_map(|layer| layer.storages());
            let descriptor = |storage: Arc<dyn zebu::Storage>| {
                storage.host_file().map(|file| file.as_fd().as_raw_fd())
            };
            Ok(storages.filter_map(descriptor).collect())
        });
        // A closed disk has none.
        files.unwrap_or_default()
    }
}

impl DiskFile for Disk {
    fn try_clone(&self) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(self.clone()))
    }
}

impl ToAsyncDisk for Disk {
    fn to_async_disk(self: Box<Self>, _executor: &Executor) -> Result<Box<dyn AsyncDisk>> {
        Ok(self)
    }
}

#[async_trait(?Send)]
impl AsyncDisk for Disk {
    fn into_inner(self: Box<Self>) -> Box<dyn DiskFile> {
        self
    }

    async fn fsync(&self) -> Result<()> {
        let flushed = self.0.flush().await;
        flushed.map_err(|e| Error::IoFsync(crate::io_error(e)))
    }

    async fn fdatasync(&self) -> Result<()> {
        let flushed = self.0.flush().await;
        flushed.map_err(|e| Error::IoFdatasync(crate::io_error(e)))
    }

    async fn read_to_mem<'a>(
        &'a self,
        file_offset: u64,
        mem: Memory,
        mem_offsets: shape::MemRegionIter<'a>,
    ) -> Result<usize> {
        let regions = mem_offsets.collect();
        let read = self.transfer(Direction::Read, file_offset, mem, regions);
        let read = read.await?;
        read.map_err(|e| Error::ReadingData(crate::io_error(e)))
    }

    async fn write_from_mem<'a>(
        &'a self,
        file_offset: u64,
        mem: Memory,
        mem_offsets: shape::MemRegionIter<'a>,
    ) -> Result<usize> {
        let regions = mem_offsets.collect();
        let written = self.transfer(Direction::Write, file_offset, mem, regions);
        let written = written.await?;
        written.map_err(|e| Error::WritingData(crate::io_error(e)))
    }

    async fn punch_hole(&self, file_offset: u64, length: u64) -> Result<()> {
        // A hole reads as zeroes, which a discard does not promise.
        let zeroes = self.0.write_zeroes(file_offset, length, Zeroing::Unmap);
        let punched = zeroes.await;
        punched.map_err(|e| Error::PunchHole(crate::io_error(e)))
    }

    async fn write_zeroes_at(&self, file_offset: u64, length: u64) -> Result<()> {
        let zeroes = self.0.write_zeroes(file_offset, length, Zeroing::Keep);
        let written = zeroes.await;
        written.map_err(|e| Error::WriteZeroes(crate::io_error(e)))
    }
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;
    use futures::future::join_all;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

    use super::*;
    use crate::tests::{SIZE, new_image, pattern};

    struct Guest(GuestMemoryMmap);

    // SAFETY: it is mapped as long as it exists, and its slices are volatile.
    unsafe impl BackingMemory for Guest {
        fn get_volatile_slice(
            &self,
            range: MemRegion,
        ) -> std::result::Result<VolatileSlice<'_>, String> {
            let slice = self.0.get_slice(GuestAddress(range.offset), range.len);
            slice.map_err(|e| e.to_string())
        }
    }

    #[test]
    fn a_guest_reads_what_it_has_written() {
        let directory = tempfile::tempdir().unwrap();
        let disk: Box<dyn DiskFile> =
            Box::new(Disk::new(new_image(&directory.path().join("a.qcow2"))));
        assert_eq!(disk.as_raw_descriptors().len(), 1);
        let copy = disk.try_clone().unwrap();
        let disk = disk.to_async_disk(&Executor).unwrap();
        let ranges = [(GuestAddress(0), 4 << 20)];
        let memory = Arc::new(Guest(GuestMemoryMmap::from_ranges(&ranges).unwrap()));
        let region = |offset, len| MemRegion { offset, len };
        let regions: Vec<_> = (0..128u64)
            .map(|n| [region(n * 8192, 512), region(n * 8192 + 4096, 1536)])
            .collect();
        for (number, [first, second]) in regions.iter().enumerate() {
            let bytes = pattern(number, 2048);
            let write = |bytes: &[u8], at| memory.0.write_slice(bytes, GuestAddress(at)).unwrap();
            write(&bytes[..512], first.offset);
            write(&bytes[512..], second.offset);
        }
        block_on(async {
            let writes = regions.iter().enumerate().map(|(number, regions)| {
                let at = number as u64 * 10240;
                disk.write_from_mem(at, memory.clone(), regions.iter().copied())
            });
            for written in join_all(writes).await {
                assert_eq!(written.unwrap(), 2048);
            }
            disk.fsync().await.unwrap();
            disk.fdatasync().await.unwrap();
            memory
                .0
                .write_slice(&vec![0; 2 << 20], GuestAddress(0))
                .unwrap();
            let reads = regions.iter().enumerate().map(|(number, regions)| {
                let at = number as u64 * 10240;
                disk.read_to_mem(at, memory.clone(), regions.iter().copied())
            });
            for read in join_all(reads).await {
                assert_eq!(read.unwrap(), 2048);
            }
        });
        for (number, [first, second]) in regions.iter().enumerate() {
            let mut bytes = vec![0; 2048];
            let (start, end) = bytes.split_at_mut(512);
            let read = |bytes: &mut [u8], at| memory.0.read_slice(bytes, GuestAddress(at)).unwrap();
            read(start, first.offset);
            read(end, second.offset);
            assert_eq!(bytes, pattern(number, 2048));
        }
        assert_eq!(disk.into_inner().get_len().unwrap(), SIZE);
        copy.set_len(2 * SIZE).unwrap();
        assert_eq!(copy.get_len().unwrap(), 2 * SIZE);
    }

    #[test]
    fn holes_zeroes_and_errors() {
        let directory = tempfile::tempdir().unwrap();
        let image = new_image(&directory.path().join("a.qcow2"));
        let disk = Box::new(Disk::new(image)).to_async_disk(&Executor).unwrap();
        let ranges = [(GuestAddress(0), 65536)];
        let memory = Arc::new(Guest(GuestMemoryMmap::from_ranges(&ranges).unwrap()));
        let fill = |byte| {
            let bytes = vec![byte; 65536];
            memory.0.write_slice(&bytes, GuestAddress(0)).unwrap();
        };
        let all = [MemRegion {
            offset: 0,
            len: 65536,
        }];
        let outside = [MemRegion {
            offset: 1,
            len: 65536,
        }];
        block_on(async {
            fill(5);
            let write = |at| disk.write_from_mem(at, memory.clone(), all.iter().copied());
            write(0).await.unwrap();
            disk.punch_hole(0, 4096).await.unwrap();
            disk.write_zeroes_at(8192, 4096).await.unwrap();
            let refused = write(SIZE - 512).await;
            assert!(matches!(refused, Err(Error::WritingData(_))));
            let refused = disk.read_to_mem(0, memory.clone(), outside.iter().copied());
            assert!(matches!(refused.await, Err(Error::GuestMemory(_))));
            fill(9);
            let read = disk.read_to_mem(0, memory.clone(), all.iter().copied());
            read.await.unwrap();
        });
        let mut bytes = vec![0; 65536];
        memory.0.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        let expected = |at| match at / 4096 {
            0 | 2 => 0,
            _ => 5,
        };
        assert!((0..65536).all(|at| bytes[at] == expected(at)));
    }
}
