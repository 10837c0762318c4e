//! An image and its backing chain as one device.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::exchange::Resting;
use super::filtered::{Filters, Rest};
use super::known_data::KnownData;
use super::{ChangeHook, DetectZeroes, ImageSpec};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::Snapshot;
use crate::drivers::{AnyImage, BackingName, CheckReport, Format, Raw, StorageId};
use crate::storage::{self, Event, FileStamp, Iov, OwnedBuffer, Queue, Storage};
use crate::{Error, Result};

/// One image of a chain.
#[derive(Debug)]
pub struct Layer {
    /// The description by which it was opened. Its `display_name` is the name for messages.
    pub spec: ImageSpec,
    /// The image.
    pub(crate) image: AnyImage,
    pub(super) known_data: KnownData,
    /// Its files of this machine that are only read, as they were before anything was read of them.
    pub(crate) stamps: Vec<Stamped>,
    /// Other programs may write to it meanwhile (`force_share`).
    pub(crate) is_shared: bool,
    /// How it is written, if it is open for writing and does not rest.
    pub(super) write: Option<WriteMode>,
    /// It was open for writing until another image was put on it.
    pub(super) resting: Option<Resting>,
    /// Images whose disks are files of it, to be closed after it.
    pub(super) nested: Vec<Arc<Device>>,
    /// What requests from above pass through before they reach it.
    pub(super) filters: Filters,
}

/// A file, and how it was at some time.
pub(crate) type Stamped = (Arc<dyn Storage>, FileStamp);

impl Layer {
    /// The format of the image.
    pub fn format(&self) -> Format {
        self.image.format()
    }

    /// The image, if it is a qcow2 one.
    #[inline]
    pub fn as_qcow2(&self) -> Option<&Image> {
        self.image.as_qcow2()
    }

    /// The image, if it is a raw one.
    pub fn as_raw(&self) -> Option<&Raw> {
        self.image.as_raw()
    }

    /// The image, if it is of this type: `get::<Vmdk>()`.
    pub fn get<T: 'static>(&self) -> Option<&T> {
        self.image.as_any()?.downcast_ref()
    }

    /// Size of the image's disk in bytes.
    pub fn size(&self) -> u64 {
        self.image.size()
    }

    /// The unit of allocation in bytes; None: the format has none.
    pub fn cluster_size(&self) -> Option<u64> {
        self.image.cluster_size()
    }

    /// What changes with every change of the content, if the format has that. Images that are
    /// created over the image keep it, to notice that the image was changed.
    pub fn content_id(&self) -> Option<&[u8]> {
        self.image.content_id()
    }

    /// The backing file, as the image names it.
    pub fn backing(&self) -> Option<BackingName<'_>> {
        self.image.backing()
    }

    /// The external data file, as the image names it; empty: it has one and does not name it.
    pub fn data_file(&self) -> Option<&[u8]> {
        self.image.data_file()
    }

    /// The internal snapshots of the image; None: the format has none.
    pub fn snapshots(&self) -> Option<&[Snapshot]> {
        self.image.snapshots()
    }

    /// The internal snapshot that the image shows instead of the active disk
    /// ([`Device::show_snapshot`]).
    pub fn shown_snapshot(&self) -> Option<&Snapshot> {
        self.image.shown()
    }

    /// Whether the image can store dirty bitmaps.
    pub fn stores_bitmaps(&self) -> bool {
        self.image.stores_bitmaps()
    }

    /// Where the VM state begins, in bytes: past the end of the disk. None: the format has none.
    pub fn vm_state_offset(&self) -> Option<u64> {
        self.image.vm_state_offset()
    }

    /// Checks the metadata of the image, and passes errors to `say`. None: the format has no check.
    ///
    /// # Errors
    ///
    /// If the metadata cannot be read, or if the check cannot go on after an error.
    pub async fn check(
        &self,
        queue: &Queue,
        say: &mut dyn FnMut(String),
    ) -> Result<Option<CheckReport>> {
        self.image.check(queue, say, &()).await
    }

    /// Whether the image's last writer did not close it; None: the format does not tell.
    pub fn is_dirty(&self) -> Option<bool> {
        self.image.is_dirty()
    }

    /// Whether the guest's data are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.image.is_encrypted()
    }

    /// The file of the image.
    pub fn file(&self) -> &dyn Storage {
        &**self.image.file()
    }

    /// Reports an event to the file, if that is a blkdebug one below a format driver.
    #[inline]
    pub(super) fn event(&self, event: Event) {
        if !self.spec.bare {
            storage::event(self.file(), event);
        }
    }

    /// All storages of the image: its file, and the others that it names.
    pub fn storages(&self) -> Vec<Arc<dyn Storage>> {
        self.image.storages()
    }

    /// A storage that extents of the image refer to.
    #[inline]
    pub fn storage(&self, id: StorageId) -> &dyn Storage {
        &**self.image.storage(id)
    }

    /// The storage of the guest's bytes: the file, or an external data file.
    pub fn data(&self) -> &dyn Storage {
        self.storage(self.image.data_storage())
    }
}

/// A block device: an image with its data file and its backing chain.
///
/// Shared by reference between any number of threads, each with its queue. [`Queue`] describes how
/// the futures of requests are driven. The [front page](crate) has an example.
#[derive(Debug)]
pub struct Device {
    pub(super) layers: Vec<Layer>,
    size: AtomicU64,
    /// Opened for the metadata only: reads are refused.
    pub(super) inspect: bool,
    /// What is told of changes.
    pub(super) hooks: Vec<Arc<dyn ChangeHook>>,
    /// What requests pass through, over the top image whatever that is.
    pub(super) filters: Filters,
    /// Whether requests pass through filters, these or those of an image of the chain.
    pub(super) has_filters: bool,
}

