//! Reads and writes of any range with any memory: short results are continued, unaligned ranges use
//! a bounce buffer.
//!
//! Each function borrows the storage and the memory until its operations have ended, also if its
//! future is dropped. So it is safe to start them.
#![allow(unsafe_code)]

use std::io;
use std::sync::OnceLock;

use super::slab::no_memory;
use super::{
    Alignment, Buffer, Iov, OpKind, PoolBuffer, Queue, Reserved, Started, Step, Storage,
    StorageExtent, Written,
};

/// The largest bounce buffer, in bytes.
const BOUNCE: usize = 1 << 20;

/// Reads into `iov` from `offset` on. Bytes past the end of the storage are zero.
///
/// # Errors
/// Those of the storage; `EFBIG` for a range behind the largest offset.
pub async fn read(storage: &dyn Storage, queue: &Queue, offset: u64, iov: &Iov) -> io::Result<()> {
    begin_read(storage, queue, offset, iov.clone())
        .finish()
        .await
}

/// A read that was given to the engine, unless it needs a bounce buffer.
pub struct Reading<'a> {
    // First, since its drop waits for the end of what uses the rest.
    started: Option<Started>,
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
}

/// Starts what [`read`] does.
pub fn begin_read<'a>(
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
) -> Reading<'a> {
    let length = iov.len() as u64;
    let started = match check(offset, length) {
        Some(result) => Some(Started::done(
            result.or_else(|_| read_far(storage, offset, &iov)),
        )),
        None => fits(storage.alignment(), offset, &iov).then(|| {
            // SAFETY: `Reading` borrows the storage.
            unsafe { storage.start(queue, OpKind::Read, offset, length, Some(&iov)) }
        }),
    };
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
                let count = started.wait().await.or_else(interrupted)?;
                if count < iov.len() {
                    read_rest(storage, queue, offset, &iov, count).await?;
                }
                Ok(())
            }
            None => read_bounced(storage, queue, offset, &iov).await,
        }
    }
}

/// The largest end of an operation: offsets of the kernel have 63 bits, and the blocks around a
/// range must be below that, too.
const LIMIT: u64 = i64::MAX as u64 & !(BOUNCE as u64 - 1);

/// The result of an operation that is empty or ends behind [`LIMIT`]; None: it must be started.
fn check(offset: u64, length: u64) -> Option<io::Result<usize>> {
    if length == 0 {
        return Some(Ok(0));
    }
    match offset.checked_add(length) {
        Some(end) if end <= LIMIT => None,
        _ => Some(Err(io::Error::from_raw_os_error(libc::EFBIG))),
    }
}

/// A read that ends behind the limit: of zeroes, if it begins past the end of the storage.
#[cold]
fn read_far(storage: &dyn Storage, offset: u64, iov: &Iov) -> io::Result<usize> {
    if offset < storage.len()? {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    iov.fill(0);
    Ok(iov.len())
}

/// 0 bytes if a signal ended the operation.
fn interrupted(error: io::Error) -> io::Result<usize> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    }
}

/// Reads the rest after a short read, which may be the end of the file.
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
        let result = if fits(storage.alignment(), at, &rest) {
            // SAFETY: `storage` is borrowed while this is awaited.
            unsafe { storage.start(queue, OpKind::Read, at, rest.len() as u64, Some(&rest)) }
                .wait()
                .await
        } else {
            Ok(0)
        };
        match result {
            Ok(0) => {
                rest.fill(0);
                return Ok(());
            }
            Ok(count) => done += count,
            Err(error) => done += interrupted(error)?,
        }
    }
    Ok(())
}

/// Whether the operation is aligned.
fn fits(alignment: Alignment, offset: u64, iov: &Iov) -> bool {
    alignment == Alignment::NONE
        || (offset & (alignment.offset as u64 - 1) == 0
            && iov.len() & (alignment.offset - 1) == 0
            && iov.is_aligned(alignment.memory, alignment.offset))
}

/// The aligned range, of at most [`BOUNCE`] bytes, around a piece of a request: its start, its
/// length, and how many bytes of the request are inside.
fn bounce_range(alignment: usize, offset: u64, left: usize) -> (u64, usize, usize) {
    let head = (offset & (alignment as u64 - 1)) as usize;
    let length = (head + left).next_multiple_of(alignment).min(BOUNCE);
    (offset - head as u64, length, left.min(length - head))
}

