//! A storage whose operations fail on request.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use zebu::storage::{Iov, OpKind, Queue, Started, Storage};

use super::Rng;

/// Bytes of a block of the simulated file system.
const BLOCK: u64 = 4096;

/// Passes operations on, except those that are to fail.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Storage>,
    /// One write in this many fails; 0: none.
    one_in: AtomicU64,
    /// The error of these writes.
    errno: AtomicI32,
    /// One flush in this many fails; 0: none.
    flushes: AtomicU64,
    /// The number of blocks that the disk has; 0: any number.
    blocks: AtomicU64,
    /// Blocks that were written.
    taken: Mutex<HashSet<u64>>,
    /// Operations that end behind this offset fail; 0: none.
    most: AtomicU64,
    rng: Mutex<Rng>,
    failures: AtomicU64,
}

impl Faulty {
    pub fn new(inner: Arc<dyn Storage>, seed: u64) -> Arc<Faulty> {
        Arc::new(Faulty {
            inner,
            one_in: AtomicU64::new(0),
            errno: AtomicI32::new(0),
            flushes: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            taken: Mutex::default(),
            most: AtomicU64::new(0),
            rng: Mutex::new(Rng::new(seed)),
            failures: AtomicU64::new(0),
        })
    }

    /// From now on one write in `one_in` fails with `errno`.
    pub fn fail_writes(&self, one_in: u64, errno: i32) {
        self.errno.store(errno, Ordering::SeqCst);
        self.one_in.store(one_in, Ordering::SeqCst);
    }

    /// From now on one flush in `one_in` fails.
    pub fn fail_flushes(&self, one_in: u64) {
        self.flushes.store(one_in, Ordering::SeqCst);
    }

    /// Limits the disk to `blocks` free blocks of 4 KiB; 0: any number.
    pub fn set_free_blocks(&self, blocks: u64) {
        let taken = self.taken.lock().unwrap().len() as u64;
        let all = if blocks == 0 { 0 } else { taken + blocks };
        self.blocks.store(all, Ordering::SeqCst);
    }

    /// Limits the disk to its first `most` bytes.
    pub fn limit(&self, most: u64) {
        self.most.store(most, Ordering::SeqCst);
    }

    fn is_beyond(&self, end: u64) -> bool {
        let most = self.most.load(Ordering::SeqCst);
        most != 0 && end > most
    }

    /// How many operations failed.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    fn is_time(&self, one_in: u64) -> bool {
        one_in != 0 && self.rng.lock().unwrap().one_in(one_in)
    }

    /// The error of a write that fails.
    fn write_error(&self, offset: u64, length: u64) -> Option<i32> {
        if self.is_time(self.one_in.load(Ordering::SeqCst)) {
            return Some(self.errno.load(Ordering::SeqCst));
        }
        if self.is_beyond(offset.saturating_add(length)) {
            return Some(libc_enospc());
        }
        let mut taken = self.taken.lock().unwrap();
        let all = self.blocks.load(Ordering::SeqCst);
        for block in offset / BLOCK..(offset + length).div_ceil(BLOCK) {
            if all != 0 && taken.len() as u64 >= all && !taken.contains(&block) {
                return Some(libc_enospc());
            }
            taken.insert(block);
        }
        None
    }
}

/// `ENOSPC`, which is the same on every Linux.
pub fn libc_enospc() -> i32 {
    28
}

/// `EIO`, likewise.
pub fn libc_eio() -> i32 {
    5
}

// SAFETY: all is passed on to a storage that keeps the promise.
unsafe impl Storage for Faulty {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let error = match kind {
            OpKind::Write
            | OpKind::WriteDurable
            | OpKind::Allocate
            | OpKind::ZeroRange
            | OpKind::ZeroQuickly => self.write_error(offset, length),
            OpKind::Flush => {
                let fails = self.is_time(self.flushes.load(Ordering::SeqCst));
                fails.then_some(libc_eio())
            }
            OpKind::SetLength => self.is_beyond(length).then_some(libc_enospc()),
            OpKind::PunchHole | OpKind::Discard | OpKind::Read | OpKind::Extent => None,
        };
        if let Some(errno) = error {
            self.failures.fetch_add(1, Ordering::SeqCst);
            return Started::done(Err(io::Error::from_raw_os_error(errno)));
        }
        // SAFETY: passed on.
        unsafe { self.inner.start(queue, kind, offset, length, memory) }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&*self.inner)
    }
}
