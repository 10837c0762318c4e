//! cloud-hypervisor: `AsyncIo`, the I/O of one virtqueue.
//!
//! The monitor submits operations, waits for an `EventFd`, and takes completions. Operations own
//! the memory that they read or write, so nothing is copied.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zebu::{Device, InUse, Iov, Queue, Remote, Zeroing};

use shape::{AsyncIo, AsyncIoCompletion, AsyncIoError, AsyncIoOperation, AsyncIoResult};

/// What the trait looks like, from `block/src/io/async_io.rs` of cloud-hypervisor (Apache-2.0 and
/// BSD-3-Clause, August 2026). Buffers have the methods that an adapter needs.
pub mod shape {
    use std::io;
    use std::sync::Arc;

    use libc::{iovec, off_t};
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
    use vmm_sys_util::eventfd::EventFd;

    /// A submission that was refused.
    #[derive(Debug)]
    pub enum AsyncIoError {
        /// Of a read.
        ReadVectored(io::Error),
        /// Of a write.
        WriteVectored(io::Error),
        /// Of a flush.
        Fsync(io::Error),
        /// Of a discard.
        PunchHole(io::Error),
        /// Of zeroes.
        WriteZeroes(io::Error),
        /// Of a batch.
        SubmitBatchRequests(io::Error),
    }

    /// The result of a submission.
    pub type AsyncIoResult<T> = Result<T, AsyncIoError>;

    /// Ranges of a guest's memory, which stay mapped as long as this exists.
    #[derive(Debug)]
    pub struct GuestMemoryTarget {
        _memory: Arc<GuestMemoryMmap>,
        iovecs: Vec<iovec>,
    }

    // SAFETY: the memory of the pointers is kept mapped, and may be used by any thread.
    unsafe impl Send for GuestMemoryTarget {}

    impl GuestMemoryTarget {
        /// Of these ranges: addresses and lengths in bytes.
        ///
        /// # Errors
        /// If they are not inside the memory.
        pub fn new(
            memory: Arc<GuestMemoryMmap>,
            ranges: &[(GuestAddress, u32)],
        ) -> Result<Self, vm_memory::GuestMemoryError> {
            let locate = |(address, length): &(GuestAddress, u32)| -> Result<_, _> {
                let slice = memory.get_slice(*address, *length as usize)?;
                Ok(iovec {
                    iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                    iov_len: slice.len(),
                })
            };
            let iovecs = ranges.iter().map(locate).collect::<Result<_, _>>();
            iovecs.map(|iovecs| GuestMemoryTarget {
                _memory: memory.clone(),
                iovecs,
            })
        }

        /// The ranges where this process has them.
        pub fn iovecs(&self) -> &[iovec] {
            &self.iovecs
        }
    }

    /// Memory of the monitor.
    #[derive(Debug)]
    pub struct OwnedIoBuffer {
        bytes: Vec<u8>,
        iovecs: [iovec; 1],
    }

    // SAFETY: the pointer is to the buffer's own memory.
    unsafe impl Send for OwnedIoBuffer {}

    impl OwnedIoBuffer {
        /// Of these bytes.
        pub fn from_vec(mut bytes: Vec<u8>) -> Self {
            let iovecs = [iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            }];
            OwnedIoBuffer { bytes, iovecs }
        }

        /// Its bytes.
        pub fn as_slice(&self) -> &[u8] {
            &self.bytes
        }

