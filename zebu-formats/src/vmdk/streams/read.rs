//! A streamOptimized VMDK as a stream.
//!
//! Each grain has a marker that says where it belongs, so no table is needed to place it. The
//! tables, which come before all grains or after them, must list exactly the grains that have come:
//! a stream that was cut off or damaged does not pass for a whole one. Grains come in any order, so
//! which do not come is known at the end: they are zeroes.

use std::collections::HashMap;

use crate::codec::{Inflater, Stream};
use crate::drivers::Limits;
use crate::drivers::stream::{Block, Fault, Reader, Reading, Sink, StreamHead};
use crate::vmdk::descriptor::{Identity, text};
use crate::vmdk::header::{
    DIRECTORY_MARKER, Entries, FOOTER_MARKER, HOSTED_MAGIC, HostedHeader, Layout, MARKER_BYTES,
    SECTOR, TABLE_MARKER,
};
use crate::{Error, Result};

/// Bytes of the longest start that is read at once: header and descriptor.
const MAX_HEAD: u64 = 1 << 20;
/// Entries of the longest grain directory.
const MAX_DIRECTORY: u64 = 256 << 10;
/// Grain tables that may have grains. A table takes some memory until the end.
const MAX_TABLES: usize = 256 << 10;
/// Entries of the longest grain table.
const MAX_TABLE: usize = 512;
/// A parent that is none.
const NO_PARENT: u32 = u32::MAX;

/// What header and descriptor say.
pub struct VmdkHead {
    header: HostedHeader,
    layout: Layout,
    has_parent: bool,
}

/// Bytes that [`VmdkHead::read`] needs, by the first sector. None: it is not streamOptimized.
pub fn needed(head: &[u8]) -> Option<usize> {
    let header = VmdkHead::header(head)?;
    let descriptor = header.embedded_descriptor()?;
    (descriptor.end <= MAX_HEAD).then_some(descriptor.end as usize)
}

impl VmdkHead {
    fn header(head: &[u8]) -> Option<HostedHeader> {
        let is_sector = head.len() as u64 >= SECTOR && head.starts_with(HOSTED_MAGIC);
        let header = is_sector.then(|| HostedHeader::decode(head))?;
        let layout = header.layout(u64::MAX).ok()?;
        let has_markers = matches!(
            layout.entries,
            Entries::Sectors {
                compressed: Some(true),
                ..
            }
        );
        (has_markers && header.descriptor_instead().is_none()).then_some(header)
    }

    /// Reads the start of a stream, of which [`needed`] has said that it is one.
    pub fn read(head: &[u8], limits: Option<&Limits>) -> Result<Self> {
        let header = HostedHeader::decode(head);
        let layout = header.layout(u64::MAX)?;
        let descriptor = header.embedded_descriptor().unwrap_or(0..0);
        let descriptor = head.get(descriptor.start as usize..descriptor.end as usize);
        let descriptor = descriptor.ok_or_else(|| cut_off(head.len() as u64))?;
        let has_parent = Identity::decode(text(descriptor))?.parent_cid != NO_PARENT;
        if let Some(limits) = limits {
            limits.check_size(layout.sectors * SECTOR)?;
        }
        if layout.directory_len > MAX_DIRECTORY {
            return refused("The image's grain directory is too large for a stream");
        }
        Ok(VmdkHead {
            header,
            layout,
            has_parent,
        })
    }
}

impl StreamHead for VmdkHead {
    fn size(&self) -> u64 {
        self.layout.sectors * SECTOR
    }

    fn unit(&self) -> u64 {
        self.layout.grain_bytes()
    }

    fn needs_file(&self) -> Option<&'static str> {
        self.has_parent.then_some("The image has a parent")
    }

    fn into_reader(self: Box<Self>, _: Reading) -> Box<dyn Reader> {
        Box::new(VmdkReader::new(*self))
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::Refused(why.into()))
}

fn cut_off(length: u64) -> Error {
    Error::Refused(format!(
        "The VMDK ends at byte {length} of the stream, before its end marker"
    ))
}

/// The grains of a table that are stored, a bit each.
type Bits = [u64; MAX_TABLE / 64];

