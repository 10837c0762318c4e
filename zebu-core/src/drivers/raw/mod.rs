//! A raw image: the disk is the storage's bytes, or a part of them.

pub(crate) mod create;
mod resize;
mod stream;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use super::{
    AnyImage, Changing, Clear, Context, CreateOption, Driver, Extent, Format, FormatImage, Gate,
    Holes, Mapping, OpenRequest, Preallocation, StorageId,
};
pub use stream::RawStream;

use crate::offset::HostOffset;
use crate::storage::{self, Event, Iov, LockRequest, Queue, Storage};
use crate::{Error, Result};

/// The driver.
pub static DRIVER: Driver = Driver {
    name: "raw",
    probe: None,
    other_form: None,
    is_writable: true,
    has_backing: false,
    has_data_file: false,
    can_compress: false,
    checks_data: false,
    create_options: Some(&CREATE_OPTIONS),
    plan: Some(create::plan),
    stream: None,
    open_options: &["offset", "size"],
    locks: [LockRequest::RAW_READ, LockRequest::RAW_WRITE],
    open: |request| Box::pin(std::future::ready(open(request))),
};

static CREATE_OPTIONS: [CreateOption; 4] = [
    CreateOption::SIZE,
    CreateOption::NOCOW,
    CreateOption::FILE_PREALLOCATION,
    CreateOption::EXTENT_SIZE_HINT,
];

fn open(request: OpenRequest<'_>) -> Result<AnyImage> {
    let part = request.raw;
    let mut raw = Raw::part_of(request.file, part.offset, part.size)?;
    raw.is_bare = part.is_bare;
    if let Some(limits) = request.limits {
        limits.check_size(raw.size())?;
    }
    if part.is_guessed && request.write {
        raw.guard = Some(Gate::default());
    }
    Ok(AnyImage::new(raw))
}

impl FormatImage for Raw {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        Raw::size(self)
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.storage.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        let host = HostOffset(self.offset + guest);
        Some(Ok(Extent::in_file(limit, Mapping::Data { host })))
    }

    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        Some(Holes::Unallocated)
    }

    fn in_place(&self, guest: u64, _length: u64) -> Option<(StorageId, HostOffset)> {
        if self.is_guarded(guest) {
            return None;
        }
        self.event(Event::WriteAio);
        Some((StorageId::FILE, HostOffset(self.offset + guest)))
    }

    fn write<'a>(&'a self, context: Context<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        // All others are written in place.
        Box::pin(self.write_start(context.queue, offset, iov))
    }

    fn clear<'a>(&'a self, context: Context<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(async move {
            let (queue, length) = (context.queue, range.end - range.start);
            let _pass = self.zero_start(queue, range.start, length).await?;
            let (file, at) = (&*self.storage, self.offset + range.start);
            match how {
                Clear::Zero => storage::zero_range(file, queue, at, length).await?,
                Clear::Unmap => storage::punch_hole(file, queue, at, length).await?,
                Clear::Quickly => storage::zero_quickly(file, queue, at, length).await?,
                Clear::Discard => storage::discard(file, queue, at, length).await?,
            }
            Ok(())
        })
    }

    fn flush<'a>(&'a self, context: Context<'a>) -> Changing<'a> {
        Box::pin(Raw::flush(self, context.queue))
    }

    fn resize<'a>(
        &'a mut self,
        context: Context<'a>,
        size: u64,
        preallocation: Preallocation,
    ) -> Changing<'a> {
        Box::pin(self.set_length(context.queue, size, preallocation))
    }

    fn reopen<'a>(&'a mut self, _context: Context<'a>) -> Changing<'a> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn as_raw(&self) -> Option<&Raw> {
        Some(self)
    }
}

/// A raw image.
#[derive(Debug)]
pub struct Raw {
    storage: Arc<dyn Storage>,
    offset: u64,
    size: AtomicU64,
    /// The disk ends where the storage does.
    to_end: bool,
    pub(in crate::drivers) guard: Option<Gate>,
    /// No format driver was named: no events are reported.
    pub(in crate::drivers) is_bare: bool,
    flushes: Arc<Flushes>,
}

/// Flushes of a storage, one at a time. A request may be dropped before its flush has ended, and
/// the kernel reports an error only once.
#[derive(Debug, Default)]
struct Flushes {
    gate: Gate,
    /// The error number of a failed flush that is not reported yet; 0: none.
    unreported: AtomicI32,
}

