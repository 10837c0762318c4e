//! VDI, the image format of VirtualBox: a header, a map of blocks of 1 MiB, the blocks. Numbers are
//! little-endian. Images are read and created.
//!
//! The format is that of `VDICore.h` in VirtualBox, version 1.1, as far as QEMU
//! reads it: dynamic and static images without a parent.

mod create;

use std::sync::Arc;

use super::sectors::by_blocks;
use super::table::{array, read_table};
use super::{
    AnyImage, BoxFuture, CheckReport, Driver, Extent, Format, FormatImage, Holes, Mapping,
    OpenRequest, StorageId, refused,
};
use crate::Result;
use crate::drivers::qcow2::structures::FormatError;
use crate::storage::{self, Queue, Storage, Work};

/// The driver.
pub static DRIVER: Driver = Driver {
    checks_data: true,
    create_options: Some(&create::CREATE_OPTIONS),
    plan: Some(create::plan),
    ..Driver::read_only("vdi", probe, |request| Box::pin(open(request)))
};

const SIGNATURE: u32 = 0xbeda_107f;
const VERSION: u32 = 0x0001_0001;
/// Bytes of the header that are read.
const HEADER_BYTES: usize = 512;
const SECTOR: u32 = 512;
const BLOCK: u32 = 1 << 20;
/// Most blocks whose map, in whole sectors, is shorter than 2 GiB.
const MAX_BLOCKS: u32 = (1 << 31) / 4 - SECTOR / 4;
/// Most bytes of a disk.
const MAX_SIZE: u64 = MAX_BLOCKS as u64 * BLOCK as u64;
/// Type of an image whose blocks are allocated when they are written.
const DYNAMIC: u32 = 1;
/// Type of an image that was allocated when it was created.
const STATIC: u32 = 2;
/// Entries from here on have no block: 0xfffffffe was discarded, 0xffffffff
/// never written.
const NO_BLOCK: u32 = 0xffff_fffe;

/// The fields of the header that are used.
#[derive(Clone, Copy, Debug)]
struct Header {
    image_type: u32,
    map_offset: u64,
    data_offset: u64,
    /// Bytes before the data of each block, for programs of their own.
    block_extra: u64,
    size: u64,
    blocks: u32,
    blocks_allocated: u32,
}

/// An open VDI image.
#[derive(Debug)]
struct Vdi {
    file: Arc<dyn Storage>,
    file_len: u64,
    header: Header,
    /// By block of the disk: its block in the file.
    map: Vec<u32>,
    work: Option<Arc<Work>>,
}

fn probe(head: &[u8]) -> bool {
    head.get(0x40..0x44) == Some(&SIGNATURE.to_le_bytes())
}

/// Refuses a disk that is too large.
fn check_size(size: u64) -> Result<()> {
    match size > MAX_SIZE {
        true => Err(refused(format!(
            "Unsupported VDI image size (size is {size:#x}, max supported is {MAX_SIZE:#x})"
        ))),
        false => Ok(()),
    }
}

