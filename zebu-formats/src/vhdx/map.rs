//! The map step: the block allocation table, and for blocks of which the parent has a part the
//! sector bitmap (sections 2.4 and 2.5 of the specification).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::tables::{PIECE, Piece};
use super::{MIB, Vhdx};
use crate::drivers::{Extent, Mapping};
use crate::offset::HostOffset;
use crate::sectors::MAX_RUN;
use crate::storage::Queue;
use crate::{Error, Result};

/// Words of the sector bitmap that one extent covers at most, for the same reason as [`MAX_RUN`].
const MAX_WORDS: usize = 1024;
/// The state of an entry.
const STATE: u64 = 7;
/// The state of a block that is there.
pub(super) const PRESENT: u64 = 6;
/// The offset in an entry. The bits between are reserved.
const OFFSET: u64 = !(MIB - 1);

/// The state of a block, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// Not in this image.
    NotPresent,
    /// Zeroes, or undefined.
    Zero,
    /// All of it at this offset.
    Present(u64),
    /// At this offset; the sector bitmap tells which sectors are.
    PartiallyPresent(u64),
}

impl Block {
    /// Decodes an entry. The error is its state.
    pub(super) fn decode(entry: u64) -> Result<Block, u64> {
        let offset = entry & OFFSET;
        match entry & STATE {
            0 => Ok(Block::NotPresent),
            // 5 is "unmapped" in version 0.95 of the format, which QEMU reads, and 3 since.
            1 | 2 | 3 | 5 => Ok(Block::Zero),
            PRESENT => Ok(Block::Present(offset)),
            7 => Ok(Block::PartiallyPresent(offset)),
            state => Err(state),
        }
    }

    /// The offset of the bitmap of this entry; None: there is no bitmap. The error is the entry's
    /// state.
    pub(super) fn decode_bitmap(entry: u64) -> Result<Option<u64>, u64> {
        match entry & STATE {
            0 => Ok(None),
            PRESENT => Ok(Some(entry & OFFSET)),
            state => Err(state),
        }
    }

    /// The block that follows this one in the file, or is like it.
    fn next(self, block_size: u64) -> Option<Block> {
        match self {
            Block::Present(offset) => offset.checked_add(block_size).map(Block::Present),
            Block::PartiallyPresent(_) => None,
            same => Some(same),
        }
    }
}

/// Why there is no result.
enum Stop {
    /// This piece of the tables is not in memory.
    Missing(u64),
    /// The image is damaged.
    Corrupt(String),
}

