//! The map step of formats that find blocks by a table in memory, some with a bitmap of its sectors
//! before each block.

use std::sync::Arc;

use super::pieces::{PIECE, Pieces};
use super::{Extent, Mapping};
use crate::offset::HostOffset;
use crate::storage::{Queue, Storage};
use crate::{Error, Result};

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// Blocks that one extent covers at most, which bounds the work for callers that use only its
/// start.
pub(super) const MAX_RUN: u64 = 1024;

/// The extent at `guest` of at most `limit` bytes, on a disk in blocks of `size` bytes. `place` has
/// the offset of a block's data in the file. Blocks without one are `missing`.
pub(super) fn by_blocks(
    guest: u64,
    limit: u64,
    size: u64,
    missing: Mapping,
    place: impl Fn(u64) -> Option<u64>,
) -> Extent {
    let (first, within) = (guest / size, guest % size);
    let start = place(first);
    let last = (guest + limit).div_ceil(size).min(first + MAX_RUN);
    let follows = |index: &u64| {
        let expected = start.map(|start| start + (index - first) * size);
        place(*index) == expected
    };
    let blocks = 1 + (first + 1..last).take_while(follows).count() as u64;
    let mapping = match start {
        Some(start) => Mapping::Data {
            host: HostOffset(start + within),
        },
        None => missing,
    };
    Extent::in_file(limit.min(blocks * size - within), mapping)
}

/// The bitmaps that precede blocks in the file: a bit for each sector that is stored.
#[derive(Debug)]
pub(super) struct SectorBitmaps {
    pieces: Pieces,
    /// Whether a bit of a byte is set, counted in the order of the sectors.
    is_set: fn(u8, u64) -> bool,
    /// What sectors are that are not stored.
    missing: Mapping,
}

/// A block that is stored with a bitmap.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockWithBitmap {
    /// The offset of the bitmap in the file.
    pub bitmap: u64,
    /// The offset of the data.
    pub data: u64,
    /// Bytes of the data.
    pub size: u64,
}

/// The bits of the sectors from some guest offset on, as far as one piece of a bitmap has them.
struct Bits {
    /// Offset of the piece, and the bytes of it that are needed.
    piece: u64,
    need: u64,
    /// The bit of the first sector in the piece.
    first: u64,
    /// How many sectors from that one on have bits in it.
    sectors: u64,
}

impl BlockWithBitmap {
    /// The bits from the sector at `within` the block on.
    fn bits(&self, within: u64) -> Bits {
        let (sector, sectors) = (within / SECTOR, self.size / SECTOR);
        let start = sector / 8 / PIECE * PIECE;
        let need = sectors.div_ceil(8).min(start + PIECE) - start;
        let first = sector - start * 8;
        Bits {
            piece: self.bitmap.saturating_add(start),
            need,
            first,
            sectors: (need * 8).min(sectors - start * 8) - first,
        }
    }
}

impl SectorBitmaps {
    /// The bitmaps in `file`.
    pub(super) fn new(
        file: Arc<dyn Storage>,
        is_set: fn(u8, u64) -> bool,
        missing: Mapping,
    ) -> Self {
        SectorBitmaps {
            pieces: Pieces::new(file),
            is_set,
            missing,
        }
    }

    /// The extent at `guest`, which is in `block`, if the bits are in memory. Does not allocate.
    pub(super) fn cached(&self, block: BlockWithBitmap, guest: u64, limit: u64) -> Option<Extent> {
        let bits = block.bits(guest % block.size);
        let piece = self.pieces.get(bits.piece, bits.need)?;
        Some(self.extent(&bits, &piece, block, guest, limit))
    }

    /// [`SectorBitmaps::cached`] with I/O.
    pub(super) async fn load(
        &self,
        queue: &Queue,
        block: BlockWithBitmap,
        guest: u64,
        limit: u64,
    ) -> Result<Extent> {
        let bits = block.bits(guest % block.size);
        let what = "A block's bitmap";
        let piece = self.pieces.load(queue, what, bits.piece, bits.need).await;
        let piece = piece.map_err(|error| match error {
            Error::Refused(what) => Error::Corrupt { guest, what },
            other => other,
        })?;
        Ok(self.extent(&bits, &piece, block, guest, limit))
    }

    fn extent(
        &self,
        bits: &Bits,
        piece: &[u8],
        block: BlockWithBitmap,
        guest: u64,
        limit: u64,
    ) -> Extent {
        let is_stored = |bit: u64| {
            let byte = piece.get((bit / 8) as usize);
            byte.is_some_and(|byte| (self.is_set)(*byte, bit % 8))
        };
        let stored = is_stored(bits.first);
        let within = guest % SECTOR;
        let sectors = (within + limit).div_ceil(SECTOR).min(bits.sectors);
        let alike = (1..sectors).take_while(|n| is_stored(bits.first + n) == stored);
        let sectors = 1 + alike.count() as u64;
        let mapping = match stored {
            true => Mapping::Data {
                host: HostOffset(block.data.saturating_add(guest % block.size)),
            },
            false => self.missing,
        };
        Extent::in_file(limit.min(sectors * SECTOR - within), mapping)
    }
}
