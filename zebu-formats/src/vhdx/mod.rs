//! VHDX, the image format of Hyper-V: dynamic, fixed and differencing images. Dynamic and fixed ones are
//! created and written in place, differencing ones are read.
//!
//! The format is that of \[MS-VHDX\], the specification of Microsoft. A file begins with two headers
//! and a region table; the regions are the log, the block allocation table (BAT) and the metadata.
//! Blocks of 1 to 256 MiB are anywhere behind. Numbers are little-endian.
//!
//! - `header`, `region`, `metadata`, `parent`: the structures that are read when an image is opened;
//! - `log`, `recover`: changes that are replayed in memory, or carried out;
//! - `tables`: pieces of the BAT and the sector bitmaps, on demand;
//! - `map`: the map step;
//! - `check`: the check;
//! - `create`: new images;
//! - `writer`: what is shared of an image that is written, and its header;
//! - `write`: changes of ranges;
//! - `commit`, `entry`: how entries reach the disk, by the log.

mod check;
mod commit;
mod crc;
mod create;
mod entry;
mod fields;
mod header;
mod log;
mod map;
mod metadata;
mod parent;
mod recover;
mod region;
mod tables;
mod write;
mod writer;

use std::ops::Range;
use std::sync::Arc;

use super::{
    AnyImage, BackingName, BoxFuture, Changing, CheckReport, Clear, Commits, Context, Driver,
    Extent, Format, FormatImage, Holes, OpenRequest, Purpose, StorageId, check_limit, refused,
};
use crate::Result;
use crate::offset::HostOffset;
use crate::progress::Report;
use crate::storage::{Iov, Patched, Queue, Storage, Work};

use fields::Guid;
use header::Header;
use metadata::{Geometry, Metadata};
use parent::Parent;
use region::Regions;
use tables::Tables;
use writer::Writer;

/// The driver.
pub static DRIVER: Driver = Driver {
    is_writable: true,
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
    /// The identity that it gets with the next change.
    next_id: Guid,
    geometry: Geometry,
    parent: Option<Parent>,
    regions: Regions,
    /// Where the log is.
    log: Range<u64>,
    /// Where the block allocation table is.
    bat: Range<u64>,
    tables: Arc<Tables>,
    work: Option<Arc<Work>>,
    /// Whether it was opened for a repair, which has carried out a log.
    is_repaired: bool,
    /// If it is open for writing.
    writer: Option<Arc<Writer>>,
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let (queue, own) = (request.queue, request.file);
    let header = Header::read(queue, &*own).await?;
    let changes = log::changes(queue, &*own, &header, limits.as_ref()).await?;
    let file: Arc<dyn Storage> = match &changes {
        Some(log::Changes { patches, length }) => {
            Arc::new(Patched::new(own.clone(), patches.clone(), *length))
        }
        None => own.clone(),
    };
    let file_len = file.len()?;
    let regions = Regions::read(queue, &*file, header.log.clone()).await?;
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
    let mut image = Vhdx {
        tables: Tables::new(file.clone(), cached),
        file,
        file_len,
        id: header.data_write,
        next_id: Guid::random()?,
        geometry,
        parent,
        regions,
        log: header.log.clone(),
        bat,
        work,
        is_repaired: false,
        writer: None,
    };
    if request.write && request.purpose != Purpose::Metadata {
        let is_data = request.purpose == Purpose::Data;
        // What is refused stays as it is.
        let end = match is_data {
            true => Some(image.check_for_writing(queue).await?),
            false => None,
        };
        image.is_repaired = !is_data && changes.is_some();
        let header = recover::recover(queue, &*own, header, changes).await?;
        image.file_len = own.len()?;
        if let Some(end) = end {
            let (id, size) = (image.next_id, image.geometry.block_size());
            image.writer = Some(Writer::new(own.clone(), header, id, size, end)?);
        }
        image.tables = Tables::new(own.clone(), cached);
        image.file = own;
    }
    Ok(AnyImage::new(image))
}

impl Vhdx {
    /// Refuses what is not written. Returns where the last of what is in the file ends.
    async fn check_for_writing(&self, queue: &Queue) -> Result<u64> {
        if self.parent.is_some() {
            return Err(refused(
                "VHDX images with a parent are not written: convert the image to another format",
            ));
        }
        let log = &self.log;
        if log.end - log.start < MIB || log.end > self.file_len {
            return Err(refused(
                "A VHDX image without space for a log is not written",
            ));
        }
        let mut first = None;
        let mut say = |error| {
            first.get_or_insert(error);
        };
        let end = self.check(queue, &mut say).await?.end;
        if let Some(error) = first {
            return Err(refused(format!(
                "The image is damaged, so it is only read: {error}"
            )));
        }
        Ok(end)
    }

    /// Bytes of the file.
    fn file_len(&self) -> u64 {
        match &self.writer {
            Some(writer) => writer.tail.length(),
            None => self.file_len,
        }
    }
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
        _report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async move {
            let mut report = CheckReport::default();
            report.corruptions = Vhdx::check(self, queue, say).await?.errors;
            report.corruptions_fixed = u64::from(self.is_repaired);
            Ok(Some(report))
        })
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        self.parent.as_ref().map(|parent| BackingName {
            name: parent.name.as_bytes(),
            format: Some(DRIVER.name.as_bytes()),
        })
    }

    fn content_id(&self) -> Option<&[u8]> {
        match &self.writer {
            Some(writer) if writer.has_begun() => Some(&self.next_id.0),
            _ => Some(&self.id.0),
        }
    }

    /// Zeroes are made in the file, in a block that stays.
    fn zero_unit(&self) -> u64 {
        1
    }

    fn in_place(&self, guest: u64, length: u64) -> Option<(StorageId, HostOffset)> {
        self.write_place(guest, length)
    }

    fn write<'a>(&'a self, context: Context<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(self.write_range(context.queue, offset, iov))
    }

    fn clear<'a>(&'a self, context: Context<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(self.clear_range(context.queue, range, how))
    }

    fn flush<'a>(&'a self, context: Context<'a>) -> Changing<'a> {
        Box::pin(async move { Commits::flush(self.writer()?, context.queue).await })
    }

    fn close<'a>(&'a mut self, context: Context<'a>) -> Changing<'a> {
        Box::pin(async move {
            let Some(writer) = &self.writer else {
                return Ok(());
            };
            let has_begun = writer.has_begun();
            writer.end(context.queue).await?;
            if has_begun {
                self.id = self.next_id;
                self.next_id = Guid::random()?;
                writer.renew(self.next_id);
            }
            Ok(())
        })
    }

    /// The next change begins another session.
    fn reopen<'a>(&'a mut self, _context: Context<'a>) -> Changing<'a> {
        Box::pin(std::future::ready(Ok(())))
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