        /// Its memory.
        pub fn iovecs(&self) -> &[iovec] {
            &self.iovecs
        }
    }

    /// A read or a write of data. `user_data` comes back with its completion.
    #[derive(Debug)]
    #[expect(missing_docs, reason = "the names say it")]
    pub enum AsyncIoOperation {
        ReadToMemory {
            offset: off_t,
            target: GuestMemoryTarget,
            user_data: u64,
        },
        WriteFromMemory {
            offset: off_t,
            target: GuestMemoryTarget,
            user_data: u64,
        },
        ReadToVec {
            offset: off_t,
            buffer: OwnedIoBuffer,
            user_data: u64,
        },
        WriteFromVec {
            offset: off_t,
            buffer: OwnedIoBuffer,
            user_data: u64,
        },
    }

    impl AsyncIoOperation {
        /// What comes back.
        pub fn user_data(&self) -> u64 {
            match self {
                Self::ReadToMemory { user_data, .. }
                | Self::WriteFromMemory { user_data, .. }
                | Self::ReadToVec { user_data, .. }
                | Self::WriteFromVec { user_data, .. } => *user_data,
            }
        }

        /// Bytes from the start of the disk.
        pub fn offset(&self) -> off_t {
            match self {
                Self::ReadToMemory { offset, .. }
                | Self::WriteFromMemory { offset, .. }
                | Self::ReadToVec { offset, .. }
                | Self::WriteFromVec { offset, .. } => *offset,
            }
        }

        /// Whether it reads the disk.
        pub fn is_read(&self) -> bool {
            matches!(self, Self::ReadToMemory { .. } | Self::ReadToVec { .. })
        }

        /// The memory, valid as long as the operation exists.
        pub fn iovecs(&self) -> &[iovec] {
            match self {
                Self::ReadToMemory { target, .. } | Self::WriteFromMemory { target, .. } => {
                    target.iovecs()
                }
                Self::ReadToVec { buffer, .. } | Self::WriteFromVec { buffer, .. } => {
                    buffer.iovecs()
                }
            }
        }
    }

    /// The end of a request.
    #[derive(Debug)]
    pub struct AsyncIoCompletion {
        /// As submitted.
        pub user_data: u64,
        /// Bytes, or a negative errno.
        pub result: i32,
        /// The buffer of a read into one.
        pub buffer: Option<OwnedIoBuffer>,
    }

    impl AsyncIoCompletion {
        /// Of the operation.
        pub fn from_operation(operation: AsyncIoOperation, result: i32) -> Self {
            let user_data = operation.user_data();
            let buffer = match operation {
                AsyncIoOperation::ReadToVec { buffer, .. } => Some(buffer),
                _ => None,
            };
            AsyncIoCompletion {
                user_data,
                result,
                buffer,
            }
        }
    }

    /// The I/O of a virtqueue.
    #[expect(missing_docs, reason = "the names say it")]
    pub trait AsyncIo: Send {
        /// Is signalled when requests have ended.
        fn notifier(&self) -> &EventFd;
        fn submit_data_operation(&mut self, op: AsyncIoOperation) -> AsyncIoResult<()>;
        /// Without `user_data` it waits, and has no completion.
        fn fsync(&mut self, user_data: Option<u64>) -> AsyncIoResult<()>;
        fn punch_hole(&mut self, offset: u64, length: u64, user_data: u64) -> AsyncIoResult<()>;
        fn write_zeroes(&mut self, offset: u64, length: u64, user_data: u64) -> AsyncIoResult<()>;
        fn next_completed_request(&mut self) -> Option<AsyncIoCompletion>;
        fn batch_requests_enabled(&self) -> bool {
            false
        }
        /// All or none are submitted.
        fn submit_batch_requests(&mut self, requests: Vec<AsyncIoOperation>) -> AsyncIoResult<()>;
        /// Of memory and offsets, in bytes.
        fn alignment(&self) -> u64 {
            512
        }
    }
}

/// The I/O of one virtqueue of a disk.
///
/// Dropping it neither ends requests in flight nor waits for them: they own their memory.
#[derive(Debug)]
pub struct QueueIo {
    disk: Arc<Remote>,
    ended: Arc<Ended>,
}

#[derive(Debug)]
struct Ended {
    list: Mutex<VecDeque<AsyncIoCompletion>>,
    notifier: EventFd,
}

impl Ended {
    fn lock(&self) -> MutexGuard<'_, VecDeque<AsyncIoCompletion>> {
        self.list.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn add(&self, completion: AsyncIoCompletion) {
        self.lock().push_back(completion);
        // It fails only if nobody has read it 2^64 times.
        let _ = self.notifier.write(1);
    }
}

/// A request, whose completion is added when this is dropped. If the thread that executes it panics, that is
/// an I/O error.
struct Pending {
    ended: Arc<Ended>,
    user_data: u64,
    /// None: it has no data.
    op: Option<AsyncIoOperation>,
    result: i32,
}

impl Pending {
    fn new(ended: Arc<Ended>, user_data: u64, op: Option<AsyncIoOperation>) -> Pending {
        Pending {
            ended,
            user_data,
            op,
            result: -libc::EIO,
        }
    }

    fn end(mut self, result: zebu::Result<usize>) {
        self.result = code(result);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let (user_data, result) = (self.user_data, self.result);
        self.ended.add(match self.op.take() {
            Some(op) => AsyncIoCompletion::from_operation(op, result),
            None => AsyncIoCompletion {
                user_data,
                result,
                buffer: None,
            },
        });
    }
}

/// Bytes, or a negative errno.
fn code(result: zebu::Result<usize>) -> i32 {
    match result {
        Ok(length) => i32::try_from(length).unwrap_or(i32::MAX),
        Err(error) => -error.errno(),
    }
}