/// What the next bytes are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// A sector before the grains.
    Front,
    /// A marker.
    Marker,
    /// A compressed grain, after its marker.
    Grain { lba: u64, length: u32 },
    /// A grain table.
    Table,
    /// The grain directory.
    Directory,
    /// The header once more.
    Footer,
    /// Metadata of no use.
    Other,
    /// Nothing but zeroes.
    End,
}

/// Reads a streamOptimized VMDK.
pub struct VmdkReader {
    header: HostedHeader,
    layout: Layout,
    next: Next,
    /// The bytes of `next` that have come, of `needed`.
    bytes: Vec<u8>,
    needed: usize,
    /// The sector at which `next` starts.
    sector: u64,
    /// The grains that have come, by the index of their table.
    came: HashMap<u32, Bits>,
    /// The tables that have come, by their sector.
    tables: HashMap<u32, Bits>,
    /// The directory, once it has come, and its sector.
    directory: Option<(u64, Vec<u8>)>,
    /// Tables before the grains, which the directory has named: their sectors, falling.
    front_tables: Vec<u32>,
    has_footer: bool,
}

impl VmdkReader {
    /// Of an image that begins so.
    pub fn new(head: VmdkHead) -> Self {
        VmdkReader {
            header: head.header,
            layout: head.layout,
            next: Next::Front,
            bytes: Vec::new(),
            needed: SECTOR as usize,
            sector: 0,
            came: HashMap::new(),
            tables: HashMap::new(),
            directory: None,
            front_tables: Vec::new(),
            has_footer: false,
        }
    }

    /// The whole of `next` has come. Returns what is next, and how many sectors it has.
    fn take(&mut self, bytes: &[u8], sink: &mut Sink<'_>) -> Result<(Next, u64), Fault> {
        let after = self.sector + bytes.len() as u64 / SECTOR;
        match self.next {
            Next::Front => self.take_front(bytes)?,
            Next::Marker => return self.take_marker(bytes),
            Next::Grain { lba, length } => self.take_grain(lba, &bytes[..length as usize], sink)?,
            Next::Table => self.add_table(self.sector, bytes)?,
            Next::Directory => {
                let length = bytes.len().min(self.layout.directory_len as usize * 4);
                self.directory = Some((self.sector, bytes[..length].to_vec()));
            }
            Next::Footer => {
                let footer = HostedHeader::decode(bytes);
                let directory = self.directory.as_ref().map(|(sector, _)| *sector);
                let is_valid = bytes.starts_with(HOSTED_MAGIC)
                    && self.header.is_same_extent(&footer)
                    && directory == Some(footer.directory());
                if !is_valid {
                    return Err(self.damaged("The footer is not that of the image").into());
                }
                self.has_footer = true;
            }
            Next::Other => {}
            Next::End => {
                if bytes.iter().any(|b| *b != 0) {
                    return Err(self.damaged("Something follows the end marker").into());
                }
                return Ok((Next::End, 1));
            }
        }
        match after < self.header.overhead() {
            true => Ok((Next::Front, 1)),
            false => Ok((Next::Marker, 1)),
        }
    }

    fn damaged(&self, what: &str) -> Error {
        let at = self.sector * SECTOR;
        Error::Refused(format!(
            "The VMDK is damaged: {what} (byte {at} of the stream)"
        ))
    }

    /// A sector before the grains, which may be one of directory or tables.
    fn take_front(&mut self, bytes: &[u8]) -> Result<()> {
        if self.header.is_in_footer() {
            return Ok(());
        }
        let sector = self.sector;
        let start = self.header.directory();
        let length = self.layout.directory_len as usize * 4;
        if sector >= start && ((sector - start) * SECTOR) < length as u64 {
            let (_, directory) = self.directory.get_or_insert_with(|| (start, Vec::new()));
            directory.extend(bytes);
            if directory.len() >= length {
                directory.truncate(length);
                self.front_tables = entries(directory).filter(|sector| *sector != 0).collect();
                self.front_tables.sort_unstable_by(|a, b| b.cmp(a));
            }
            return Ok(());
        }
        let sectors = self.layout.table_bytes().div_ceil(SECTOR);
        while let Some(first) = self.front_tables.last().copied() {
            let first = u64::from(first);
            if sector < first {
                break;
            }
            if sector >= first + sectors {
                self.front_tables.pop();
                continue;
            }
            // Entries of a sector of a table.
            let at = (sector - first) as usize * (SECTOR / 4) as usize;
            let bits = self.bits(bytes);
            let table = self.tables.entry(first as u32).or_default();
            for (nth, word) in bits.iter().take(2).enumerate() {
                if let Some(place) = table.get_mut(at / 64 + nth) {
                    *place |= word;
                }
            }
            break;
        }
        Ok(())
    }

