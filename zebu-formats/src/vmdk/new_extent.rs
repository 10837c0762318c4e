//! Extents of new VMDKs.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::header::{HOSTED_MAGIC, MARKERS, SECTOR, ZERO_GRAINS};
use crate::drivers::structures::INCOMPLETE_VERSION;
use crate::drivers::{make_valid, write_table};
use crate::storage::{self, Iov, Queue, Storage, is_zero};
use crate::{BlockLayout, Linear, NewBlocks};
use crate::{Error, Result};

/// Sectors of a grain.
const GRAIN: u64 = 128;
/// Bytes of a grain.
pub const GRAIN_BYTES: u64 = GRAIN * SECTOR;
/// Entries of a grain table.
pub const TABLE: u64 = 512;
/// Sectors of a grain table.
const TABLE_SECTORS: u64 = TABLE * 4 / SECTOR;
/// The first sector of the descriptor in a sparse file.
pub const DESCRIPTOR: u64 = 1;
/// Sectors that are kept for it.
pub const DESCRIPTOR_SECTORS: u64 = 20;
/// The version of a stream.
const STREAM_VERSION: u32 = 3;
/// Bytes of the longest sparse file: sectors are numbered in 32 bits.
const MAX_FILE: u64 = SECTOR << 32;
/// Entries of tables that are written at a time: 1 MiB.
const ENTRIES_AT_ONCE: usize = 256 << 10;

/// How the bytes of an extent are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// As they are.
    Flat,
    /// In grains, which get their places when they are written.
    Sparse,
    /// In grains that are zlib streams.
    Stream,
}

/// An extent that is being filled.
#[derive(Debug)]
pub struct NewExtent {
    /// The range of the disk that it is.
    pub range: Range<u64>,
    file: Arc<dyn Storage>,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Flat(Linear),
    Sparse(Layout, NewBlocks),
    Stream(Layout, StreamGrains),
}

impl NewExtent {
    /// The start of the file of a sparse extent, which does not open before [`NewExtent::finish`].
    pub fn mark(range: &Range<u64>, kind: Kind, zeroed_grain: bool) -> Vec<u8> {
        let sectors = (range.end - range.start) / SECTOR;
        let layout = Layout::new(sectors, zeroed_grain, kind == Kind::Stream);
        layout.header(INCOMPLETE_VERSION).to_vec()
    }

    /// Begins the extent for a range of the disk in its file, which has the mark if it is a sparse one.
    pub async fn begin(
        queue: &Queue,
        file: Arc<dyn Storage>,
        range: Range<u64>,
        kind: Kind,
        zeroed_grain: bool,
    ) -> Result<Self> {
        let size = range.end - range.start;
        let layout = Layout::new(size / SECTOR, zeroed_grain, kind == Kind::Stream);
        if kind != Kind::Flat {
            layout.begin(queue, &*file).await?;
        }
        let content = match kind {
            Kind::Flat => Content::Flat(Linear::begin(queue, file.clone(), 0..size, size).await?),
            Kind::Sparse => {
                let places = BlockLayout {
                    start: layout.grains * SECTOR,
                    size: GRAIN_BYTES,
                    prefix: &[],
                };
                let count = layout.grain_count() as u32; // Of 64 TiB at most.
                Content::Sparse(layout, NewBlocks::new(file.clone(), places, count))
            }
            Kind::Stream => Content::Stream(layout, StreamGrains::new(&layout)),
        };
        Ok(NewExtent {
            range,
            file,
            content,
        })
    }