/// Reads into the start of `buffer`.
async fn read_into(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    buffer: &mut super::Buffer,
    length: usize,
) -> io::Result<()> {
    // SAFETY: the buffer is borrowed until the read, awaited here, has ended.
    let iov = unsafe { buffer.iov() }.slice(0, length);
    // SAFETY: `storage` is borrowed while this is awaited.
    let count = unsafe { storage.start(queue, OpKind::Read, offset, length as u64, Some(&iov)) }
        .wait()
        .await
        .or_else(interrupted)?;
    if count < length {
        read_rest(storage, queue, offset, &iov, count).await?;
    }
    Ok(())
}

/// Reserves memory for the bounce buffers, one after the other, of a request of `length` bytes.
async fn reserve_bounce(queue: &Queue, alignment: usize, length: usize) -> Option<Reserved> {
    let most = length.saturating_add(2 * alignment).min(BOUNCE);
    queue.reserve(Step::Bounce, Queue::pooled(most)).await
}

async fn read_bounced(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
) -> io::Result<()> {
    let alignment = storage.alignment().offset;
    let _memory = reserve_bounce(queue, alignment, iov.len()).await;
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

/// Memory for so many elements. An image determines how long its tables are, so it is an error, where
/// other ways of allocation end the process.
///
/// # Errors
/// `ENOMEM`.
pub fn reserved<T>(count: usize) -> io::Result<Vec<T>> {
    let mut memory = Vec::new();
    let reserved = memory.try_reserve_exact(count);
    reserved.map_err(|_| no_memory()).map(|()| memory)
}

/// So many bytes of zeroes, as [`reserved`].
///
/// # Errors
/// `ENOMEM`.
pub fn zeroed(length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = reserved(length)?;
    bytes.resize(length, 0);
    Ok(bytes)
}

/// Reads `length` bytes at `offset` into new memory. The caller has limited `length`.
///
/// # Errors
/// Those of [`read()`], and `ENOMEM`.
pub async fn read_vec(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: usize,
) -> io::Result<Vec<u8>> {
    let mut bytes = zeroed(length)?;
    // SAFETY: `bytes` lives until the read, awaited here, has ended.
    let iov = unsafe { Iov::from_raw(bytes.as_mut_ptr(), length) };
    read(storage, queue, offset, &iov).await?;
    Ok(bytes)
}

/// As [`read_vec`], into a buffer of the queue's pool, which may be longer.
pub async fn read_pooled(
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
/// With direct I/O, an unaligned range is a read-modify-write of the blocks around it, for which
/// other writes to those blocks wait ([`Blocks`](super::Blocks)).
///
/// # Errors
/// Those of the storage; `EFBIG` for a range behind the largest offset.
pub async fn write(storage: &dyn Storage, queue: &Queue, offset: u64, iov: &Iov) -> io::Result<()> {
    begin_write(storage, queue, offset, iov.clone())
        .finish()
        .await
}

/// Writes a copy of `bytes` at `offset`, as [`write()`] does.
///
/// # Errors
/// Those of [`write()`].
pub async fn write_slice(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    bytes: &[u8],
) -> io::Result<()> {
    let mut buffer = queue.buffer(bytes.len());
    buffer[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: this future owns the buffer, which lives until the write, awaited here, has ended,
    // and for ever if the future is forgotten.
    let iov = unsafe { buffer.iov() }.slice(0, bytes.len());
    write(storage, queue, offset, &iov).await
}

/// A write that was given to the engine, unless it needs a bounce buffer or waits for blocks.
pub struct Writing<'a> {
    // First, since its drop waits for the end of what uses the rest.
    started: Option<Started>,
    written: Option<Written<'a>>,
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
}

/// Starts what [`write`] does.
pub fn begin_write<'a>(
    storage: &'a dyn Storage,
    queue: &'a Queue,
    offset: u64,
    iov: Iov,
) -> Writing<'a> {
    let mut written = None;
    let started = match check(offset, iov.len() as u64) {
        Some(result) => Some(Started::done(result)),
        None => {
            let range = offset..offset + iov.len() as u64;
            let free = fits(storage.alignment(), offset, &iov)
                && storage.blocks().is_none_or(|blocks| {
                    written = blocks.try_plain(range);
                    written.is_some()
                });
            // SAFETY: `Writing` borrows the storage.
            free.then(|| unsafe { start_write(storage, queue, offset, &iov) })
        }
    };
    Writing {
        started,
        written,
        storage,
        queue,
        offset,
        iov,
    }
}

