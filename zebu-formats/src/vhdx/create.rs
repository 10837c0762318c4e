//! New VHDX images: dynamic and fixed ones with sectors of 512 bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::fields::Guid;
use super::header::Header;
use super::map::PRESENT;
use super::metadata::{self, Geometry};
use super::{MIB, header, refused, region};
use crate::Result;
use crate::drivers::{
    BoxFuture, CreateOption, CreateValue, ImagePlan, NewImage, OptionKind, PlanRequest, make_valid,
};
use crate::storage::{self, Iov, Queue, Storage, is_zero};
use crate::{BlockLayout, Linear, NewBlocks};

/// In the order in which they are shown.
pub(super) static CREATE_OPTIONS: [CreateOption; 8] = [
    CreateOption::new("size", OptionKind::Size, "Virtual disk size; max of 64TB."),
    CreateOption::new("log_size", OptionKind::Size, "Log size; min 1MB.").or("1048576"),
    CreateOption::new(
        "block_size",
        OptionKind::Size,
        "Block Size; min 1MB, max 256MB. 0 means auto-calculate based on image size.",
    )
    .or("0"),
    CreateOption::new(
        "subformat",
        OptionKind::Text,
        "VHDX format type, can be either 'dynamic' or 'fixed'. Default is 'dynamic'.",
    ),
    CreateOption::new(
        "block_state_zero",
        OptionKind::Switch,
        "Force use of payload blocks of type 'ZERO'. Non-standard, but default.  Do not set to \
         'off' when using 'qemu-img convert' with subformat=dynamic.",
    ),
    CreateOption::NOCOW,
    CreateOption::FILE_PREALLOCATION,
    CreateOption::EXTENT_SIZE_HINT,
];

/// Bytes of a logical sector.
const SECTOR: u32 = 512;
/// Bytes of the largest block.
const MAX_BLOCK: u64 = 256 << 20;
/// Bytes of the largest log.
const MAX_LOG: u64 = 4095 << 20;
/// Bytes of the region of metadata, and of the space behind it.
const METADATA_BYTES: u64 = MIB;
const SPACE: u64 = 4 * MIB;
/// Bytes of the block allocation table that are written at a time, and the unit in which zeroes are
/// left out.
const PIECE: usize = 1 << 20;
const PAGE: usize = 4096;
/// States of blocks without data.
const NOT_PRESENT: u64 = 0;
const ZERO: u64 = 2;

/// A new image that can be made.
#[derive(Clone, Copy, Debug)]
struct Plan {
    geometry: Geometry,
    log_bytes: u64,
    is_fixed: bool,
    /// The state of blocks that are not written.
    empty: u64,
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let options = request.options;
    let is_fixed = options.is_fixed()?;
    let size = request.size.checked_next_multiple_of(SECTOR.into());
    let size = size.filter(|size| *size <= metadata::MAX_SIZE);
    let size = size.ok_or_else(|| refused("Image size too large; max of 64TB"))?;
    // As in QEMU, sizes are rounded up, the largest to 0.
    let bytes = |name, default| match options.get(name) {
        Some(CreateValue::Size(bytes)) => bytes.checked_next_multiple_of(MIB).unwrap_or(0),
        _ => default,
    };
    let log_bytes = bytes("log_size", MIB);
    if log_bytes > MAX_LOG {
        return Err(refused("Log size must be smaller than 4 GB"));
    }
    if log_bytes == 0 {
        return Err(refused("Log size must be a multiple of 1 MB"));
    }
    let block_size = match bytes("block_size", 0) {
        0 => default_block_size(size),
        bytes => bytes.min(MAX_BLOCK),
    };
    if !block_size.is_power_of_two() {
        return Err(refused("Block size must be a power of two"));
    }
    let empty = match options.get("block_state_zero") {
        Some(CreateValue::Switch(false)) if is_fixed => PRESENT,
        Some(CreateValue::Switch(false)) => NOT_PRESENT,
        _ => ZERO,
    };
    Ok(Box::new(Plan {
        geometry: Geometry::new(size, block_size as u32, SECTOR)?,
        log_bytes,
        is_fixed,
        empty,
    }))
}

/// The size of a block that QEMU chooses for a disk.
fn default_block_size(size: u64) -> u64 {
    const GIB: u64 = 1 << 30;
    match size {
        _ if size > 32 * 1024 * GIB => 64 * MIB,
        _ if size > 100 * GIB => 32 * MIB,
        _ if size > GIB => 16 * MIB,
        _ => 8 * MIB,
    }
}

impl Plan {
    fn bat(&self) -> u64 {
        MIB + self.log_bytes
    }

    fn bat_bytes(&self) -> u64 {
        let entries = match self.geometry.entries() {
            // QEMU does not open a disk without blocks that has a smaller table.
            0 => u64::from(u32::MAX >> self.geometry.chunk_bits()),
            entries => entries,
        };
        (entries * 8).next_multiple_of(MIB)
    }

    fn metadata(&self) -> u64 {
        self.bat() + self.bat_bytes()
    }

