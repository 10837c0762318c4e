//! Blocking reads and writes, and the status of ranges.

use std::ffi::{c_int, c_void};

use crate::device::{Handle, given};
use crate::error::{Failure, Out, Result, call_code, call_count};
use crate::request::{Request, memory, vector};

/// Executes a request, and waits for it.
fn execute(
    device: Option<&Handle>,
    error: Out<'_>,
    request: impl FnOnce() -> Result<Request>,
) -> c_int {
    call_code(error, || {
        let request = request()?;
        given(device)?.wait(|queue, device| request.execute(queue, device))
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
    execute(device, error, || {
        Ok(Request::Read(memory(buffer, length)?, offset))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_write(
    device: Option<&Handle>,
    buffer: *const c_void,
    length: usize,
    offset: u64,
    error: Out<'_>,
) -> c_int {
    execute(device, error, || {
        Ok(Request::Write(memory(buffer, length)?, offset))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_readv(
    device: Option<&Handle>,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    error: Out<'_>,
) -> c_int {
    execute(device, error, || {
        Ok(Request::Read(vector(iov, count)?, offset))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_writev(
    device: Option<&Handle>,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    error: Out<'_>,
) -> c_int {
    execute(device, error, || {
        Ok(Request::Write(vector(iov, count)?, offset))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_flush(device: Option<&Handle>, error: Out<'_>) -> c_int {
    execute(device, error, || Ok(Request::Flush))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_discard(
    device: Option<&Handle>,
    offset: u64,
    length: u64,
    error: Out<'_>,
) -> c_int {
    execute(device, error, || Ok(Request::Discard(offset, length)))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_write_zeroes(
    device: Option<&Handle>,
    offset: u64,
    length: u64,
    flags: u32,
    error: Out<'_>,
) -> c_int {
    execute(device, error, || {
        Request::write_zeroes(offset, length, flags)
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
            let size = device.size();
            let out_of_range = zebu::Error::OutOfRange {
                offset,
                length,
                size,
            };
            let end = offset.checked_add(length).ok_or(out_of_range)?;
            let mut found = Vec::new();
            let mut stream = device.extents(&queue, offset..end);
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
