//! The table of requests in flight, in memory that outlives this process. After a crash of the
//! server, the front end passes the memory to the next server, which executes these requests again.
//!
//! Requests complete in any order, so the rings alone do not tell which are incomplete. Layout and
//! order of writes are those of the vhost-user specification for split virtqueues ("Inflight I/O
//! tracking").

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// Bytes before the entries of a queue.
const HEADER: usize = 16;
/// Bytes of the entry of a descriptor.
const ENTRY: usize = 16;
const ALIGNMENT: usize = 64;

/// Flags of the server's own, in a field of 8 bytes.
const FLAGS: usize = 0;
/// In the table of the first queue: the guest has switched the write cache off.
const CACHE_OFF: u64 = 1 << 63;
const VERSION: usize = 8;
const COUNT: usize = 10;
const LAST: usize = 12;
const USED: usize = 14;

/// The table of all queues.
pub struct Inflight {
    region: Arc<MmapRegion<()>>,
    queues: u16,
    queue_size: u16,
}

/// The table of one queue.
pub struct QueueInflight {
    region: Arc<MmapRegion<()>>,
    start: usize,
    size: u16,
    /// The number of the next request, by which recovery sorts.
    counter: u64,
}

/// Bytes of the table of one queue.
fn stride(queue_size: u16) -> usize {
    (HEADER + ENTRY * usize::from(queue_size)).next_multiple_of(ALIGNMENT)
}

/// Where the entry of a descriptor is in the memory of all tables.
#[cfg(feature = "front-end")]
pub fn entry(queue: u16, queue_size: u16, head: u16) -> usize {
    usize::from(queue) * stride(queue_size) + QueueInflight::entry(head)
}

impl Inflight {
    /// Creates an empty table in new memory.
    ///
    /// # Errors
    ///
    /// There is no memory, or no descriptor for it.
    pub fn create(queues: u16, queue_size: u16) -> io::Result<(VhostUserInflight, File)> {
        let length = (stride(queue_size) * usize::from(queues)) as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("zebu-inflight", flags)?);
        file.set_len(length)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        let message = VhostUserInflight::new(length, 0, queues, queue_size);
        Ok((message, file))
    }

    /// Maps the memory that the front end passes. `None`: it is smaller than `message` requires.
    pub fn open(message: &VhostUserInflight, file: File) -> Option<Self> {
        let (queues, queue_size) = (message.num_queues, message.queue_size);
        let length = stride(queue_size) * usize::from(queues);
        let end = message.mmap_offset.checked_add(message.mmap_size)?;
        if message.mmap_size < length as u64 || file.metadata().ok()?.len() < end {
            return None;
        }
        let offset = FileOffset::new(file, message.mmap_offset);
        let region = MmapRegion::from_file(offset, length).ok()?;
        Some(Inflight {
            region: Arc::new(region),
            queues,
            queue_size,
        })
    }

    /// Whether the write cache is switched on.
    pub fn cache_switch(&self) -> bool {
        let flags = self
            .region
            .as_volatile_slice()
            .load(FLAGS, Ordering::SeqCst);
        flags.is_ok_and(|flags: u64| flags & CACHE_OFF == 0)
    }

    /// Keeps the switch for the next server: the front end does not tell it.
    pub fn set_cache_switch(&self, on: bool) {
        let flags = if on { 0 } else { CACHE_OFF };
        // A table without queues has no place for it, and no requests.
        let _ = self
            .region
            .as_volatile_slice()
            .store(flags, FLAGS, Ordering::SeqCst);
    }

    /// The table of the queue `index` of `size` descriptors. `None`: the table has no such queue.
    pub fn queue(&self, index: u16, size: u16) -> Option<QueueInflight> {
        if index >= self.queues || size > self.queue_size {
            return None;
        }
        Some(QueueInflight {
            region: self.region.clone(),
            start: usize::from(index) * stride(self.queue_size),
            size,
            counter: 0,
        })
    }
}

impl QueueInflight {
    fn load16(&self, at: usize) -> u16 {
        let slice = self.region.as_volatile_slice();
        let value = slice.load(self.start + at, Ordering::SeqCst);
        value.expect("inside the region")
    }

    fn store16(&self, at: usize, value: u16) {
        let slice = self.region.as_volatile_slice();
        let stored = slice.store(value, self.start + at, Ordering::SeqCst);
        stored.expect("inside the region");
    }