    /// Where the blocks begin.
    fn data(&self) -> u64 {
        self.metadata() + METADATA_BYTES + SPACE
    }
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.geometry.size
    }

    fn alignment(&self) -> u64 {
        MIB
    }

    /// Without a valid header no program opens it.
    fn mark(&self) -> Result<Option<Vec<u8>>> {
        let mut mark = header::encode_start().to_vec();
        mark.resize(SECTOR as usize, 0);
        Ok(Some(mark))
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let [file] = <[_; 1]>::try_from(files).expect("the image's own file");
            if file.is_device() {
                for offset in header::OFFSETS {
                    storage::write_slice(&*file, queue, offset, &[0; header::BYTES]).await?;
                }
                // What the device held must not be opened with new data.
                storage::flush(&*file, queue).await?;
            }
            let (start, size) = (self.data(), self.geometry.block_size());
            let blocks = self.geometry.blocks();
            let data = match self.is_fixed {
                true => {
                    let end = start + blocks * size;
                    let disk = Linear::begin(queue, file.clone(), start..end, end).await?;
                    let is_written = (0..blocks).map(|_| AtomicBool::new(false)).collect();
                    Data::Fixed(disk, is_written)
                }
                false => {
                    let prefix = &[];
                    let layout = BlockLayout {
                        start,
                        size,
                        prefix,
                    };
                    // At most 64 Mi of them.
                    let blocks = NewBlocks::new(file.clone(), layout, blocks as u32);
                    Data::Dynamic(layout, blocks)
                }
            };
            let plan = *self;
            Ok(Box::new(NewVhdx { file, plan, data }) as Box<dyn NewImage>)
        })
    }
}

/// An image that is being filled.
#[derive(Debug)]
struct NewVhdx {
    file: Arc<dyn Storage>,
    plan: Plan,
    data: Data,
}

#[derive(Debug)]
enum Data {
    /// The disk, and which blocks are written.
    Fixed(Linear, Box<[AtomicBool]>),
    Dynamic(BlockLayout, NewBlocks),
}

impl NewImage for NewVhdx {
    fn has_order(&self) -> bool {
        matches!(self.data, Data::Dynamic(..))
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            match &self.data {
                Data::Dynamic(_, blocks) => blocks.write(queue, offset, &iov).await,
                Data::Fixed(disk, is_written) => {
                    disk.write(queue, offset, &iov).await?;
                    let block_size = self.plan.geometry.block_size();
                    let start = offset / block_size;
                    let end = (offset + iov.len() as u64).div_ceil(block_size);
                    for block in &is_written[start as usize..end as usize] {
                        block.store(true, Ordering::Relaxed);
                    }
                    Ok(())
                }
            }
        })
    }

    /// The first header makes it an image.
    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let (file, plan) = (&*self.file, self.plan);
            match self.data {
                Data::Fixed(_, is_written) => {
                    let places = (0..).zip(is_written).map(|(block, is_written)| {
                        let start = plan.data() + (block << plan.geometry.block_bits);
                        match is_written.into_inner() || plan.empty == PRESENT {
                            true => start | PRESENT,
                            false => plan.empty,
                        }
                    });
                    plan.write_bat(queue, file, places).await?;
                }
                Data::Dynamic(layout, blocks) => {
                    storage::set_len(file, queue, blocks.end()).await?;
                    let places = blocks.into_places().map(|place| match place {
                        Some(place) => layout.offset(place) | PRESENT,
                        None => plan.empty,
                    });
                    plan.write_bat(queue, file, places).await?;
                }
            }
            let regions = region::encode(
                plan.bat()..plan.metadata(),
                plan.metadata()..plan.metadata() + METADATA_BYTES,
            );
            for offset in region::OFFSETS {
                storage::write_slice(file, queue, offset, &regions).await?;
            }
            let metadata = metadata::encode(&plan.geometry, plan.is_fixed, Guid::random()?);
            storage::write_slice(file, queue, plan.metadata(), &metadata).await?;
            let first = Header {
                place: 0,
                sequence: 1,
                file_write: Guid::random()?,
                data_write: Guid::random()?,
                log: MIB..MIB + plan.log_bytes,
                log_id: None,
            };
            for header in [&first, &first.next()?] {
                let offset = header::OFFSETS[header.place];
                make_valid(file, queue, offset, &header.encode()).await?;
            }
            Ok(())
        })
    }
}

impl Plan {
    /// Writes the block allocation table, of these entries of blocks. Zeroes are only written to a
    /// device.
    async fn write_bat(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        blocks: impl Iterator<Item = u64>,
    ) -> Result<()> {
        let in_chunk = 1u64 << self.geometry.chunk_bits();
        let entries = (0..).zip(blocks).flat_map(|(block, entry)| {
            // The entry of the chunk before, which has no sector bitmap.
            let bitmap = (block != 0 && block % in_chunk == 0).then_some(0);
            bitmap.into_iter().chain([entry])
        });
        let space = self.bat_bytes() / 8;
        let mut entries = entries.chain(std::iter::repeat(0)).take(space as usize);
        let mut piece = Vec::with_capacity(PIECE);
        for offset in (self.bat()..self.metadata()).step_by(PIECE) {
            piece.clear();
            piece.extend(entries.by_ref().take(PIECE / 8).flat_map(u64::to_le_bytes));
            if file.is_device() {
                storage::write_slice(file, queue, offset, &piece).await?;
                continue;
            }
            let pages: Vec<&[u8]> = piece.chunks(PAGE).collect();
            let mut start = 0;
            for run in pages.chunk_by(|one, other| is_zero(one) == is_zero(other)) {
                let end = start + run.len() * PAGE;
                if !is_zero(run[0]) {
                    let at = offset + start as u64;
                    storage::write_slice(file, queue, at, &piece[start..end]).await?;
                }
                start = end;
            }
        }
        Ok(())
    }
}
