//! The two headers, of which one is current (section 2.2.2 of the specification).

use std::ops::Range;

use super::crc::{Crc, seal};
use super::fields::{Fields, Guid, put};
use super::{MIB, refused};
use crate::Result;
use crate::storage::{self, Queue, Storage};

/// What a file begins with.
pub(super) const SIGNATURE: &[u8] = b"vhdxfile";
/// Where the headers are.
pub(super) const OFFSETS: [u64; 2] = [64 << 10, 128 << 10];
/// Bytes of a header, all of which its checksum covers.
pub(super) const BYTES: usize = 4096;
/// The creator of an image, a field that no reader interprets.
const CREATOR: &str = "zebu";
/// Bytes of a header that have a meaning.
const USED: usize = 80;

/// The current header.
#[derive(Clone, Debug)]
pub(super) struct Header {
    /// Which of [`OFFSETS`] it is at.
    pub place: usize,
    /// Higher than that of the other one.
    pub sequence: u64,
    /// Changes before the file does.
    pub file_write: Guid,
    /// Changes before the disk does.
    pub data_write: Guid,
    /// Where the log is.
    pub log: Range<u64>,
    /// What its entries have; None: there are none.
    pub log_id: Option<Guid>,
}

impl Header {
    /// Reads the file's signature and the headers.
    pub(super) async fn read(queue: &Queue, file: &dyn Storage) -> Result<Header> {
        let start = storage::read_vec(file, queue, 0, SIGNATURE.len()).await?;
        if start != SIGNATURE {
            return Err(refused("Image not in VHDX format (no signature)"));
        }
        let mut headers = Vec::new();
        for (place, offset) in OFFSETS.into_iter().enumerate() {
            let bytes = storage::read_vec(file, queue, offset, BYTES).await?;
            if is_valid(&bytes) {
                headers.push((place, bytes));
            }
        }
        let sequence = |header: &(usize, Vec<u8>)| Fields(&header.1).u64(8);
        let current = match &headers[..] {
            [one] => Some(one),
            [a, b] if sequence(a) != sequence(b) => headers.iter().max_by_key(|h| sequence(h)),
            // Some tools write the same header twice.
            [a, b] => (a.1[..USED] == b.1[..USED]).then_some(a),
            _ => None,
        };
        match current {
            Some((place, bytes)) => Header::decode(*place, Fields(bytes)),
            None => Err(refused("No valid VHDX header found")),
        }
    }

    /// Decodes a valid header, and checks the place of the log.
    fn decode(place: usize, fields: Fields<'_>) -> Result<Header> {
        let id = fields.guid(48);
        let (length, offset) = (u64::from(fields.u32(68)), fields.u64(72));
        let version = fields.u16(64);
        if version != 0 {
            return Err(refused(format!("Unsupported VHDX log version {version}")));
        }
        let has_entries = id != Guid::NONE && length != 0;
        let is_aligned = offset.is_multiple_of(MIB) && (!has_entries || length.is_multiple_of(MIB));
        match offset.checked_add(length) {
            Some(end) if is_aligned && offset >= MIB => Ok(Header {
                place,
                sequence: fields.u64(8),
                file_write: fields.guid(16),
                data_write: fields.guid(32),
                log: offset..end,
                log_id: has_entries.then_some(id),
            }),
            _ => Err(refused(format!(
                "Invalid place of the VHDX log: {length} bytes at {offset:#x}"
            ))),
        }
    }
}

impl Header {
    /// The header that replaces this one: at the other place, so that one of them is valid at every
    /// instant.
    pub(super) fn next(&self) -> Result<Header> {
        let sequence = self.sequence.checked_add(1);
        Ok(Header {
            place: 1 - self.place,
            sequence: sequence.ok_or_else(|| refused("The VHDX header has no next number"))?,
            ..self.clone()
        })
    }

    /// Its bytes.
    pub(super) fn encode(&self) -> [u8; BYTES] {
        let mut header = [0; BYTES];
        put(&mut header, 0, b"head");
        put(&mut header, 8, &self.sequence.to_le_bytes());
        put(&mut header, 16, &self.file_write.0);
        put(&mut header, 32, &self.data_write.0);
        put(&mut header, 48, &self.log_id.unwrap_or(Guid::NONE).0);
        // The version.
        put(&mut header, 66, &1u16.to_le_bytes());
        let length = (self.log.end - self.log.start) as u32; // Below 4 GiB.
        put(&mut header, 68, &length.to_le_bytes());
        put(&mut header, 72, &self.log.start.to_le_bytes());
        seal(&mut header);
        header
    }
}

/// Whether these are the bytes of a header of version 1.
fn is_valid(bytes: &[u8]) -> bool {
    let fields = Fields(bytes);
    let is_header = bytes.starts_with(b"head") && fields.u16(66) == 1;
    is_header && fields.u32(4) == Crc::of_start(bytes).finish()
}

/// The start of a new file.
pub(super) fn encode_start() -> Vec<u8> {
    let creator = CREATOR.encode_utf16().flat_map(u16::to_le_bytes);
    SIGNATURE.iter().copied().chain(creator).collect()
}
