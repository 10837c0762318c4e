//! New VDI images.

use std::iter::repeat_n;
use std::sync::Arc;

use super::{BLOCK, DYNAMIC, HEADER_BYTES, Header, SECTOR, SIGNATURE, STATIC, VERSION, check_size};
use crate::Result;
use crate::drivers::structures::INCOMPLETE_VERSION;
use crate::drivers::{
    BoxFuture, CreateOption, ImagePlan, NewImage, OptionKind, PlanRequest, make_valid, random_uuid,
    write_table,
};
use crate::storage::{self, Iov, Queue, Storage};
use crate::{BlockLayout, Linear, NewBlocks};

/// In the order in which they are shown.
pub(super) static CREATE_OPTIONS: [CreateOption; 5] = [
    CreateOption::SIZE,
    CreateOption::new(
        "static",
        OptionKind::Switch,
        "VDI static (pre-allocated) image",
    )
    .or("off"),
    CreateOption::NOCOW,
    CreateOption::FILE_PREALLOCATION,
    CreateOption::EXTENT_SIZE_HINT,
];

/// The text at the start of an image, which names the program that has made it.
const TEXT: &[u8] = b"<<< zebu disk image >>>\n";
/// The text of an image that is not finished. Its version is none that exists.
pub(super) const UNFINISHED_TEXT: &[u8] = b"<<< zebu: unfinished disk image >>>\n";
/// The value of an entry of the map without a block.
const UNALLOCATED: u32 = u32::MAX;
/// Bytes of the header that its own length counts.
const HEADER_LENGTH: u32 = 0x180;

#[derive(Clone, Copy, Debug)]
struct Plan {
    size: u64,
    is_static: bool,
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let size = request.size.checked_next_multiple_of(SECTOR.into());
    let size = size.unwrap_or(u64::MAX);
    check_size(size)?;
    Ok(Box::new(Plan {
        size,
        is_static: request.options.is_on("static"),
    }))
}

impl Plan {
    fn header(self) -> Header {
        let blocks = self.size.div_ceil(BLOCK.into()) as u32; // At most MAX_BLOCKS.
        let map_offset = SECTOR.into();
        let map_bytes = (u64::from(blocks) * 4).next_multiple_of(SECTOR.into());
        Header {
            image_type: match self.is_static {
                true => STATIC,
                false => DYNAMIC,
            },
            map_offset,
            data_offset: map_offset + map_bytes,
            block_extra: 0,
            size: self.size,
            blocks,
            blocks_allocated: match self.is_static {
                true => blocks,
                false => 0,
            },
        }
    }
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.size
    }

    fn alignment(&self) -> u64 {
        SECTOR.into()
    }

    fn mark(&self) -> Result<Option<Vec<u8>>> {
        let mut mark = self.header().encode(UNFINISHED_TEXT)?;
        mark[0x44..0x48].copy_from_slice(&INCOMPLETE_VERSION.to_le_bytes());
        Ok(Some(mark.to_vec()))
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let [file] = <[_; 1]>::try_from(files).expect("the image's own file");
            let header = self.header();
            let layout = BlockLayout {
                start: header.data_offset,
                size: BLOCK.into(),
                prefix: &[],
            };
            let data = match self.is_static {
                true => {
                    let end = layout.offset(header.blocks);
                    let disk = layout.start..end;
                    Data::Static(Linear::begin(queue, file.clone(), disk, end).await?)
                }
                false => Data::Dynamic(NewBlocks::new(file.clone(), layout, header.blocks)),
            };
            Ok(Box::new(NewVdi { file, header, data }) as Box<dyn NewImage>)
        })
    }
}

/// A VDI image that is being filled.
#[derive(Debug)]
struct NewVdi {
    file: Arc<dyn Storage>,
    header: Header,
    data: Data,
}

#[derive(Debug)]
enum Data {
    Static(Linear),
    Dynamic(NewBlocks),
}

impl NewImage for NewVdi {
    fn has_order(&self) -> bool {
        matches!(self.data, Data::Dynamic(_))
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            match &self.data {
                Data::Static(disk) => disk.write(queue, offset, &iov).await,
                Data::Dynamic(blocks) => blocks.write(queue, offset, &iov).await,
            }
        })
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let (file, mut header) = (&*self.file, self.header);
            match self.data {
                Data::Static(_) => header.write_map(queue, file, 0..header.blocks).await?,
                Data::Dynamic(blocks) => {
                    header.blocks_allocated = blocks.allocated();
                    storage::set_len(file, queue, blocks.end()).await?;
                    let places = blocks.into_places().map(|p| p.unwrap_or(UNALLOCATED));
                    header.write_map(queue, file, places).await?;
                }
            }
            make_valid(file, queue, 0, &header.encode(TEXT)?).await
        })
    }
}

impl Header {
    /// The first sector of an image. Its UUIDs are new.
    fn encode(&self, text: &[u8]) -> Result<[u8; HEADER_BYTES]> {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, text);
        for (at, number) in [
            (0x40, SIGNATURE),
            (0x44, VERSION),
            (0x48, HEADER_LENGTH),
            (0x4c, self.image_type),
            // Below 2 GiB, by MAX_BLOCKS.
            (0x154, self.map_offset as u32),
            (0x158, self.data_offset as u32),
            (0x168, SECTOR),
            (0x178, BLOCK),
            (0x180, self.blocks),
            (0x184, self.blocks_allocated),
        ] {
            put(at, &number.to_le_bytes());
        }
        put(0x170, &self.size.to_le_bytes());
        // Those of the image and of its last snapshot.
        put(0x188, &random_uuid()?);
        put(0x198, &random_uuid()?);
        Ok(bytes)
    }

    /// Writes the map, and zeroes up to the end of its last sector.
    async fn write_map(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        entries: impl Iterator<Item = u32>,
    ) -> Result<()> {
        let space = (self.data_offset - self.map_offset) / 4;
        let rest = space as usize - self.blocks as usize;
        let entries = entries.map(u32::to_le_bytes).chain(repeat_n([0; 4], rest));
        write_table(file, queue, self.map_offset, entries).await
    }
}
