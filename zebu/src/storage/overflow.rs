//! The page cache as a second way into a file that is written past it.
//!
//! A file that is written once, and need not be on the disk when that ends, can be
//! written in two ways at the same time: the device fetches what it can take, and what comes
//! while it is busy is copied into the page cache, by a processor that would wait otherwise.
//! Neither way is always the faster one. A copy runs at several GB/s into pages
//! that the kernel has at hand, at a tenth of that where a hypervisor must
//! provide them first, and at the device's speed when too many wait to be written
//! back. So copies are measured, and while they are slow there are none.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use super::Iov;
use super::file::file_system;
use super::op::write_now;

/// Direct writes that keep a device busy.
const BUSY: usize = 3;
/// Shorter writes are not worth a copy: tables, mostly, which are written again.
const LEAST: u64 = 64 << 10;
/// A copy that takes longer is slow: 1 GB/s.
const NS_PER_BYTE: u64 = 1;
/// Bytes that pass by for each nanosecond more: a copy at 400 MB/s, 1.5 ns a byte more, lets
/// 24 times as much pass as it copied, and takes as long as a device of 10 GB/s does
/// for that. (A wait of 0.2 s, for writeback: 3 GB.)
const PASSING_PER_NS: u64 = 16;

/// The second way into a file.
///
/// Both ways may be used at once where no page is written in both: the kernel
/// keeps them coherent (open(2) on `O_DIRECT`: the file systems of disks), but
/// a page that is dirty in the cache is written back before a direct write to
/// it, and a direct write in flight fails to invalidate one that becomes dirty.
#[derive(Debug)]
pub(super) struct Overflow {
    /// The same file without `O_DIRECT`.
    file: OwnedFd,
    /// Bytes of a page, or more.
    page: u64,
    /// Bytes that are to pass by yet. Locked by who copies: a file takes one copy
    /// at a time.
    passing: Mutex<u64>,
}

impl Overflow {
    /// For the regular file `fd`, of a file system that keeps the two ways
    /// coherent. `None` if it is of another kind, or cannot be opened again.
    pub(super) fn of(fd: RawFd, page: u64) -> Option<Overflow> {
        if !is_coherent(fd) {
            return None;
        }
        let again = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{fd}"));
        Some(Overflow {
            file: again.ok()?.into(),
            page,
            passing: Mutex::new(0),
        })
    }

    /// Whether a write may be worth a copy now, while `in_flight` direct writes are
    /// on their way, this one counted. If not, it passes by.
    pub(super) fn takes(&self, in_flight: usize, offset: u64, length: u64) -> bool {
        let whole = (offset | length) & (self.page - 1) == 0;
        if in_flight <= BUSY || length < LEAST || !whole {
            return false;
        }
        let Some(mut passing) = self.turn() else {
            return false;
        };
        let takes = *passing == 0;
        *passing = passing.saturating_sub(length);
        takes
    }

    /// Copies `iov` into the page cache, unless somebody does or that has turned out
    /// slow. The caller has no other write of these bytes in flight.
    pub(super) fn write(&self, offset: u64, iov: &Iov) -> Option<io::Result<usize>> {
        let mut passing = self.turn().filter(|passing| **passing == 0)?;
        let length = iov.len() as u64;
        let start = Instant::now();
        let result = write_now(self.file.as_raw_fd(), offset, iov);
        let ns = start.elapsed().as_nanos() as u64;
        *passing = ns.saturating_sub(length * NS_PER_BYTE) * PASSING_PER_NS;
        Some(result)
    }

    /// The one turn to copy, unless somebody has it.
    fn turn(&self) -> Option<MutexGuard<'_, u64>> {
        match self.passing.try_lock() {
            Ok(passing) => Some(passing),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Whether the file system is one of those of disks, which keep the page cache
/// and direct I/O coherent.
fn is_coherent(fd: RawFd) -> bool {
    /// ext2, ext3 and ext4; XFS; Btrfs.
    const MAGICS: [i64; 3] = [0xef53, 0x5846_5342, 0x9123_683e];
    MAGICS.contains(&file_system(fd))
}
