//! The metadata: size, blocks, sectors, parent (section 2.6 of the specification).

use std::ops::Range;

use super::fields::{Fields, Guid, put};
use super::parent::Parent;
use super::{MIB, refused};
use crate::Result;
use crate::storage::{self, Queue, Storage};

/// Bytes of the table that the region begins with. Items follow it.
const TABLE: usize = 64 << 10;
/// Entries of a table at most.
const MAX_ENTRIES: u16 = 2047;
/// Bytes of the largest disk.
pub(super) const MAX_SIZE: u64 = 64 << 40;
/// Sectors that one block of the sector bitmap covers, as a power of two.
const BITMAP_BITS: u32 = 23;

/// The number of items that a reader must know.
const ITEMS: usize = 6;
/// The items that a reader must know: what they are, and how many bytes are read of them.
const KNOWN: [(Guid, &str, u64); ITEMS] = [
    (
        Guid::new(0xcaa1_6737_fa36_4d43_b3b6_33f0_aa44_e76b),
        "file parameters",
        8,
    ),
    (
        Guid::new(0x2fa5_4224_cd1b_4876_b211_5dbe_d83b_f4b8),
        "virtual disk size",
        8,
    ),
    (
        Guid::new(0xbeca_12ab_b2e6_4523_93ef_c309_e000_c746),
        "virtual disk id",
        0,
    ),
    (
        Guid::new(0x8141_bf1d_a96f_4709_ba47_f233_a8fa_ab5f),
        "logical sector size",
        4,
    ),
    (
        Guid::new(0xcda3_48c7_445d_4471_9cc9_e988_5251_c556),
        "physical sector size",
        0,
    ),
    (
        Guid::new(0xa8d3_5f2d_b30b_454d_abf7_d3d8_4834_ab0c),
        "parent locator",
        20,
    ),
];
/// Places in [`KNOWN`].
const PARAMETERS: usize = 0;
const SIZE: usize = 1;
const SECTOR_SIZE: usize = 3;
const PARENT: usize = 5;

/// The sizes of the disk and of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a block, as a power of two.
    pub block_bits: u32,
    /// Bytes of a logical sector, as a power of two.
    pub sector_bits: u32,
}

impl Geometry {
    /// Checks the sizes.
    pub(super) fn new(size: u64, block_size: u32, sector_size: u32) -> Result<Geometry> {
        if !block_size.is_power_of_two() || !(1 << 20..=256 << 20).contains(&block_size) {
            return Err(refused(format!("Invalid VHDX block size {block_size}")));
        }
        if sector_size != 512 && sector_size != 4096 {
            return Err(refused(format!("Invalid VHDX sector size {sector_size}")));
        }
        if !size.is_multiple_of(sector_size.into()) || size > MAX_SIZE {
            return Err(refused(format!(
                "Invalid VHDX disk size {size} with sectors of {sector_size} bytes"
            )));
        }
        Ok(Geometry {
            size,
            block_bits: block_size.trailing_zeros(),
            sector_bits: sector_size.trailing_zeros(),
        })
    }

    /// Bytes of a block.
    pub(super) fn block_size(&self) -> u64 {
        1 << self.block_bits
    }

    /// Blocks of the disk.
    pub(super) fn blocks(&self) -> u64 {
        self.size.div_ceil(self.block_size())
    }

    /// Blocks of a chunk, which has one block of the sector bitmap, as a power of two.
    pub(super) fn chunk_bits(&self) -> u32 {
        BITMAP_BITS + self.sector_bits - self.block_bits
    }

    /// The place of a block's entry in the table: after each chunk is the entry of its bitmap.
    pub(super) fn entry_of_block(&self, block: u64) -> u64 {
        block + (block >> self.chunk_bits())
    }

    /// The place of the entry of the bitmap that a block has a part of.
    pub(super) fn entry_of_bitmap(&self, block: u64) -> u64 {
        let chunk = block >> self.chunk_bits();
        ((chunk + 1) << self.chunk_bits()) + chunk
    }

    /// The bit of the sector at `guest` in its bitmap.
    pub(super) fn bit(&self, guest: u64) -> u64 {
        (guest >> self.sector_bits) & ((1 << BITMAP_BITS) - 1)
    }

    /// Entries that the table must have, apart from that of the last bitmap.
    pub(super) fn entries(&self) -> u64 {
        match self.blocks().checked_sub(1) {
            Some(last) => self.entry_of_block(last) + 1,
            None => 0,
        }
    }
}

/// The metadata that are used.
#[derive(Debug)]
pub(super) struct Metadata {
    pub geometry: Geometry,
    /// The parent of a differencing image.
    pub parent: Option<Parent>,
}