impl Header {
    /// The header in the first [`HEADER_BYTES`] of a file.
    fn decode(bytes: &[u8]) -> Result<Self> {
        let u32_at = |at| u32::from_le_bytes(array(bytes, at));
        let u64_at = |at| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let is_null = |at: usize| bytes.get(at..at + 16).is_some_and(|uuid| uuid == [0; 16]);
        let size = u64_at(0x170);
        check_size(size)?;
        let signature = u32_at(0x40);
        if signature != SIGNATURE {
            return Err(refused(format!(
                "Image not in VDI format (bad signature {signature:08x})"
            )));
        }
        if bytes.starts_with(create::UNFINISHED_TEXT) {
            return Err(FormatError::Incomplete.into());
        }
        let unsupported = |why: String| Err(refused(format!("unsupported VDI image ({why})")));
        let version = u32_at(0x44);
        if version != VERSION {
            let (major, minor) = (version >> 16, version & 0xffff);
            return unsupported(format!("version {major}.{minor}"));
        }
        let header = Header {
            image_type: u32_at(0x4c),
            map_offset: u32_at(0x154).into(),
            data_offset: u32_at(0x158).into(),
            block_extra: u32_at(0x17c).into(),
            // VBoxManage makes images with an incomplete last sector.
            size: size.next_multiple_of(SECTOR.into()),
            blocks: u32_at(0x180),
            blocks_allocated: u32_at(0x184),
        };
        let sector = u64::from(SECTOR);
        if !header.map_offset.is_multiple_of(sector) {
            return unsupported(format!(
                "unaligned block map offset {:#x}",
                header.map_offset
            ));
        }
        if !header.data_offset.is_multiple_of(sector) {
            return unsupported(format!("unaligned data offset {:#x}", header.data_offset));
        }
        let (sector_size, block_size) = (u32_at(0x168), u32_at(0x178));
        if sector_size != SECTOR {
            return unsupported(format!("sector size {sector_size} is not {SECTOR}"));
        }
        if block_size != BLOCK {
            return unsupported(format!("block size {block_size} is not {BLOCK}"));
        }
        if !header.block_extra.is_multiple_of(sector) || header.block_extra > BLOCK.into() {
            return unsupported(format!("{} extra bytes per block", header.block_extra));
        }
        let room = u64::from(header.blocks) * u64::from(BLOCK);
        if header.size > room {
            return unsupported(format!(
                "disk size {}, image bitmap has room for {room}",
                header.size
            ));
        }
        if !is_null(0x1a8) {
            return unsupported("non-NULL link UUID".into());
        }
        if !is_null(0x1b8) {
            return unsupported("non-NULL parent UUID".into());
        }
        if header.blocks > MAX_BLOCKS {
            return unsupported(format!(
                "too many blocks {}, max is {MAX_BLOCKS}",
                header.blocks
            ));
        }
        Ok(header)
    }
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, file) = (request.queue, request.file);
    let file_len = file.len()?;
    let bytes = storage::read_vec(&*file, queue, 0, HEADER_BYTES).await?;
    let header = Header::decode(&bytes)?;
    let map_bytes = u64::from(header.blocks) * 4;
    if let Some(limits) = limits {
        limits.check_size(header.size)?;
        limits.check_kept_table("The block map's length", map_bytes)?;
    }
    let (at, blocks) = (header.map_offset, header.blocks.into());
    let map = read_table(
        queue,
        &*file,
        "The block map",
        at,
        blocks,
        u32::from_le_bytes,
    )
    .await?;
    Ok(AnyImage::new(Vdi {
        file,
        file_len,
        header,
        map,
        work,
    }))
}

impl Vdi {
    /// Where a block of the disk is in the file.
    fn block(&self, index: u64) -> Option<u64> {
        let block = *self.map.get(usize::try_from(index).ok()?)?;
        let Header {
            data_offset,
            block_extra,
            ..
        } = self.header;
        let stored = block_extra + u64::from(BLOCK);
        (block < NO_BLOCK).then(|| data_offset + u64::from(block) * stored + block_extra)
    }

    fn extent(&self, guest: u64, limit: u64) -> Extent {
        let missing = Mapping::Zero { host: None };
        by_blocks(guest, limit, BLOCK.into(), missing, |index| {
            self.block(index)
        })
    }

    /// Checks that every mapped block is inside the image and used once, and that their number is
    /// that of the header. Returns the number of errors.
    fn check(&self, say: &mut dyn FnMut(String)) -> u64 {
        let mut used = vec![false; self.map.len()];
        let (mut errors, mut allocated) = (0, 0);
        let mut wrong = |text| {
            errors += 1;
            say(text);
        };
        for (index, block) in self.map.iter().enumerate() {
            if *block >= NO_BLOCK {
                continue;
            }
            match used.get_mut(*block as usize) {
                None => wrong(format!("ERROR: block index {index} too large, is {block}")),
                Some(used) => {
                    allocated += 1;
                    if std::mem::replace(used, true) {
                        wrong(format!("ERROR: block index {block} also used by {block}"));
                    }
                }
            }
        }
        let said = self.header.blocks_allocated;
        if allocated != said {
            wrong(format!(
                "ERROR: allocated blocks mismatch, is {allocated}, should be {said}"
            ));
        }
        errors
    }
}

impl FormatImage for Vdi {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.header.size
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(BLOCK.into())
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        Some(Ok(self.extent(guest, limit)))
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    /// The sectors that the file has. QEMU reads missing ones as zeroes, but writes whole blocks, as
    /// VirtualBox does.
    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        let end = self.file_len / u64::from(SECTOR) * u64::from(SECTOR);
        Ok(end.saturating_sub(host).min(length))
    }

    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        Some(match self.header.image_type {
            STATIC => Holes::ZeroData,
            _ => Holes::Ignored,
        })
    }

    fn check<'a>(
        &'a self,
        _queue: &'a Queue,
        say: &'a mut dyn FnMut(String),
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        let report = CheckReport {
            corruptions: Vdi::check(self, say),
            ..CheckReport::default()
        };
        Box::pin(std::future::ready(Ok(Some(report))))
    }
}
