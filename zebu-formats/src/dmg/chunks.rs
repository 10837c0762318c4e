//! The chunks of a DMG image.
//!
//! Each partition has a list of its chunks, a `mish` block. These blocks are in the resource fork,
//! or in base64 in a property list.

use crate::codec::{Inflater, Stream};
use crate::storage::{self, Queue, Storage};
use crate::table::array;
use crate::{Error, Result};

const SECTOR: u64 = 512;
/// Bytes of a chunk at most, compressed or not, as in QEMU.
const MAX_BYTES: u64 = 64 << 20;
/// Bytes of one resource at most.
const MAX_RESOURCE: u32 = 64 << 20;
/// Where a block has its chunks, and the bytes of each.
const CHUNKS: (usize, usize) = (204, 40);
/// Bytes by which data that were compressed badly may be longer than what they inflate to, besides
/// as many again.
const BADLY: u64 = 64 << 10;

/// What a chunk consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Zeroes, or what does not matter.
    Zero,
    /// The sectors.
    Plain,
    /// Compressed sectors.
    Packed(Packing),
    /// What zebu cannot read.
    Unsupported(u32),
}

/// How sectors are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    Zlib,
    #[cfg(feature = "bzip2")]
    Bzip2,
}

/// A run of sectors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub kind: Kind,
    /// Its first sector on the disk.
    pub first: u64,
    /// Its number of sectors, at least one. At most [`MAX_BYTES`] if it is compressed.
    pub count: u64,
    /// Where its data are in the file.
    pub offset: u64,
    /// The bytes of compressed data.
    pub length: u32,
}

impl Kind {
    /// By its number; None: it has no sectors.
    fn of(number: u32) -> Option<Kind> {
        Some(match number {
            0 | 2 => Kind::Zero,
            1 => Kind::Plain,
            0x8000_0005 => Kind::Packed(Packing::Zlib),
            #[cfg(feature = "bzip2")]
            0x8000_0006 => Kind::Packed(Packing::Bzip2),
            // A comment, the end.
            0x7fff_fffe | 0xffff_ffff => return None,
            other => Kind::Unsupported(other),
        })
    }

    fn is_known(&self) -> bool {
        !matches!(self, Kind::Unsupported(_))
    }
}

impl Packing {
    /// What inflates so many bytes.
    pub(super) fn inflater(self, size: u32) -> Inflater {
        let stream = match self {
            Packing::Zlib => Stream::Zlib { most: size },
            #[cfg(feature = "bzip2")]
            Packing::Bzip2 => Stream::Bzip2,
        };
        Inflater { stream, size }
    }
}

/// The name of a type that is not supported.
pub(super) fn name(number: u32) -> String {
    match number {
        0x8000_0004 => "UDCO (ADC)".into(),
        0x8000_0006 => "UDBZ (bzip2)".into(),
        0x8000_0007 => "ULFO (LZFSE)".into(),
        0x8000_0008 => "ULMO (LZMA)".into(),
        other => format!("{other:#x}"),
    }
}

impl Chunk {
    /// The sector after the last one.
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }

    /// Bytes that inflating it takes.
    pub(super) fn memory(&self) -> u64 {
        match self.kind {
            Kind::Packed(_) => u64::from(self.length) + self.count * SECTOR,
            _ => 0,
        }
    }

    /// The chunk in `bytes` of a block whose sectors begin at `first`, and whose data are at
    /// `offset`. None: it has no sectors.
    fn decode(bytes: &[u8], first: u64, offset: u64) -> Result<Option<Chunk>> {
        let u64_at = |at| u64::from_be_bytes(array(bytes, at));
        let (count, length) = (u64_at(0x10), u64_at(0x20));
        let Some(kind) = Kind::of(u32::from_be_bytes(array(bytes, 0))) else {
            return Ok(None);
        };
        let has_data = matches!(kind, Kind::Plain | Kind::Packed(_));
        if has_data && count > MAX_BYTES / SECTOR {
            let most = MAX_BYTES / SECTOR;
            return Err(damaged(format!(
                "sector count {count} is larger than max ({most})"
            )));
        }
        if kind.is_known() && length > MAX_BYTES {
            return Err(damaged(format!(
                "length {length} is larger than max ({MAX_BYTES})"
            )));
        }
        let sum = |a: u64, b: u64| {
            let sum = a.checked_add(b).filter(|sum| *sum <= i64::MAX as u64);
            sum.ok_or_else(|| damaged("an offset is too large".into()))
        };
        let count = match kind {
            // Sectors without data are missing.
            Kind::Plain => count.min(length / SECTOR),
            _ => count,
        };
        let most = 2 * count.min(MAX_BYTES / SECTOR) * SECTOR + BADLY;
        let chunk = Chunk {
            kind,
            first: sum(u64_at(8), first)?,
            count,
            offset: match has_data {
                true => sum(u64_at(0x18), offset)?,
                false => 0,
            },
            // Nothing inflates from no data.
            length: length.clamp(1, most) as u32,
        };
        Ok(Some(chunk).filter(|chunk| chunk.count > 0))
    }
}