    /// Writes data at `offset` of the extent.
    pub async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        match &self.content {
            Content::Flat(disk) => disk.write(queue, offset, iov).await,
            Content::Sparse(_, blocks) => {
                blocks.write(queue, offset, iov).await?;
                match blocks.end() > MAX_FILE {
                    true => Err(too_long()),
                    false => Ok(()),
                }
            }
            Content::Stream(..) => unreachable!("all grains of the image are compressed"),
        }
    }

    /// Writes compressed grains, as [`NewImage::write_packed`](crate::drivers::NewImage).
    pub async fn write_packed(
        &self,
        queue: &Queue,
        blocks: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        match &self.content {
            Content::Stream(_, grains) => grains.write(queue, &*self.file, blocks, data).await,
            _ => unreachable!("the image stores grains as they are"),
        }
    }

    /// Writes the tables, and the header after everything else is durable.
    pub async fn finish(self, queue: &Queue) -> Result<()> {
        let file = &*self.file;
        match self.content {
            Content::Flat(_) => Ok(storage::flush(file, queue).await?),
            Content::Sparse(layout, blocks) => {
                let end = blocks.end();
                // At most MAX_FILE, by NewExtent::write.
                let sector = |place: u32| (layout.grains + u64::from(place) * GRAIN) as u32;
                let sectors = blocks.into_places().map(|place| place.map_or(0, sector));
                layout.finish(queue, file, end, sectors).await
            }
            Content::Stream(layout, grains) => {
                let (end, sectors) = grains.into_sectors();
                layout.finish(queue, file, end, sectors.into_iter()).await
            }
        }
    }
}

/// Appends a compressed grain with its marker, in whole sectors. It is at `offset` of the disk.
pub fn push_grain(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
    bytes.extend((offset / SECTOR).to_le_bytes());
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
}

/// The error of a file that would be too long.
pub fn too_long() -> Error {
    Error::Refused("The file would become too long for a VMDK".into())
}

/// Compressed grains, which get their places in the order of the writes.
#[derive(Debug)]
struct StreamGrains(Mutex<Places>);

#[derive(Debug)]
struct Places {
    /// The sector behind the last grain.
    next: u64,
    /// By grain: its first sector; 0: it is not stored.
    sectors: Vec<u32>,
}

impl StreamGrains {
    fn new(layout: &Layout) -> Self {
        StreamGrains(Mutex::new(Places {
            next: layout.grains,
            sectors: vec![0; layout.grain_count() as usize],
        }))
    }

    /// Writes grains one after the other, each with a marker and starting at a sector.
    async fn write(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        blocks: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        let mut bytes = Vec::new();
        let mut starts = Vec::new();
        for (offset, range) in blocks {
            starts.push(((offset / GRAIN_BYTES) as usize, bytes.len() as u64 / SECTOR));
            push_grain(&mut bytes, *offset, &data[range.clone()]);
        }
        let start = {
            let mut places = crate::lock(&self.0);
            let start = places.next;
            places.next += bytes.len() as u64 / SECTOR;
            if places.next > MAX_FILE / SECTOR {
                return Err(too_long());
            }
            for (grain, sector) in starts {
                places.sectors[grain] = (start + sector) as u32;
            }
            start
        };
        Ok(storage::write_slice(file, queue, start * SECTOR, &bytes).await?)
    }

    /// The end of the last grain in bytes, and the sectors at which grains start.
    fn into_sectors(self) -> (u64, Vec<u32>) {
        let places = self.0.into_inner().unwrap_or_else(|e| e.into_inner());
        (places.next * SECTOR, places.sectors)
    }
}

/// Where the tables of a sparse extent are, in sectors. There are two directories with tables of
/// their own, and all tables have their places from the start, as in QEMU's images.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Sectors of the disk.
    sectors: u64,
    zeroed_grain: bool,
    is_stream: bool,
    tables: u64,
    redundant: u64,
    directory: u64,
    /// The first sector of grains.
    grains: u64,
}

impl Layout {
    fn new(sectors: u64, zeroed_grain: bool, is_stream: bool) -> Self {
        let tables = sectors.div_ceil(GRAIN).div_ceil(TABLE);
        let length = Self::directory_sectors(tables) + tables * TABLE_SECTORS;
        let redundant = DESCRIPTOR + DESCRIPTOR_SECTORS;
        let directory = redundant + length;
        Layout {
            sectors,
            zeroed_grain,
            is_stream,
            tables,
            redundant,
            directory,
            grains: (directory + length).next_multiple_of(GRAIN),
        }
    }

