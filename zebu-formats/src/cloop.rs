//! cloop, the compressed images of Knoppix, for reading: a shell script of 128 bytes, the size and
//! number of blocks, their offsets, and the blocks as zlib streams. Numbers are big-endian.
//!
//! The format is that of version 2.0, `create_compressed_fs.c` of cloop.

use std::sync::Arc;

use super::inflate::Inflated;
use super::table::{array, read_table};
use super::{
    AnyImage, CompressedData, Driver, Extent, Format, FormatImage, Mapping, OpenRequest,
    check_limit, disk_size, refused,
};
use crate::Result;
use crate::codec::{Inflater, Stream};
use crate::offset::HostOffset;
use crate::storage::{self, Storage, Work};

/// The driver.
pub static DRIVER: Driver = Driver {
    ..Driver::read_only(
        "cloop",
        |head| head.starts_with(SCRIPT),
        |request| Box::pin(open(request)),
    )
};

/// What an image begins with.
const SCRIPT: &[u8] =
    b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n";
/// Where the numbers are, and then the offsets.
const NUMBERS: u64 = 128;
const OFFSETS: u64 = NUMBERS + 8;
const SECTOR: u32 = 512;
/// Bytes of a block at most, as in QEMU.
const MAX_BLOCK: u32 = 64 << 20;
/// Bytes of a compressed block at most, as in QEMU.
const MAX_COMPRESSED: u64 = 2 * MAX_BLOCK as u64;
/// Bytes of the offsets at most, as in QEMU.
const MAX_OFFSETS: u64 = 512 << 20;

/// An open cloop image.
#[derive(Debug)]
struct Cloop {
    file: Arc<dyn Storage>,
    block_size: u32,
    /// By block: where it begins in the file; at last, where the last one ends.
    offsets: Vec<u64>,
    inflated: Inflated,
    work: Option<Arc<Work>>,
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let numbers = storage::read_vec(&*file, queue, NUMBERS, 8).await?;
    let block_size = u32::from_be_bytes(array(&numbers, 0));
    let blocks = u32::from_be_bytes(array(&numbers, 4));
    check_numbers(block_size, blocks)?;
    let sectors = u64::from(blocks) * u64::from(block_size / SECTOR);
    let size = disk_size(sectors)?;
    let count = u64::from(blocks) + 1;
    if let Some(limits) = limits {
        limits.check_size(size)?;
        limits.check_kept_table("The length of the list of offsets", count * 8)?;
    }
    let (what, decode) = ("The list of offsets", u64::from_be_bytes);
    let offsets = read_table(queue, &*file, what, OFFSETS, count, decode).await?;
    let longest = check_offsets(&offsets)?;
    let largest = u64::from(block_size) + longest.min(most(block_size));
    if let Some(limits) = limits {
        // One is kept, and one is inflated at a time.
        check_limit("memory", "The need for memory", 2 * largest, limits.memory)?;
    }
    Ok(AnyImage::new(Cloop {
        inflated: Inflated::new(file.clone(), largest, work.clone()),
        file,
        block_size,
        offsets,
        work,
    }))
}

fn check_numbers(block_size: u32, blocks: u32) -> Result<()> {
    if !block_size.is_multiple_of(SECTOR) {
        return Err(refused(format!(
            "block_size {block_size} must be a multiple of 512"
        )));
    }
    if block_size == 0 {
        return Err(refused("block_size cannot be zero"));
    }
    if block_size > MAX_BLOCK {
        let most = MAX_BLOCK >> 20;
        return Err(refused(format!(
            "block_size {block_size} must be {most} MB or less"
        )));
    }
    let most = (u32::MAX - 1) / 8;
    if blocks > most {
        return Err(refused(format!("n_blocks {blocks} must be {most} or less")));
    }
    if (u64::from(blocks) + 1) * 8 > MAX_OFFSETS {
        return Err(refused(
            "image requires too many offsets, try increasing block size",
        ));
    }
    Ok(())
}

/// Bytes of the longest block in the file.
fn check_offsets(offsets: &[u64]) -> Result<u64> {
    let mut longest = 0;
    for (index, pair) in offsets.windows(2).enumerate() {
        let index = index + 1;
        let Some(length) = pair[1].checked_sub(pair[0]) else {
            return Err(refused(format!(
                "offsets not monotonically increasing at index {index}, image file is corrupt"
            )));
        };
        if length > MAX_COMPRESSED {
            return Err(refused(format!(
                "invalid compressed block size at index {index}, image file is corrupt"
            )));
        }
        longest = longest.max(length);
    }
    Ok(longest)
}

/// Bytes of a compressed block that are read at most. It may be longer than what it inflates to.
fn most(block_size: u32) -> u64 {
    2 * u64::from(block_size) + (64 << 10)
}

impl Cloop {
    fn extent(&self, guest: u64, limit: u64) -> Extent {
        let size = u64::from(self.block_size);
        let (index, skip) = ((guest / size) as usize, guest % size);
        let (start, end) = (self.offsets[index], self.offsets[index + 1]);
        // Nothing inflates from no data.
        let length = (end - start).clamp(1, most(self.block_size)) as u32;
        let data = CompressedData {
            host: HostOffset(start),
            length,
            slack: 0,
            inflater: Inflater {
                stream: Stream::Zlib {
                    most: self.block_size,
                },
                size: self.block_size,
            },
        };
        Extent::in_file(limit.min(size - skip), Mapping::Compressed { data, skip })
    }
}

impl FormatImage for Cloop {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        (self.offsets.len() as u64 - 1) * u64::from(self.block_size)
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        Some(Ok(self.extent(guest, limit)))
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
