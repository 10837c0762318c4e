//! The buffers of a queue, which are used again.

use std::cell::RefCell;
use std::io;

use super::super::buffer::{BUFFER_ALIGN, Buffer, OwnedBuffer, sealed};
use super::super::slab::Slab;
use super::Queue;

/// A buffer that returns to its queue's pool.
pub struct PoolBuffer {
    pub(super) buffer: Option<Buffer>,
    pub(super) queue: Queue,
}

impl PoolBuffer {
    /// The buffer, which does not return to the pool.
    pub(crate) fn into_buffer(mut self) -> Buffer {
        self.buffer.take().expect("present until dropped")
    }
}

impl std::ops::Deref for PoolBuffer {
    type Target = Buffer;
    fn deref(&self) -> &Buffer {
        self.buffer.as_ref().expect("present until dropped")
    }
}

impl AsRef<[u8]> for PoolBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::ops::DerefMut for PoolBuffer {
    fn deref_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("present until dropped")
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.queue.inner.buffers.give(buffer);
        }
    }
}

impl sealed::Sealed for PoolBuffer {}

impl OwnedBuffer for PoolBuffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Buffers kept for reuse by one queue, in classes of powers of two.
///
/// Holds at most `keep` bytes of idle buffers.
pub struct BufferPool {
    keep: usize,
    free: RefCell<Free>,
}

struct Free {
    /// `classes[i]` holds buffers of `4096 << i` bytes.
    classes: [Vec<Buffer>; BufferPool::CLASSES],
    bytes: usize,
    slab: Slab,
}

impl BufferPool {
    /// Up to a huge page.
    const CLASSES: usize = 10;

    pub(super) fn new(keep: usize) -> Self {
        BufferPool {
            keep,
            free: RefCell::new(Free {
                classes: Default::default(),
                bytes: 0,
                slab: Slab::default(),
            }),
        }
    }

    fn class(len: usize) -> usize {
        len.div_ceil(BUFFER_ALIGN)
            .next_power_of_two()
            .trailing_zeros() as usize
    }

    /// The length of the buffer that [`BufferPool::take`] returns.
    pub(super) fn taken(len: usize) -> usize {
        match Self::class(len.max(1)) {
            class if class >= Self::CLASSES => len,
            class => BUFFER_ALIGN << class,
        }
    }

    /// A buffer of at least `len` bytes, its content unspecified.
    ///
    /// # Errors
    /// There is no memory.
    pub(super) fn take(&self, len: usize) -> io::Result<Buffer> {
        let class = Self::class(len.max(1));
        if class >= Self::CLASSES {
            return Buffer::try_new(len);
        }
        let mut free = self.free.borrow_mut();
        match free.classes[class].pop() {
            Some(buffer) => {
                free.bytes -= buffer.len();
                Ok(buffer)
            }
            None => Buffer::cut(&mut free.slab, BUFFER_ALIGN << class),
        }
    }

    /// Returns a buffer.
    pub(super) fn give(&self, buffer: Buffer) {
        let class = Self::class(buffer.len().max(1));
        let mut free = self.free.borrow_mut();
        if class < Self::CLASSES
            && buffer.len() == BUFFER_ALIGN << class
            && free.bytes + buffer.len() <= self.keep
        {
            free.bytes += buffer.len();
            free.classes[class].push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against idle buffers that are never used again, or take up memory without a limit.
    use super::*;

    #[test]
    fn buffers_are_reused_and_bounded() {
        let pool = BufferPool::new(8 << 20);
        let a = pool.take(5000).unwrap();
        assert_eq!(a.len(), 8192);
        let at = a.as_ptr();
        pool.give(a);
        assert_eq!(pool.take(8192).unwrap().as_ptr(), at);
        for _ in 0..64 {
            pool.give(Buffer::new(1 << 20));
        }
        assert!(pool.free.borrow().bytes <= 8 << 20);
    }
}
