//! The binary header, the first 4096 bytes of each copy. LUKS2 On-Disk Format Specification, "Binary Header".

use zebu_core::parts::drivers::structures::LuksHash;

use super::encryption::hash_named;
use crate::hash::digest;

/// Bytes of the binary header; the metadata follow it.
pub const BINARY_BYTES: usize = 4096;
/// Where the second copy may be, which is as many bytes as each copy has.
pub const SIZES: [u64; 9] = [
    0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x4_0000, 0x8_0000, 0x10_0000, 0x20_0000, 0x40_0000,
];
/// Random bytes in the header of each copy.
pub const SALT_BYTES: usize = 64;

const VERSION: u16 = 2;
const CHECKSUM: std::ops::Range<usize> = 448..512;
const DEFAULT_CHECKSUM: &str = "sha256";

/// One of the two copies of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// At the start of the file.
    First,
    /// Behind the first.
    Second,
}

impl Which {
    const fn magic(self) -> &'static [u8; 6] {
        match self {
            Which::First => b"LUKS\xba\xbe",
            Which::Second => b"SKUL\xba\xbe",
        }
    }

    /// The other one.
    pub const fn other(self) -> Self {
        match self {
            Which::First => Which::Second,
            Which::Second => Which::First,
        }
    }

    /// Where it starts, if each has so many bytes.
    pub const fn offset(self, bytes: u64) -> u64 {
        match self {
            Which::First => 0,
            Which::Second => bytes,
        }
    }
}

/// What the binary header says of both copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    /// Bytes of a copy, with the metadata.
    pub bytes: u64,
    /// Counts the changes.
    pub sequence: u64,
    /// The label, up to 47 bytes.
    pub label: Vec<u8>,
    /// The subsystem, up to 47 bytes.
    pub subsystem: Vec<u8>,
    /// The UUID, as text of up to 39 bytes.
    pub uuid: Vec<u8>,
    /// The hash of the checksum.
    pub checksum: LuksHash,
}

/// What is found where a copy may be.
pub enum Found {
    /// No magic.
    Nothing,
    /// The magic, with another version.
    Version(u16),
    /// Values that a copy in this place does not have.
    Damaged,
    /// A header, of which the checksum is not yet known to be right.
    Header(Binary),
}

impl Binary {
    /// Reads the header at the start of `bytes`, which are at `offset` of the file.
    pub fn decode(which: Which, offset: u64, bytes: &[u8]) -> Found {
        let Some(header) = bytes.first_chunk::<BINARY_BYTES>() else {
            return Found::Nothing;
        };
        if header[..6] != *which.magic() {
            return Found::Nothing;
        }
        let version = u16::from_be_bytes([header[6], header[7]]);
        if version != VERSION {
            return Found::Version(version);
        }
        match Self::fields(header) {
            Some(binary) if is_at(header, which, &binary, offset) => Found::Header(binary),
            _ => Found::Damaged,
        }
    }

    fn fields(header: &[u8; BINARY_BYTES]) -> Option<Self> {
        let checksum = text(&header[72..104]);
        Some(Binary {
            bytes: number(header, 8),
            sequence: number(header, 16),
            label: text(&header[24..72]),
            checksum: hash_named(std::str::from_utf8(&checksum).ok()?).ok()?,
            uuid: text(&header[168..208]),
            subsystem: text(&header[208..256]),
        })
    }

    /// Whether the checksum of a whole copy is right.
    pub fn is_whole(&self, copy: &[u8]) -> bool {
        let Some(end) = copy.get(CHECKSUM.end..) else {
            return false;
        };
        let zeroes = [0; SALT_BYTES];
        let sum = digest(self.checksum, &[&copy[..CHECKSUM.start], &zeroes, end]);
        sum.is_ok_and(|sum| copy[CHECKSUM].starts_with(&sum))
    }

    /// A whole copy with these metadata; None if they do not fit.
    pub fn encode(&self, which: Which, metadata: &[u8], salt: &[u8]) -> Option<Vec<u8>> {
        let mut copy = vec![0; usize::try_from(self.bytes).ok()?];
        let end = BINARY_BYTES + metadata.len();
        // A zero ends the metadata.
        if end >= copy.len() {
            return None;
        }
        let checksum = self.checksum.name().as_bytes();
        for (start, field) in [
            (0, &which.magic()[..]),
            (6, &VERSION.to_be_bytes()),
            (8, &self.bytes.to_be_bytes()),
            (16, &self.sequence.to_be_bytes()),
            (24, &self.label),
            (72, checksum),
            (104, salt),
            (168, &self.uuid),
            (208, &self.subsystem),
            (256, &which.offset(self.bytes).to_be_bytes()),
            (BINARY_BYTES, metadata),
        ] {
            copy[start..start + field.len()].copy_from_slice(field);
        }
        let sum = digest(self.checksum, &[&copy]).ok()?;
        copy[CHECKSUM][..sum.len()].copy_from_slice(&sum);
        Some(copy)
    }

    /// That of a new container.
    pub fn new(bytes: u64, uuid: Vec<u8>, label: Vec<u8>, subsystem: Vec<u8>) -> Option<Self> {
        let fits = uuid.len() < 40 && label.len() < 48 && subsystem.len() < 48;
        let has_no_zero = ![&uuid, &label, &subsystem].iter().any(|t| t.contains(&0));
        (fits && has_no_zero && SIZES.contains(&bytes)).then_some(Binary {
            bytes,
            sequence: 0,
            label,
            subsystem,
            uuid,
            checksum: hash_named(DEFAULT_CHECKSUM).ok()?,
        })
    }
}

/// Whether the sizes that the header names belong to its place.
fn is_at(header: &[u8; BINARY_BYTES], which: Which, binary: &Binary, offset: u64) -> bool {
    SIZES.contains(&binary.bytes)
        && offset == which.offset(binary.bytes)
        && offset == number(header, 256)
}

fn number(header: &[u8; BINARY_BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&header[at..at + 8]);
    u64::from_be_bytes(bytes)
}

/// Up to the first zero; the last byte is one, whatever it is.
fn text(field: &[u8]) -> Vec<u8> {
    let field = &field[..field.len() - 1];
    let end = field.iter().position(|byte| *byte == 0);
    field[..end.unwrap_or(field.len())].to_vec()
}
