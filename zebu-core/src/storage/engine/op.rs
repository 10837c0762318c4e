//! Operations on file descriptors, and how a thread executes one with a blocking system call.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use super::super::extent::{self, StorageExtent};

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Reads into the segments.
    Read,
    /// Writes the segments.
    Write,
    /// As `Write`, and the data is durable on completion (`RWF_DSYNC`).
    WriteDurable,
    /// Makes all completed writes durable (`fdatasync(2)`).
    Flush,
    /// Turns `length` bytes into zeroes that stay allocated
    /// (`FALLOC_FL_ZERO_RANGE`).
    ZeroRange,
    /// Turns `length` bytes into a hole that reads as zeroes
    /// (`FALLOC_FL_PUNCH_HOLE`).
    PunchHole,
    /// The content of `length` bytes is not needed any more; the storage decides what they read as.
    /// A file punches a hole.
    Discard,
    /// As [`OpKind::ZeroRange`] if that is faster than writing zeroes, else fails with
    /// `EOPNOTSUPP`. That of a file is taken for fast, that of a block device is not: the kernel
    /// may write zeroes instead.
    ZeroQuickly,
    /// Allocates `length` bytes without changing what they read as
    /// (`fallocate(2)`, mode 0).
    Allocate,
    /// Makes the storage `length` bytes long; new bytes read as zeroes (`ftruncate(2)`).
    SetLength,
    /// Finds out whether there is data at `offset`, which is inside the storage, and how far. The
    /// answer is written to the memory ([`StorageExtent::put`]). A storage that knows no holes
    /// ends with 0 bytes.
    Extent,
}

/// An operation. Its memory is valid until its end;
/// see [`Engine::submit`](super::Engine::submit).
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// Its kind.
    pub kind: OpKind,
    /// The file.
    pub fd: RawFd,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes of a range operation, or of all segments; the new length of the file.
    pub length: u64,
    /// The only segment when `segments` is 1, otherwise an array of `iovec`, no
    /// longer than `UIO_MAXIOV`.
    pub memory: *mut libc::c_void,
    /// Number of segments; 0 for operations without memory.
    pub segments: u32,
    /// Whether it goes through the page cache.
    pub buffered: bool,
    /// Whether io_uring is to have a thread of the kernel execute it
    /// ([`QueueOptions::force_async`](crate::storage::QueueOptions::force_async)).
    pub force_async: bool,
}

// SAFETY: an Op is a description. The thread that performs it relies on the promise made to
// `Engine::submit` that its memory is valid and unshared.
unsafe impl Send for Op {}

impl Op {
    /// An operation without memory.
    pub(in super::super) fn without_memory(
        kind: OpKind,
        fd: RawFd,
        offset: u64,
        length: u64,
    ) -> Op {
        Op {
            kind,
            fd,
            offset,
            length,
            memory: std::ptr::null_mut(),
            segments: 0,
            buffered: false,
            force_async: false,
        }
    }

