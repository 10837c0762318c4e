//! Data and holes of a storage.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use super::Iov;

/// Bytes of a storage that are alike, from an offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageExtent {
    /// They read as zeroes.
    pub zero: bool,
    /// They take up space.
    pub allocated: bool,
    /// How many there are; 0 at the end of the storage.
    pub length: u64,
}

impl StorageExtent {
    /// Bytes of memory that [`OpKind::Extent`](super::OpKind::Extent) needs.
    pub(super) const SIZE: usize = 16;

    /// Bytes that must be read.
    pub fn data(length: u64) -> Self {
        StorageExtent {
            zero: false,
            allocated: true,
            length,
        }
    }

    /// Bytes that are not stored and read as zeroes.
    pub fn hole(length: u64) -> Self {
        StorageExtent {
            zero: true,
            allocated: false,
            length,
        }
    }

    /// Ends an operation [`OpKind::Extent`](super::OpKind::Extent) with this answer: writes it to
    /// the memory of the operation, and returns the length of the answer.
    pub fn put(self, memory: &Iov) -> usize {
        memory.copy_from(&self.encode());
        Self::SIZE
    }

    pub(super) fn encode(self) -> [u8; Self::SIZE] {
        let flags = u64::from(self.zero) | u64::from(self.allocated) << 1;
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&self.length.to_ne_bytes());
        bytes[8..].copy_from_slice(&flags.to_ne_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; Self::SIZE]) -> Self {
        let word = |at: usize| {
            let word = bytes[at..at + 8].first_chunk().expect("8 bytes");
            u64::from_ne_bytes(*word)
        };
        StorageExtent {
            zero: word(8) & 1 != 0,
            allocated: word(8) & 2 != 0,
            length: word(0),
        }
    }
}

/// Whether there is data at `offset` of a file, and how far (`SEEK_DATA`, `SEEK_HOLE`). All is
/// data where the file system knows no holes.
///
/// # Errors
/// Those of lseek(2).
pub fn of_file(fd: RawFd, offset: u64) -> io::Result<StorageExtent> {
    let end = seek(fd, 0, libc::SEEK_END)?.unwrap_or(0);
    let all = end.saturating_sub(offset);
    if all == 0 {
        return Ok(StorageExtent::data(0));
    }
    let data = match seek(fd, offset, libc::SEEK_DATA) {
        // No data from here to the end.
        Ok(None) => end,
        Ok(Some(at)) => at.min(end),
        Err(_) => return Ok(StorageExtent::data(all)),
    };
    if data > offset {
        return Ok(StorageExtent::hole(data - offset));
    }
    let hole = seek(fd, offset, libc::SEEK_HOLE)?.unwrap_or(end).min(end);
    let length = hole.saturating_sub(offset).max(1).min(all);
    Ok(StorageExtent::data(length))
}

/// The position that lseek(2) finds; `None` past the end.
pub fn seek(fd: RawFd, offset: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    // SAFETY: a system call without pointers. Nothing uses the file position that it moves.
    let at = unsafe { libc::lseek(fd, offset as libc::off_t, whence) };
    if at >= 0 {
        return Ok(Some(at as u64));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENXIO) => Ok(None),
        _ => Err(error),
    }
}