    fn entry(head: u16) -> usize {
        HEADER + ENTRY * usize::from(head)
    }

    fn is_taken(&self, head: u16) -> bool {
        let slice = self.region.as_volatile_slice();
        let value: Result<u8, _> = slice.load(self.start + Self::entry(head), Ordering::SeqCst);
        value.expect("inside the region") != 0
    }

    fn set_taken(&self, head: u16, taken: bool) {
        let slice = self.region.as_volatile_slice();
        let at = self.start + Self::entry(head);
        let stored = slice.store(u8::from(taken), at, Ordering::SeqCst);
        stored.expect("inside the region");
    }

    fn order(&self, head: u16) -> u64 {
        let slice = self.region.as_volatile_slice();
        let at = self.start + Self::entry(head) + 8;
        let value = slice.load(at, Ordering::SeqCst);
        value.expect("inside the region")
    }

    /// The requests that were taken and not completed, in order, when the ring's used index is
    /// `used`.
    pub fn recover(&mut self, used: u16) -> Vec<u16> {
        self.store16(VERSION, 1);
        self.store16(COUNT, self.size);
        let last = self.load16(LAST);
        if self.load16(USED) != used && last < self.size {
            // The last server was killed between writing the used index and this entry.
            self.set_taken(last, false);
        }
        self.store16(USED, used);
        let mut heads: Vec<u16> = (0..self.size).filter(|head| self.is_taken(*head)).collect();
        heads.sort_by_key(|head| self.order(*head));
        let newest = heads.last().map(|head| self.order(*head));
        self.counter = newest.map_or(0, |newest| newest.wrapping_add(1));
        heads
    }

    /// Marks a request as taken.
    pub fn take(&mut self, head: u16) {
        if head >= self.size {
            return;
        }
        let at = self.start + Self::entry(head) + 8;
        let slice = self.region.as_volatile_slice();
        let stored = slice.store(self.counter, at, Ordering::SeqCst);
        stored.expect("inside the region");
        self.counter = self.counter.wrapping_add(1);
        self.set_taken(head, true);
    }

    /// Must be called before the request is put on the used ring.
    pub fn answer(&self, head: u16) {
        self.store16(LAST, head);
    }

    /// Must be called after the request was put on the used ring, whose index is now `used`.
    pub fn answered(&self, head: u16, used: u16) {
        if head < self.size {
            self.set_taken(head, false);
        }
        self.store16(USED, used);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against requests that are lost, or executed twice, when a server was killed between
    //! any two of its writes.
    use super::*;

    fn open(message: &VhostUserInflight, file: &File) -> QueueInflight {
        let inflight = Inflight::open(message, file.try_clone().unwrap()).unwrap();
        inflight.queue(1, 8).unwrap()
    }

    #[test]
    fn what_was_taken_is_found_by_the_next() {
        let (message, file) = Inflight::create(2, 8).unwrap();
        let mut queue = open(&message, &file);
        assert!(queue.recover(0).is_empty());
        for head in [5, 2, 7] {
            queue.take(head);
        }
        queue.answer(2);
        queue.answered(2, 1);
        assert_eq!(open(&message, &file).recover(1), [5, 7]);
        // Killed before the used index was written.
        queue.answer(5);
        assert_eq!(open(&message, &file).recover(1), [5, 7]);
        // Killed after it was written.
        queue.answer(5);
        let mut next = open(&message, &file);
        assert_eq!(next.recover(2), [7]);
        // Later requests follow.
        next.take(0);
        assert_eq!(open(&message, &file).recover(2), [7, 0]);
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let (message, file) = Inflight::create(2, 8).unwrap();
        let wrong = |f: fn(&mut VhostUserInflight)| {
            let mut message = message;
            f(&mut message);
            Inflight::open(&message, file.try_clone().unwrap()).is_none()
        };
        assert!(!wrong(|_| ()));
        assert!(wrong(|message| message.num_queues = 3));
        assert!(wrong(|message| message.queue_size = 1024));
        assert!(wrong(|message| message.mmap_size -= 1));
        assert!(wrong(|message| message.mmap_offset = 4096));
        assert!(wrong(|message| message.mmap_offset = u64::MAX));
        let inflight = Inflight::open(&message, file).unwrap();
        assert!(inflight.queue(2, 8).is_none());
        assert!(inflight.queue(1, 16).is_none());
    }
}
