//! Buffers that return to their queue.

use super::super::buffer::Buffer;
use super::Queue;

/// A buffer that returns to its queue's pool.
pub struct PoolBuffer {
    pub(super) buffer: Option<Buffer>,
    pub(super) queue: Queue,
}

impl PoolBuffer {
    /// Takes it away from the pool.
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
