//! The page cache as a second way into a file that is written past it.
//!
//! A file that is written once, and need not be on the disk when that ends, can be
//! written in two ways at the same time: the device fetches what it can take, and what comes
//! while it is busy is copied into the page cache, by a processor that would wait otherwise.
//! Neither way is always the faster one. A copy runs at several GB/s into pages
//! that the kernel has at hand, at a tenth of that where a hypervisor must
//! provide them first, and at the device's speed when too many wait to be written
//! back. So copies are measured, and while they are slow there are none. Until one is slow all is
//! copied: where every page is at hand that is the fastest, and where some are, little is lost.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use super::Iov;
use super::file::file_system;
use super::op::write_now;
use crate::lock;

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
/// Bytes of a copy after which it is seen whether it is slow, as long as none was.
const PIECE: usize = 256 << 10;

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
    /// Whether no copy has been slow yet.
    quick: AtomicBool,
    /// [`NS_PER_BYTE`], but for tests.
    ns_per_byte: u64,
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
            quick: AtomicBool::new(true),
            ns_per_byte: NS_PER_BYTE,
        })
    }

    /// Whether a write may be worth a copy now: as long as none was slow, or while `in_flight` direct
    /// writes, this one counted, keep the device busy. If not, it passes by.
    pub(super) fn takes(&self, in_flight: usize, offset: u64, length: u64) -> bool {
        let whole = (offset | length) & (self.page - 1) == 0;
        if length < LEAST || !whole {
            return false;
        }
        if self.is_quick() {
            return true;
        }
        if in_flight <= BUSY {
            return false;
        }
        let Some(mut passing) = self.turn() else {
            return false;
        };
        let takes = *passing == 0;
        *passing = passing.saturating_sub(length);
        takes
    }

    /// Copies `iov` into the page cache, unless copies have turned out slow, or somebody copies
    /// and they may be. As long as none was slow, what is left of `iov` after the first
    /// slow piece is not written. The caller has no other write of these bytes in flight.
    pub(super) fn write(&self, offset: u64, iov: &Iov) -> Option<io::Result<usize>> {
        let (mut passing, piece) = match self.is_quick() {
            // Waits while other threads copy: no longer than a copy takes, unless one turns
            // out slow, and then no more.
            true => (lock(&self.passing), PIECE),
            false => (self.turn()?, iov.len()),
        };
        let mut done = 0;
        while done < iov.len() && *passing == 0 {
            let piece = iov.slice(done, piece.min(iov.len() - done));
            match self.copy(offset + done as u64, &piece, &mut passing) {
                Ok(0) => break,
                Ok(count) => done += count,
                // The caller goes on from a short write, and meets the error again.
                Err(error) if done == 0 => return Some(Err(error)),
                Err(_) => break,
            }
        }
        (done > 0).then_some(Ok(done))
    }

    /// Copies `iov`, and notes how much is to pass by if that was slow.
    fn copy(&self, offset: u64, iov: &Iov, passing: &mut u64) -> io::Result<usize> {
        let start = Instant::now();
        let result = write_now(self.file.as_raw_fd(), offset, iov);
        let ns = start.elapsed().as_nanos() as u64;
        *passing = ns.saturating_sub(iov.len() as u64 * self.ns_per_byte) * PASSING_PER_NS;
        if *passing > 0 {
            self.quick.store(false, Ordering::Relaxed);
        }
        result
    }

    fn is_quick(&self) -> bool {
        self.quick.load(Ordering::Relaxed)
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

#[cfg(test)]
mod tests {
    //! If these fail, output is copied at a tenth of the device's speed, or never.

    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn all_is_copied_until_a_piece_was_slow() {
        const LENGTH: usize = 4 * PIECE;
        let file = tempfile::tempfile().unwrap();
        let again = file.try_clone().unwrap();
        let mut bytes: Vec<u8> = (0..LENGTH).map(|i| (i / 4096 % 251) as u8 + 1).collect();
        // SAFETY: `bytes` outlives `iov`.
        let iov = unsafe { Iov::from_raw(bytes.as_mut_ptr(), LENGTH) };
        let mut overflow = Overflow {
            file: again.into(),
            page: 4096,
            passing: Mutex::new(0),
            quick: AtomicBool::new(true),
            ns_per_byte: 1 << 20,
        };
        let written = |overflow: &Overflow, at| overflow.write(at, &iov).map(Result::unwrap);
        let length = LENGTH as u64;
        assert!(overflow.takes(1, 0, length));
        assert!(!overflow.takes(9, 0, 4096) && !overflow.takes(9, 512, length));
        assert_eq!(written(&overflow, 0), Some(LENGTH));
        // From here on every copy is a slow one.
        overflow.ns_per_byte = 0;
        assert_eq!(written(&overflow, length), Some(PIECE));
        assert_eq!(written(&overflow, 2 * length), None);
        let mut back = vec![0; LENGTH + PIECE];
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back[..LENGTH] == bytes && back[LENGTH..] == bytes[..PIECE]);
        assert_eq!(file.metadata().unwrap().len(), length + PIECE as u64);
        // So much passes by; then the next one is tried, as a whole, if the device is busy.
        let passing = *overflow.passing.lock().unwrap();
        assert!(passing > 0 && !overflow.takes(9, 0, passing.next_multiple_of(4096).max(LEAST)));
        assert!(!overflow.takes(BUSY, 0, length) && overflow.takes(BUSY + 1, 0, length));
        assert_eq!(written(&overflow, 2 * length), Some(LENGTH));
        assert!(*overflow.passing.lock().unwrap() > 0);
    }
}
