//! Reads and writes of any range with any memory: short results go on,
//! unaligned ones take a bounce buffer.
//!
//! Each function keeps what it uses (storage, memory) borrowed until the
//! operation has ended, also when its future is dropped.

use std::io;

use super::{Alignment, Iov, OpKind, PoolBuffer, Queue, Started, Storage};

/// The largest bounce buffer, in bytes.
const BOUNCE: usize = 1 << 20;

/// Fills `iov` from `offset` on. Bytes past the end of the storage are zero,
/// as in a file that grows later.
pub async fn read(storage: &dyn Storage, queue: &Queue, offset: u64, iov: &Iov) -> io::Result<()> {
    begin_read(storage, queue, offset, iov.clone())
        .finish()
        .await
}

/// A read that is in the engine already, unless it needs a bounce buffer.
pub(crate) struct Reading<'a> {
    // Dropped first, which waits for the end: the rest is what it uses.
    started: Option<Started>,
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
}

/// Starts what [`read`] does.
pub(crate) fn begin_read<'a>(
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
) -> Reading<'a> {
    let started = fits(storage.alignment(), offset, &iov)
        .then(|| storage.start(queue, OpKind::Read, offset, iov.len() as u64, Some(&iov)));
    Reading {
        started,
        storage,
        queue,
        offset,
        iov,
    }
}

impl Reading<'_> {
    /// Waits until the memory is filled.
    pub(crate) async fn finish(self) -> io::Result<()> {
        let Reading {
            started,
            storage,
            queue,
            offset,
            iov,
        } = self;
        match started {
            Some(started) => {
                let count = started.wait().await?;
                if count < iov.len() {
                    read_rest(storage, queue, offset, &iov, count).await?;
                }
                Ok(())
            }
            None => read_bounced(storage, queue, offset, &iov).await,
        }
    }
}

/// What is left after a short read: more, or the end of the file.
#[cold]
async fn read_rest(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
    mut done: usize,
) -> io::Result<()> {
    while done < iov.len() {
        let rest = iov.slice(done, iov.len() - done);
        let at = offset + done as u64;
        // An unaligned count with O_DIRECT happens only at the end.
        let count = if fits(storage.alignment(), at, &rest) {
            storage
                .start(queue, OpKind::Read, at, rest.len() as u64, Some(&rest))
                .wait()
                .await?
        } else {
            0
        };
        if count == 0 {
            rest.fill(0);
            return Ok(());
        }
        done += count;
    }
    Ok(())
}

/// Whether the operation can go to the storage as it is.
fn fits(alignment: Alignment, offset: u64, iov: &Iov) -> bool {
    alignment == Alignment::NONE
        || (offset & (alignment.offset as u64 - 1) == 0
            && iov.len() & (alignment.offset - 1) == 0
            && iov.is_aligned(alignment.memory, alignment.offset))
}

/// The aligned range around a piece of a request, at most [`BOUNCE`] bytes:
/// its start, its length, and how much of the request lies in it.
fn bounce_range(alignment: usize, offset: u64, left: usize) -> (u64, usize, usize) {
    let head = (offset & (alignment as u64 - 1)) as usize;
    let length = (head + left).next_multiple_of(alignment).min(BOUNCE);
    (offset - head as u64, length, left.min(length - head))
}

/// Waits for one read into the start of `buffer`, returning how many bytes
/// came before the end of the storage.
#[allow(unsafe_code)]
async fn read_into(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    buffer: &mut super::Buffer,
    length: usize,
) -> io::Result<()> {
    // SAFETY: the buffer is borrowed until the read, awaited here, has ended.
    let iov = unsafe { buffer.iov() }.slice(0, length);
    let count = storage
        .start(queue, OpKind::Read, offset, length as u64, Some(&iov))
        .wait()
        .await?;
    if count < length {
        read_rest(storage, queue, offset, &iov, count).await?;
    }
    Ok(())
}

async fn read_bounced(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
) -> io::Result<()> {
    let alignment = storage.alignment().offset;
    let mut done = 0;
    while done < iov.len() {
        let at = offset + done as u64;
        let (start, length, count) = bounce_range(alignment, at, iov.len() - done);
        let mut buffer = queue.buffer(length);
        read_into(storage, queue, start, &mut buffer, length).await?;
        let head = (at - start) as usize;
        iov.slice(done, count)
            .copy_from(&buffer[head..head + count]);
        done += count;
    }
    Ok(())
}

/// Reads `length` bytes at `offset` into new memory. The caller has bounded
/// `length`.
#[allow(unsafe_code)]
pub async fn read_vec(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: usize,
) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    // SAFETY: `bytes` lives until the read, awaited here, has ended.
    let iov = unsafe { Iov::from_raw(bytes.as_mut_ptr(), length) };
    read(storage, queue, offset, &iov).await?;
    Ok(bytes)
}

/// The same into a buffer of the queue's pool, which may be longer.
#[allow(unsafe_code)]
pub(crate) async fn read_pooled(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: usize,
) -> io::Result<PoolBuffer> {
    let mut buffer = queue.buffer(length);
    // SAFETY: the buffer lives until the read, awaited here, has ended.
    let iov = unsafe { buffer.iov() }.slice(0, length);
    read(storage, queue, offset, &iov).await?;
    Ok(buffer)
}