    fn take_marker(&mut self, bytes: &[u8]) -> Result<(Next, u64), Fault> {
        let value = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        let size = u32::from_le_bytes(bytes[8..12].try_into().unwrap_or_default());
        let kind = u32::from_le_bytes(bytes[12..16].try_into().unwrap_or_default());
        if size > 0 {
            // The first bytes of the grain are in the marker's sector.
            let longest = 2 * self.layout.grain_bytes();
            if u64::from(size) > longest {
                return Err(self.damaged("A grain is too long").into());
            }
            let sectors = (MARKER_BYTES + u64::from(size)).div_ceil(SECTOR);
            return Ok((
                Next::Grain {
                    lba: value,
                    length: size,
                },
                sectors,
            ));
        }
        let table = self.layout.table_bytes().div_ceil(SECTOR);
        let directory = (self.layout.directory_len * 4).div_ceil(SECTOR);
        match (kind, value) {
            (0, 0) if self.header.is_in_footer() => Ok((Next::End, 1)),
            // Space between grains.
            (0, 0) => Ok((Next::Marker, 1)),
            (TABLE_MARKER, sectors) if sectors == table => Ok((Next::Table, sectors)),
            (DIRECTORY_MARKER, sectors) if sectors == directory => Ok((Next::Directory, sectors)),
            (FOOTER_MARKER, 1) => Ok((Next::Footer, 1)),
            (TABLE_MARKER..=FOOTER_MARKER, _) => {
                Err(self.damaged("A marker has a wrong length").into())
            }
            // Of a kind that is not known here.
            (_, 1..=0xffff) => Ok((Next::Other, value)),
            _ => Err(self.damaged("A marker is not valid").into()),
        }
    }

    fn take_grain(&mut self, lba: u64, data: &[u8], sink: &mut Sink<'_>) -> Result<(), Fault> {
        let Layout {
            grain,
            table_len,
            sectors,
            ..
        } = self.layout;
        if lba >= sectors || !lba.is_multiple_of(grain) {
            return Err(self.damaged("A marker names no grain of the disk").into());
        }
        let number = lba / grain;
        let (table, entry) = ((number / table_len) as u32, (number % table_len) as usize);
        if self.came.len() >= MAX_TABLES && !self.came.contains_key(&table) {
            return Err(refused::<()>("The disk is too large for a stream")
                .unwrap_err()
                .into());
        }
        let bits = self.came.entry(table).or_default();
        let bit = 1u64 << (entry % 64);
        if bits[entry / 64] & bit != 0 {
            return Err(self.damaged("A grain comes twice").into());
        }
        bits[entry / 64] |= bit;
        let guest = lba * SECTOR;
        let size = self.layout.grain_bytes();
        // The last grain may be cut off where the disk ends.
        let length = size.min(sectors * SECTOR - guest);
        let inflater = Inflater {
            stream: Stream::Zlib { most: size as u32 },
            size: length as u32,
        };
        let host = self.sector * SECTOR;
        Ok(sink.compressed(guest, length, inflater, host, data)?)
    }

    fn add_table(&mut self, sector: u64, bytes: &[u8]) -> Result<()> {
        if self.tables.len() >= MAX_TABLES {
            return refused("The disk is too large for a stream");
        }
        let bits = self.bits(bytes);
        match u32::try_from(sector) {
            Ok(sector) => {
                self.tables.insert(sector, bits);
                Ok(())
            }
            Err(_) => refused("The stream is longer than a VMDK can be"),
        }
    }

    /// The entries of a table, or of a part of one, that are grains.
    fn bits(&self, bytes: &[u8]) -> Bits {
        let zero_grains = matches!(
            self.layout.entries,
            Entries::Sectors {
                zero_grains: true,
                ..
            }
        );
        let mut bits = Bits::default();
        for (nth, entry) in entries(bytes).enumerate().take(MAX_TABLE) {
            if entry != 0 && !(zero_grains && entry == 1) {
                bits[nth / 64] |= 1 << (nth % 64);
            }
        }
        bits
    }

