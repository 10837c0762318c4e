//! Blocking reads and writes, and the status of ranges.

use std::ffi::{c_int, c_void};

use zebu::{Iov, Zeroing};

use crate::device::{Handle, given};
use crate::error::{Failure, Out, Result, call_code, call_count};
use crate::text::check_flags;

const UNMAP: u32 = 1 << 0;

/// The memory of a request: `length` bytes.
pub fn memory(buffer: *const c_void, length: usize) -> Result<Iov> {
    if buffer.is_null() && length > 0 {
        return Err(Failure::null("buffer"));
    }
    // SAFETY: the header requires memory that is valid, and unused by others, until the request has
    // ended.
    Ok(unsafe { Iov::from_raw(buffer.cast_mut().cast(), length) })
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
    // SAFETY: as in `memory`.
    Ok(unsafe { Iov::from_iovecs(iov) })
}

/// How zeroes are written.
pub fn zeroing(flags: u32) -> Result<Zeroing> {
    check_flags(flags, UNMAP)?;
    Ok(match flags & UNMAP {
        0 => Zeroing::Keep,
        _ => Zeroing::Unmap,
    })
}

fn read(device: Option<&Handle>, iov: Iov, offset: u64) -> Result<()> {
    given(device)?.wait(|queue, device| async move {
        let device = device.enter().await?;
        device.read(&queue, offset, &iov).await
    })
}

fn write(device: Option<&Handle>, iov: Iov, offset: u64) -> Result<()> {
    given(device)?.wait(|queue, device| async move {
        let device = device.enter().await?;
        device.write(&queue, offset, &iov).await
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_read(
    device: Option<&Handle>,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
    error: Out<'_>,
) -> c_int {
    call_code(error, || read(device, memory(buffer, length)?, offset))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_write(
    device: Option<&Handle>,
    buffer: *const c_void,
    length: usize,
    offset: u64,
    error: Out<'_>,
) -> c_int {
    call_code(error, || write(device, memory(buffer, length)?, offset))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_readv(
    device: Option<&Handle>,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    error: Out<'_>,
) -> c_int {
    call_code(error, || read(device, vector(iov, count)?, offset))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_writev(
    device: Option<&Handle>,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    error: Out<'_>,
) -> c_int {
    call_code(error, || write(device, vector(iov, count)?, offset))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_flush(device: Option<&Handle>, error: Out<'_>) -> c_int {
    call_code(error, || {
        given(device)?
            .wait(|queue, device| async move { device.enter().await?.flush(&queue).await })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_discard(
    device: Option<&Handle>,
    offset: u64,
    length: u64,
    error: Out<'_>,
) -> c_int {
    call_code(error, || {
        given(device)?.wait(|queue, device| async move {
            let device = device.enter().await?;
            device.discard(&queue, offset, length).await
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_write_zeroes(
    device: Option<&Handle>,
    offset: u64,
    length: u64,
    flags: u32,
    error: Out<'_>,
) -> c_int {
    call_code(error, || {
        let zeroing = zeroing(flags)?;
        given(device)?.wait(|queue, device| async move {
            let device = device.enter().await?;
            device.write_zeroes(&queue, offset, length, zeroing).await
        })
    })
}

const DATA: u32 = 1 << 0;
const ZERO: u32 = 1 << 1;
const ALLOCATED: u32 = 1 << 2;
const COMPRESSED: u32 = 1 << 3;

/// `zebu_extent`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CExtent {
    pub offset: u64,
    pub length: u64,
    pub host_offset: u64,
    pub flags: u32,
    pub depth: u32,
}

impl CExtent {
    fn new(offset: u64, status: &zebu::Status) -> CExtent {
        let flags = [
            (status.data, DATA),
            // What no layer maps reads as zeroes.
            (status.zero || !status.present, ZERO),
            (status.present, ALLOCATED),
            (status.compressed, COMPRESSED),
        ];
        let flags = flags.iter().filter(|(is, _)| *is).map(|(_, flag)| flag);
        CExtent {
            offset,
            length: status.length,
            host_offset: status.host.unwrap_or(u64::MAX),
            flags: flags.sum(),
            depth: status.depth as u32,
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn zebu_extents(
    device: Option<&Handle>,
    offset: u64,
    length: u64,
    extents: *mut CExtent,
    max: usize,
    error: Out<'_>,
) -> isize {
    call_count(error, || {
        if extents.is_null() || max == 0 {
            return Err(Failure::misuse("There is no room for extents"));
        }
        let found = given(device)?.wait(|queue, device| async move {
            let device = device.enter().await?;
            let mut found = Vec::new();
            let mut stream = device.extents(&queue, offset..offset.saturating_add(length));
            while found.len() < max {
                match stream.next().await {
                    None => break,
                    Some(extent) => {
                        let (offset, status) = extent?;
                        found.push(CExtent::new(offset, &status));
                    }
                }
            }
            Ok(found)
        })?;
        // SAFETY: the header requires room for `max` extents, and no more were looked for.
        unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), extents, found.len()) };
        Ok(found.len())
    })
}
