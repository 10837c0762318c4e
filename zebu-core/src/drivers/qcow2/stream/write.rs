//! A qcow2 image that is written in order, by its layout.

use std::ops::Range;

use super::layout::{Layout, Places, Stored};
use crate::Result;
use crate::drivers::stream::{Packing, Pipe, Slice, StreamImage, changed};

/// A place in a layout.
pub struct InLayout {
    layout: Layout,
    places: Places,
    /// The number of the next entry.
    next: usize,
    /// The range of the disk that is still to come of the entry before that.
    rest: Range<u64>,
    /// Where data begin in the stream.
    start: u64,
}

impl Layout {
    /// The image, which is written next.
    pub fn into_image(self) -> Box<dyn StreamImage> {
        Box::new(InLayout::new(self))
    }
}

impl InLayout {
    /// The start of the stream.
    pub fn new(layout: Layout) -> Self {
        InLayout {
            places: layout.places(),
            layout,
            next: 0,
            rest: 0..0,
            start: 0,
        }
    }

    /// Ends the present entry with zeroes, and begins the next one. Returns it.
    fn advance(&mut self, pipe: &mut Pipe) -> Result<Option<Stored>> {
        pipe.send_zeroes(self.rest.end - self.rest.start)?;
        self.rest = 0..0;
        let Some(stored) = self.layout.stored(self.next) else {
            return Ok(None);
        };
        self.next += 1;
        let at = self.start + self.places.place(stored);
        pipe.send_zeroes(at - pipe.length())?;
        if let Stored::Plain { first, count } = stored {
            let size = self.layout.cluster_size();
            self.rest = first * size..(first + count) * size;
        }
        Ok(Some(stored))
    }
}

impl StreamImage for InLayout {
    fn unit(&self) -> u64 {
        self.layout.cluster_size()
    }

    fn packing(&self) -> Option<Packing> {
        self.layout.packing()
    }

    fn length(&self) -> Option<u64> {
        Some(self.layout.length())
    }

    fn begin(&mut self, pipe: &mut Pipe) -> Result<()> {
        self.layout.write_tables(pipe)?;
        self.start = pipe.length();
        Ok(())
    }

    fn write(&mut self, pipe: &mut Pipe, offset: u64, slice: &Slice) -> Result<()> {
        let mut done = 0;
        while done < slice.len() {
            let at = offset + done as u64;
            if at >= self.rest.end {
                match self.advance(pipe)? {
                    Some(Stored::Plain { .. }) => continue,
                    _ => return Err(changed()),
                }
            }
            pipe.send_zeroes(at.checked_sub(self.rest.start).ok_or_else(changed)?)?;
            let count = (slice.len() - done).min((self.rest.end - at) as usize);
            pipe.send_slice(slice.slice(done..done + count))?;
            done += count;
            self.rest.start = at + count as u64;
        }
        Ok(())
    }

    fn write_packed(&mut self, pipe: &mut Pipe, offset: u64, data: &[u8]) -> Result<()> {
        let expected = Stored::Compressed {
            cluster: offset / self.layout.cluster_size(),
            length: data.len() as u64,
        };
        loop {
            match self.advance(pipe)? {
                Some(stored) if stored == expected => return Ok(pipe.send(data.to_vec())?),
                // It reads as zeroes now.
                Some(Stored::Plain { .. }) => {}
                _ => return Err(changed()),
            }
        }
    }

    fn finish(mut self: Box<Self>, pipe: &mut Pipe) -> Result<()> {
        while let Some(stored) = self.advance(pipe)? {
            if let Stored::Compressed { .. } = stored {
                return Err(changed());
            }
        }
        // So that the last sector of compressed data is whole.
        Ok(pipe.pad(self.layout.cluster_size())?)
    }
}