/// # Safety
/// As [`Storage::start`].
unsafe fn start_write(storage: &dyn Storage, queue: &Queue, offset: u64, iov: &Iov) -> Started {
    let kind = if storage.cache_mode().is_write_through() {
        OpKind::WriteDurable
    } else {
        OpKind::Write
    };
    // SAFETY: passed on.
    unsafe { storage.start(queue, kind, offset, iov.len() as u64, Some(iov)) }
}

impl Writing<'_> {
    /// Whether it was given to the engine.
    pub(crate) fn has_started(&self) -> bool {
        self.started.is_some()
    }

    /// Waits until everything is written.
    pub(crate) async fn finish(self) -> io::Result<()> {
        let Writing {
            started,
            mut written,
            storage,
            queue,
            offset,
            iov,
        } = self;
        let started = match started {
            Some(started) => started,
            None if !fits(storage.alignment(), offset, &iov) => {
                return write_bounced(storage, queue, offset, &iov).await;
            }
            None => {
                if let Some(blocks) = storage.blocks() {
                    written = Some(blocks.plain(offset..offset + iov.len() as u64).await);
                }
                // SAFETY: `storage` is borrowed while this is awaited, below.
                unsafe { start_write(storage, queue, offset, &iov) }
            }
        };
        let result = write_rest(storage, queue, offset, &iov, started).await;
        drop(written);
        result
    }
}

/// Waits for a write, and writes the rest.
async fn write_rest(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
    mut started: Started,
) -> io::Result<()> {
    let mut done = 0;
    loop {
        match started.wait().await {
            Ok(count) => {
                done += count;
                if done >= iov.len() {
                    return Ok(());
                }
                if count == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
            }
            Err(error) => done += interrupted(error)?,
        }
        let rest = iov.slice(done, iov.len() - done);
        // SAFETY: `storage` is borrowed while this is awaited, in the next round.
        started = unsafe { start_write(storage, queue, offset + done as u64, &rest) };
    }
}

async fn write_bounced(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    iov: &Iov,
) -> io::Result<()> {
    let alignment = storage.alignment().offset;
    // First: those that hold memory wait for the blocks of others.
    let _memory = reserve_bounce(queue, alignment, iov.len()).await;
    let _written = begin_careful(storage, offset, iov.len() as u64).await?;
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
        // SAFETY: `storage` is borrowed while this is awaited.
        let started = unsafe { start_write(storage, queue, start, &out) };
        write_rest(storage, queue, start, &out, started).await?;
        done += count;
    }
    // The padding of the last block must not make the file longer.
    let end = offset + iov.len() as u64;
    let padded = end.next_multiple_of(alignment as u64);
    let wanted = end.max(end_before);
    // Unless the storage has been made longer meanwhile.
    if padded > wanted && !storage.is_device() && storage.len()? == padded {
        set_len(storage, queue, wanted).await?;
    }
    Ok(())
}

/// Excludes other writes to the blocks of a range, and to all behind it if the padding of the last
/// block makes the storage longer.
async fn begin_careful(
    storage: &dyn Storage,
    offset: u64,
    length: u64,
) -> io::Result<Option<Written<'_>>> {
    let Some(blocks) = storage.blocks() else {
        return Ok(None);
    };
    let mask = storage.alignment().offset as u64 - 1;
    let start = offset & !mask;
    let end = (offset + length + mask) & !mask;
    let reaches = |end: u64| io::Result::Ok(end > storage.len()? && !storage.is_device());
    if !reaches(end)? {
        let written = blocks.careful(start..end).await;
        if !reaches(end)? {
            return Ok(Some(written));
        }
    }
    Ok(Some(blocks.careful(start..u64::MAX).await))
}

