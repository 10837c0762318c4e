//! The region table: where the block allocation table and the metadata are (section 2.2.3 of the
//! specification).

use std::ops::Range;

use super::crc::{Crc, seal};
use super::fields::{Fields, Guid, put};
use super::{MIB, refused};
use crate::Result;
use crate::storage::{self, Queue, Storage};

/// Where the copies of the table are.
pub(super) const OFFSETS: [u64; 2] = [192 << 10, 256 << 10];
/// Bytes of a table, all of which its checksum covers.
const BYTES: usize = 64 << 10;
/// Entries of a table at most.
const MAX_ENTRIES: u32 = 2047;
const BAT: Guid = Guid::new(0x2dc2_7766_f623_4200_9d64_115e_9bfd_4a08);
const METADATA: Guid = Guid::new(0x8b7c_a206_4790_4b9a_b8fe_575f_050f_886e);

/// What the regions of the file are used for.
#[derive(Debug)]
pub(super) struct Regions {
    /// The block allocation table.
    pub bat: Range<u64>,
    /// The metadata.
    pub metadata: Range<u64>,
    /// All that no block may overlap, in order: the headers, the log, and all regions.
    taken: Box<[Range<u64>]>,
}

impl Regions {
    /// Reads the table, or its second copy if the first is damaged.
    pub(super) async fn read(
        queue: &Queue,
        file: &dyn Storage,
        log: Range<u64>,
    ) -> Result<Regions> {
        for offset in OFFSETS {
            let bytes = storage::read_vec(file, queue, offset, BYTES).await?;
            let checksum = Fields(&bytes).u32(4);
            if bytes.starts_with(b"regi") && checksum == Crc::of_start(&bytes).finish() {
                return Regions::decode(Fields(&bytes), log);
            }
        }
        Err(refused("No valid VHDX region table found"))
    }

    fn decode(table: Fields<'_>, log: Range<u64>) -> Result<Regions> {
        let count = table.u32(8);
        if count > MAX_ENTRIES {
            return Err(refused(format!(
                "The VHDX region table has {count} entries"
            )));
        }
        let (mut bat, mut metadata) = (None, None);
        let mut taken = vec![0..MIB, log];
        for index in 0..count as usize {
            let at = 16 + index * 32;
            let id = table.guid(at);
            let (offset, length) = (table.u64(at + 16), u64::from(table.u32(at + 24)));
            let is_aligned = offset.is_multiple_of(MIB) && length.is_multiple_of(MIB);
            let Some(end) = offset.checked_add(length).filter(|_| is_aligned) else {
                return Err(refused(format!(
                    "Invalid VHDX region {id}: {length} bytes at {offset:#x}"
                )));
            };
            taken.push(offset..end);
            let known = match id {
                BAT => &mut bat,
                METADATA => &mut metadata,
                _ if table.u32(at + 28) & 1 == 0 => continue,
                _ => return Err(refused(format!("Unknown VHDX region {id} is required"))),
            };
            if known.replace(offset..end).is_some() {
                return Err(refused(format!("There are two VHDX regions {id}")));
            }
        }
        taken.sort_by_key(|range| (range.start, range.end));
        for pair in taken.windows(2) {
            if pair[0].end > pair[1].start {
                return Err(refused(format!(
                    "VHDX regions overlap at {:#x}",
                    pair[1].start
                )));
            }
        }
        match (bat, metadata) {
            (Some(bat), Some(metadata)) => Ok(Regions {
                bat,
                metadata,
                taken: taken.into(),
            }),
            _ => Err(refused("A VHDX region is missing")),
        }
    }

    /// Where the last of them ends.
    pub(super) fn end(&self) -> u64 {
        self.taken.last().map_or(0, |range| range.end)
    }

    /// Bytes from `offset` to the next region or to the largest offset; 0: there is a region.
    pub(super) fn free_from(&self, offset: u64) -> u64 {
        let next = self.taken.partition_point(|range| range.end <= offset);
        match self.taken.get(next) {
            None => u64::MAX - offset,
            Some(range) => range.start.saturating_sub(offset),
        }
    }
}

/// The table of a new image.
pub(super) fn encode(bat: Range<u64>, metadata: Range<u64>) -> Vec<u8> {
    let mut table = vec![0; BYTES];
    put(&mut table, 0, b"regi");
    put(&mut table, 8, &2u32.to_le_bytes());
    for (index, (id, region)) in [(BAT, bat), (METADATA, metadata)].into_iter().enumerate() {
        let entry = &mut table[16 + index * 32..];
        let length = (region.end - region.start) as u32; // At most 513 MiB.
        put(entry, 0, &id.0);
        put(entry, 16, &region.start.to_le_bytes());
        put(entry, 24, &length.to_le_bytes());
        // It is required.
        put(entry, 28, &1u32.to_le_bytes());
    }
    seal(&mut table);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_between_regions() {
        let regions = Regions {
            bat: 3..4,
            metadata: 6..8,
            taken: [0..2, 3..4, 6..8].into(),
        };
        let free = [0, 1, 2, 3, 4, 5, 6, 8, 9].map(|at| regions.free_from(at));
        assert_eq!(free, [0, 0, 1, 0, 2, 1, 0, u64::MAX - 8, u64::MAX - 9]);
    }
}
