//! New VHD images.

use std::iter::repeat;
use std::sync::Arc;

use super::geometry::{Geometry, SECTOR};
use super::{CHECKSUM, COOKIE, DYNAMIC_COOKIE, DYNAMIC_HEADER, NO_BLOCK, checksum};
use crate::drivers::{
    BoxFuture, CreateOption, ImagePlan, NewImage, OptionKind, PlanRequest, make_valid, random_uuid,
    refuse_empty, seconds_since, write_table,
};
use crate::storage::{self, Iov, Queue, Storage};
use crate::{BlockLayout, Linear, NewBlocks};
use crate::{Error, Result};

/// In the order in which they are shown.
pub(super) static CREATE_OPTIONS: [CreateOption; 6] = [
    CreateOption::SIZE,
    CreateOption::new(
        "subformat",
        OptionKind::Text,
        "Type of virtual hard disk format. Supported formats are {dynamic (default) | fixed} ",
    ),
    CreateOption::new(
        "force_size",
        OptionKind::Switch,
        "Force disk size calculation to use the actual size specified, rather than using the \
         nearest CHS-based calculation",
    ),
    CreateOption::NOCOW,
    CreateOption::FILE_PREALLOCATION,
    CreateOption::EXTENT_SIZE_HINT,
];

/// Bytes of the disk in a block.
const BLOCK: u64 = 2 << 20;
/// What a block begins with: a bit for each of its sectors. All are there, and read as zeroes
/// where nothing was written.
const BITMAP: [u8; 512] = [0xff; 512];
/// Bytes of a footer.
const FOOTER_BYTES: usize = 512;
/// Where the second header of a dynamic image is, and the table of its blocks.
const HEADER_OFFSET: u64 = 512;
const TABLE_OFFSET: u64 = 1536;
/// The start of the year 2000, in seconds since 1970.
const EPOCH: u64 = 946_684_800;

#[derive(Clone, Copy, Debug)]
struct Plan {
    /// Sectors of the disk.
    sectors: u64,
    geometry: Geometry,
    is_fixed: bool,
    /// The size is the one in the footer, whatever the geometry.
    force_size: bool,
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let is_fixed = request.options.is_fixed()?;
    let force_size = request.options.is_on("force_size");
    let (geometry, sectors) = Geometry::for_disk(request.size.div_ceil(SECTOR), force_size)?;
    Ok(Box::new(Plan {
        sectors,
        geometry,
        is_fixed,
        force_size,
    }))
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.sectors * SECTOR
    }

    fn alignment(&self) -> u64 {
        match self.is_fixed {
            true => 1 << 20,
            false => SECTOR,
        }
    }

    fn check_opens(&self) -> Result<()> {
        match self.is_fixed {
            true => refuse_empty(self.size(), "A fixed VHD"),
            false => Ok(()),
        }
    }

    /// Without a checksum it is no footer. A fixed image begins with the disk.
    fn mark(&self) -> Result<Option<Vec<u8>>> {
        let mut mark = COOKIE.to_vec();
        mark.resize(FOOTER_BYTES, 0);
        Ok((!self.is_fixed).then_some(mark))
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let [file] = <[_; 1]>::try_from(files).expect("the image's own file");
            let footer = self.footer()?;
            if self.is_fixed {
                let disk = self.begin_fixed(queue, &file).await?;
                let size = self.size();
                return Ok(Box::new(NewFixed {
                    file,
                    size,
                    footer,
                    disk,
                }) as Box<dyn NewImage>);
            }
            let layout = BlockLayout {
                start: TABLE_OFFSET + (u64::from(self.blocks()) * 4).next_multiple_of(SECTOR),
                size: BLOCK,
                prefix: &BITMAP,
            };
            let blocks = NewBlocks::new(file.clone(), layout, self.blocks());
            Ok(Box::new(NewDynamic {
                file,
                header: self.header(),
                footer,
                layout,
                blocks,
            }) as Box<dyn NewImage>)
        })
    }
}

impl Plan {
    fn blocks(&self) -> u32 {
        self.size().div_ceil(BLOCK) as u32 // At most 2040 GiB.
    }

