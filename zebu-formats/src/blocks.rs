//! The blocks of a new image, which get their places in the file in the order of their first
//! writes.

use std::sync::{Arc, Mutex};

use super::check_inside;
use crate::Result;
use crate::drivers::Gate;
use crate::storage::{self, Iov, Queue, Storage};

/// How blocks lie in the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockLayout {
    /// The offset of the first place.
    pub start: u64,
    /// Bytes of the disk in a block.
    pub size: u64,
    /// What every place begins with, before the bytes of the disk.
    pub prefix: &'static [u8],
}

impl BlockLayout {
    /// The offset of a place.
    pub(crate) fn offset(&self, place: u32) -> u64 {
        self.start + u64::from(place) * self.length()
    }

    /// Bytes of a place.
    fn length(&self) -> u64 {
        self.prefix.len() as u64 + self.size
    }
}

/// The blocks of a new image, all of them unallocated at first.
///
/// What is not written of an allocated block reads as zeroes: a file is empty at first, and on a
/// device a block is zeroed when it gets its place.
#[derive(Debug)]
pub(crate) struct NewBlocks {
    file: Arc<dyn Storage>,
    layout: BlockLayout,
    /// Bytes of all blocks.
    size: u64,
    places: Mutex<Places>,
    /// Held while blocks of a device are zeroed.
    zeroing: Gate,
}

#[derive(Debug)]
struct Places {
    /// By block: its place plus 1, or 0. (Zeroes take no memory until they are changed.)
    of_blocks: Vec<u32>,
    taken: u32,
}

/// A range of a request that is contiguous in the file.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    offset: u64,
    /// In the request.
    start: usize,
    length: usize,
}

impl NewBlocks {
    /// The `count` blocks of a disk.
    pub(crate) fn new(file: Arc<dyn Storage>, layout: BlockLayout, count: u32) -> Self {
        NewBlocks {
            file,
            layout,
            size: u64::from(count) * layout.size,
            places: Mutex::new(Places {
                of_blocks: vec![0; count as usize],
                taken: 0,
            }),
            zeroing: Gate::default(),
        }
    }

    /// Writes data at `offset` of the disk, as [`NewImage::write`](super::NewImage::write).
    pub(crate) async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        check_inside(offset, iov, self.size)?;
        let file = &*self.file;
        let (runs, new) = match file.is_device() {
            false => self.place(offset, iov.len()),
            true => {
                // No other request may find the place of a block that is not zeroed yet.
                let _pass = self.zeroing.enter().await;
                let (runs, new) = self.place(offset, iov.len());
                for place in &new {
                    let (at, length) = (self.layout.offset(*place), self.layout.length());
                    storage::zero_range(file, queue, at, length).await?;
                }
                (runs, new)
            }
        };
        if !self.layout.prefix.is_empty() {
            for place in new {
                let at = self.layout.offset(place);
                storage::write_slice(file, queue, at, self.layout.prefix).await?;
            }
        }
        for run in runs {
            let part = iov.slice(run.start, run.length);
            storage::write(file, queue, run.offset, &part).await?;
        }
        Ok(())
    }

    /// Gives the blocks of a range their places. Returns where the range is in the file, and the
    /// places that are new.
    fn place(&self, offset: u64, length: usize) -> (Vec<Run>, Vec<u32>) {
        let BlockLayout { size, prefix, .. } = self.layout;
        let (mut runs, mut new): (Vec<Run>, Vec<u32>) = Default::default();
        let mut places = crate::lock(&self.places);
        let mut start = 0;
        while start < length {
            let at = offset + start as u64;
            let within = at % size;
            let part = ((size - within) as usize).min(length - start);
            let place = match places.of_blocks[(at / size) as usize] {
                0 => {
                    let place = places.taken;
                    places.taken += 1;
                    places.of_blocks[(at / size) as usize] = places.taken;
                    new.push(place);
                    place
                }
                next => next - 1,
            };
            let offset = self.layout.offset(place) + prefix.len() as u64 + within;
            match runs.last_mut() {
                Some(last) if last.offset + last.length as u64 == offset => last.length += part,
                _ => runs.push(Run {
                    offset,
                    start,
                    length: part,
                }),
            }
            start += part;
        }
        (runs, new)
    }

    /// How many blocks are allocated.
    pub(crate) fn allocated(&self) -> u32 {
        crate::lock(&self.places).taken
    }

    /// The offset after the last allocated block.
    pub(crate) fn end(&self) -> u64 {
        self.layout.offset(self.allocated())
    }

    /// The places of all blocks, in the order of the disk; None: unallocated.
    pub(crate) fn into_places(self) -> impl Iterator<Item = Option<u32>> {
        let places = self.places.into_inner().unwrap_or_else(|e| e.into_inner());
        let places = places.of_blocks.into_iter();
        places.map(|next| next.checked_sub(1))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against two blocks in one place, and against ranges in another block's place.
    use super::*;
    use crate::storage::Memory;

    fn blocks(prefix: &'static [u8]) -> NewBlocks {
        let layout = BlockLayout {
            start: 100,
            size: 10,
            prefix,
        };
        NewBlocks::new(Arc::new(Memory::default()), layout, 8)
    }

    fn run(offset: u64, start: usize, length: usize) -> Run {
        Run {
            offset,
            start,
            length,
        }
    }

    #[test]
    fn blocks_get_places_in_the_order_of_writes() {
        let blocks = blocks(b"");
        assert_eq!(blocks.place(35, 20), (vec![run(105, 0, 20)], vec![0, 1, 2]));
        assert_eq!(blocks.place(30, 5), (vec![run(100, 0, 5)], vec![]));
        // A new block before one that is there, and one behind.
        let (runs, new) = blocks.place(22, 40);
        let expected = [run(132, 0, 8), run(100, 8, 30), run(140, 38, 2)];
        assert_eq!((&runs[..], new), (&expected[..], vec![3, 4]));
        assert_eq!((blocks.allocated(), blocks.end()), (5, 150));
        let places: Vec<_> = blocks.into_places().collect();
        let expected = [None, None, Some(3), Some(0), Some(1), Some(2), Some(4)];
        assert_eq!(places[..7], expected);
        assert_eq!(places[7], None);
    }

    #[test]
    fn prefixes_part_blocks() {
        let blocks = blocks(b"abc");
        let (runs, new) = blocks.place(5, 10);
        assert_eq!(runs, [run(108, 0, 5), run(116, 5, 5)]);
        assert_eq!((new, blocks.end()), (vec![0, 1], 126));
    }
}