    /// Of a stream whose tables follow the grains, which begin at a sector.
    pub fn in_order(sectors: u64, grains: u64) -> Self {
        Layout {
            redundant: 0,
            directory: 0,
            grains,
            ..Self::new(sectors, false, true)
        }
    }

    /// Grain tables.
    pub fn table_count(&self) -> u64 {
        self.tables
    }

    /// The header of a stream, whose grain directory is at a sector.
    pub fn stream_header(&self, directory: u64) -> [u8; SECTOR as usize] {
        let at_directory = Layout { directory, ..*self };
        at_directory.header(STREAM_VERSION)
    }

    /// Sectors of a directory.
    fn directory_sectors(tables: u64) -> u64 {
        (tables * 4).div_ceil(SECTOR)
    }

    fn grain_count(&self) -> u64 {
        self.sectors.div_ceil(GRAIN)
    }

    /// Makes tables and descriptor zeroes.
    async fn begin(&self, queue: &Queue, file: &dyn Storage) -> Result<()> {
        let start = self.grains * SECTOR;
        storage::set_len(file, queue, start).await?;
        if file.is_device() {
            storage::zero_range(file, queue, SECTOR, start - SECTOR).await?;
        }
        Ok(())
    }

    /// Writes tables and header of a file that ends at `end`. `sectors` has the first sector of
    /// each grain; 0: it is not stored.
    async fn finish(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        end: u64,
        mut sectors: impl Iterator<Item = u32>,
    ) -> Result<()> {
        storage::set_len(file, queue, end).await?;
        let both = [self.redundant, self.directory];
        let tables = both.map(|start| start + Self::directory_sectors(self.tables));
        for (directory, first) in both.into_iter().zip(tables) {
            let tables = (0..self.tables).map(|nth| first + nth * TABLE_SECTORS);
            // Below 2^32, since the disk has 64 TiB at most.
            let entries = tables.map(|sector| (sector as u32).to_le_bytes());
            write_table(file, queue, directory * SECTOR, entries).await?;
        }
        let mut at = 0;
        loop {
            let piece = sectors.by_ref().take(ENTRIES_AT_ONCE);
            let piece: Vec<u8> = piece.flat_map(u32::to_le_bytes).collect();
            if piece.is_empty() {
                break;
            }
            // Without grains the file is zero already.
            if !is_zero(&piece) {
                for first in tables {
                    storage::write_slice(file, queue, first * SECTOR + at, &piece).await?;
                }
            }
            at += piece.len() as u64;
        }
        let version = match (self.is_stream, self.zeroed_grain) {
            (true, _) => STREAM_VERSION,
            (false, true) => 2,
            (false, false) => 1,
        };
        make_valid(file, queue, 0, &self.header(version)).await
    }

    /// The header with this version.
    fn header(&self, version: u32) -> [u8; SECTOR as usize] {
        // Line ends that a transfer as text would change; a redundant directory.
        const LINE_ENDS: u32 = 1 << 0;
        const REDUNDANT: u32 = 1 << 1;
        // Grains are compressed, and have markers.
        const STREAM: u32 = 1 << 16 | MARKERS;
        let mut flags = LINE_ENDS;
        if self.redundant != 0 {
            flags |= REDUNDANT;
        }
        if self.zeroed_grain {
            flags |= ZERO_GRAINS;
        }
        if self.is_stream {
            flags |= STREAM;
        }
        let mut bytes = [0; SECTOR as usize];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, HOSTED_MAGIC);
        put(4, &version.to_le_bytes());
        put(8, &flags.to_le_bytes());
        for (at, number) in [
            (12, self.sectors),
            (20, GRAIN),
            (28, DESCRIPTOR),
            (36, DESCRIPTOR_SECTORS),
            (48, self.redundant),
            (56, self.directory),
            (64, self.grains),
        ] {
            put(at, &number.to_le_bytes());
        }
        put(44, &(TABLE as u32).to_le_bytes());
        put(73, b"\n \r\n");
        put(77, &u16::from(self.is_stream).to_le_bytes());
        bytes
    }
}