impl Vhdx {
    /// The extent at `guest`, if all that it needs is in memory.
    pub(super) fn extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        match self.find(guest, limit, |number| self.tables.get(number)) {
            Ok(extent) => Some(Ok(extent)),
            Err(Stop::Missing(_)) => None,
            Err(Stop::Corrupt(what)) => Some(Err(Error::Corrupt { guest, what })),
        }
    }

    /// The extent at `guest`.
    pub(super) async fn load_extent(
        &self,
        queue: &Queue,
        guest: u64,
        limit: u64,
    ) -> Result<Extent> {
        // Held, since a small cache may drop one piece while the next is read.
        let mut held: Vec<(u64, Arc<Piece>)> = Vec::new();
        loop {
            let piece = |number| {
                let found = held.iter().find(|(of, _)| *of == number);
                found
                    .map(|(_, piece)| piece.clone())
                    .or_else(|| self.tables.get(number))
            };
            match self.find(guest, limit, piece) {
                Ok(extent) => return Ok(extent),
                Err(Stop::Corrupt(what)) => return Err(Error::Corrupt { guest, what }),
                Err(Stop::Missing(number)) => {
                    held.push((number, self.tables.load(queue, number).await?));
                }
            }
        }
    }

    /// The extent at `guest`, by the pieces of the tables that `piece` has.
    fn find(
        &self,
        guest: u64,
        limit: u64,
        piece: impl Fn(u64) -> Option<Arc<Piece>>,
    ) -> Result<Extent, Stop> {
        let geometry = &self.geometry;
        let block_size = geometry.block_size();
        let (first, within) = (guest >> geometry.block_bits, guest & (block_size - 1));
        let offset = |block| self.offset_of_entry(block);
        let number = offset(first) / PIECE;
        let entries = piece(number).ok_or(Stop::Missing(number))?;
        let entry = |block| {
            let at = offset(block);
            let is_here = at / PIECE == number;
            is_here.then(|| entries[(at % PIECE / 8) as usize].load(Ordering::Acquire))
        };
        let entry_of_first = entry(first).expect("in its own piece");
        let block = Block::decode(entry_of_first)
            .map_err(|state| Stop::Corrupt(format!("Invalid state {state} of block {first}")))?;
        let mut most = MAX_RUN;
        if let Block::Present(host) | Block::PartiallyPresent(host) = block {
            most = most.min(self.regions.free_from(host) / block_size);
            if most == 0 {
                return Err(Stop::Corrupt(format!(
                    "Block {first} overlaps the metadata of the image at {host:#x}"
                )));
            }
        }
        if let Block::PartiallyPresent(host) = block {
            return self.find_sectors(guest, limit.min(block_size - within), host + within, piece);
        }
        let last = (guest + limit - 1) >> geometry.block_bits;
        let end = last.min(first + most - 1);
        let mut previous = block;
        let follows = |index: &u64| {
            let expected = previous.next(block_size);
            match entry(*index).and_then(|entry| Block::decode(entry).ok()) {
                Some(next) if Some(next) == expected => {
                    previous = next;
                    true
                }
                _ => false,
            }
        };
        let blocks = 1 + (first + 1..=end).take_while(follows).count() as u64;
        let mapping = match block {
            Block::NotPresent if self.parent.is_some() => Mapping::Unallocated { host: None },
            Block::Present(host) => Mapping::Data {
                host: HostOffset(host + within),
            },
            _ => Mapping::Zero { host: None },
        };
        let length = limit.min(blocks * block_size - within);
        Ok(Extent::in_file(length, mapping))
    }

    /// The extent at `guest` in a block of which the parent has a part: `limit` bytes of it are at
    /// `host`.
    fn find_sectors(
        &self,
        guest: u64,
        limit: u64,
        host: u64,
        piece: impl Fn(u64) -> Option<Arc<Piece>>,
    ) -> Result<Extent, Stop> {
        let geometry = &self.geometry;
        let block = guest >> geometry.block_bits;
        let corrupt = |what: &str| Stop::Corrupt(format!("Block {block}: {what}"));
        if self.parent.is_none() {
            return Err(corrupt("it has a part only, and the image has no parent"));
        }
        let at = self.bat.start + geometry.entry_of_bitmap(block) * 8;
        if at >= self.bat.end {
            return Err(corrupt("its sector bitmap is not in the table"));
        }
        let number = at / PIECE;
        let entries = piece(number).ok_or(Stop::Missing(number))?;
        let entry = entries[(at % PIECE / 8) as usize].load(Ordering::Acquire);
        let bitmap = Block::decode_bitmap(entry);
        let Ok(Some(bitmap)) = bitmap else {
            return Err(corrupt("its sector bitmap is missing"));
        };
        if self.regions.free_from(bitmap) < MIB || bitmap + MIB > self.file_len() {
            return Err(corrupt(&format!(
                "the place {bitmap:#x} of its sector bitmap is invalid"
            )));
        }
        let bit = geometry.bit(guest);
        let at = bitmap + bit / 64 * 8;
        let number = at / PIECE;
        let words = piece(number).ok_or(Stop::Missing(number))?;
        let sectors = {
            let sector = guest >> geometry.sector_bits;
            let last = (guest + limit - 1) >> geometry.sector_bits;
            last - sector + 1
        };
        let words = &words[(at % PIECE / 8) as usize..];
        let (is_present, run) = run(words, bit % 64, sectors);
        let within = guest & ((1 << geometry.sector_bits) - 1);
        let mapping = match is_present {
            true => Mapping::Data {
                host: HostOffset(host),
            },
            false => Mapping::Unallocated { host: None },
        };
        let length = limit.min((run << geometry.sector_bits) - within);
        Ok(Extent::in_file(length, mapping))
    }

    /// Where in the file the entry of a block is.
    pub(super) fn offset_of_entry(&self, block: u64) -> u64 {
        self.bat.start + self.geometry.entry_of_block(block) * 8
    }

    /// How many of `length` bytes at `host` the file has.
    pub(super) fn before_end(&self, host: u64, length: u64) -> u64 {
        self.file_len().saturating_sub(host).min(length)
    }
}

/// The bit at `from` of the first word, and how many bits from there on are like it: at most
/// `most`, and those of [`MAX_WORDS`] words.
fn run(words: &[AtomicU64], from: u64, most: u64) -> (bool, u64) {
    let value = words[0].load(Ordering::Relaxed) >> from & 1 != 0;
    let (mut count, mut skip) = (0, from);
    for word in words.iter().take(MAX_WORDS) {
        // The bits that differ are ones.
        let word = word.load(Ordering::Relaxed);
        let other = if value { !word } else { word };
        let alike = u64::from((other >> skip).trailing_zeros()).min(64 - skip);
        count += alike;
        if count >= most || skip + alike < 64 {
            break;
        }
        skip = 0;
    }
    (value, count.min(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_bits() {
        let run = |words: &[u64], from, most| {
            let words: Vec<_> = words.iter().map(|word| AtomicU64::new(*word)).collect();
            super::run(&words, from, most)
        };
        assert_eq!(run(&[0], 0, 100), (false, 64));
        assert_eq!(run(&[0], 60, 100), (false, 4));
        assert_eq!(run(&[!0, !0, 1], 1, 1000), (true, 128));
        assert_eq!(run(&[!0, !0, 1], 1, 100), (true, 100));
        assert_eq!(run(&[0b1000_1100], 0, 100), (false, 2));
        assert_eq!(run(&[0b1000_1100], 2, 100), (true, 2));
        assert_eq!(run(&[0b1000_1100], 4, 2), (false, 2));
        assert_eq!(run(&[1 << 63, 1], 63, 100), (true, 2));
        assert_eq!(run(&[0; 5000], 3, u64::MAX), (false, 64 * 1024 - 3));
    }

    #[test]
    fn states_of_blocks() {
        let decode = |state: u64| Block::decode(5 << 20 | 0xff00 | state);
        assert_eq!(decode(0), Ok(Block::NotPresent));
        for state in [1, 2, 3, 5] {
            assert_eq!(decode(state), Ok(Block::Zero));
        }
        assert_eq!(decode(6), Ok(Block::Present(5 << 20)));
        assert_eq!(decode(7), Ok(Block::PartiallyPresent(5 << 20)));
        assert_eq!(decode(4), Err(4));
    }
}
