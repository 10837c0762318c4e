//! qcow2 as a driver.

use std::ops::Range;
use std::sync::Arc;

use super::amend::AmendOptions;
use super::check::CheckMessage;
use super::{Image, OpenImage, SharedImage, SnapshotName, create, stream};
use crate::codec::Compression;
use crate::drivers::qcow2::structures::{CryptMethod, Header, MAGIC, Snapshot};
use crate::drivers::{
    AfterClose, AnyImage, BackingName, BitmapChange, BitmapInfo, Bits, BoxFuture, Changing,
    CheckReport, Clear, CompressedData, Context, Driver, Epochs, Extent, Format, FormatImage,
    Holes, OpenRequest, Preallocation, Purpose, RepairMode, SnapshotChange, StorageId,
};
use crate::offset::HostOffset;
use crate::progress::Report;
use crate::storage::{Counted, Iov, LockRequest, Queue, Storage, Work};
use crate::{Error, Result};

/// The driver.
pub static DRIVER: Driver = Driver {
    name: "qcow2",
    probe: Some(probe),
    other_form: None,
    is_writable: true,
    has_backing: true,
    has_data_file: true,
    can_compress: true,
    checks_data: true,
    create_options: Some(&create::CREATE_OPTIONS),
    plan: Some(create::plan),
    stream: Some(&stream::STREAM),
    open_options: &[
        "encrypt",
        "cache-clean-interval",
        "cache-size",
        "discard-no-unref",
        "l2-cache-entry-size",
        "l2-cache-size",
        "lazy-refcounts",
        "overlap-check",
        "pass-discard-other",
        "pass-discard-request",
        "pass-discard-snapshot",
        "refcount-cache-size",
    ],
    locks: [LockRequest::QCOW2_READ, LockRequest::QCOW2_WRITE],
    open: |request| Box::pin(open(request)),
};

/// Whether it is qcow2. An unknown version is, too: opening it reports the number.
fn probe(head: &[u8]) -> bool {
    let version = head.get(4..8);
    head.starts_with(&MAGIC.to_be_bytes()) && version.is_some_and(|v| v > [0, 0, 0, 1].as_slice())
}

async fn open(mut request: OpenRequest<'_>) -> Result<AnyImage> {
    let (limits, work) = request.count_work()?;
    let OpenRequest {
        queue,
        file,
        write,
        purpose,
        others,
        qcow2,
        key,
        ..
    } = request;
    let for_check = matches!(purpose, Purpose::Check { .. });
    let mut image = match for_check {
        false => OpenImage::of_version(queue, file, qcow2.unfinished).await?,
        true => OpenImage::for_check(queue, file).await?,
    };
    if let Some((limits, work)) = limits.zip(work.clone()) {
        image.limit(limits, work)?;
    }
    let header = image.header();
    if header.is_corrupt() && write && !for_check {
        return Err(Error::Refused(
            "qcow2: Image is corrupt; cannot be opened read/write".into(),
        ));
    }
    if header.is_dirty() && write && !for_check {
        return Err(Error::Dirty);
    }
    let named = header
        .has_data_file()
        .then(|| header.extensions.data_file());
    let data = others.data_file(named).await?;
    let data: Option<Arc<dyn Storage>> = match (data, work) {
        (Some(data), Some(work)) => Some(Arc::new(Counted::new(data, work))),
        (data, _) => data,
    };
    if let Some(format) = &qcow2.encryption {
        check_encryption(image.header(), format)?;
    }
    let data = match purpose.needs_data() {
        true => image.unlock(queue, data, key).await?,
        false => data,
    };
    let mut image = image.finish(queue, data, qcow2.caches).await?;
    image.whole_clusters = qcow2.whole_clusters;
    if write && purpose == Purpose::Data {
        image.check_data_file(queue).await?;
        image.begin_writing(queue, qcow2.write).await?;
    }
    Ok(AnyImage::from_qcow2(SharedImage::new(image)))
}

/// Refuses an image that is not encrypted as its options say, in QEMU's words.
fn check_encryption(header: &Header, format: &str) -> Result<()> {
    let said = match header.crypt() {
        CryptMethod::None => {
            return Err(Error::Refused(format!(
                "No encryption in image header, but options specified format '{format}'"
            )));
        }
        CryptMethod::Luks => "luks",
        _ => "aes",
    };
    match said == format {
        true => Ok(()),
        false => Err(Error::Refused(format!(
            "Header reported '{said}' encryption format but options specify '{format}'"
        ))),
    }
}

impl FormatImage for SharedImage {
    fn format(&self) -> Format {
        Format::of(&DRIVER)
    }

    fn size(&self) -> u64 {
        Image::size(self)
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(self.geometry().cluster_size())
    }

