//! A raw image as a stream.

use super::Reader;
use super::block::Block;
use super::piece::{Fault, Sink};
use crate::Error;

/// Reads a raw image, whose size is known when it has ended.
pub struct RawReader {
    /// Bytes that the target has at most.
    most: u64,
    size: u64,
}

impl RawReader {
    /// For a target of `most` bytes at most.
    pub fn new(most: u64) -> Self {
        RawReader { most, size: 0 }
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
        Ok(sink.block(at, block)?)
    }

    fn end(&mut self, _length: u64, _sink: &mut Sink<'_>) -> Result<u64, Fault> {
        Ok(self.size)
    }
}