/// Options of a device that is open for writing.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteMode {
    /// Discards are carried out.
    pub discard: bool,
    /// What becomes of writes of zeroes.
    pub detect_zeroes: DetectZeroes,
}

/// A device whose top image may change its size, which the device takes over when this is dropped.
pub(super) struct Resizing<'a>(pub &'a mut Device);

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        *self.0.size.get_mut() = self.0.top().size();
    }
}

impl Device {
    /// The device of these layers, at least one, the top one first.
    pub(super) fn new(layers: Vec<Layer>, inspect: bool) -> Self {
        let size = layers[0].size();
        let mut device = Device {
            layers,
            size: size.into(),
            inspect,
            hooks: Vec::new(),
            filters: Filters::default(),
            has_filters: false,
        };
        device.find_filters();
        device
    }

    /// Looks again whether requests pass through filters. Every change of these and of the list of images
    /// ends with it.
    pub(super) fn find_filters(&mut self) {
        let mut of_images = self.layers.iter().map(|layer| &layer.filters);
        self.has_filters = !self.filters.is_empty() || of_images.any(|f| !f.is_empty());
    }

    /// The images of the chain. The filters of the device are those of the first one.
    pub(super) fn into_layers(mut self) -> Vec<Layer> {
        let own = std::mem::take(&mut self.layers[0].filters);
        self.layers[0].filters = self.filters.onto(own);
        self.layers
    }

    /// The top image, and what it lies on, for a change of the whole image.
    pub(super) fn top_mut(&mut self) -> (&mut AnyImage, Option<Rest<'_>>) {
        let (top, below) = self.layers.split_first_mut().expect("at least one");
        (&mut top.image, Rest::below(below))
    }

    /// Whether discards are carried out.
    pub(super) fn discards(&self) -> bool {
        self.layers[0].write.is_some_and(|w| w.discard)
    }

    /// What becomes of writes of zeroes.
    pub(super) fn detect_zeroes(&self) -> DetectZeroes {
        self.layers[0]
            .write
            .map_or(DetectZeroes::Off, |w| w.detect_zeroes)
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Takes over the size of a raw image whose file or block device has grown since it was opened.
    /// True if the disk is larger than before. May be called while requests are in flight.
    ///
    /// A disk does not become smaller by this. Images whose size does not follow from their storage
    /// (qcow2, a part of a file) keep it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the storage's length cannot be found out.
    pub fn refresh_size(&self) -> Result<bool> {
        let Some(raw) = self.top().as_raw() else {
            return Ok(false);
        };
        let size = raw.refresh_size()?;
        Ok(self.size.fetch_max(size, Ordering::Relaxed) < size)
    }

    /// The images of the chain, the top one first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// All images that are read: those of the chain, the top one first, then those of the devices
    /// whose disks are files of it.
    pub fn all_layers(&self) -> Box<dyn Iterator<Item = &Layer> + '_> {
        let nested = self.layers.iter().flat_map(|layer| &layer.nested);
        let inner = nested.flat_map(|image| image.all_layers());
        Box::new(self.layers.iter().chain(inner))
    }

    /// The top image.
    pub fn top(&self) -> &Layer {
        &self.layers[0]
    }

    /// Whether reads and writes of the top image's data bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.top().data().cache_mode().is_direct()
    }

    /// Fills `buffer` with the bytes from `offset` on. Blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Device::read`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn read_blocking(&self, queue: &Queue, offset: u64, buffer: &mut [u8]) -> Result<()> {
        // SAFETY: `buffer` is borrowed until the read, waited for here, has
        // ended.
        #[allow(unsafe_code)]
        let iov = unsafe { Iov::from_raw(buffer.as_mut_ptr(), buffer.len()) };
        queue.block_on(self.read(queue, offset, &iov))
    }

    /// Fills `buffers`, one after the other, with the bytes from `offset` on. Blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Device::read`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn read_vectored_blocking(
        &self,
        queue: &Queue,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
    ) -> Result<()> {
        let segments: Vec<_> = buffers
            .iter_mut()
            .map(|b| (b.as_mut_ptr(), b.len()))
            .collect();
        // SAFETY: `buffers` are borrowed until the read, waited for here, has ended.
        #[allow(unsafe_code)]
        let iov = unsafe { Iov::from_segments(&segments) };
        queue.block_on(self.read(queue, offset, &iov))
    }

    /// Reads into the first `length` bytes of a buffer, which comes back with the result.
    ///
    /// # Errors
    ///
    /// Those of [`Device::read`]. [`Error::Refused`] if `length` exceeds the buffer.
    pub async fn read_buffer<B: OwnedBuffer>(
        &self,
        queue: &Queue,
        offset: u64,
        mut buffer: B,
        length: usize,
    ) -> (B, Result<()>) {
        // SAFETY: the buffer lives in this future until the read has ended;
        // a dropped future waits for that before it drops the buffer.
        #[allow(unsafe_code)]
        let iov = unsafe { buffer.first(length) };
        let result = match iov {
            Ok(iov) => self.read(queue, offset, &iov).await,
            Err(e) => Err(e),
        };
        (buffer, result)
    }

    /// Refuses a range that is not inside the disk.
    pub(super) fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        match offset.checked_add(length) {
            _ if self.inspect => Err(Error::Refused(
                "The image was opened to look at its metadata only".into(),
            )),
            Some(end) if end <= self.size() => Ok(()),
            _ => Err(Error::OutOfRange {
                offset,
                length,
                size: self.size(),
            }),
        }
    }
}