    /// Compares the grains that have come with those in the tables.
    fn check_tables(&mut self) -> Result<()> {
        if self.layout.directory_len == 0 {
            return Ok(());
        }
        let Some((_, directory)) = self.directory.take() else {
            return Err(self.damaged("It has no grain directory"));
        };
        for (index, sector) in (0u32..).zip(entries(&directory)) {
            let listed = match sector {
                0 => Bits::default(),
                sector => match self.tables.get(&sector) {
                    Some(bits) => *bits,
                    None => return Err(self.damaged("A grain table is not where it should be")),
                },
            };
            let came = self.came.get(&index).copied().unwrap_or_default();
            if listed != came {
                return Err(self.damaged("The grain tables list other grains than there are"));
            }
        }
        let tables = entries(&directory).count();
        match self.came.keys().all(|index| (*index as usize) < tables) {
            true => Ok(()),
            false => Err(self.damaged("The grain directory is too short")),
        }
    }

    /// Hands over the gaps between the grains that have come.
    fn zero_gaps(&self, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let (grain, size) = (self.layout.grain_bytes(), self.layout.sectors * SECTOR);
        let mut tables: Vec<_> = self.came.iter().collect();
        tables.sort_unstable_by_key(|(index, _)| **index);
        let mut end = 0;
        for (index, bits) in tables {
            let first = u64::from(*index) * self.layout.table_len;
            for entry in (0..MAX_TABLE).filter(|entry| bits[entry / 64] >> (entry % 64) & 1 != 0) {
                let start = (first + entry as u64) * grain;
                if start > end {
                    sink.zero(end, start - end)?;
                }
                end = start + grain;
            }
        }
        match size.saturating_sub(end) {
            0 => Ok(()),
            rest => Ok(sink.zero(end, rest)?),
        }
    }
}

/// The numbers of a table.
fn entries(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let entries = bytes.as_chunks().0.iter();
    entries.map(|entry| u32::from_le_bytes(*entry))
}

impl Reader for VmdkReader {
    fn block(&mut self, _at: u64, block: Block, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let mut rest = &block[..];
        while !rest.is_empty() {
            let count = rest.len().min(self.needed - self.bytes.len());
            let (taken, after) = rest.split_at(count);
            rest = after;
            self.bytes.extend(taken);
            if self.bytes.len() < self.needed {
                break;
            }
            let mut bytes = std::mem::take(&mut self.bytes);
            let (next, sectors) = self.take(&bytes, sink)?;
            match next {
                // It begins in the sector of its marker, which is kept.
                Next::Grain { .. } => {
                    self.needed = (sectors * SECTOR) as usize - MARKER_BYTES as usize;
                    bytes.drain(..MARKER_BYTES as usize);
                }
                _ => {
                    let whole = match self.next {
                        Next::Grain { .. } => self.needed as u64 + MARKER_BYTES,
                        _ => self.needed as u64,
                    };
                    self.sector += whole / SECTOR;
                    self.needed = (sectors * SECTOR) as usize;
                    bytes.clear();
                }
            }
            self.next = next;
            self.bytes = bytes;
            // A short grain is whole already.
            if matches!(next, Next::Grain { .. }) && self.bytes.len() == self.needed {
                let bytes = std::mem::take(&mut self.bytes);
                self.take(&bytes, sink)?;
                self.sector += 1;
                self.next = Next::Marker;
                self.needed = SECTOR as usize;
            }
        }
        Ok(())
    }

    fn end(&mut self, length: u64, sink: &mut Sink<'_>) -> Result<u64, Fault> {
        // The last grain need not fill its last sector.
        if let Next::Grain { length, .. } = self.next
            && self.bytes.len() >= length as usize
        {
            let bytes = std::mem::take(&mut self.bytes);
            self.take(&bytes, sink)?;
            self.next = Next::Marker;
        }
        let is_whole = match self.header.is_in_footer() {
            true => self.has_footer && self.next == Next::End,
            false => self.next == Next::Marker || self.next == Next::End,
        };
        if !is_whole || self.bytes.iter().any(|b| *b != 0) {
            return Err(cut_off(length).into());
        }
        self.check_tables()?;
        self.zero_gaps(sink)?;
        Ok(self.layout.sectors * SECTOR)
    }
}
