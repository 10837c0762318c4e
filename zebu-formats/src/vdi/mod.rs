//! VDI, the image format of VirtualBox: a header, a map of blocks of 1 MiB, the blocks. Numbers are
//! little-endian.
//!
//! The format is that of `VDICore.h` in VirtualBox, version 1.1, as far as QEMU
//! reads it: dynamic and static images without a parent.
//!
//! - `write`: writes;
//! - `clear`: zeroes and discards;
//! - `commit`: what happens on a flush;
//! - `create`: new images.

mod clear;
mod commit;
mod create;
mod dirty;
mod write;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::sectors::by_blocks;
use super::table::{array, read_table};
use super::{
    AnyImage, BoxFuture, Changing, CheckReport, Clear, Commits, Context, Driver, Extent, Format,
    FormatImage, Holes, Mapping, OpenRequest, Purpose, StorageId, refused,
};
use crate::drivers::structures::FormatError;
use crate::offset::HostOffset;
use crate::progress::Report;
use crate::storage::{self, Iov, Queue, Storage, Work};
use crate::{Error, Result};
use write::Writer;

/// The driver.
pub static DRIVER: Driver = Driver {
    is_writable: true,
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

/// What requests and tasks share of an image.
#[derive(Debug)]
struct Vdi {
    file: Arc<dyn Storage>,
    /// As it was when the image was opened.
    header: Header,
    /// The count of blocks in the header on the disk.
    count: AtomicU32,
    /// By block of the disk: its place among the blocks in the file. One without a place gets one
    /// after the block is written, and keeps it.
    map: Vec<AtomicU32>,
}

/// An open VDI image.
#[derive(Debug)]
struct OpenVdi {
    image: Arc<Vdi>,
    /// Its state if it is open for writing.
    writer: Option<Arc<Writer>>,
    /// Whether it was open for writing before it was closed.
    was_written: bool,
    /// Bytes of the file, if it is not open for writing.
    file_len: u64,
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
    let is_written = request.write && request.purpose == Purpose::Data;
    let file_len = file.len()?;
    let bytes = storage::read_vec(&*file, queue, 0, HEADER_BYTES).await?;
    let header = Header::decode(&bytes)?;
    let map_bytes = u64::from(header.blocks) * 4;
    if let Some(limits) = limits {
        limits.check_size(header.size)?;
        limits.check_kept_table("The block map's length", map_bytes)?;
    }
    let (at, blocks) = (header.map_offset, header.blocks.into());
    let map = read_table(queue, &*file, "The block map", at, blocks, |entry| {
        AtomicU32::new(u32::from_le_bytes(entry))
    })
    .await?;
    let image = Arc::new(Vdi {
        file,
        count: AtomicU32::new(header.blocks_allocated),
        header,
        map,
    });
    let writer = match is_written {
        true => Some(Writer::begin(image.clone())?),
        false => None,
    };
    Ok(AnyImage::new(OpenVdi {
        image,
        was_written: writer.is_some(),
        writer,
        file_len,
        work,
    }))
}

impl Vdi {
    /// The place of a block of the disk among the blocks in the file.
    fn place(&self, index: u64) -> Option<u32> {
        let entry = self.map.get(usize::try_from(index).ok()?)?;
        // What is found was written before.
        let place = entry.load(Ordering::Acquire);
        (place < NO_BLOCK).then_some(place)
    }

    /// Bytes of a block in the file.
    fn stored(&self) -> u64 {
        self.header.block_extra + u64::from(BLOCK)
    }

    /// Where a place starts in the file, in bytes.
    fn place_offset(&self, place: u32) -> u64 {
        self.header.data_offset + u64::from(place) * self.stored()
    }

    /// Where the data of a block of the disk are in the file.
    fn block(&self, index: u64) -> Option<u64> {
        let start = self.place_offset(self.place(index)?);
        Some(start + self.header.block_extra)
    }

    /// Where a block at this place ends in the file, as far as it is part of the disk.
    fn needed_end(&self, index: u64, place: u32) -> u64 {
        let size = u64::from(BLOCK);
        let inside = self.header.size.saturating_sub(index * size).min(size);
        self.place_offset(place) + self.header.block_extra + inside
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
        for index in 0..self.map.len() as u64 {
            let Some(block) = self.place(index) else {
                continue;
            };
            match used.get_mut(block as usize) {
                None => wrong(format!("ERROR: block index {index} too large, is {block}")),
                Some(used) => {
                    allocated += 1;
                    if std::mem::replace(used, true) {
                        wrong(format!("ERROR: block index {block} also used by {block}"));
                    }
                }
            }
        }
        let said = self.count.load(Ordering::Relaxed);
        if allocated != said {
            wrong(format!(
                "ERROR: allocated blocks mismatch, is {allocated}, should be {said}"
            ));
        }
        errors
    }
}

impl OpenVdi {
    fn writer(&self) -> Result<&Arc<Writer>> {
        self.writer.as_ref().ok_or_else(|| Error::os(libc::EBADF))
    }

    /// After a change: the map is made durable in a write-through mode.
    async fn changed(&self, queue: &Queue) -> Result<()> {
        match self.image.file.cache_mode().is_write_through() {
            true => Commits::flush(self.writer()?, queue).await,
            false => Ok(()),
        }
    }

    /// Makes everything durable, and cuts off what the file was made longer by in advance.
    async fn finish(&mut self, queue: &Queue) -> Result<()> {
        let Some(writer) = &self.writer else {
            return Ok(());
        };
        writer.commits.check()?;
        let end = writer.places.shrink();
        // Also what a power cut has left. Nothing is lost without it: a check says that the header
        // counts too many blocks.
        if writer.fill_holes(queue).await.is_ok() && !writer.is_settled() {
            Commits::flush(writer, queue).await?;
        }
        writer.tail.cut(queue, end).await?;
        self.file_len = writer.tail.length();
        self.writer = None;
        Ok(())
    }
}

impl FormatImage for OpenVdi {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.image.header.size
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(BLOCK.into())
    }

    /// Zeroes go into the file where a block has its place, and are there where it has none.
    fn zero_unit(&self) -> u64 {
        1
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.image.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        Some(Ok(self.image.extent(guest, limit)))
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    /// The sectors that the file has. QEMU reads missing ones as zeroes, but writes whole blocks, as
    /// VirtualBox does.
    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        let file_len = match &self.writer {
            Some(writer) => writer.tail.length(),
            None => self.file_len,
        };
        let end = file_len / u64::from(SECTOR) * u64::from(SECTOR);
        Ok(end.saturating_sub(host).min(length))
    }

    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        Some(match self.image.header.image_type {
            STATIC => Holes::ZeroData,
            _ => Holes::Ignored,
        })
    }

    fn check<'a>(
        &'a self,
        _queue: &'a Queue,
        say: &'a mut dyn FnMut(String),
        _report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        let mut report = CheckReport::default();
        report.corruptions = self.image.check(say);
        Box::pin(std::future::ready(Ok(Some(report))))
    }

    fn in_place(&self, guest: u64, length: u64) -> Option<(StorageId, HostOffset)> {
        let writer = self.writer.as_ref()?;
        writer.commits.check().ok()?;
        let extent = self.image.extent(guest, length);
        match extent.mapping {
            Mapping::Data { host } if extent.length == length && writer.is_durable() => {
                Some((StorageId::FILE, host))
            }
            _ => None,
        }
    }

    fn write<'a>(&'a self, context: Context<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            self.writer()?.write(context.queue, offset, iov).await?;
            self.changed(context.queue).await
        })
    }

    fn clear<'a>(&'a self, context: Context<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(async move { self.writer()?.clear(context.queue, range, how).await })
    }

    fn flush<'a>(&'a self, context: Context<'a>) -> Changing<'a> {
        Box::pin(async move { Commits::flush(self.writer()?, context.queue).await })
    }

    fn close<'a>(&'a mut self, context: Context<'a>) -> Changing<'a> {
        Box::pin(self.finish(context.queue))
    }

    fn reopen<'a>(&'a mut self, _context: Context<'a>) -> Changing<'a> {
        Box::pin(async move {
            if self.writer.is_none() && self.was_written {
                self.writer = Some(Writer::begin(self.image.clone())?);
            }
            self.writer().map(drop)
        })
    }
}
