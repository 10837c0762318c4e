//! Growing images of Bochs, for reading: a header, a catalog of extents, the extents, each behind a
//! bitmap of its sectors. Numbers are little-endian.
//!
//! The format is that of "redolog" images, versions 1 and 2, in Bochs' `hdimage.h`. Other kinds of
//! them (undoable, volatile) are refused.

use std::sync::Arc;

use super::sectors::{BlockWithBitmap, SectorBitmaps, by_blocks};
use super::table::{array, read_table};
use super::{
    AnyImage, BoxFuture, Driver, Extent, Format, FormatImage, Mapping, OpenRequest, StorageId,
    disk_size, refused,
};
use crate::Result;
use crate::storage::{self, Queue, Storage, Work};

/// The driver.
pub static DRIVER: Driver = Driver {
    checks_data: true,
    ..Driver::read_only(
        "bochs",
        |head| head.starts_with(SIGNATURE),
        |request| Box::pin(open(request)),
    )
};

const SIGNATURE: &[u8] = b"Bochs Virtual HD Image\0";
const TYPE: &[u8] = b"Redolog\0";
const SUBTYPE: &[u8] = b"Growing\0";
const VERSION_1: u32 = 0x0001_0000;
const VERSION_2: u32 = 0x0002_0000;
/// Bytes of the header.
const HEADER: usize = 512;
const SECTOR: u64 = 512;
/// Entries of the catalog at most, as in QEMU.
const MAX_CATALOG: u32 = 1 << 20;
/// Bytes of an extent at most, as in QEMU.
const MAX_EXTENT: u32 = 8 << 20;
/// The entry of an extent that is not stored.
const NO_EXTENT: u32 = u32::MAX;
/// What sectors are that are not stored.
const MISSING: Mapping = Mapping::Zero { host: None };

/// The fields of the header that are used.
struct Header {
    catalog_offset: u32,
    catalog: u32,
    bitmap: u32,
    extent: u32,
    sectors: u64,
}

/// An open Bochs image.
#[derive(Debug)]
struct Bochs {
    file: Arc<dyn Storage>,
    file_len: u64,
    size: u64,
    extent_size: u64,
    /// Bytes of the bitmap before an extent's data.
    bitmap_size: u64,
    /// Where the extents begin in the file.
    data_offset: u64,
    /// By extent of the disk: its number in the file, or [`NO_EXTENT`].
    catalog: Vec<u32>,
    bitmaps: SectorBitmaps,
    work: Option<Arc<Work>>,
}

impl Header {
    fn decode(bytes: &[u8]) -> Result<Self> {
        let u32_at = |at| u32::from_le_bytes(array(bytes, at));
        let u64_at = |at| u64::from_le_bytes(array(bytes, at));
        let is = |at: usize, text| bytes[at..].starts_with(text);
        let version = u32_at(64);
        let is_known = [VERSION_1, VERSION_2].contains(&version);
        if !is(0, SIGNATURE) || !is(32, TYPE) || !is(48, SUBTYPE) || !is_known {
            return Err(refused("Image not in Bochs format"));
        }
        let disk = match version {
            VERSION_1 => u64_at(84),
            _ => u64_at(88),
        };
        Ok(Header {
            catalog_offset: u32_at(68),
            catalog: u32_at(72),
            bitmap: u32_at(76),
            extent: u32_at(80),
            sectors: disk / SECTOR,
        })
    }

    fn check(&self) -> Result<()> {
        let size = self.extent;
        if u64::from(size) < SECTOR {
            return Err(refused("Extent size must be at least 512"));
        }
        if !size.is_power_of_two() {
            return Err(refused(format!("Extent size {size} is not a power of two")));
        }
        if size > MAX_EXTENT {
            return Err(refused(format!("Extent size {size} is too large")));
        }
        let needed = self.sectors.div_ceil(u64::from(size) / SECTOR);
        if u64::from(self.catalog) < needed {
            return Err(refused("Catalog size is too small for this disk size"));
        }
        Ok(())
    }
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let bytes = storage::read_vec(&*file, queue, 0, HEADER).await?;
    let header = Header::decode(&bytes)?;
    if header.catalog > MAX_CATALOG {
        return Err(refused("Catalog size is too large"));
    }
    header.check()?;
    let size = disk_size(header.sectors)?;
    if let Some(limits) = limits {
        limits.check_size(size)?;
        limits.check_kept_table("The catalog's length", u64::from(header.catalog) * 4)?;
    }
    let (at, count) = (header.catalog_offset.into(), header.catalog.into());
    let (what, decode) = ("The catalog", u32::from_le_bytes);
    let catalog = read_table(queue, &*file, what, at, count, decode).await?;
    // A bitmap has at least one sector. QEMU's arithmetic has 32 bits.
    let bitmap_sectors = 1 + u64::from(header.bitmap.wrapping_sub(1)) / SECTOR;
    Ok(AnyImage::new(Bochs {
        bitmaps: SectorBitmaps::new(file.clone(), |byte, bit| byte >> bit & 1 != 0, MISSING),
        file_len: file.len()?,
        file,
        size,
        extent_size: header.extent.into(),
        bitmap_size: bitmap_sectors * SECTOR,
        data_offset: at + count * 4,
        catalog,
        work,
    }))
}

impl Bochs {
    /// Where the bitmap of an extent is in the file.
    fn bitmap(&self, index: u64) -> Option<u64> {
        let entry = *self.catalog.get(usize::try_from(index).ok()?)?;
        let size = self.extent_size + self.bitmap_size;
        let place = || u64::from(entry).saturating_mul(size);
        (entry != NO_EXTENT).then(|| self.data_offset.saturating_add(place()))
    }

    /// The extent of the image that `guest` is in, if it is stored.
    fn stored(&self, guest: u64) -> Option<BlockWithBitmap> {
        let bitmap = self.bitmap(guest / self.extent_size)?;
        Some(BlockWithBitmap {
            bitmap,
            data: bitmap.saturating_add(self.bitmap_size),
            size: self.extent_size,
        })
    }

    /// The range from `guest` on of which no extent is stored.
    fn missing(&self, guest: u64, limit: u64) -> Extent {
        by_blocks(guest, limit, self.extent_size, MISSING, |index| {
            self.bitmap(index)
        })
    }
}

impl FormatImage for Bochs {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        match self.stored(guest) {
            Some(block) => self.bitmaps.cached(block, guest, limit).map(Ok),
            None => Some(Ok(self.missing(guest, limit))),
        }
    }

    fn load_extent<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        Box::pin(async move {
            match self.stored(guest) {
                Some(block) => self.bitmaps.load(queue, block, guest, limit).await,
                None => Ok(self.missing(guest, limit)),
            }
        })
    }

    /// Data past the end of the file are refused; QEMU reads zeroes.
    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(self.file_len.saturating_sub(host).min(length))
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    fn is_dirty(&self) -> Option<bool> {
        None
    }
}
