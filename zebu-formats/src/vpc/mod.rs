//! VHD, the image format of Virtual PC and Hyper-V; `vpc` by QEMU's name. A footer of
//! 512 bytes ends the file. An image that grows has a copy of it at the start, a second header, a
//! table of blocks, and the blocks, each behind a bitmap of its sectors. Numbers are big-endian.
//!
//! The format is that of the "Virtual Hard Disk Image Format Specification" 1.0: fixed, dynamic and
//! differencing images. In dynamic images bitmaps are not read, as in QEMU. In differencing
//! images they say which sectors are the parent's. (QEMU reads these as if they were dynamic.)

mod create;
mod geometry;
mod parent;

use std::sync::Arc;

use super::sectors::{BlockWithBitmap, SectorBitmaps, by_blocks};
use super::table::{array, read_table};
use super::{
    AnyImage, BackingName, BoxFuture, Driver, Extent, Format, FormatImage, Holes, Mapping,
    OpenRequest, StorageId, VhdSize, refused,
};
use crate::offset::HostOffset;
use crate::storage::{self, Queue, Storage, Work};
use crate::{Error, Result};

use geometry::{MAX_CHS, MAX_SECTORS, SECTOR};

/// The driver.
pub static DRIVER: Driver = Driver {
    has_backing: true,
    checks_data: true,
    create_options: Some(&create::CREATE_OPTIONS),
    plan: Some(create::plan),
    open_options: &["force_size_calc"],
    ..Driver::read_only(
        "vpc",
        // A fixed image has the cookie only at its end: see `guess.rs`.
        |head| head.starts_with(COOKIE),
        |request| Box::pin(open(request)),
    )
};

/// What a footer begins with.
const COOKIE: &[u8; 8] = b"conectix";
/// Where a footer has its checksum.
const CHECKSUM: usize = 64;
/// What the second header begins with.
const DYNAMIC_COOKIE: &[u8; 8] = b"cxsparse";
/// Bytes of the second header.
const DYNAMIC_HEADER: usize = 1024;
/// Entries of the table of blocks at most, as in QEMU.
const MAX_BLOCKS: u32 = i32::MAX as u32 / 4;
/// The entry of a block that is not stored.
const NO_BLOCK: u32 = u32::MAX;
/// What sectors of a differencing image are that are not stored.
const IN_PARENT: Mapping = Mapping::Unallocated { host: None };

/// Disk types.
const FIXED: u32 = 2;
const DIFFERENCING: u32 = 4;

/// The fields of the footer that are used.
struct Footer {
    /// Where the second header is.
    data_offset: u64,
    creator: [u8; 4],
    /// Size of the disk in bytes.
    current_size: u64,
    /// Sectors of the disk by its geometry.
    geometry: u64,
    disk_type: u32,
    id: [u8; 16],
}

/// The fields of the second header that are used.
struct DynamicHeader {
    table_offset: u64,
    blocks: u32,
    block_size: u32,
}

/// An open VHD image.
#[derive(Debug)]
struct Vpc {
    file: Arc<dyn Storage>,
    file_len: u64,
    size: u64,
    /// What identifies the image.
    id: [u8; 16],
    /// None: a fixed image.
    blocks: Option<Blocks>,
    work: Option<Arc<Work>>,
}

/// The blocks of an image that grows.
#[derive(Debug)]
struct Blocks {
    block_size: u64,
    /// Bytes of the bitmap before a block's data.
    bitmap_size: u64,
    /// By block of the disk: the sector of its bitmap in the file, or [`NO_BLOCK`].
    table: Vec<u32>,
    /// Of a differencing image.
    parent: Option<Parent>,
}

/// What a differencing image has.
#[derive(Debug)]
struct Parent {
    /// The name of its file.
    name: Vec<u8>,
    /// What identifies it.
    id: [u8; 16],
    bitmaps: SectorBitmaps,
}

impl Footer {
    fn decode(bytes: &[u8]) -> Result<Self> {
        if u32::from_be_bytes(array(bytes, CHECKSUM)) != checksum(bytes, CHECKSUM) {
            return Err(refused("Incorrect header checksum"));
        }
        let cylinders = u64::from(u16::from_be_bytes(array(bytes, 56)));
        Ok(Footer {
            data_offset: u64::from_be_bytes(array(bytes, 16)),
            creator: array(bytes, 28),
            current_size: u64::from_be_bytes(array(bytes, 48)),
            geometry: cylinders * u64::from(bytes[58]) * u64::from(bytes[59]),
            disk_type: u32::from_be_bytes(array(bytes, 60)),
            id: array(bytes, 68),
        })
    }

    /// Sectors of the disk. Virtual PC uses the geometry, which may be smaller than the size field;
    /// other programs use that field. The creator of the image decides, as in QEMU.
    fn sectors(&self, by: VhdSize) -> u64 {
        let by_geometry = by == VhdSize::Chs || [*b"vpc ", *b"qemu"].contains(&self.creator);
        let by_size = by == VhdSize::CurrentSize || self.geometry == MAX_CHS;
        match by_geometry && !by_size {
            true => self.geometry,
            false => self.current_size / SECTOR,
        }
    }
}