    /// The disk of a fixed image, whose footer is missing.
    async fn begin_fixed(&self, queue: &Queue, file: &Arc<dyn Storage>) -> Result<Linear> {
        let end = self.size() + FOOTER_BYTES as u64;
        if file.is_device() && file.len()? > end {
            // Readers look for the footer at the end of the device.
            return Err(Error::Refused(format!(
                "A fixed VHD ends with its footer, so the device must have {end} bytes"
            )));
        }
        let disk = Linear::begin(queue, file.clone(), 0..self.size(), end).await?;
        // A device may have held a footer there.
        storage::flush(&**file, queue).await?;
        Ok(disk)
    }

    fn footer(&self) -> Result<[u8; FOOTER_BYTES]> {
        let mut bytes = [0; FOOTER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, COOKIE);
        // A bit that is always set.
        put(8, &2u32.to_be_bytes());
        put(12, &0x0001_0000u32.to_be_bytes());
        let header = match self.is_fixed {
            true => u64::MAX,
            false => HEADER_OFFSET,
        };
        put(16, &header.to_be_bytes());
        put(24, &(seconds_since(EPOCH) as u32).to_be_bytes());
        // QEMU, and other readers after it, derive from the name whether the size is that of the
        // geometry.
        put(28, if self.force_size { b"qem2" } else { b"qemu" });
        // Those of Virtual PC 2007 on Windows.
        put(32, &0x0005_0003u32.to_be_bytes());
        put(36, b"Wi2k");
        put(40, &self.size().to_be_bytes());
        put(48, &self.size().to_be_bytes());
        put(56, &self.geometry.cylinders.to_be_bytes());
        put(58, &[self.geometry.heads, self.geometry.sectors]);
        let kind: u32 = if self.is_fixed { 2 } else { 3 };
        put(60, &kind.to_be_bytes());
        put(68, &random_uuid()?);
        put_checksum(&mut bytes, CHECKSUM);
        Ok(bytes)
    }

    /// The second header of a dynamic image.
    fn header(&self) -> [u8; DYNAMIC_HEADER] {
        let mut bytes = [0; DYNAMIC_HEADER];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, DYNAMIC_COOKIE);
        // No header follows.
        put(8, &u64::MAX.to_be_bytes());
        put(16, &TABLE_OFFSET.to_be_bytes());
        put(24, &0x0001_0000u32.to_be_bytes());
        put(28, &self.blocks().to_be_bytes());
        put(32, &(BLOCK as u32).to_be_bytes());
        put_checksum(&mut bytes, 36);
        bytes
    }
}

/// Sets the checksum at `at`.
fn put_checksum(bytes: &mut [u8], at: usize) {
    let checksum = checksum(bytes, at);
    bytes[at..at + 4].copy_from_slice(&checksum.to_be_bytes());
}

/// A fixed image that is being filled: the disk, and a footer.
#[derive(Debug)]
struct NewFixed {
    file: Arc<dyn Storage>,
    size: u64,
    footer: [u8; FOOTER_BYTES],
    disk: Linear,
}

impl NewImage for NewFixed {
    fn has_order(&self) -> bool {
        false
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { self.disk.write(queue, offset, &iov).await })
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { make_valid(&*self.file, queue, self.size, &self.footer).await })
    }
}

/// A dynamic image that is being filled: a copy of the footer, a header, the table of blocks, the
/// blocks, and the footer.
#[derive(Debug)]
struct NewDynamic {
    file: Arc<dyn Storage>,
    header: [u8; DYNAMIC_HEADER],
    footer: [u8; FOOTER_BYTES],
    layout: BlockLayout,
    blocks: NewBlocks,
}

impl NewImage for NewDynamic {
    fn has_order(&self) -> bool {
        true
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { self.blocks.write(queue, offset, &iov).await })
    }

    /// Programs look for the footer at the start, so that is written last.
    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let Self {
                file,
                header,
                footer,
                layout,
                blocks,
            } = *self;
            let file = &*file;
            storage::write_slice(file, queue, blocks.end(), &footer).await?;
            storage::write_slice(file, queue, HEADER_OFFSET, &header).await?;
            let offsets = blocks.into_places().map(|place| match place {
                // At most 2040 GiB and the bitmaps, in sectors.
                Some(place) => (layout.offset(place) / SECTOR) as u32,
                None => NO_BLOCK,
            });
            let space = (layout.start - TABLE_OFFSET) / 4;
            let entries = offsets.chain(repeat(NO_BLOCK)).take(space as usize);
            let entries = entries.map(u32::to_be_bytes);
            write_table(file, queue, TABLE_OFFSET, entries).await?;
            make_valid(file, queue, 0, &footer).await
        })
    }
}
