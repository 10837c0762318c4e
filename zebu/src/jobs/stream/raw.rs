//! A raw image as a stream.

use super::Reader;
use super::block::Block;
use super::piece::{Fault, Sink};
use crate::Error;
use crate::drivers::check_tail;
use crate::format::TAIL_BYTES;

/// Reads a raw image, whose size is known when it has ended.
pub struct RawReader {
    /// Bytes that the target has at most.
    most: u64,
    size: u64,
    /// The last [`TAIL_BYTES`], if the format was guessed by the start of the stream.
    tail: Option<Vec<u8>>,
}

impl RawReader {
    /// For a target of `most` bytes at most.
    pub fn new(most: u64, is_guessed: bool) -> Self {
        RawReader {
            most,
            size: 0,
            tail: is_guessed.then(Vec::new),
        }
    }
}

impl Reader for RawReader {
    fn block(&mut self, at: u64, mut block: Block, sink: &mut Sink<'_>) -> Result<(), Fault> {
        // As of a file, the disk has whole sectors.
        block.pad(512);
        self.size = at + block.len() as u64;
        if self.size > self.most {
            let most = self.most;
            let why =
                format!("The stream is longer than the {most} bytes that the target can have");
            return Err(Error::Refused(why).into());
        }
        if let Some(tail) = &mut self.tail {
            let new = &block[block.len().saturating_sub(TAIL_BYTES)..];
            tail.extend(new);
            tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
        }
        Ok(sink.block(at, block)?)
    }

    fn end(&mut self, _length: u64, _sink: &mut Sink<'_>) -> Result<u64, Fault> {
        if let Some(tail) = &self.tail {
            check_tail(tail)?;
        }
        Ok(self.size)
    }
}
