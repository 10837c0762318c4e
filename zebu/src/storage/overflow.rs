//! The page cache as a second way into a file that is written past it.
//!
//! A file that is written once, and need not be on the disk when that ends, can be
//! written in two ways at the same time: the device fetches what it can take, and what comes
//! while it is busy is copied into the page cache, by a processor that would wait otherwise.
//! Neither way is always the faster one. A copy runs at several GB/s into pages
//! that the kernel has at hand, at a tenth of that where a hypervisor must
//! provide them first, and at the device's speed when too many wait to be written
//! back. So copies are measured. At first all is copied: where pages are at hand that is the
//! fastest. Once slow copies have cost more than a millisecond it goes both ways, and while
//! copies are slow there are none.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::time::Instant;

use super::Iov;
use super::file::file_system;
use super::op::{read_cached, write_now};
use crate::lock;

/// Direct writes that keep a device busy.
const BUSY: usize = 3;
/// Shorter writes are not worth a copy once it goes both ways: tables, mostly, which are written
/// again.
const LEAST: u64 = 64 << 10;
/// A copy that takes longer is slow: 1 GB/s.
const NS_PER_BYTE: u64 = 1;
/// Bytes that pass by for each nanosecond more: a copy at 400 MB/s, 1.5 ns a byte more, lets
/// 24 times as much pass as it copied, and takes as long as a device of 10 GB/s does
/// for that. (A wait of 0.2 s, for writeback: 3 GB.)
const PASSING_PER_NS: u64 = 16;
/// Nanoseconds that slow copies may cost before it goes both ways. Where pages must be provided a
/// copy of 1 MiB takes 2 to 6 ms.
const PATIENCE: u64 = 1_000_000;
/// Bytes that make good for a nanosecond of that: now and then a copy is slow
/// everywhere, by 0.1 to 0.6 ms in 64 MiB.
const FORGIVEN_PER_NS: u64 = 64;

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
    state: Mutex<State>,
    /// [`NS_PER_BYTE`], but for tests.
    ns_per_byte: u64,
}

/// What is known of copies.
#[derive(Debug, Default)]
struct State {
    /// Nanoseconds that slow copies have cost, and that are not made good. Above
    /// [`PATIENCE`] it stays.
    lost: u64,
    /// Bytes that are to pass by yet.
    passing: u64,
    /// Whether somebody copies, once it goes both ways: then a file takes one copy
    /// at a time, since who would wait for that has the device.
    copying: bool,
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
        let file = OwnedFd::from(again.ok()?);
        // No page is to be brought in beside those asked for: the device may be writing it.
        // SAFETY: no memory is involved.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
        Some(Overflow {
            file,
            page,
            state: Mutex::default(),
            ns_per_byte: NS_PER_BYTE,
        })
    }

    /// Whether a write may be worth a copy now: while all is copied, or while `in_flight` direct
    /// writes, this one counted, keep the device busy. If not, it passes by.
    pub(super) fn takes(&self, in_flight: usize, offset: u64, length: u64) -> bool {
        let whole = (offset | length) & (self.page - 1) == 0;
        let mut state = lock(&self.state);
        if state.copies_all() {
            return whole;
        }
        if !whole || length < LEAST || in_flight <= BUSY || state.copying {
            return false;
        }
        let takes = state.passing == 0;
        state.passing = state.passing.saturating_sub(length);
        takes
    }

    /// Reads what was copied and still lies in the page cache, while all is copied: the device would
    /// have to fetch it first. As [`read_cached`].
    pub(super) fn read(&self, offset: u64, iov: &Iov) -> Option<usize> {
        let copies_all = lock(&self.state).copies_all();
        copies_all.then(|| read_cached(self.file.as_raw_fd(), offset, iov))?
    }

    /// Copies `iov` into the page cache, unless copies have turned out slow, or somebody copies
    /// and they may be. The caller has no other write of these bytes in flight.
    pub(super) fn write(&self, offset: u64, iov: &Iov) -> Option<io::Result<usize>> {
        if !lock(&self.state).begin() {
            return None;
        }
        let (result, slow_by) = self.copy(offset, iov);
        lock(&self.state).end(slow_by, iov.len() as u64);
        Some(result)
    }

    /// Copies `iov`, and says by how many nanoseconds that was slow.
    fn copy(&self, offset: u64, iov: &Iov) -> (io::Result<usize>, u64) {
        let start = Instant::now();
        let result = write_now(self.file.as_raw_fd(), offset, iov);
        let ns = start.elapsed().as_nanos() as u64;
        let slow_by = ns.saturating_sub(iov.len() as u64 * self.ns_per_byte);
        (result, slow_by)
    }
}