    /// Executes the operation on this thread and returns the bytes moved.
    ///
    /// # Safety
    /// The promise of [`Engine::submit`](super::Engine::submit) holds.
    pub unsafe fn perform(&self) -> io::Result<usize> {
        if self.kind == OpKind::Extent {
            let answer = extent::of_file(self.fd, self.offset)?.encode();
            debug_assert_eq!(
                (self.segments, self.length),
                (1, StorageExtent::SIZE as u64)
            );
            // SAFETY: the memory has this length, as the caller promises.
            unsafe {
                self.memory
                    .cast::<[u8; StorageExtent::SIZE]>()
                    .write_unaligned(answer)
            };
            return Ok(answer.len());
        }
        loop {
            // SAFETY: passed on to the caller.
            let result = unsafe { self.call() };
            if result >= 0 {
                return Ok(result as usize);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Executes the operation on this thread; the result is that of a
    /// [`Completion`](super::Completion).
    ///
    /// # Safety
    /// As [`Op::perform`].
    pub(in super::super) unsafe fn complete(&self) -> i32 {
        // SAFETY: passed on to the caller.
        match unsafe { self.perform() } {
            Ok(n) => i32::try_from(n).unwrap_or(i32::MAX),
            Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    /// Reads on this thread what is in the page cache (`RWF_NOWAIT` of preadv2(2)), perhaps not all
    /// of it. `None` if the first byte is not, if the file system does not support that, at the end
    /// of the file (Linux 5.9 and 5.10 report it in other places), and after an error: a usual read
    /// is needed then.
    ///
    /// # Safety
    /// As [`Op::perform`].
    pub(in super::super) unsafe fn complete_cached(&self) -> Option<i32> {
        let one = libc::iovec {
            iov_base: self.memory,
            iov_len: self.length as usize,
        };
        let (iov, count) = match self.segments {
            0 | 1 => (&raw const one, 1),
            n => (self.memory as *const libc::iovec, n as libc::c_int),
        };
        debug_assert!(self.offset <= i64::MAX as u64, "-1 is the file's position");
        let offset = self.offset as libc::off_t;
        // SAFETY: fd is open and the memory valid, as the caller promises.
        let read = unsafe { libc::preadv2(self.fd, iov, count, offset, libc::RWF_NOWAIT) };
        i32::try_from(read).ok().filter(|read| *read > 0)
    }

    unsafe fn call(&self) -> libc::ssize_t {
        let offset = self.offset as libc::off_t;
        let iov = self.memory as *const libc::iovec;
        let count = self.segments as libc::c_int;
        let length = self.length as libc::off_t;
        // SAFETY: fd is open and the memory valid, as the caller promises.
        unsafe {
            match (self.kind, self.segments) {
                (OpKind::Read, 1) => {
                    libc::pread(self.fd, self.memory, self.length as usize, offset)
                }
                (OpKind::Read, _) => libc::preadv(self.fd, iov, count, offset),
                (OpKind::Write, 1) => {
                    libc::pwrite(self.fd, self.memory, self.length as usize, offset)
                }
                (OpKind::Write, _) => libc::pwritev(self.fd, iov, count, offset),
                (OpKind::WriteDurable, 1) => {
                    let one = libc::iovec {
                        iov_base: self.memory,
                        iov_len: self.length as usize,
                    };
                    libc::pwritev2(self.fd, &one, 1, offset, libc::RWF_DSYNC)
                }
                (OpKind::WriteDurable, _) => {
                    libc::pwritev2(self.fd, iov, count, offset, libc::RWF_DSYNC)
                }
                (OpKind::Flush, _) => libc::fdatasync(self.fd) as libc::ssize_t,
                (OpKind::SetLength, _) => libc::ftruncate(self.fd, length) as libc::ssize_t,
                (kind, _) => {
                    libc::fallocate(self.fd, kind.fallocate_mode(), offset, length) as libc::ssize_t
                }
            }
        }
    }
}

impl OpKind {
    /// The `mode` of `fallocate(2)` for the range operations.
    pub(super) fn fallocate_mode(self) -> libc::c_int {
        match self {
            OpKind::ZeroRange | OpKind::ZeroQuickly => {
                libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE
            }
            OpKind::PunchHole | OpKind::Discard => {
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against cached reads that the caller's thread does not execute, which no other test
    //! detects, and against a wrong end of file.
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_read_of_cached_bytes_completes_at_once() {
        let mut file = tempfile::tempfile_in(".").unwrap();
        file.write_all(&[7; 10_000]).unwrap();
        let mut bytes = [0u8; 8192];
        let mut read = |offset| {
            let op = Op {
                memory: bytes.as_mut_ptr().cast(),
                segments: 1,
                ..Op::without_memory(OpKind::Read, file.as_raw_fd(), offset, 8192)
            };
            // SAFETY: `bytes` lives until the read has ended.
            unsafe { op.complete_cached() }
        };
        assert_eq!(read(0), Some(8192));
        assert_eq!(read(8192), Some(10_000 - 8192));
        assert_eq!(read(10_000), None);
        assert_eq!(bytes, [7; 8192]);
    }
}