async fn transfer(queue: &Queue, device: &Device, op: &AsyncIoOperation) -> zebu::Result<usize> {
    // SAFETY: the operation owns the memory, and outlives this future.
    let iov = unsafe { Iov::from_iovecs(op.iovecs()) }.shared();
    let offset = u64::try_from(op.offset()).map_err(io::Error::other)?;
    match op.is_read() {
        true => device.read(queue, offset, &iov).await?,
        false => device.write(queue, offset, &iov).await?,
    }
    Ok(iov.len())
}

impl QueueIo {
    /// Of a disk. Each virtqueue has one, and all share the `Remote`.
    ///
    /// # Errors
    /// If no descriptor is free.
    pub fn new(disk: Arc<Remote>) -> io::Result<QueueIo> {
        let ended = Arc::new(Ended {
            list: Mutex::default(),
            notifier: EventFd::new(EFD_NONBLOCK)?,
        });
        Ok(QueueIo { disk, ended })
    }

    /// Starts a request without data.
    fn start<F>(&self, user_data: u64, request: impl FnOnce(Queue, InUse) -> F + Send + 'static)
    where
        F: Future<Output = zebu::Result<()>> + 'static,
    {
        let pending = Pending::new(self.ended.clone(), user_data, None);
        drop(self.disk.run(move |queue, device| async move {
            let result = match device.enter().await {
                Ok(device) => request(queue, device).await,
                Err(error) => Err(error),
            };
            pending.end(result.map(|()| 0));
            Ok(())
        }));
    }
}

impl AsyncIo for QueueIo {
    fn notifier(&self) -> &EventFd {
        &self.ended.notifier
    }

    fn submit_data_operation(&mut self, op: AsyncIoOperation) -> AsyncIoResult<()> {
        let pending = Pending::new(self.ended.clone(), op.user_data(), Some(op));
        drop(self.disk.run(move |queue, device| async move {
            let result = match (device.enter().await, &pending.op) {
                (Ok(device), Some(op)) => transfer(&queue, &device, op).await,
                (Ok(_), None) => Ok(0),
                (Err(error), _) => Err(error),
            };
            pending.end(result);
            Ok(())
        }));
        Ok(())
    }

    fn fsync(&mut self, user_data: Option<u64>) -> AsyncIoResult<()> {
        match user_data {
            Some(user_data) => {
                self.start(user_data, |queue, device| async move {
                    device.flush(&queue).await
                });
                Ok(())
            }
            None => {
                let queue = Queue::new(Default::default()).map_err(AsyncIoError::Fsync)?;
                let flushed = queue.block_on(self.disk.flush());
                flushed.map_err(|e| AsyncIoError::Fsync(crate::io_error(e)))
            }
        }
    }

    fn punch_hole(&mut self, offset: u64, length: u64, user_data: u64) -> AsyncIoResult<()> {
        self.start(user_data, move |queue, device| async move {
            device.discard(&queue, offset, length).await
        });
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, length: u64, user_data: u64) -> AsyncIoResult<()> {
        self.start(user_data, move |queue, device| async move {
            let zeroing = Zeroing::Unmap;
            device.write_zeroes(&queue, offset, length, zeroing).await
        });
        Ok(())
    }

    fn next_completed_request(&mut self) -> Option<AsyncIoCompletion> {
        self.ended.lock().pop_front()
    }

    fn batch_requests_enabled(&self) -> bool {
        true
    }

    fn submit_batch_requests(&mut self, requests: Vec<AsyncIoOperation>) -> AsyncIoResult<()> {
        // No submission is ever refused.
        requests
            .into_iter()
            .try_for_each(|op| self.submit_data_operation(op))
    }

