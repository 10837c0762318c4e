//! Contents of sectors. Each contains its address and the step that wrote it, so that lost and
//! misplaced writes are detected.

use crate::disk::SECTOR;
use zebu_testkit::Rng;

/// The content of a sector: the step that wrote it, the number of a base, or [`ZERO`].
pub type Tag = u32;

/// Zeroes.
pub const ZERO: Tag = 0;
/// Content that no step wrote.
pub const UNKNOWN: Tag = u32::MAX;
/// Content of a base image.
const BASE: Tag = 0x4000_0000;
/// The last sector of a base that ends within it. The tag contains the number of bytes.
const PART: Tag = 0x8000_0000;
/// The least number of bytes in such a sector.
pub const LEAST_PART: u64 = 16;

/// Bytes of a sector.
const SIZE: usize = SECTOR as usize;

/// The content of a base image.
pub fn base_tag(base: usize) -> Tag {
    BASE | base as Tag
}

/// The last sector of a base, of which the base has `bytes`.
pub fn part_tag(base: usize, bytes: u64) -> Tag {
    PART | (base as Tag) << 10 | bytes as Tag
}

/// Fills a sector. Half of the contents are incompressible.
pub fn fill(tag: Tag, sector: u64, out: &mut [u8]) {
    out.fill(0);
    if tag == ZERO {
        return;
    }
    let mut head = [0; 16];
    head[..4].copy_from_slice(&tag.to_le_bytes());
    head[4..8].copy_from_slice(b"zebu");
    head[8..].copy_from_slice(&sector.to_le_bytes());
    let length = match tag & PART {
        0 => SIZE,
        _ => ((tag & 0x3ff) as usize).min(SIZE),
    };
    let mut noise = Rng::new(u64::from(tag) << 32 | sector);
    for (n, piece) in out[..length].chunks_mut(16).enumerate() {
        let mut bytes = head;
        if n > 0 && tag & 1 == 1 {
            bytes[..8].copy_from_slice(&noise.next().to_le_bytes());
            bytes[8..].copy_from_slice(&noise.next().to_le_bytes());
        }
        piece.copy_from_slice(&bytes[..piece.len()]);
    }
}

/// The bytes of sectors with these contents, the first of which is `first`.
pub fn bytes_of(tags: impl IntoIterator<Item = Tag>, first: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (sector, tag) in (first..).zip(tags) {
        let at = bytes.len();
        bytes.resize(at + SIZE, 0);
        fill(tag, sector, &mut bytes[at..]);
    }
    bytes
}

/// Identifies the content of a sector.
pub fn identify(bytes: &[u8], sector: u64) -> Tag {
    if bytes.iter().all(|byte| *byte == 0) {
        return ZERO;
    }
    let tag = Tag::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut expected = [0; SIZE];
    fill(tag, sector, &mut expected);
    match bytes == expected {
        true => tag,
        false => UNKNOWN,
    }
}

/// Whether every byte is of one of these contents. A read may return a mixture if a write is in
/// flight.
pub fn is_mixture(bytes: &[u8], sector: u64, tags: &[Tag]) -> bool {
    let contents: Vec<_> = tags.iter().map(|tag| bytes_of([*tag], sector)).collect();
    let is_of_one = |(n, byte)| contents.iter().any(|content| content[n] == byte);
    tags.len() > 1 && bytes.iter().copied().enumerate().all(is_of_one)
}

/// Describes bytes for messages.
pub fn describe(bytes: &[u8], sector: u64) -> String {
    match identify(bytes, sector) {
        ZERO => "zeroes".into(),
        UNKNOWN => {
            let tag = Tag::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let belongs = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
            match &bytes[4..8] == b"zebu" {
                true if belongs == sector => format!("a mixture that begins with {}", name(tag)),
                true => format!("{} of sector {belongs:#x}", name(tag)),
                false => format!("{:02x?}..", &bytes[..16]),
            }
        }
        tag => name(tag),
    }
}

/// A content's name, for messages.
pub fn name(tag: Tag) -> String {
    match tag {
        ZERO => "zeroes".into(),
        UNKNOWN => "anything".into(),
        tag if tag & PART != 0 => format!("the end of base {}", tag >> 10 & 0xff),
        tag if tag & BASE != 0 => format!("base {}", tag & 0xff),
        tag => format!("step {tag}'s data"),
    }
}