    fn zero_unit(&self) -> u64 {
        self.geometry().subcluster_size()
    }

    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        let mut storages = vec![self.file().clone()];
        if self.data_storage() != StorageId::FILE {
            storages.push(self.data().clone());
        }
        storages
    }

    fn data_storage(&self) -> StorageId {
        Image::data_storage(self)
    }

    fn has_zero_units(&self) -> bool {
        self.version() >= 3
    }

    fn packed_by(&self) -> Option<Compression> {
        let is_stored = !self.geometry().has_data_file() && !self.header().is_encrypted();
        is_stored.then(|| self.compression())
    }

    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        Image::cached_extent(self, guest, limit)
    }

    fn load_extent<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        Box::pin(Image::load_extent(self, queue, guest, limit))
    }

    fn data_before_end(&self, _storage: StorageId, host: u64, length: u64) -> Result<u64> {
        Image::data_before_end(self, host, length)
    }

    #[inline]
    fn check_data(&self, guest: u64, _storage: StorageId, host: u64, length: u64) -> Result<()> {
        Image::check_data(self, guest, host, length)
    }

    fn work(&self) -> Option<&Arc<Work>> {
        self.work.as_ref()
    }

    fn check_compressed(
        &self,
        guest: u64,
        _storage: &dyn Storage,
        data: CompressedData,
    ) -> Result<CompressedData> {
        Image::check_compressed(self, guest, data)
    }

    fn inflated<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        _storage: &'a dyn Storage,
        data: CompressedData,
    ) -> BoxFuture<'a, Result<Arc<Vec<u8>>>> {
        Box::pin(Image::inflated(self, queue, guest, data))
    }

    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        self.known_preallocation().map(holes)
    }

    fn load_holes<'a>(
        &'a self,
        queue: &'a Queue,
        _storage: StorageId,
    ) -> BoxFuture<'a, Result<Holes>> {
        Box::pin(async move { self.is_preallocated(queue).await.map(holes) })
    }

    fn is_dirty(&self) -> Option<bool> {
        Some(self.header().is_dirty())
    }

    fn is_encrypted(&self) -> bool {
        self.header().is_encrypted()
    }

    fn backing(&self) -> Option<BackingName<'_>> {
        let header = self.header();
        Some(BackingName {
            name: header.backing_file()?,
            format: header.extensions.backing_format(),
        })
    }

    fn data_file(&self) -> Option<&[u8]> {
        let header = self.header();
        let name = header.extensions.data_file().unwrap_or_default();
        header.has_data_file().then_some(name)
    }

    fn check<'a>(
        &'a self,
        queue: &'a Queue,
        say: &'a mut dyn FnMut(String),
        report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async move {
            let mut emit = |message: CheckMessage| say(message.to_string());
            Image::check(self, queue, &mut emit, report).await.map(Some)
        })
    }

    fn repair<'a>(
        &'a self,
        queue: &'a Queue,
        mode: RepairMode,
        say: &'a mut dyn FnMut(String),
        report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async move {
            let mut emit = |message: CheckMessage| say(message.to_string());
            let repairing = Image::repair(self, queue, mode, &mut emit, report);
            repairing.await.map(Some)
        })
    }

    fn stores_bitmaps(&self) -> bool {
        self.version() >= 3
    }

    fn bitmaps<'a>(&'a self, queue: &'a Queue) -> BoxFuture<'a, Result<Vec<BitmapInfo>>> {
        Box::pin(Image::bitmaps(self, queue))
    }

    fn bitmap<'a>(&'a self, queue: &'a Queue, name: &'a [u8]) -> BoxFuture<'a, Result<Arc<Bits>>> {
        Box::pin(self.bitmap_by_name(queue, name))
    }

    fn change_bitmap<'a>(
        &'a mut self,
        queue: &'a Queue,
        name: &'a [u8],
        change: BitmapChange<'a>,
    ) -> Changing<'a> {
        let change = async move |image: &mut Image| {
            let result = image.change_bitmap(queue, name, change).await;
            image.mark_if_corrupt(queue, result).await
        };
        Box::pin(self.whole(change))
    }

    fn snapshots(&self) -> Option<&[Snapshot]> {
        Some(Image::snapshots(self))
    }

    fn shown(&self) -> Option<&Snapshot> {
        self.shown.as_ref()
    }

    fn show_snapshot<'a>(&'a mut self, queue: &'a Queue, name: &'a SnapshotName) -> Changing<'a> {
        Box::pin(async move { self.own().await?.show_snapshot(queue, name).await })
    }

    fn snapshot_shows_below<'a>(
        &'a self,
        queue: &'a Queue,
        snapshot: &'a Snapshot,
        end: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(Image::snapshot_shows_below(self, queue, snapshot, end))
    }

    fn change_snapshots<'a>(
        &'a mut self,
        queue: &'a Queue,
        change: SnapshotChange<'a>,
    ) -> Changing<'a> {
        let change = async move |image: &mut Image| {
            let result = match change {
                SnapshotChange::Create(name) => image.snapshot_create(queue, name).await,
                SnapshotChange::Apply(name) => image.snapshot_apply(queue, name).await,
                SnapshotChange::Delete(name) => image.snapshot_delete(queue, name).await,
            };
            image.mark_if_corrupt(queue, result).await
        };
        Box::pin(self.whole(change))
    }

    fn vm_state_offset(&self) -> Option<u64> {
        Some(Image::vm_state_offset(self))
    }

    fn write_vm_state<'a>(
        &'a mut self,
        context: Context<'a>,
        offset: u64,
        iov: &'a Iov,
    ) -> Changing<'a> {
        Box::pin(async move {
            let end = offset + iov.len() as u64;
            let image = self.own().await?;
            image.reach_vm_state(context.queue, end).await?;
            Image::write_vm_state(self, context, offset, iov).await
        })
    }

    fn epochs(&self) -> Option<Arc<Epochs>> {
        let writer = self.writer().ok()?;
        Some(writer.epochs.clone())
    }

    fn in_place(&self, guest: u64, length: u64) -> Option<(StorageId, HostOffset)> {
        let host = Image::in_place(self, guest, length)?;
        Some((self.data_storage(), host))
    }

    fn write<'a>(&'a self, context: Context<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            let result = self.disk(context).write(offset, iov).await;
            self.changed(context.queue, result).await
        })
    }

    fn clear<'a>(&'a self, context: Context<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(async move {
            let disk = self.disk(context);
            let (start, length) = (range.start, range.end - range.start);
            let result = match how {
                // Version 2 has no zeroes but those that are written.
                Clear::Quickly if self.version() == 2 => return Err(Error::os(libc::EOPNOTSUPP)),
                Clear::Quickly => return Ok(()),
                Clear::Zero => disk.zero(start, length, false).await,
                Clear::Unmap => disk.zero(start, length, true).await,
                Clear::Discard => disk.discard(start, length).await,
            };
            self.changed(context.queue, result).await
        })
    }

    fn write_compressed<'a>(
        &'a self,
        context: Context<'a>,
        offset: u64,
        iov: &'a Iov,
    ) -> Changing<'a> {
        Box::pin(async move {
            self.refuse_packed()?;
            let disk = self.disk(context);
            disk.write_compressed(offset, iov).await
        })
    }

    fn write_packed<'a>(
        &'a self,
        context: Context<'a>,
        clusters: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> Changing<'a> {
        Box::pin(async move {
            self.refuse_packed()?;
            self.check_packed(clusters, data)?;
            let result = Image::write_packed(self, context.queue, clusters, data).await;
            self.changed(context.queue, result).await
        })
    }

    fn flush<'a>(&'a self, context: Context<'a>) -> Changing<'a> {
        Box::pin(Image::flush(self, context.queue))
    }

    fn resize<'a>(
        &'a mut self,
        context: Context<'a>,
        size: u64,
        preallocation: Preallocation,
    ) -> Changing<'a> {
        let change = async move |image: &mut Image| {
            let resizing = image.resize(context, size, preallocation);
            resizing.await
        };
        Box::pin(self.whole(change))
    }

    fn make_empty<'a>(&'a mut self, context: Context<'a>, unmap: bool) -> Changing<'a> {
        let change = async move |image: &mut Image| image.make_empty(context, unmap).await;
        Box::pin(self.whole(change))
    }

    fn set_backing<'a>(
        &'a mut self,
        context: Context<'a>,
        name: Option<&'a [u8]>,
        format: Option<&'a [u8]>,
    ) -> Changing<'a> {
        Box::pin(async move {
            self.check_new_backing(name, format)?;
            let change = |header: &mut Header| header.set_backing(name, format);
            self.replace_header(context.queue, change).await
        })
    }

    fn close<'a>(&'a mut self, context: Context<'a>) -> Changing<'a> {
        Box::pin(async move { self.own().await?.close(context.queue).await })
    }

    fn reopen<'a>(&'a mut self, context: Context<'a>) -> Changing<'a> {
        Box::pin(async move { self.own().await?.reopen(context.queue).await })
    }

    fn amend<'a>(
        &'a mut self,
        context: Context<'a>,
        options: &'a AmendOptions,
        report: &'a dyn Report,
    ) -> Changing<'a> {
        Box::pin(self.amend_open(context, options, report))
    }

    fn after_close<'a>(&'a self, queue: &'a Queue, step: AfterClose<'a>) -> Changing<'a> {
        Box::pin(async move {
            match step {
                AfterClose::Amend(options, report) => {
                    self.amend_closed(queue, options, report).await
                }
                AfterClose::CutEnd => self.cut_end(queue).await,
                AfterClose::FinishNew if self.header().unfinished => {
                    create::finish(&**self.file(), queue, self.version()).await
                }
                AfterClose::FinishNew => Ok(()),
            }
        })
    }

    fn as_qcow2(&self) -> Option<&Image> {
        Some(self)
    }
}

/// The meaning of holes in an image.
fn holes(is_preallocated: bool) -> Holes {
    match is_preallocated {
        true => Holes::ZeroData,
        false => Holes::Ignored,
    }
}
