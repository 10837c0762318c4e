//! Blocks of a stream, and their memory, which is used again.

use std::io::{self, Read};
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex};

use crate::lock;
use crate::storage::Buffer;

/// Bytes of a block, unless a reader needs larger ones.
pub const BLOCK: usize = 1 << 20;

/// Bytes of all blocks at most.
const MOST: usize = 32 << 20;

/// Buffers of one length, of which there are a limited number.
#[derive(Debug)]
pub struct Pool {
    length: usize,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Not in use.
    free: Vec<Buffer>,
    made: usize,
}

/// A part of a stream. Its memory returns to the pool when it is dropped.
#[derive(Debug)]
pub struct Block {
    /// None once it is dropped.
    buffer: Option<Buffer>,
    /// Bytes that are filled.
    filled: usize,
    pool: Arc<Pool>,
}

impl Block {
    /// The whole buffer, of which the first bytes are filled.
    pub fn buffer_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("present until dropped")
    }

    /// Adds zeroes up to a multiple of `unit`, a part of the buffer's length.
    pub fn pad(&mut self, unit: usize) {
        let (from, to) = (self.filled, self.filled.next_multiple_of(unit));
        self.buffer_mut()[from..to].fill(0);
        self.filled = to;
    }
}

impl Deref for Block {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let buffer = self.buffer.as_ref().expect("present until dropped");
        &buffer[..self.filled]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            lock(&self.pool.state).free.push(buffer);
            self.pool.returned.notify_one();
        }
    }
}

impl Pool {
    /// Of blocks of so many bytes.
    pub fn new(length: usize) -> Arc<Pool> {
        Arc::new(Pool {
            length,
            state: Mutex::default(),
            returned: Condvar::new(),
        })
    }

    /// Bytes of a block.
    pub fn block_len(&self) -> usize {
        self.length
    }

    /// A block that `fill` fills. It returns how many bytes it has filled. Waits while all are in
    /// use: by workers, and one by the thread that reads.
    pub fn block(
        self: &Arc<Self>,
        fill: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Block> {
        let mut block = Block {
            buffer: Some(self.take()),
            filled: 0,
            pool: self.clone(),
        };
        block.filled = fill(block.buffer_mut())?;
        Ok(block)
    }

    fn take(&self) -> Buffer {
        let mut state = lock(&self.state);
        loop {
            if let Some(buffer) = state.free.pop() {
                return buffer;
            }
            if state.made < (MOST / self.length).max(4) {
                state.made += 1;
                return Buffer::new(self.length);
            }
            state = self.returned.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }
}

/// Reads until `bytes` are full or the stream ends. Returns how many were read.
pub fn read_full(reader: &mut dyn Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < bytes.len() {
        match reader.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}