    fn alignment(&self) -> u64 {
        // What direct I/O cannot take is copied.
        1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::shape::{GuestMemoryTarget, OwnedIoBuffer};
    use super::*;
    use crate::tests::{SIZE, new_image, pattern};

    /// Waits for so many completions, as the monitor's loop does.
    fn wait(io: &mut QueueIo, count: usize) -> BTreeMap<u64, AsyncIoCompletion> {
        let mut found = BTreeMap::new();
        while found.len() < count {
            let mut poll = libc::pollfd {
                fd: std::os::fd::AsRawFd::as_raw_fd(io.notifier()),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one element.
            assert_eq!(unsafe { libc::poll(&mut poll, 1, 10_000) }, 1);
            io.notifier().read().unwrap();
            while let Some(end) = io.next_completed_request() {
                found.insert(end.user_data, end);
            }
        }
        found
    }

    #[test]
    fn a_guest_reads_what_it_has_written() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Arc::new(new_image(&directory.path().join("a.qcow2")));
        let mut io = QueueIo::new(disk).unwrap();
        let ranges = [(GuestAddress(0), 4 << 20)];
        let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap());
        // Many in flight, each of two ranges of the memory.
        let target = |number: u64| {
            let ranges = [
                (GuestAddress(number * 8192), 512),
                (GuestAddress(number * 8192 + 4096), 1536),
            ];
            GuestMemoryTarget::new(memory.clone(), &ranges).unwrap()
        };
        for number in 0..128 {
            let bytes = pattern(number as usize, 2048);
            let at = GuestAddress(number * 8192);
            memory.write_slice(&bytes[..512], at).unwrap();
            let at = GuestAddress(number * 8192 + 4096);
            memory.write_slice(&bytes[512..], at).unwrap();
        }
        let writes = (0..128).map(|number| AsyncIoOperation::WriteFromMemory {
            offset: number as i64 * 10240,
            target: target(number),
            user_data: number,
        });
        io.submit_batch_requests(writes.collect()).unwrap();
        assert!(wait(&mut io, 128).values().all(|end| end.result == 2048));
        io.fsync(Some(7)).unwrap();
        assert_eq!(wait(&mut io, 1)[&7].result, 0);
        io.fsync(None).unwrap();
        for number in 0..128 {
            let zero = vec![0; 8192];
            memory
                .write_slice(&zero, GuestAddress(number * 8192))
                .unwrap();
            io.submit_data_operation(AsyncIoOperation::ReadToMemory {
                offset: number as i64 * 10240,
                target: target(number),
                user_data: number,
            })
            .unwrap();
        }
        assert!(wait(&mut io, 128).values().all(|end| end.result == 2048));
        for number in 0..128 {
            let mut bytes = vec![0; 2048];
            let (first, second) = bytes.split_at_mut(512);
            memory
                .read_slice(first, GuestAddress(number * 8192))
                .unwrap();
            memory
                .read_slice(second, GuestAddress(number * 8192 + 4096))
                .unwrap();
            assert_eq!(bytes, pattern(number as usize, 2048));
        }
    }

    #[test]
    fn a_request_that_panics_ends_alone() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Arc::new(new_image(&directory.path().join("a.qcow2")));
        let mut io = QueueIo::new(disk).unwrap();
        io.start(0, |_, _| async { panic!("on purpose") });
        assert_eq!(wait(&mut io, 1)[&0].result, -libc::EIO);
        // Both threads go on.
        let writes = (1..9).map(|user_data| AsyncIoOperation::WriteFromVec {
            offset: 0,
            buffer: OwnedIoBuffer::from_vec(pattern(1, 4096)),
            user_data,
        });
        io.submit_batch_requests(writes.collect()).unwrap();
        let ends = wait(&mut io, 8);
        assert!(ends.values().all(|end| end.result == 4096));
    }

    #[test]
    fn buffers_zeroes_and_errors() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Arc::new(new_image(&directory.path().join("a.qcow2")));
        let mut io = QueueIo::new(disk).unwrap();
        let write = |offset, user_data| AsyncIoOperation::WriteFromVec {
            offset,
            buffer: OwnedIoBuffer::from_vec(pattern(1, 4096)),
            user_data,
        };
        io.submit_data_operation(write(0, 1)).unwrap();
        io.submit_data_operation(write(65536, 2)).unwrap();
        io.submit_data_operation(write(SIZE as i64, 3)).unwrap();
        io.submit_data_operation(write(-1, 4)).unwrap();
        let ends = wait(&mut io, 4);
        let results: Vec<_> = ends.values().map(|end| end.result).collect();
        assert_eq!(results[..3], [4096, 4096, -libc::EINVAL]);
        assert!(results[3] < 0);
        io.write_zeroes(0, 2048, 5).unwrap();
        io.punch_hole(65536, 65536, 6).unwrap();
        assert!(wait(&mut io, 2).values().all(|end| end.result == 0));
        io.submit_data_operation(AsyncIoOperation::ReadToVec {
            offset: 0,
            buffer: OwnedIoBuffer::from_vec(vec![9; 4096]),
            user_data: 7,
        })
        .unwrap();
        let buffer = wait(&mut io, 1).remove(&7).unwrap().buffer.unwrap();
        assert_eq!(buffer.as_slice()[..2048], [0; 2048]);
        assert_eq!(buffer.as_slice()[2048..], pattern(1, 4096)[2048..]);
    }
}
