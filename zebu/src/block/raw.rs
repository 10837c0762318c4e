//! A raw image: the storage's bytes, or a part of them, are the disk's.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use super::guess::Guard;
use crate::image::Gate;
use crate::storage::{self, Event, Queue, Storage};
use crate::{Error, Result};

/// A raw image.
#[derive(Debug)]
pub struct Raw {
    storage: Arc<dyn Storage>,
    offset: u64,
    size: AtomicU64,
    /// The disk ends where the storage does.
    to_end: bool,
    pub(super) guard: Option<Guard>,
    /// The storage is the disk without a format driver between: no events are reported.
    pub(super) is_bare: bool,
    flushes: Arc<Flushes>,
}

/// Flushes of a storage, one at a time. A request may be dropped before its flush
/// ends, and the kernel reports an error only once.
#[derive(Debug, Default)]
struct Flushes {
    gate: Gate,
    /// The error number of a failed flush that no request has reported yet; 0: none.
    unreported: AtomicI32,
}

impl Raw {
    /// The part of `storage` from `offset` (None: its start) on, of `size`
    /// bytes (None: to its end). A length that is no multiple of 512 is rounded
    /// up, as QEMU does; the missing bytes read as zeroes.
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
                "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to the \
                 actual size of the containing file ({})",
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

    /// Where the bytes are.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Reports an event to the storage, if that is a blkdebug one.
    #[inline]
    pub(super) fn event(&self, event: Event) {
        if !self.is_bare {
            storage::event(&*self.storage, event);
        }
    }

    /// Where in the storage the disk starts, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether the disk is a part of the storage, of a size that was given. The storage
    /// goes on behind it, so it cannot be resized.
    pub(super) fn is_fixed(&self) -> bool {
        !self.to_end
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Whether its format was guessed and it is open for writing: writes that
    /// would make it look like an image of another format fail with `EPERM`.
    pub fn is_guessed(&self) -> bool {
        self.guard.is_some()
    }

    /// Makes durable what was written. Fails also if an earlier flush failed whose
    /// request was dropped.
    pub(super) async fn flush(&self, queue: &Queue) -> Result<()> {
        let (storage, flushes) = (self.storage.clone(), self.flushes.clone());
        let is_bare = self.is_bare;
        let flush = queue.detach(|queue| async move {
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
            errno => Err(std::io::Error::from_raw_os_error(errno).into()),
        }
    }

    /// Another size of the disk, which the storage has room for.
    pub(super) fn set_size(&mut self, size: u64) {
        *self.size.get_mut() = size;
    }

    /// Looks for the end of the storage again; the size of the disk, which
    /// never becomes smaller by this.
    pub(super) fn look_again(&self) -> Result<u64> {
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
    use crate::storage::Memory;

    #[test]
    fn it_grows_with_its_storage_and_never_shrinks() {
        let storage: Arc<dyn Storage> = Arc::new(Memory::new(vec![0; 4096]));
        let part = |offset, size| Raw::part_of(storage.clone(), offset, size).unwrap();
        let (whole, rest) = (part(None, None), part(Some(1024), None));
        let fixed = part(None, Some(2048));
        let sizes = |length| {
            storage.set_len(length).unwrap();
            [&whole, &rest, &fixed].map(|raw| raw.look_again().unwrap())
        };
        assert_eq!(sizes(4096), [4096, 3072, 2048]);
        assert_eq!(sizes(8000), [8192, 7168, 2048]);
        assert_eq!(sizes(512), [8192, 7168, 2048]);
    }
}
