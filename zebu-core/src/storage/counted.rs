//! Counting the work that an untrusted image causes, and a storage whose reads count as work.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Iov, OpKind, Queue, Started, Storage};
use crate::LimitExceeded;

/// The least work of one read, in bytes.
const READ_WORK: u64 = 512;

/// The work that may still be done with an image, shared by all its users.
#[derive(Debug)]
pub struct Work {
    done: AtomicU64,
    limit: u64,
}

impl Work {
    pub(crate) fn new(limit: u64) -> Self {
        Work {
            done: AtomicU64::new(0),
            limit,
        }
    }

    /// Counts a read of so many bytes.
    pub(crate) fn read(&self, bytes: u64) -> io::Result<()> {
        self.spend(bytes.max(READ_WORK)).map_err(io::Error::other)
    }

    /// Counts `amount`. An error once the limit is exceeded, and for all calls from then on.
    #[inline]
    pub(crate) fn spend(&self, amount: u64) -> Result<(), LimitExceeded> {
        // It does not wrap around: callers stop soon after an error.
        let done = self.done.fetch_add(amount, Ordering::Relaxed) + amount;
        if done <= self.limit {
            return Ok(());
        }
        Err(LimitExceeded {
            name: "work",
            what: "The work",
            value: done,
            limit: self.limit,
        })
    }
}

/// A storage whose reads count as work.
#[derive(Debug)]
pub struct Counted {
    storage: Arc<dyn Storage>,
    work: Arc<Work>,
}

impl Counted {
    /// Counts what is read of `storage`.
    pub(crate) fn new(storage: Arc<dyn Storage>, work: Arc<Work>) -> Self {
        Counted { storage, work }
    }
}

#[allow(unsafe_code)]
// SAFETY: all is passed on to a storage that keeps the promises.
unsafe impl Storage for Counted {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::Read
            && let Err(error) = self.work.read(memory.map_or(0, |iov| iov.len() as u64))
        {
            return Started::done(Err(error));
        }
        // SAFETY: as the caller promised; `self` keeps the storage.
        unsafe { self.storage.start(queue, kind, offset, length, memory) }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&*self.storage)
    }
}