impl Metadata {
    /// Reads what is in this region of a file of `file_len` bytes.
    pub(super) async fn read(
        queue: &Queue,
        file: &dyn Storage,
        region: Range<u64>,
        file_len: u64,
    ) -> Result<Metadata> {
        if region.is_empty() || region.end > file_len {
            return Err(refused(format!(
                "The VHDX metadata at {:#x} are past the end of the file",
                region.start
            )));
        }
        let bytes = storage::read_vec(file, queue, region.start, TABLE).await?;
        let items = items(Fields(&bytes), region)?;
        let read = async |item: usize| {
            let Some(place) = &items[item] else {
                return Err(refused(format!("The VHDX {} is missing", KNOWN[item].1)));
            };
            let length = match item {
                PARENT => place.end - place.start,
                _ => KNOWN[item].2,
            };
            Ok(storage::read_vec(file, queue, place.start, length as usize).await?)
        };
        let parameters = read(PARAMETERS).await?;
        let (size, sector_size) = (read(SIZE).await?, read(SECTOR_SIZE).await?);
        let parameters = Fields(&parameters);
        let geometry = Geometry::new(
            Fields(&size).u64(0),
            parameters.u32(0),
            Fields(&sector_size).u32(0),
        )?;
        let has_parent = parameters.u32(4) & 2 != 0;
        if let Some(missing) = (0..PARENT).find(|item| items[*item].is_none()) {
            return Err(refused(format!("The VHDX {} is missing", KNOWN[missing].1)));
        }
        if !has_parent && items[PARENT].is_some() {
            return Err(refused(
                "A VHDX image without a parent has a parent locator",
            ));
        }
        let parent = match has_parent {
            true => Some(Parent::decode(&read(PARENT).await?)?),
            false => None,
        };
        Ok(Metadata { geometry, parent })
    }
}

/// Where the items of [`KNOWN`] are in the file.
fn items(table: Fields<'_>, region: Range<u64>) -> Result<[Option<Range<u64>>; ITEMS]> {
    if !table.0.starts_with(b"metadata") {
        return Err(refused("No valid VHDX metadata table found"));
    }
    let count = table.u16(10);
    if count > MAX_ENTRIES {
        return Err(refused(format!(
            "The VHDX metadata table has {count} entries"
        )));
    }
    let mut items = [const { None }; KNOWN.len()];
    for index in 0..usize::from(count) {
        let at = 32 + index * 32;
        let id = table.guid(at);
        let Some(item) = KNOWN.iter().position(|known| known.0 == id) else {
            match table.u32(at + 24) & 4 {
                0 => continue,
                _ => return Err(refused(format!("Unknown VHDX metadata {id} are required"))),
            }
        };
        let (_, name, least) = KNOWN[item];
        let (offset, length) = (u64::from(table.u32(at + 16)), u64::from(table.u32(at + 20)));
        let is_inside = offset >= TABLE as u64 && offset + length <= region.end - region.start;
        if !is_inside || !(least..=MIB).contains(&length) {
            return Err(refused(format!(
                "Invalid place of the VHDX {name}: {length} bytes at {offset:#x} of the metadata"
            )));
        }
        let start = region.start + offset;
        if items[item].replace(start..start + length).is_some() {
            return Err(refused(format!("There are two VHDX {name} items")));
        }
    }
    Ok(items)
}

/// The metadata of a new image without a parent: the table and the items. `id` is the identity of
/// the disk.
pub(super) fn encode(geometry: &Geometry, is_fixed: bool, id: Guid) -> Vec<u8> {
    let mut parameters = (geometry.block_size() as u32).to_le_bytes().to_vec(); // At most 256 MiB.
    parameters.extend(u32::from(is_fixed).to_le_bytes());
    let sector = (1u32 << geometry.sector_bits).to_le_bytes();
    let items: [&[u8]; PARENT] = [
        &parameters,
        &geometry.size.to_le_bytes(),
        &id.0,
        &sector,
        &sector,
    ];
    let mut bytes = vec![0; TABLE];
    put(&mut bytes, 0, b"metadata");
    put(&mut bytes, 10, &(items.len() as u16).to_le_bytes());
    for (index, (item, (known, ..))) in items.into_iter().zip(KNOWN).enumerate() {
        let (offset, length) = (bytes.len() as u32, item.len() as u32);
        let entry = &mut bytes[32 + index * 32..];
        put(entry, 0, &known.0);
        put(entry, 16, &offset.to_le_bytes());
        put(entry, 20, &length.to_le_bytes());
        // It is required, and all but the parameters are of the disk.
        let flags: u32 = if index == PARAMETERS { 4 } else { 6 };
        put(entry, 24, &flags.to_le_bytes());
        bytes.extend(item);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_blocks_and_bitmaps() {
        // 16 blocks have one bitmap.
        let geometry = Geometry::new(33 << 28, 1 << 28, 512).unwrap();
        assert_eq!((geometry.blocks(), geometry.chunk_bits()), (33, 4));
        let of_block = [0, 15, 16, 31, 32].map(|block| geometry.entry_of_block(block));
        assert_eq!(of_block, [0, 15, 17, 32, 34]);
        let of_bitmap = [0, 15, 16, 32].map(|block| geometry.entry_of_bitmap(block));
        assert_eq!(of_bitmap, [16, 16, 33, 50]);
        assert_eq!(geometry.entries(), 35);
        assert_eq!(geometry.bit((1 << 32) + 1024), 2);
        let largest = Geometry::new(MAX_SIZE, 1 << 20, 4096).unwrap();
        assert_eq!((largest.blocks(), largest.chunk_bits()), (1 << 26, 15));
        assert_eq!(Geometry::new(0, 1 << 20, 512).unwrap().entries(), 0);
    }

    #[test]
    fn sizes_outside_of_the_specification() {
        for (size, block, sector) in [
            (1 << 20, 1 << 19, 512),
            (1 << 20, 1 << 29, 512),
            (1 << 20, 3 << 20, 512),
            (1 << 20, 1 << 20, 1024),
            (512, 1 << 20, 4096),
            (MAX_SIZE + 512, 1 << 20, 512),
        ] {
            assert!(
                Geometry::new(size, block, sector).is_err(),
                "{size} {block} {sector}"
            );
        }
    }
}