/// Makes the storage `length` bytes long; new bytes read as zeroes.
///
/// If it is dropped, the storage is as long as before or as requested.
///
/// # Errors
/// `EINVAL` if the storage is of fixed size, and shorter; `EFBIG` or `ENOSPC` if it cannot be so
/// long.
pub async fn set_len(storage: &dyn Storage, queue: &Queue, length: u64) -> io::Result<()> {
    if length > i64::MAX as u64 {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    perform(storage, queue, OpKind::SetLength, 0, length).await
}

/// What the bytes from `offset` on are: at least one byte, or none at the end of the storage. Data
/// where the storage does not distinguish.
///
/// # Errors
/// Those of the storage.
pub async fn extent(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
) -> io::Result<StorageExtent> {
    let left = storage.len()?.saturating_sub(offset);
    if left == 0 {
        return Ok(StorageExtent::hole(0));
    }
    let mut buffer = queue.buffer(StorageExtent::SIZE);
    // SAFETY: the buffer lives until the operation, awaited here, has ended.
    let iov = unsafe { buffer.iov() }.slice(0, StorageExtent::SIZE);
    let found = loop {
        // SAFETY: `storage` is borrowed while this is awaited.
        let started = unsafe {
            let size = iov.len() as u64;
            storage.start(queue, OpKind::Extent, offset, size, Some(&iov))
        };
        match started.wait().await {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => break result?,
        }
    };
    let mut extent = match buffer.first_chunk() {
        Some(answer) if found == StorageExtent::SIZE => StorageExtent::decode(*answer),
        _ => StorageExtent::data(left),
    };
    // A window ends before its storage does.
    extent.length = extent.length.clamp(1, left);
    Ok(extent)
}

/// Makes all completed writes durable, unless the cache mode ignores flushes.
///
/// # Errors
/// Those of the storage. After an error it is unknown what is durable, and no later flush tells.
pub async fn flush(storage: &dyn Storage, queue: &Queue) -> io::Result<()> {
    if storage.cache_mode().ignores_flushes() {
        return Ok(());
    }
    range(storage, queue, OpKind::Flush, 0, 0).await
}

/// Makes zeroes that were not written as data durable in a write-through cache mode.
async fn flush_zeroes(storage: &dyn Storage, queue: &Queue) -> io::Result<()> {
    match storage.cache_mode().is_write_through() {
        true => flush(storage, queue).await,
        false => Ok(()),
    }
}

/// Zeroes a range and keeps it allocated; writes zeroes if the storage has no operation for it. The
/// storage does not become longer. Durable as [`write()`] is.
///
/// # Errors
/// Those of [`write()`].
pub async fn zero_range(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    match zero(storage, queue, OpKind::ZeroRange, offset, length).await {
        Err(e) if is_unsupported(&e) => {
            let inside = storage.len()?.saturating_sub(offset);
            write_zeroes(storage, queue, offset, length.min(inside)).await
        }
        Err(e) => Err(e),
        Ok(()) => flush_zeroes(storage, queue).await,
    }
}

/// Zeroes a range and frees its blocks if the storage has an operation for it, else as
/// [`zero_range`].
///
/// # Errors
/// Those of [`write()`].
pub async fn punch_hole(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    free(storage, queue, OpKind::PunchHole, offset, length).await
}

/// Frees the blocks of a range by `kind`, for [`punch_hole`] and [`discard`].
async fn free(
    storage: &dyn Storage,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    match zero(storage, queue, kind, offset, length).await {
        Err(e) if is_unsupported(&e) => zero_range(storage, queue, offset, length).await,
        Err(e) => Err(e),
        Ok(()) => flush_zeroes(storage, queue).await,
    }
}

/// Zeroes a range if that is faster than writing zeroes, else fails with
/// `EOPNOTSUPP`; with direct I/O also if the range is not whole pages.
pub async fn zero_quickly(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    let unit = storage.blocks().map_or(1, |blocks| blocks.page());
    if !offset.is_multiple_of(unit) || !length.is_multiple_of(unit) {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    range(storage, queue, OpKind::ZeroQuickly, offset, length).await
}

/// Frees the blocks of a range, those of whole pages: its content is not needed any more.
pub async fn deallocate(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    let page = storage.blocks().map_or(1, |blocks| blocks.page());
    let start = offset.next_multiple_of(page);
    let end = (offset + length) & !(page - 1);
    match start < end {
        true => range(storage, queue, OpKind::Discard, start, end - start).await,
        false => Ok(()),
    }
}

/// Discards a range: its content is not needed any more. It reads as zeroes afterwards; of a remote
/// storage, as anything.
///
/// # Errors
/// Those of the storage.
pub async fn discard(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    match storage.is_remote() {
        true => deallocate(storage, queue, offset, length).await,
        false => free(storage, queue, OpKind::Discard, offset, length).await,
    }
}

/// Allocates a range without changing its content. The storage becomes longer if it ends before
/// the range does.
///
/// # Errors
/// `EOPNOTSUPP` if the storage cannot do that, `ENOSPC`, and others of the storage.
pub async fn allocate(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    range(storage, queue, OpKind::Allocate, offset, length).await
}

/// Zeroes a range by `kind`; with direct I/O only whole pages, and writes the rest.
async fn zero(
    storage: &dyn Storage,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    let Some(blocks) = storage.blocks() else {
        return range(storage, queue, kind, offset, length).await;
    };
    if let Some(result) = check(offset, length) {
        return result.map(drop);
    }
    let (end, mask) = (offset + length, blocks.page() - 1);
    let first = ((offset + mask) & !mask).min(end);
    let last = (end & !mask).max(first);
    range(storage, queue, kind, first, last - first).await?;
    // The storage does not become longer.
    let inside = storage.len()?;
    for (start, end) in [(offset, first), (last, end)] {
        let end = end.min(inside);
        write_zeroes(storage, queue, start, end.saturating_sub(start)).await?;
    }
    Ok(())
}

async fn range(
    storage: &dyn Storage,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    if kind != OpKind::Flush
        && let Some(result) = check(offset, length)
    {
        return result.map(drop);
    }
    let _written = match storage.blocks().filter(|_| kind != OpKind::Flush) {
        Some(blocks) => Some(blocks.plain(offset..offset + length).await),
        None => None,
    };
    perform(storage, queue, kind, offset, length).await
}

/// Waits for an operation without memory.
async fn perform(
    storage: &dyn Storage,
    queue: &Queue,
    kind: OpKind,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    loop {
        // SAFETY: `storage` is borrowed while this is awaited.
        let started = unsafe { storage.start(queue, kind, offset, length, None) };
        match started.wait().await {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(drop),
        }
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL)
    )
}

/// The most bytes of [`zeroes`].
pub const ZEROES: usize = 1 << 20;

/// `length` zero bytes, at most [`ZEROES`], which are only to be written from. All users share
/// them.
pub fn zeroes(length: usize) -> Iov {
    static SHARED: OnceLock<Buffer> = OnceLock::new();
    let shared = SHARED.get_or_init(|| Buffer::new(ZEROES));
    // SAFETY: it is never freed and never changes; a write only reads the memory.
    unsafe { Iov::from_raw(shared.as_ptr().cast_mut(), ZEROES) }.slice(0, length)
}

/// Writes zeroes as data. The storage becomes longer if it ends before the range does.
///
/// # Errors
/// Those of [`write()`].
pub async fn write_zeroes(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    if let Some(result) = check(offset, length) {
        return result.map(drop);
    }
    let mut done = 0;
    while done < length {
        let count = (length - done).min(ZEROES as u64) as usize;
        write(storage, queue, offset + done, &zeroes(count)).await?;
        done += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Guards against vectors with more segments than the kernel accepts at once.
    #![allow(unsafe_code)]
    use super::super::queue::tests::queues;
    use super::super::{OpenFile, open_file};
    use super::*;

    #[test]
    fn thousands_of_segments() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let how = OpenFile {
            write: true,
            ..OpenFile::default()
        };
        let storage = &*open_file(file.path(), how).unwrap();
        for queue in queues() {
            let mut bytes: Vec<u8> = (0..5000u32).map(|i| (i % 251) as u8).collect();
            let expected = bytes.clone();
            let segments: Vec<_> = bytes
                .chunks_mut(2)
                .map(|c| (c.as_mut_ptr(), c.len()))
                .collect();
            // SAFETY: `bytes` is used only when no request is in flight.
            let iov = unsafe { Iov::from_segments(&segments) };
            queue.block_on(async {
                write(storage, &queue, 7, &iov).await.unwrap();
                iov.fill(0);
                read(storage, &queue, 7, &iov).await.unwrap();
            });
            assert!(bytes == expected, "{}", queue.options().engine);
        }
    }
}
