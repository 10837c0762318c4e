//! Requests: what blocking calls and queues have in common.

use std::ffi::{c_int, c_void};

use zebu::{Iov, Queue, SharedDevice, Zeroing};

use crate::error::{Failure, Result};
use crate::text::check_flags;

const UNMAP: u32 = 1 << 0;

/// A request to a device. Offsets and lengths are in bytes.
pub enum Request {
    Read(Iov, u64),
    Write(Iov, u64),
    Flush,
    Discard(u64, u64),
    WriteZeroes(u64, u64, Zeroing),
}

impl Request {
    /// Zeroes, written as the flags say.
    pub fn write_zeroes(offset: u64, length: u64, flags: u32) -> Result<Request> {
        check_flags(flags, UNMAP)?;
        let zeroing = match flags & UNMAP {
            0 => Zeroing::Keep,
            _ => Zeroing::Unmap,
        };
        Ok(Request::WriteZeroes(offset, length, zeroing))
    }

    pub async fn execute(self, queue: Queue, device: SharedDevice) -> zebu::Result<()> {
        let device = device.enter().await?;
        match self {
            Request::Read(iov, offset) => device.read(&queue, offset, &iov).await,
            Request::Write(iov, offset) => device.write(&queue, offset, &iov).await,
            Request::Flush => device.flush(&queue).await,
            Request::Discard(offset, length) => device.discard(&queue, offset, length).await,
            Request::WriteZeroes(offset, length, zeroing) => {
                device.write_zeroes(&queue, offset, length, zeroing).await
            }
        }
    }
}

/// The memory of a request: `length` bytes.
pub fn memory(buffer: *const c_void, length: usize) -> Result<Iov> {
    if buffer.is_null() && length > 0 {
        return Err(Failure::null("buffer"));
    }
    // SAFETY: the header requires memory that is valid, and unused by others, until the request has
    // ended.
    Ok(unsafe { Iov::from_raw(buffer.cast_mut().cast(), length) }.shared())
}

/// The memory of a vectored request.
pub fn vector(iov: *const libc::iovec, count: c_int) -> Result<Iov> {
    let count = usize::try_from(count).map_err(|_| Failure::misuse("count is below zero"))?;
    if count == 0 {
        return memory(std::ptr::null(), 0);
    }
    if iov.is_null() {
        return Err(Failure::null("iov"));
    }
    // SAFETY: the header requires an array of so many elements.
    let iov = unsafe { std::slice::from_raw_parts(iov, count) };
    if iov.iter().any(|v| v.iov_base.is_null() && v.iov_len > 0) {
        return Err(Failure::null("iov_base"));
    }
    let length = iov
        .iter()
        .try_fold(0, |sum: usize, v| sum.checked_add(v.iov_len));
    if length.is_none() {
        return Err(Failure::misuse("iov is longer than the address space"));
    }
    // SAFETY: as in `memory`.
    Ok(unsafe { Iov::from_iovecs(iov) }.shared())
}
