//! VHDX, the image format of Hyper-V: dynamic, fixed and differencing images. Images are read; dynamic
//! and fixed ones are created.
//!
//! The format is that of \[MS-VHDX\], the specification of Microsoft. A file begins with two headers
//! and a region table; the regions are the log, the block allocation table (BAT) and the metadata.
//! Blocks of 1 to 256 MiB are anywhere behind. Numbers are little-endian.
//!
//! - `header`, `region`, `metadata`, `parent`: the structures that are read when an image is opened;
//! - `log`: changes that are replayed in memory;
//! - `tables`: pieces of the BAT and the sector bitmaps, on demand;
//! - `map`: the map step;
//! - `check`: the check;
//! - `create`: new images.

mod check;
mod crc;
mod create;
mod fields;
mod header;
mod log;
mod map;
mod metadata;
mod parent;
mod region;
mod tables;

use std::ops::Range;
use std::sync::Arc;

use super::{
    AnyImage, BackingName, BoxFuture, CheckReport, Driver, Extent, Format, FormatImage, Holes,
    OpenRequest, StorageId, check_limit, refused,
};
use crate::Result;
use crate::storage::{Queue, Storage, Work};

use fields::Guid;
use header::Header;
use metadata::{Geometry, Metadata};
use parent::Parent;
use region::Regions;
use tables::Tables;

/// The driver.
pub static DRIVER: Driver = Driver {
    has_backing: true,
    checks_data: true,
    create_options: Some(&create::CREATE_OPTIONS),
    plan: Some(create::plan),
    ..Driver::read_only(
        "vhdx",
        |head| head.starts_with(header::SIGNATURE),
        |request| Box::pin(open(request)),
    )
};

/// The unit of all places in the file, in bytes.
const MIB: u64 = 1 << 20;

/// An open VHDX image.
#[derive(Debug)]
struct Vhdx {
    /// With the log replayed.
    file: Arc<dyn Storage>,
    file_len: u64,
    /// The identity of its content.
    id: Guid,
    geometry: Geometry,
    parent: Option<Parent>,
    regions: Regions,
    /// Where the block allocation table is.
    bat: Range<u64>,
    tables: Arc<Tables>,
    work: Option<Arc<Work>>,
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, mut file) = (request.queue, request.file);
    let header = Header::read(queue, &*file).await?;
    if let Some(replayed) = log::replay(queue, &file, &header, limits.as_ref()).await? {
        file = Arc::new(replayed);
    }
    let file_len = file.len()?;
    let regions = Regions::read(queue, &*file, header.log).await?;
    let place = regions.metadata.clone();
    let Metadata { geometry, parent } = Metadata::read(queue, &*file, place, file_len).await?;
    let bat_bytes = geometry.entries() * 8;
    let cached = match parent.is_some() {
        // Sector bitmaps, too.
        true => tables::MAX_BYTES,
        false => bat_bytes.min(tables::MAX_BYTES),
    };
    if let Some(limits) = limits {
        limits.check_size(geometry.size)?;
        limits.check_table("The block allocation table's length", bat_bytes)?;
        check_limit("memory", "The need for memory", cached, limits.memory)?;
    }
    let bat = regions.bat.clone();
    if bat_bytes > bat.end - bat.start || bat.start + bat_bytes > file_len {
        return Err(refused(format!(
            "The VHDX block allocation table at {:#x} has no space for {bat_bytes} bytes",
            bat.start
        )));
    }
    Ok(AnyImage::new(Vhdx {
        tables: Tables::new(file.clone(), cached),
        file,
        file_len,
        id: header.data_write,
        geometry,
        parent,
        regions,
        bat,
        work,
    }))
}

impl FormatImage for Vhdx {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        self.geometry.size
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(self.geometry.block_size())
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        vec![self.file.clone()]
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        self.extent(guest, limit)
    }

    fn load_extent<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        Box::pin(Vhdx::load_extent(self, queue, guest, limit))
    }

    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Ok(self.before_end(host, length))
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    /// A block is allocated as a whole. Most of it may be a hole.
    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        Some(Holes::ZeroData)
    }

    fn check<'a>(
        &'a self,
        queue: &'a Queue,
        say: &'a mut dyn FnMut(String),
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async move {
            Ok(Some(CheckReport {
                corruptions: Vhdx::check(self, queue, say).await?,
                ..CheckReport::default()
            }))
        })
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        self.parent.as_ref().map(|parent| BackingName {
            name: parent.name.as_bytes(),
            format: Some(DRIVER.name.as_bytes()),
        })
    }

    fn content_id(&self) -> Option<&[u8]> {
        Some(&self.id.0)
    }

    /// A parent that was written since the image was made has another content than the image
    /// relies on.
    fn check_backing(&self, backing: &dyn FormatImage) -> Result<()> {
        let Some(parent) = self.parent.as_ref() else {
            return Ok(());
        };
        let id = match backing.content_id() {
            Some(id) if backing.format() == self.format() => id,
            // The caller has named another image, which has no identity.
            _ => return Ok(()),
        };
        match parent.ids.iter().any(|known| known.0 == id) {
            true => Ok(()),
            false => Err(refused(format!(
                "The parent has changed: its identity is {}, not {}",
                fields::Fields(id).guid(0),
                parent.ids[0]
            ))),
        }
    }
}