fn damaged(what: String) -> Error {
    Error::Refused(format!("A chunk of the dmg file is damaged: {what}"))
}

/// Adds the chunks of a block; other content has none. `data` is where the data of all partitions
/// begin.
fn add_block(chunks: &mut Vec<Chunk>, block: &[u8], data: u64) -> Result<()> {
    let (start, size) = CHUNKS;
    if !block.starts_with(b"mish") || block.len() < start + size {
        return Ok(());
    }
    let u64_at = |at| u64::from_be_bytes(array(block, at));
    let offset = data.checked_add(u64_at(0x18));
    let offset = offset.ok_or_else(|| damaged("an offset is too large".into()))?;
    for bytes in block[start..].chunks_exact(size) {
        chunks.extend(Chunk::decode(bytes, u64_at(8), offset)?);
    }
    Ok(())
}

/// The chunks by the resource fork: its offset and length.
pub(super) async fn of_resources(
    queue: &Queue,
    file: &dyn Storage,
    (start, length): (u64, u64),
    data: u64,
) -> Result<Vec<Chunk>> {
    let wrong = || Error::Refused("The resource fork of the dmg file is damaged".into());
    let head = storage::read_vec(file, queue, start, 12).await?;
    let u32_at = |at| u64::from(u32::from_be_bytes(array(&head, at)));
    let (first, bytes) = (u32_at(0), u32_at(8));
    if bytes == 0 || first + bytes > length {
        return Err(wrong());
    }
    let (mut at, end) = (start + first, start + first + bytes);
    let mut chunks = Vec::new();
    while at < end {
        let size = storage::read_vec(file, queue, at, 4).await?;
        let size = u32::from_be_bytes(array(&size, 0));
        if !(1..=MAX_RESOURCE).contains(&size) || u64::from(size) > end - at {
            return Err(wrong());
        }
        let block = storage::read_vec(file, queue, at + 4, size as usize).await?;
        add_block(&mut chunks, &block, data)?;
        at += 4 + u64::from(size);
    }
    Ok(chunks)
}

/// The chunks by the property list: its offset and length.
pub(super) async fn of_list(
    queue: &Queue,
    file: &dyn Storage,
    (start, length): (u64, u64),
    data: u64,
) -> Result<Vec<Chunk>> {
    let bytes = storage::read_vec(file, queue, start, length as usize).await?;
    let mut chunks = Vec::new();
    let mut rest = &bytes[..];
    while let Some(begin) = find(rest, b"<data>") {
        let text = &rest[begin + b"<data>".len()..];
        let Some(end) = find(text, b"</data>") else {
            let why = "The property list of the dmg file is damaged";
            return Err(Error::Refused(why.into()));
        };
        add_block(&mut chunks, &from_base64(&text[..end]), data)?;
        rest = &text[end..];
    }
    Ok(chunks)
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|part| part == what)
}

/// The bytes of a text in base64. Other characters are skipped.
fn from_base64(text: &[u8]) -> Vec<u8> {
    let value = |c: &u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let values = text.iter().take_while(|c| **c != b'=').filter_map(value);
    let values: Vec<u8> = values.collect();
    let mut bytes = Vec::with_capacity(values.len() / 4 * 3 + 3);
    for four in values.chunks(4) {
        let bits = four.iter().fold(0, |bits, v| bits << 6 | u32::from(*v));
        let bits = bits << (6 * (4 - four.len()));
        bytes.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64() {
        for (text, bytes) in [
            (&b""[..], &b""[..]),
            (b"Zg==", b"f"),
            (b"\n\tZm9v\n YmE=\n", b"fooba"),
            (b"Zm9vYmFy", b"foobar"),
            (b"/+8=", &[0xff, 0xef]),
            (b"Z", b""),
        ] {
            assert_eq!(from_base64(text), bytes);
        }
    }

    #[test]
    fn offsets_and_counts_do_not_overflow() {
        let mut block = vec![0xff; 204 + 40];
        block[..4].copy_from_slice(b"mish");
        for number in [0u32, 1, 2, 0x8000_0005, 0x8000_0006, 0x8000_0007, 9] {
            block[204..208].copy_from_slice(&number.to_be_bytes());
            for at in [8, 0x18, 204 + 8, 204 + 0x10, 204 + 0x18, 204 + 0x20] {
                let mut block = block.clone();
                block[at..at + 8].fill(0);
                let _ = add_block(&mut Vec::new(), &block, 512);
            }
        }
    }
}
