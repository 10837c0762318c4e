//! Growing images of Bochs, for reading: a header, a catalog of extents, the extents, each behind a
//! bitmap of its sectors. Numbers are little-endian.
//!
//! The format is that of "redolog" images, versions 1 and 2, in Bochs' `hdimage.h`. Other kinds of
//! them (undoable, volatile) are refused.

use std::sync::Arc;

use super::pieces::{PIECE, Pieces};
use super::table::{array, read_table};
use super::{
    AnyImage, BoxFuture, Driver, Extent, Format, FormatImage, Holes, LOOKUP_WORK, Mapping,
    OpenRequest, StorageId, disk_size, refused, spend,
};
use crate::format::HostOffset;
use crate::storage::{self, LockRequest, Queue, Storage, Work};
use crate::{Error, Result};

/// The driver.
pub static DRIVER: Driver = Driver {
    name: "bochs",
    probe: Some(|head| head.starts_with(SIGNATURE)),
    is_writable: false,
    has_backing: false,
    has_data_file: false,
    can_compress: false,
    checks_data: true,
    create_options: None,
    plan: None,
    open_options: &[],
    locks: [LockRequest::QCOW2_READ, LockRequest::QCOW2_WRITE],
    open: |request| Box::pin(open(request)),
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
/// Extents of the image that one extent covers at most, which bounds the work for callers that use
/// only its start.
const MAX_RUN: u64 = 1024;

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
    bitmaps: Pieces,
    work: Option<Arc<Work>>,
}

/// The bits of the sectors of an extent that is stored.
struct BitsAt {
    /// Offset of the bitmap, and the bytes of it that are needed.
    at: u64,
    need: u64,
    /// The sector in the extent, and how many there are from that one on.
    sector: u64,
    sectors: u64,
    /// Where the data are, if they are stored.
    host: u64,
}

/// The result of a look-up in the catalog.
enum Found {
    Extent(Extent),
    /// The bits decide.
    Bits(BitsAt),
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
    Ok(AnyImage::new(Box::new(Bochs {
        bitmaps: Pieces::new(file.clone()),
        file_len: file.len()?,
        file,
        size,
        extent_size: header.extent.into(),
        bitmap_size: bitmap_sectors * SECTOR,
        data_offset: at + count * 4,
        catalog,
        work,
    })))
}

impl Bochs {
    /// Where the bitmap of an extent is in the file.
    fn bitmap(&self, index: u64) -> Option<u64> {
        let entry = *self.catalog.get(usize::try_from(index).ok()?)?;
        let size = self.extent_size + self.bitmap_size;
        let place = || u64::from(entry).saturating_mul(size);
        (entry != NO_EXTENT).then(|| self.data_offset.saturating_add(place()))
    }

    fn find(&self, guest: u64, limit: u64) -> Found {
        let size = self.extent_size;
        let (first, within) = (guest / size, guest % size);
        let Some(at) = self.bitmap(first) else {
            let last = (guest + limit).div_ceil(size).min(first + MAX_RUN);
            let missing = |index: &u64| self.bitmap(*index).is_none();
            let extents = 1 + (first + 1..last).take_while(missing).count() as u64;
            return Found::Extent(Extent {
                length: limit.min(extents * size - within),
                storage: StorageId::FILE,
                mapping: Mapping::Zero { host: None },
            });
        };
        let sector = within / SECTOR;
        Found::Bits(BitsAt {
            at,
            need: (size / SECTOR).div_ceil(8).min(PIECE),
            sector,
            sectors: size / SECTOR - sector,
            host: at.saturating_add(self.bitmap_size + within),
        })
    }
}

impl BitsAt {
    /// The extent at `guest` by the bits of `piece`.
    fn extent(&self, piece: &[u8], guest: u64, limit: u64) -> Extent {
        let is_stored = |sector: u64| {
            let byte = piece.get((sector / 8) as usize);
            byte.is_some_and(|byte| byte >> (sector % 8) & 1 != 0)
        };
        let stored = is_stored(self.sector);
        let within = guest % SECTOR;
        let sectors = (within + limit).div_ceil(SECTOR).min(self.sectors);
        let alike = (1..sectors).take_while(|n| is_stored(self.sector + n) == stored);
        let sectors = 1 + alike.count() as u64;
        Extent {
            length: limit.min(sectors * SECTOR - within),
            storage: StorageId::FILE,
            mapping: match stored {
                true => Mapping::Data {
                    host: HostOffset(self.host),
                },
                false => Mapping::Zero { host: None },
            },
        }
    }
}

impl FormatImage for Bochs {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.size
    }

    /// None: QEMU does not show it.
    fn cluster_size(&self) -> Option<u64> {
        None
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        if let Err(error) = self.spend(LOOKUP_WORK) {
            return Some(Err(error));
        }
        match self.find(guest, limit) {
            Found::Extent(extent) => Some(Ok(extent)),
            Found::Bits(bits) => {
                let piece = self.bitmaps.get(bits.at, bits.need)?;
                Some(Ok(bits.extent(&piece, guest, limit)))
            }
        }
    }

    fn load_extent<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        Box::pin(async move {
            match self.find(guest, limit) {
                Found::Extent(extent) => Ok(extent),
                Found::Bits(bits) => {
                    let what = "An extent's bitmap";
                    let piece = self.bitmaps.load(queue, what, bits.at, bits.need).await;
                    let piece = piece.map_err(|e| match e {
                        Error::Refused(what) => Error::Corrupt { guest, what },
                        other => other,
                    })?;
                    Ok(bits.extent(&piece, guest, limit))
                }
            }
        })
    }

    /// Data past the end of the file are refused; QEMU reads zeroes.
    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(self.file_len.saturating_sub(host).min(length))
    }

    fn spend(&self, work: u64) -> Result<()> {
        spend(self.work.as_deref(), work)
    }

    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        Some(Holes::Ignored)
    }

    fn is_dirty(&self) -> Option<bool> {
        None
    }
}