impl Raw {
    /// The part of `storage` from `offset` (None: its start) on, of `size`
    /// bytes (None: to its end). A length that is no multiple of 512 is rounded
    /// up, as QEMU does; the missing bytes read as zeroes.
    #[doc(hidden)]
    pub fn part_of(
        storage: Arc<dyn Storage>,
        offset: Option<u64>,
        size: Option<u64>,
    ) -> Result<Self> {
        let offset = offset.unwrap_or(0);
        let Some(rest) = storage.len()?.checked_sub(offset) else {
            return Err(Error::Refused(format!(
                "Offset ({offset}) cannot be greater than size of the containing file ({})",
                storage.len()?
            )));
        };
        if let Some(size) = size.filter(|size| *size > rest) {
            return Err(Error::Refused(format!(
                "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to \
                 the  actual size of the containing file ({})",
                storage.len()?
            )));
        }
        Ok(Raw {
            storage,
            offset,
            size: size.unwrap_or(rest).next_multiple_of(512).into(),
            to_end: size.is_none(),
            guard: None,
            is_bare: false,
            flushes: Arc::default(),
        })
    }

    /// It reports no events of its format to the storage.
    #[doc(hidden)]
    #[must_use]
    pub fn without_events(mut self) -> Self {
        self.is_bare = true;
        self
    }

    /// Where the bytes are.
    #[doc(hidden)]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Reports an event to the storage, if that is a blkdebug one.
    #[inline]
    pub(crate) fn event(&self, event: Event) {
        if !self.is_bare {
            storage::event(&*self.storage, event);
        }
    }

    /// Where in the storage the disk starts, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether the disk is a part of the storage with a given size, which cannot be resized: the
    /// storage goes on behind it.
    pub(crate) fn is_fixed(&self) -> bool {
        !self.to_end
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Whether its format was guessed and it is open for writing. Writes that would make it look
    /// like an image of another format fail with `EPERM`.
    pub fn is_guessed(&self) -> bool {
        self.guard.is_some()
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], also of an earlier flush whose request was dropped.
    pub(crate) async fn flush(&self, queue: &Queue) -> Result<()> {
        let (storage, flushes) = (self.storage.clone(), self.flushes.clone());
        let is_bare = self.is_bare;
        let flush = queue.begin(|queue| async move {
            let _pass = flushes.gate.enter().await;
            let _unbroken = queue.unbroken(&*storage);
            if !is_bare {
                storage::event(&*storage, storage::Event::FlushToOs);
                storage::event(&*storage, storage::Event::FlushToDisk);
            }
            let result = storage::flush(&*storage, &queue).await;
            if let Err(e) = &result {
                let errno = e.raw_os_error().unwrap_or(libc::EIO);
                flushes.unreported.store(errno, Ordering::SeqCst);
            }
            result
        });
        let result = flush.await;
        match self.flushes.unreported.swap(0, Ordering::SeqCst) {
            0 => Ok(result?),
            errno => Err(Error::os(errno)),
        }
    }

    /// Sets the size of the disk, rounded up as when it is opened. The storage has the space.
    fn set_size(&mut self, size: u64) {
        *self.size.get_mut() = size.next_multiple_of(512);
    }

    /// The size of the disk by the current end of the storage. It never becomes smaller by this.
    pub(crate) fn refresh_size(&self) -> Result<u64> {
        if self.to_end {
            let rest = self.storage.len()?.saturating_sub(self.offset);
            let size = rest.next_multiple_of(512);
            self.size.fetch_max(size, Ordering::Relaxed);
        }
        Ok(self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{Memory, QueueOptions};

    #[test]
    fn a_raw_image_grows_with_its_storage_and_never_shrinks() {
        let storage: Arc<dyn Storage> = Arc::new(Memory::new(vec![0; 4096]));
        let part = |offset, size| Raw::part_of(storage.clone(), offset, size).unwrap();
        let (whole, rest) = (part(None, None), part(Some(1024), None));
        let fixed = part(None, Some(2048));
        let sizes = |length| {
            let queue = Queue::new(QueueOptions::default()).unwrap();
            queue
                .block_on(storage::set_len(&*storage, &queue, length))
                .unwrap();
            [&whole, &rest, &fixed].map(|raw| raw.refresh_size().unwrap())
        };
        assert_eq!(sizes(4096), [4096, 3072, 2048]);
        assert_eq!(sizes(8000), [8192, 7168, 2048]);
        assert_eq!(sizes(512), [8192, 7168, 2048]);
    }
}