impl State {
    /// Whether all is copied yet.
    fn copies_all(&self) -> bool {
        self.lost <= PATIENCE
    }

    /// Whether somebody may copy now. He says when it ended.
    fn begin(&mut self) -> bool {
        if self.copies_all() {
            // Any number at once: they wait for each other in the kernel, which has who waits
            // look on for a while before it puts him to sleep.
            return true;
        }
        let may = self.passing == 0 && !self.copying;
        self.copying |= may;
        may
    }

    /// After a copy of `length` bytes that was slow by some nanoseconds.
    fn end(&mut self, slow_by: u64, length: u64) {
        if self.copies_all() {
            self.lost = (self.lost + slow_by).saturating_sub(length / FORGIVEN_PER_NS);
        }
        if !self.copies_all() {
            // Also of one that began when all was copied: it may end somebody else's turn, and
            // then two copy.
            self.copying = false;
            self.passing = self.passing.max(slow_by * PASSING_PER_NS);
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
    fn all_is_copied_until_slow_copies_have_cost_much() {
        const LENGTH: usize = 1 << 20;
        let file = tempfile::tempfile().unwrap();
        let again = file.try_clone().unwrap();
        let mut bytes: Vec<u8> = (0..LENGTH).map(|i| (i / 4096 % 251) as u8 + 1).collect();
        // SAFETY: `bytes` outlives `iov`.
        let iov = unsafe { Iov::from_raw(bytes.as_mut_ptr(), LENGTH) };
        let mut overflow = Overflow {
            file: again.into(),
            page: 4096,
            state: Mutex::default(),
            ns_per_byte: 1 << 20,
        };
        let written = |overflow: &Overflow, at| overflow.write(at, &iov).map(Result::unwrap);
        let length = LENGTH as u64;
        assert!(overflow.takes(1, 0, length));
        assert!(overflow.takes(1, 0, 4096) && !overflow.takes(9, 512, length));
        assert_eq!(overflow.read(0, &iov), None);
        assert_eq!(written(&overflow, 0), Some(LENGTH));
        let mut read = vec![0; LENGTH];
        // SAFETY: `read` outlives `into`.
        let into = unsafe { Iov::from_raw(read.as_mut_ptr(), LENGTH) };
        assert_eq!(overflow.read(0, &into), Some(LENGTH));
        assert_eq!(read, bytes);
        // What was slow is made good by what is not.
        lock(&overflow.state).end(PATIENCE, length);
        assert_eq!(written(&overflow, 0), Some(LENGTH));
        let lost = lock(&overflow.state).lost;
        assert_eq!(lost, PATIENCE - 2 * length / FORGIVEN_PER_NS);
        assert!(overflow.takes(1, 0, length));
        // That was too much, and stays.
        lock(&overflow.state).end(PATIENCE, length);
        lock(&overflow.state).end(0, length);
        // What follows a slow copy passes by.
        assert_eq!(written(&overflow, length), None);
        let passing = lock(&overflow.state).passing;
        assert!(passing > 0 && !overflow.takes(9, 0, passing.next_multiple_of(4096)));
        // Only while the device is busy, and one at a time.
        assert!(!overflow.takes(9, 0, 4096) && !overflow.takes(9, 512, length));
        assert_eq!(overflow.read(0, &iov), None);
        assert!(!overflow.takes(BUSY, 0, length) && overflow.takes(BUSY + 1, 0, length));
        assert!(lock(&overflow.state).begin());
        assert!(!overflow.takes(9, 0, length));
        assert_eq!(written(&overflow, length), None);
        lock(&overflow.state).end(0, length);
        // From here on every copy is a slow one.
        overflow.ns_per_byte = 0;
        assert_eq!(written(&overflow, length), Some(LENGTH));
        assert_eq!(written(&overflow, 2 * length), None);
        let mut back = vec![0; 2 * LENGTH];
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back[..LENGTH] == bytes && back[LENGTH..] == bytes);
        assert_eq!(file.metadata().unwrap().len(), 2 * length);
        // So much passes by; then the next one is tried.
        let passing = lock(&overflow.state).passing;
        assert!(passing > 0 && !overflow.takes(9, 0, passing.next_multiple_of(4096).max(LEAST)));
        assert!(overflow.takes(9, 0, length));
        assert_eq!(written(&overflow, 2 * length), Some(LENGTH));
        assert!(lock(&overflow.state).passing > 0);
    }
}
