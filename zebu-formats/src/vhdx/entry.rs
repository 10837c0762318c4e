//! The log as it is written: one entry for each commit.
//!
//! The log is used as two places, in turn. An entry begins its own sequence: what the entry before it
//! changes is durable where it belongs when this one becomes valid. So the entry that is current is
//! whole while the next one is written, however little of that reaches the disk.
//!
//! An entry becomes valid by its first 512 bytes, which a disk writes as a whole, and which have its
//! header and all its descriptors. So it is not there, or complete: some programs refuse an image if
//! descriptors are damaged.

use std::ops::Range;

use super::crc::Crc;
use super::fields::{Guid, put};
use super::log::{DESCRIPTOR, SECTOR};

/// Bytes that a disk writes as a whole.
const ATOMIC: usize = 512;
/// Sectors of the file that one entry changes at most.
pub(super) const MOST: usize = ATOMIC / DESCRIPTOR - 2;

/// A sector of the file, and its new bytes.
#[derive(Debug)]
pub(super) struct NewSector {
    /// Where in the file it is.
    pub offset: u64,
    pub bytes: [u8; SECTOR as usize],
}

/// What an entry says besides its changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryFields {
    pub log_id: Guid,
    pub sequence: u64,
    /// Where in the log it is.
    pub at: u64,
    /// Bytes that the file has durably when the entry becomes valid.
    pub flushed: u64,
    /// Bytes that all structures of the file fit into.
    pub last: u64,
}

/// The bytes of an entry. Between the two are zeroes, which are there already ([`places`]).
pub(super) struct EncodedEntry {
    /// What makes it valid, to be written last.
    pub head: [u8; ATOMIC],
    /// What follows its first sector.
    pub data: Vec<u8>,
}

/// Where in a log of so many bytes the entries are. The log is at least 1 MiB.
pub(super) fn places(log: &Range<u64>) -> [u64; 2] {
    let half = (log.end - log.start) / 2;
    [0, half - half % SECTOR]
}

/// The bytes of an entry that changes these sectors, at most [`MOST`].
pub(super) fn encode(fields: &EntryFields, sectors: &[NewSector]) -> EncodedEntry {
    let sequence = fields.sequence.to_le_bytes();
    let mut first = [0; SECTOR as usize];
    put(&mut first, 0, b"loge");
    let length = (1 + sectors.len() as u32) * SECTOR as u32;
    put(&mut first, 8, &length.to_le_bytes());
    put(&mut first, 12, &(fields.at as u32).to_le_bytes()); // The log is below 4 GiB.
    put(&mut first, 16, &sequence);
    put(&mut first, 24, &(sectors.len() as u32).to_le_bytes());
    put(&mut first, 32, &fields.log_id.0);
    put(&mut first, 48, &fields.flushed.to_le_bytes());
    put(&mut first, 56, &fields.last.to_le_bytes());
    let mut data = Vec::with_capacity(sectors.len() * SECTOR as usize);
    for (nth, sector) in sectors.iter().enumerate() {
        // The descriptor has the bytes that the signature and the number take in the sector.
        let descriptor = &mut first[(2 + nth) * DESCRIPTOR..];
        let end = sector.bytes.len() - 4;
        put(descriptor, 0, b"desc");
        put(descriptor, 4, &sector.bytes[end..]);
        put(descriptor, 8, &sector.bytes[..8]);
        put(descriptor, 16, &sector.offset.to_le_bytes());
        put(descriptor, 24, &sequence);
        data.extend(b"data");
        data.extend(&sequence[4..]);
        data.extend(&sector.bytes[8..end]);
        data.extend(&sequence[..4]);
    }
    let mut crc = Crc::of_start(&first);
    crc.update(&data);
    put(&mut first, 4, &crc.finish().to_le_bytes());
    let mut head = [0; ATOMIC];
    head.copy_from_slice(&first[..ATOMIC]);
    EncodedEntry { head, data }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_entries_of_the_largest_size_fit() {
        let most = (1 + MOST as u64) * SECTOR;
        for log in [1 << 20..2 << 20, 5 << 20..8 << 20] {
            let [first, second] = places(&log);
            assert!(first + most <= second && second + most <= log.end - log.start);
        }
    }
}
