//! DMG, the disk images of macOS, for reading: chunks, most of them compressed, then a description of
//! them, then a trailer of 512 bytes, by its signature `koly`. Numbers are big-endian.
//!
//! The format has no specification. What is known of it is what QEMU reads: chunks of zeroes, plain
//! ones, and those that zlib (UDZO) or bzip2 (UDBZ) has compressed.

mod chunks;

use std::sync::Arc;

use chunks::{Chunk, Kind};

use super::inflate::Inflated;
use super::sectors::MAX_RUN;
use super::table::{array, check_in_file};
use super::{
    AnyImage, CompressedData, Driver, Extent, Format, FormatImage, Mapping, OpenRequest, StorageId,
    check_limit, disk_size, refused,
};
use crate::offset::HostOffset;
use crate::storage::{self, Queue, Storage, Work};
use crate::{Error, Result};

/// The driver.
pub static DRIVER: Driver = Driver {
    checks_data: true,
    ..Driver::read_only(
        "dmg",
        // The content is not recognized, but the name of the file is: see `guess.rs`.
        |_| false,
        |request| Box::pin(open(request)),
    )
};

const SECTOR: u64 = 512;
/// Bytes of the trailer.
const TRAILER: usize = 512;
/// Where the trailer may begin, from the end of the file in whole sectors, and how far its signature
/// is searched for: the file need not end at a sector.
const SEARCHED: (u64, u64) = (1023, 515);
/// Bytes of a property list at most, as in QEMU.
const MAX_LIST: u64 = 16 << 20;

/// An open DMG image.
#[derive(Debug)]
struct Dmg {
    file: Arc<dyn Storage>,
    file_len: u64,
    size: u64,
    /// By the sectors that they have; these do not overlap.
    chunks: Vec<Chunk>,
    inflated: Inflated,
    work: Option<Arc<Work>>,
}

/// The fields of the trailer.
struct Trailer {
    data_offset: u64,
    resources: (u64, u64),
    list: (u64, u64),
    sectors: u64,
}

impl Trailer {
    async fn find(queue: &Queue, file: &dyn Storage) -> Result<Trailer> {
        let length = file.len()?.next_multiple_of(SECTOR);
        if length == 0 {
            return Err(refused("dmg file must be at least 512 bytes long"));
        }
        let (before_end, searched) = SEARCHED;
        let start = length.saturating_sub(before_end);
        let searched = searched.min(length) as usize;
        let bytes = storage::read_vec(file, queue, start, searched).await?;
        let Some(found) = bytes.windows(4).position(|four| four == b"koly") else {
            return Err(refused("Could not locate UDIF trailer in dmg file"));
        };
        let at = start + found as u64;
        check_in_file("The trailer", at, TRAILER as u64, file.len()?)?;
        let bytes = storage::read_vec(file, queue, at, TRAILER).await?;
        let u64_at = |at| u64::from_be_bytes(array(&bytes, at));
        let trailer = Trailer {
            data_offset: u64_at(0x18),
            resources: (u64_at(0x28), u64_at(0x30)),
            list: (u64_at(0xd8), u64_at(0xe0)),
            sectors: u64_at(0x1ec),
        };
        let is_before = |(start, length): (u64, u64)| start < at && length <= at - start;
        let all = is_before(trailer.resources) && is_before(trailer.list);
        match all && trailer.data_offset <= at {
            true => Ok(trailer),
            false => Err(refused("The trailer of the dmg file is damaged")),
        }
    }
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let trailer = Trailer::find(queue, &*file).await?;
    let size = disk_size(trailer.sectors)?;
    let (resources, list) = (trailer.resources, trailer.list);
    if let Some(limits) = limits {
        limits.check_size(size)?;
        limits.check_kept_table("The resource fork's length", resources.1)?;
        limits.check_kept_table("The property list's length", list.1)?;
    }
    let mut chunks = if resources.1 != 0 {
        chunks::of_resources(queue, &*file, resources, trailer.data_offset).await?
    } else if (1..=MAX_LIST).contains(&list.1) {
        chunks::of_list(queue, &*file, list, trailer.data_offset).await?
    } else {
        return Err(refused("The dmg file has no list of its chunks"));
    };
    chunks.sort_unstable_by_key(|chunk| chunk.first);
    if chunks.windows(2).any(|pair| pair[0].end() > pair[1].first) {
        return Err(refused("Chunks of the dmg file overlap"));
    }
    let largest = chunks.iter().map(Chunk::memory).max().unwrap_or(0);
    if let Some(limits) = limits {
        // One is kept, and one is inflated at a time.
        check_limit("memory", "The need for memory", 2 * largest, limits.memory)?;
    }
    Ok(AnyImage::new(Dmg {
        inflated: Inflated::new(file.clone(), largest, work.clone()),
        file_len: file.len()?,
        file,
        size,
        chunks,
        work,
    }))
}

impl Dmg {
    fn extent(&self, guest: u64, limit: u64) -> Result<Extent> {
        let sector = guest / SECTOR;
        let corrupt = |what: String| Error::Corrupt { guest, what };
        let after = self.chunks.partition_point(|chunk| chunk.first <= sector);
        let chunk = self.chunks[..after].last();
        let Some(chunk) = chunk.filter(|chunk| sector < chunk.end()) else {
            return Err(corrupt(format!("No chunk has sector {sector}")));
        };
        let skip = guest - chunk.first * SECTOR;
        let mut end = chunk.end();
        let mapping = match chunk.kind {
            Kind::Zero => {
                let following = self.chunks[after..].iter().take(MAX_RUN as usize);
                for next in following.take_while(|next| next.kind == Kind::Zero) {
                    if next.first != end {
                        break;
                    }
                    end = next.end();
                }
                Mapping::Zero { host: None }
            }
            Kind::Plain => Mapping::Data {
                host: HostOffset(chunk.offset + skip),
            },
            Kind::Packed(packing) => {
                let size = chunk.count * SECTOR;
                let data = CompressedData {
                    host: HostOffset(chunk.offset),
                    length: chunk.length,
                    slack: 0,
                    inflater: packing.inflater(size as u32),
                };
                Mapping::Compressed { data, skip }
            }
            Kind::Unsupported(number) => {
                let name = chunks::name(number);
                return Err(refused(format!(
                    "The dmg file has chunks of the type {name}, which is not supported"
                )));
            }
        };
        let length = limit.min(end.saturating_mul(SECTOR) - guest);
        Ok(Extent::in_file(length, mapping))
    }
}

impl FormatImage for Dmg {
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
        Some(self.extent(guest, limit))
    }

    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(self.file_len.saturating_sub(host).min(length))
    }

    fn inflated_cache(&self) -> Option<&Inflated> {
        Some(&self.inflated)
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    fn is_dirty(&self) -> Option<bool> {
        None
    }
}