/// The checksum of a footer or header that has it at `at`: the complement of the sum of all other
/// bytes.
fn checksum(bytes: &[u8], at: usize) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    !(sum(&bytes[..at]) + sum(&bytes[at + 4..]))
}

impl DynamicHeader {
    /// The header of a disk of so many sectors.
    fn decode(bytes: &[u8], sectors: u64) -> Result<Self> {
        if !bytes.starts_with(DYNAMIC_COOKIE) {
            return Err(refused("Invalid header magic"));
        }
        let header = DynamicHeader {
            table_offset: u64::from_be_bytes(array(bytes, 16)),
            blocks: u32::from_be_bytes(array(bytes, 28)),
            block_size: u32::from_be_bytes(array(bytes, 32)),
        };
        let size = header.block_size;
        if !size.is_power_of_two() || u64::from(size) < SECTOR {
            return Err(refused(format!("Invalid block size {size}")));
        }
        if sectors * SECTOR / u64::from(size) > u64::from(u32::MAX) {
            return Err(refused("Too many blocks"));
        }
        // To QEMU the number is signed, and one that is negative is too large.
        let is_negative = header.blocks > i32::MAX as u32;
        if !is_negative && u64::from(header.blocks) * u64::from(size) < sectors * SECTOR {
            return Err(refused("Page table too small"));
        }
        if header.blocks > MAX_BLOCKS {
            let blocks = header.blocks as i32;
            return Err(refused(format!("Max Table Entries too large ({blocks})")));
        }
        Ok(header)
    }
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let file_len = file.len()?;
    let (footer, grows) = find_footer(queue, &*file, file_len).await?;
    let sectors = footer.sectors(request.vpc);
    if sectors > MAX_SECTORS {
        let context = format!("Could not open '{}'", file.path().display());
        return Err(Error::os(libc::EFBIG).during(context));
    }
    let size = sectors * SECTOR;
    if let Some(limits) = limits {
        limits.check_size(size)?;
    }
    let mut blocks = None;
    if grows {
        let at = footer.data_offset;
        if i64::try_from(at.saturating_add(DYNAMIC_HEADER as u64)).is_err() {
            return Err(refused("Error reading dynamic VHD header"));
        }
        let bytes = storage::read_vec(&*file, queue, at, DYNAMIC_HEADER).await?;
        let header = DynamicHeader::decode(&bytes, sectors)?;
        if let Some(limits) = limits {
            let bytes = u64::from(header.blocks) * 4;
            limits.check_kept_table("The block allocation table's length", bytes)?;
        }
        let table = read_blocks(queue, &file, &header, file_len, size).await?;
        let parent = match footer.disk_type {
            DIFFERENCING => Some(Parent {
                name: parent::name(queue, &*file, &bytes).await?,
                id: array(&bytes, 40),
                bitmaps: SectorBitmaps::new(
                    file.clone(),
                    |byte, bit| byte & 0x80 >> bit != 0,
                    IN_PARENT,
                ),
            }),
            _ => None,
        };
        let block_size = header.block_size.into();
        blocks = Some(Blocks {
            block_size,
            bitmap_size: bitmap_size(block_size),
            table,
            parent,
        });
    }
    Ok(AnyImage::new(Vpc {
        file,
        file_len,
        size,
        id: footer.id,
        blocks: blocks.filter(|_| footer.disk_type != FIXED),
        work,
    }))
}

/// The footer, and whether the image has a second header. Of an image that grows the copy at the start
/// counts, as in QEMU, unless that is damaged.
async fn find_footer(queue: &Queue, file: &dyn Storage, file_len: u64) -> Result<(Footer, bool)> {
    let copy = storage::read_vec(file, queue, 0, SECTOR as usize).await?;
    let after = copy.strip_prefix(COOKIE);
    let is_unfinished = after.is_some_and(storage::is_zero);
    let copy = after.is_some().then(|| Footer::decode(&copy));
    match copy {
        Some(Ok(footer)) => return Ok((footer, true)),
        // Of an image that was not completed, whose footer at the end is another image's or too early.
        Some(Err(e)) if is_unfinished => return Err(e),
        _ => {}
    }
    let Some(at) = file_len.next_multiple_of(SECTOR).checked_sub(SECTOR) else {
        return Err(refused("File too small for a VHD header"));
    };
    let bytes = storage::read_vec(file, queue, at, SECTOR as usize).await?;
    let footer = match bytes.starts_with(COOKIE) {
        true => Footer::decode(&bytes),
        false => Err(refused("invalid VPC image")),
    };
    match (footer, copy) {
        (Ok(footer), _) => {
            let grows = footer.disk_type != FIXED;
            Ok((footer, grows))
        }
        (Err(_), Some(Err(damaged))) => Err(damaged),
        (Err(e), _) => Err(e),
    }
}

