//! Reads and writes of any range with any memory: short results go on,
//! unaligned ones take a bounce buffer.
//!
//! Each function keeps what it uses (storage, memory) borrowed until the
//! operation has ended, also when its future is dropped: that is what makes it
//! safe to start one.
#![allow(unsafe_code)]

use std::io;

use super::{Alignment, Iov, OpKind, PoolBuffer, Queue, Started, Storage, StorageExtent, Written};

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

/// Where operations end at the latest: the kernel counts offsets in 63 bits,
/// and a block that is read or written as a whole must lie below that, too.
const LIMIT: u64 = i64::MAX as u64 & !(BOUNCE as u64 - 1);

/// What is known of an operation without starting it: that it is empty, or
/// goes too far.
fn check(offset: u64, length: u64) -> Option<io::Result<usize>> {
    if length == 0 {
        return Some(Ok(0));
    }
    match offset.checked_add(length) {
        Some(end) if end <= LIMIT => None,
        _ => Some(Err(io::Error::from_raw_os_error(libc::EFBIG))),
    }
}

/// A read that goes beyond the limit: past the end of the storage, like any.
#[cold]
fn read_far(storage: &dyn Storage, offset: u64, iov: &Iov) -> io::Result<usize> {
    if offset < storage.len()? {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    iov.fill(0);
    Ok(iov.len())
}

/// A signal ended the operation before it moved anything.
fn interrupted(error: io::Error) -> io::Result<usize> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
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
/// and written back; other writes to those blocks wait meanwhile
/// ([`Blocks`](super::Blocks)).
pub async fn write(storage: &dyn Storage, queue: &Queue, offset: u64, iov: &Iov) -> io::Result<()> {
    begin_write(storage, queue, offset, iov.clone())
        .finish()
        .await
}

/// Writes a copy of `bytes` at `offset`, as [`write()`] does.
pub async fn write_slice(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    bytes: &[u8],
) -> io::Result<()> {
    let mut buffer = queue.buffer(bytes.len());
    buffer[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: the buffer is this future's own: it lives until the write, awaited
    // here, has ended, and for ever if the future is forgotten.
    let iov = unsafe { buffer.iov() }.slice(0, bytes.len());
    write(storage, queue, offset, &iov).await
}

/// A write that is in the engine already, unless it needs a bounce buffer.
pub(crate) struct Writing<'a> {
    // Dropped first, which waits for the end: the rest is what it uses.
    started: Option<Started>,
    written: Option<Written<'a>>,
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
    /// Whether it is in the engine, or else waits for blocks or a bounce buffer
    /// first.
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
        // SAFETY: `storage` is borrowed while this is awaited, next time round.
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

/// Keeps other writes away from the blocks of a range; also from everything
/// behind it if the padding of the last block will make the storage longer.
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
/// Dropped, it waits for the end, as all operations do: the storage is as long as before or as
/// requested.
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

/// What the bytes from `offset` on are, as far as the storage knows: at least one byte, or none
/// at the end of the storage.
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

/// Makes every completed write durable, unless the cache mode ignores that.
pub async fn flush(storage: &dyn Storage, queue: &Queue) -> io::Result<()> {
    if storage.cache_mode().ignores_flushes() {
        return Ok(());
    }
    range(storage, queue, OpKind::Flush, 0, 0).await
}

/// Makes zeroes durable that were not written as data, where writes are.
async fn flush_zeroes(storage: &dyn Storage, queue: &Queue) -> io::Result<()> {
    match storage.cache_mode().is_write_through() {
        true => flush(storage, queue).await,
        false => Ok(()),
    }
}

/// Zeroes a range and keeps it allocated; writes zeroes where the storage
/// cannot do it by itself. What is past the end of the storage stays there:
/// it does not become longer. Durable as [`write()`] is.
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

/// Zeroes a range and frees its blocks where the storage can; for the rest as
/// [`zero_range`].
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
pub(crate) async fn zero_quickly(
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

/// Gives the blocks of a range back to the file system, those of whole pages:
/// its content is not needed any more.
pub(crate) async fn deallocate(
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

/// Hints that the content of a range is not needed any more: what it reads as
/// afterwards is zeroes, or what the storage has there if that is someone
/// else's.
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

/// Allocates a range without changing what it reads as. The storage becomes
/// longer if it ends before the range does.
pub async fn allocate(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    range(storage, queue, OpKind::Allocate, offset, length).await
}

/// Has the file system zero a range; where direct I/O is in use, only the whole
/// pages of it, and writes the rest.
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
    // It does not become longer.
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

/// Writes zeroes as data. The storage becomes longer if it ends before the
/// range does.
pub async fn write_zeroes(
    storage: &dyn Storage,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    if let Some(result) = check(offset, length) {
        return result.map(drop);
    }
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

#[cfg(test)]
mod tests {
    //! Guards against memory in more pieces than the kernel takes at once.
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