/// Writes `iov` at `offset`, durably on return if the storage's cache mode is
/// a write-through one.
///
/// Where direct I/O needs it, the blocks around an unaligned range are read
/// and written back: the caller keeps other writes away from those blocks.
pub async fn write(storage: &dyn Storage, queue: &Queue, offset: u64, iov: &Iov) -> io::Result<()> {
    begin_write(storage, queue, offset, iov.clone())
        .finish()
        .await
}

/// Writes `bytes` at `offset`, as [`write()`] does.
#[allow(unsafe_code)]
pub async fn write_slice(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    bytes: &[u8],
) -> io::Result<()> {
    // SAFETY: `bytes` is borrowed until the write, awaited here, has ended; a
    // write only reads the memory.
    let iov = unsafe { Iov::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) };
    write(storage, queue, offset, &iov).await
}

/// A write that is in the engine already, unless it needs a bounce buffer.
pub(crate) struct Writing<'a> {
    // Dropped first, which waits for the end: the rest is what it uses.
    started: Option<Started>,
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
}

/// Starts what [`write`] does.
pub(crate) fn begin_write<'a>(
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
) -> Writing<'a> {
    let started =
        fits(storage.alignment(), offset, &iov).then(|| start_write(storage, queue, offset, &iov));
    Writing {
        started,
        storage,
        queue,
        offset,
        iov,
    }
}

fn start_write(storage: &dyn Storage, queue: &Queue, offset: u64, iov: &Iov) -> Started {
    let kind = if storage.cache_mode().is_write_through() {
        OpKind::WriteDurable
    } else {
        OpKind::Write
    };
    storage.start(queue, kind, offset, iov.len() as u64, Some(iov))
}

impl Writing<'_> {
    /// Waits until everything is written.
    pub(crate) async fn finish(self) -> io::Result<()> {
        let Writing {
            started,
            storage,
            queue,
            offset,
            iov,
        } = self;
        match started {
            Some(started) => write_rest(storage, queue, offset, &iov, started).await,
            None => write_bounced(storage, queue, offset, &iov).await,
        }
    }
}

/// Waits for a write, and writes what it left.
async fn write_rest(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
    mut started: Started,
) -> io::Result<()> {
    let mut done = 0;
    loop {
        let count = started.wait().await?;
        done += count;
        if done >= iov.len() {
            return Ok(());
        }
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let rest = iov.slice(done, iov.len() - done);
        started = start_write(storage, queue, offset + done as u64, &rest);
    }
}

#[allow(unsafe_code)]
async fn write_bounced(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
) -> io::Result<()> {
    let alignment = storage.alignment().offset;
    let end_before = storage.len()?;
    let mut done = 0;
    while done < iov.len() {
        let at = offset + done as u64;
        let (start, length, count) = bounce_range(alignment, at, iov.len() - done);
        let mut buffer = queue.buffer(length);
        let head = (at - start) as usize;
        if head != 0 || count != length {
            read_into(storage, queue, start, &mut buffer, length).await?;
        }
        iov.slice(done, count)
            .copy_to(&mut buffer[head..head + count]);
        // SAFETY: the buffer lives until the write, awaited here, has ended.
        let out = unsafe { buffer.iov() }.slice(0, length);
        let started = start_write(storage, queue, start, &out);
        write_rest(storage, queue, start, &out, started).await?;
        done += count;
    }
    // The padding of the last block must not make the file longer.
    let end = offset + iov.len() as u64;
    if !storage.is_device() && !end.is_multiple_of(alignment as u64) && end > end_before {
        storage.set_len(end)?;
    }
    Ok(())
}

/// Makes every completed write durable, unless the cache mode ignores that.
pub async fn flush(storage: &dyn Storage, queue: &Queue) -> io::Result<()> {
    if storage.cache_mode() == super::CacheMode::Unsafe {
        return Ok(());
    }
    range(storage, queue, OpKind::Flush, 0, 0).await
}

/// Zeroes a range and keeps it allocated; writes zeroes where the storage
/// cannot do it by itself.
pub async fn zero_range(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    match range(storage, queue, OpKind::ZeroRange, offset, length).await {
        Err(e) if is_unsupported(&e) => write_zeroes(storage, queue, offset, length).await,
        other => other,
    }
}

/// Zeroes a range and frees its blocks where the storage can.
pub async fn punch_hole(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    match range(storage, queue, OpKind::PunchHole, offset, length).await {
        Err(e) if is_unsupported(&e) => zero_range(storage, queue, offset, length).await,
        other => other,
    }
}

/// Allocates a range without changing what it reads as.
pub async fn allocate(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    range(storage, queue, OpKind::Allocate, offset, length).await
}

async fn range(
    storage: &dyn Storage,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    storage
        .start(queue, kind, offset, length, None)
        .wait()
        .await
        .map(drop)
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL)
    )
}

/// Writes zeroes as data.
#[allow(unsafe_code)]
pub async fn write_zeroes(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    let mut buffer = queue.buffer(length.min(BOUNCE as u64) as usize);
    buffer.fill(0);
    // SAFETY: the buffer lives until the last write, awaited here, has ended.
    let zeroes = unsafe { buffer.iov() };
    let mut done = 0;
    while done < length {
        let count = (length - done).min(BOUNCE as u64) as usize;
        write(storage, queue, offset + done, &zeroes.slice(0, count)).await?;
        done += count as u64;
    }
    Ok(())
}