/// Bytes of the bitmap of a block: a bit for each sector, in whole sectors.
fn bitmap_size(block_size: u64) -> u64 {
    (block_size / SECTOR).div_ceil(8).next_multiple_of(SECTOR)
}

/// The table of blocks, as far as the disk of `size` bytes has them. All blocks that the table has
/// must be in the file.
async fn read_blocks(
    queue: &Queue,
    file: &Arc<dyn Storage>,
    header: &DynamicHeader,
    file_len: u64,
    size: u64,
) -> Result<Vec<u32>> {
    let block_size = u64::from(header.block_size);
    let block_end = |entry: &u32| u64::from(*entry) * SECTOR + bitmap_size(block_size) + block_size;
    let truncated = || {
        refused(
            "block-vpc: free_data_block_offset points after the end of file. The image has been \
             truncated.",
        )
    };
    let (at, count) = (header.table_offset, u64::from(header.blocks));
    let table_end = at.checked_add(count * 4).ok_or_else(truncated)?;
    if table_end.div_ceil(SECTOR) > file_len.div_ceil(SECTOR) {
        return Err(truncated());
    }
    let what = "The block allocation table";
    let mut table = read_table(queue, &**file, what, at, count, u32::from_be_bytes).await?;
    let stored = table.iter().filter(|entry| **entry != NO_BLOCK);
    let end = stored.map(block_end).max().unwrap_or(0);
    if end > file_len {
        return Err(truncated());
    }
    table.truncate(size.div_ceil(block_size) as usize);
    table.shrink_to_fit();
    Ok(table)
}

impl Blocks {
    /// Where the bitmap of a block is in the file.
    fn bitmap(&self, index: u64) -> Option<u64> {
        let entry = *self.table.get(usize::try_from(index).ok()?)?;
        (entry != NO_BLOCK).then(|| u64::from(entry) * SECTOR)
    }

    /// The extent at `guest`, unless the bitmap of its block decides.
    fn extent(&self, guest: u64, limit: u64) -> Extent {
        let missing = match self.parent {
            None => Mapping::Zero { host: None },
            Some(_) => IN_PARENT,
        };
        by_blocks(guest, limit, self.block_size, missing, |index| {
            self.bitmap(index).map(|bitmap| bitmap + self.bitmap_size)
        })
    }

    /// The parent, and the block with `guest`, if it is stored: its bitmap says of which sectors
    /// the data are the parent's.
    fn with_bitmap(&self, guest: u64) -> Option<(&Parent, BlockWithBitmap)> {
        let parent = self.parent.as_ref()?;
        let bitmap = self.bitmap(guest / self.block_size)?;
        let data = bitmap + self.bitmap_size;
        let size = self.block_size;
        Some((parent, BlockWithBitmap { bitmap, data, size }))
    }
}

impl Vpc {
    fn with_bitmap(&self, guest: u64) -> Option<(&Parent, BlockWithBitmap)> {
        self.blocks.as_ref()?.with_bitmap(guest)
    }

    /// The extent at `guest`, unless a bitmap decides.
    fn extent(&self, guest: u64, limit: u64) -> Extent {
        match &self.blocks {
            Some(blocks) => blocks.extent(guest, limit),
            None => {
                let host = HostOffset(guest);
                Extent::in_file(limit, Mapping::Data { host })
            }
        }
    }

    fn parent(&self) -> Option<&Parent> {
        self.blocks.as_ref()?.parent.as_ref()
    }
}

impl FormatImage for Vpc {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn cluster_size(&self) -> Option<u64> {
        self.blocks.as_ref().map(|blocks| blocks.block_size)
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        match self.with_bitmap(guest) {
            Some((parent, block)) => parent.bitmaps.cached(block, guest, limit).map(Ok),
            None => Some(Ok(self.extent(guest, limit))),
        }
    }

    fn load_extent<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        Box::pin(async move {
            match self.with_bitmap(guest) {
                Some((parent, block)) => parent.bitmaps.load(queue, block, guest, limit).await,
                None => Ok(self.extent(guest, limit)),
            }
        })
    }

    /// Blocks were checked when the image was opened.
    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(match self.blocks {
            Some(_) => length,
            None => self.file_len.saturating_sub(host).min(length),
        })
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        Some(match self.blocks {
            Some(_) => Holes::Ignored,
            None => Holes::ZeroData,
        })
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        Some(BackingName {
            name: &self.parent()?.name,
            format: Some(DRIVER.name.as_bytes()),
        })
    }

    /// The parent of a differencing image is not written any more, so this need not change.
    fn content_id(&self) -> Option<&[u8]> {
        Some(&self.id)
    }

    fn check_backing(&self, backing: &dyn FormatImage) -> Result<()> {
        match (self.parent(), backing.content_id()) {
            (Some(parent), Some(id)) if backing.format() == self.format() && id != parent.id => {
                Err(refused(
                    "The backing file is not the parent that the image was made for",
                ))
            }
            _ => Ok(()),
        }
    }
}
