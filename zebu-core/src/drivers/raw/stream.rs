//! A raw image that is written in order.

use crate::Result;
use crate::drivers::stream::{Pipe, Slice, StreamImage, changed};

/// So many bytes, of which `at` are written.
#[derive(Default)]
pub struct RawStream {
    at: u64,
    size: u64,
}

impl RawStream {
    /// A disk of so many bytes; 0: they are known at its end.
    pub fn new(size: u64) -> Self {
        RawStream { at: 0, size }
    }
}

impl StreamImage for RawStream {
    fn length(&self) -> Option<u64> {
        Some(self.size)
    }

    fn begin(&mut self, pipe: &mut Pipe) -> Result<()> {
        match self.size {
            0 => Ok(()),
            size => Ok(pipe.expect(size)?),
        }
    }

    fn write(&mut self, pipe: &mut Pipe, offset: u64, slice: &Slice) -> Result<()> {
        pipe.send_zeroes(offset.checked_sub(self.at).ok_or_else(changed)?)?;
        self.at = offset + slice.len() as u64;
        Ok(pipe.send_slice(slice.clone())?)
    }

    fn set_size(&mut self, size: u64) {
        self.size = size;
    }

    fn finish(self: Box<Self>, pipe: &mut Pipe) -> Result<()> {
        Ok(pipe.send_zeroes(self.size.saturating_sub(self.at))?)
    }
}
