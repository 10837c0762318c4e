//! Image formats: one driver for each, and what they have in common.
//!
//! A driver is one module. Those of raw and qcow2 are here, and in `registry.rs`; all others are in the crate
//! zebu-formats, and registered (`registered.rs`). It recognizes the
//! format, opens an image, and implements [`FormatImage`]: the map step of reads, and for a format that
//! is written the map step of writes and all changes. What lies below an image is a [`Below`], so copy-on-write is the
//! driver's business. New images go through `create/`. The layers above ask for
//! what an image can and not for its format, also for what only one format has (snapshots, bitmaps, VM
//! state). [`FormatImage::as_qcow2`], `as_raw` and `as_any` are for programs that show more of these.
//!
//! To be read in this order:
//!
//! - here, with `below`: what an image can; `format`, `registry`: what a format is, and all of them;
//! - `raw/`, the shortest that is written; `qcow2/`, which says where to begin;
//! - `any`, `extent`: an image and its map step, as the layers above hold it;
//! - `guess`, `signature`, `open`, `options`, `limits`: from a file to an open image;
//! - `create/`: new images; `preallocate`: space for what is added; `stream/`: images in order;
//! - `cache`, `epoch`, `wait`, `sync`, `bits`: what threads share;
//! - `commits`, `inflate`, `encryption`: what formats share.
//!
//! Encryption that is keyed by host offset (LUKS) is a filter over the file with the data: the map step does not
//! change by it. One that is keyed by guest offset (the AES method of qcow2) would stand where [`Mapping::Data`] is
//! read and written.

mod any;
mod below;
mod bitmaps;
mod bits;
pub(crate) mod cache;
mod check;
mod commits;
mod create;
mod encryption;
mod epoch;
mod extent;
mod format;
mod guess;
pub(crate) mod inflate;
pub(crate) mod limits;
pub(crate) mod open;
mod options;
pub(crate) mod preallocate;
pub mod qcow2;
pub(crate) mod raw;
mod registry;
pub(crate) mod signature;
pub(crate) mod stream;
mod sync;
pub(crate) mod wait;

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use crate::codec::Compression;
use crate::offset::HostOffset;
use crate::progress::Report;
use crate::storage::{Iov, Queue, Storage, Work};
use crate::{Error, Result};

pub use any::AnyImage;
pub use below::{Below, Changing, Clear, Context};
pub use bitmaps::BitmapChange;
pub use bitmaps::BitmapInfo;
pub use bits::Bits;
pub use check::{CheckReport, RepairMode};
pub use commits::{Commits, Committed};
pub use create::{CreateValue, CreateValues, Filling, ImagePlan, NewImage, PlanImage, PlanRequest};
pub use create::{
    Making, begin_file, check_inside, make_valid, random_uuid, refuse_empty, seconds_since,
    too_large, write_table,
};
pub use encryption::{Encryption, NewEncryption, OpenEncryption};
pub use epoch::{Epochs, Stay};
pub use extent::{CompressedData, Extent, Mapping, StorageId};
pub use format::{CreateOption, Driver, Format, OptionKind, OtherForm};
pub use guess::{Guess, check_inner, check_tail, is_partitioned, probe, probe_head};
use inflate::Inflated;
pub use inflate::inflate;
pub use limits::Limits;
pub use limits::{LOOKUP_WORK, check_limit, disk_size, spend};
pub use open::{OpenFormat, OpenRequest, OtherFiles, Purpose};
pub use options::{Qcow2Opening, RawPart, VhdSize};
pub use preallocate::Preallocation;
pub use qcow2::SnapshotChange;
use qcow2::amend::AmendOptions;
use qcow2::structures::Snapshot;
pub(crate) use qcow2::{SnapshotName, check_recorded};
pub use raw::Raw;
pub use registry::READ_ONLY_FORMATS;
pub use registry::is_format;
pub use wait::{Gate, Held, Pass, Ranges};

/// A future on the heap, for methods of trait objects.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// An open image of some format.
///
/// Shared by reference between any number of threads, each with its queue.
#[doc(hidden)]
pub trait FormatImage: Debug + Send + Sync {
    /// The format.
    fn format(&self) -> Format;

    /// Size of the disk in bytes.
    fn size(&self) -> u64;

    /// The unit of allocation in bytes; None: the format has none, or QEMU does not show it.
    fn cluster_size(&self) -> Option<u64> {
        None
    }

    /// Whether a unit of it can be zero without data, whatever lies below.
    fn has_zero_units(&self) -> bool {
        false
    }

    /// How clusters that are written packed are compressed; None: they cannot be.
    fn packed_by(&self) -> Option<Compression> {
        None
    }

    /// The unit in which a range can be made zero or left to the backing file,
    /// in bytes; 1 if there is none.
    fn zero_unit(&self) -> u64 {
        self.cluster_size().unwrap_or(1)
    }

    /// The storages that extents refer to. The first is the image's file. They
    /// stay the same while the image is open.
    fn storages(&self) -> Vec<Arc<dyn Storage>>;

    /// The storage of the guest's bytes.
    fn data_storage(&self) -> StorageId {
        StorageId::FILE
    }

    /// The extent at `guest`, which is inside the disk, as far as it is mapped alike: at most
    /// `limit` bytes (at least 1). None if that needs I/O. Must not allocate.
    fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>>;

    /// [`FormatImage::cached_extent`] with I/O, for where that was None. Not called for an image
    /// whose extents are all known.
    fn load_extent<'a>(
        &'a self,
        _queue: &'a Queue,
        _guest: u64,
        _limit: u64,
    ) -> BoxFuture<'a, Result<Extent>> {
        unreachable!("every extent is known")
    }

    /// How many of the `length` bytes of data from `host` of `storage` on may be read: those before
    /// the end of the storage, and those that read as zeroes behind it.
    fn data_before_end(&self, _storage: StorageId, _host: u64, length: u64) -> Result<u64> {
        Ok(length)
    }

    /// Refuses data that are partly missing by [`FormatImage::data_before_end`]. Only called if
    /// [`Driver::checks_data`] is set.
    fn check_data(&self, guest: u64, storage: StorageId, host: u64, length: u64) -> Result<()> {
        match self.data_before_end(storage, host, length)? {
            there if there == length => Ok(()),
            there => Err(past_end(guest + there, host + there)),
        }
    }

    /// The cache of inflated clusters of the image's file, for small reads.
    fn inflated_cache(&self) -> Option<&Inflated> {
        None
    }

    /// The inflated cluster that is mapped at `guest`, of compressed data in `storage`. A driver may
    /// read more than `data` if these do not inflate.
    fn inflated<'a>(
        &'a self,
        queue: &'a Queue,
        guest: u64,
        storage: &'a dyn Storage,
        data: CompressedData,
    ) -> BoxFuture<'a, Result<Arc<Vec<u8>>>> {
        Box::pin(async move {
            if let Some(cache) = self.inflated_cache() {
                return cache.get(queue, guest, data).await;
            }
            spend(self.work().map(|work| &**work), data.work())?;
            inflate(queue, storage, guest, data).await.map(Arc::new)
        })
    }

    /// The work that may still be done with an untrusted image. Look-ups of extents are counted by
    /// [`AnyImage`].
    fn work(&self) -> Option<&Arc<Work>> {
        None
    }

    /// The part of compressed data, mapped at `guest`, that `storage` has.
    ///
    /// # Errors
    /// If it lacks more than the data's slack.
    fn check_compressed(
        &self,
        guest: u64,
        storage: &dyn Storage,
        data: CompressedData,
    ) -> Result<CompressedData> {
        match storage.len()? {
            length if data.last() >= length => Err(data.past_end(guest)),
            length => Ok(data.within(length)),
        }
    }

    /// The meaning of holes of a storage under data; None if that needs I/O.
    fn cached_holes(&self, _storage: StorageId) -> Option<Holes> {
        Some(Holes::Ignored)
    }

    /// [`FormatImage::cached_holes`] with I/O, for where that was None.
    fn load_holes<'a>(
        &'a self,
        _queue: &'a Queue,
        storage: StorageId,
    ) -> BoxFuture<'a, Result<Holes>> {
        let known = self.cached_holes(storage).unwrap_or(Holes::Ignored);
        Box::pin(async move { Ok(known) })
    }

    /// Checks the metadata, and passes errors to `say`. None: the driver has no check.
    fn check<'a>(
        &'a self,
        _queue: &'a Queue,
        _say: &'a mut dyn FnMut(String),
        _report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Repairs an image that was opened to be checked and written. None: the driver has no repair.
    fn repair<'a>(
        &'a self,
        _queue: &'a Queue,
        _mode: RepairMode,
        _say: &'a mut dyn FnMut(String),
        _report: &'a dyn Report,
    ) -> BoxFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Whether its last writer did not close it; None: the format does not tell, and `info` shows
    /// nothing.
    fn is_dirty(&self) -> Option<bool> {
        Some(false)
    }

    /// Whether it can store dirty bitmaps.
    fn stores_bitmaps(&self) -> bool {
        false
    }

    /// Whether it could have bitmaps that cannot be listed, and has none.
    fn has_no_bitmaps(&self) -> bool {
        false
    }

    /// The bitmaps that it stores.
    fn bitmaps<'a>(&'a self, _queue: &'a Queue) -> BoxFuture<'a, Result<Vec<BitmapInfo>>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// The bits of a bitmap. Of one that records changes, these set bits of what is returned.
    fn bitmap<'a>(&'a self, _queue: &'a Queue, name: &'a [u8]) -> BoxFuture<'a, Result<Arc<Bits>>> {
        Box::pin(std::future::ready(Err(Error::bitmap_not_found(name))))
    }

    /// Changes a bitmap. Durable on return.
    fn change_bitmap<'a>(
        &'a mut self,
        _queue: &'a Queue,
        name: &'a [u8],
        change: BitmapChange<'a>,
    ) -> Changing<'a> {
        let error = match change {
            BitmapChange::Add { .. } => {
                Error::os(libc::ENOTSUP).during("Can't store persistent bitmaps")
            }
            _ => Error::bitmap_not_found(name),
        };
        Box::pin(std::future::ready(Err(error)))
    }

    /// The internal snapshots; None: the format has none.
    fn snapshots(&self) -> Option<&[Snapshot]> {
        None
    }

    /// The internal snapshot that it shows instead of the active disk.
    fn shown(&self) -> Option<&Snapshot> {
        None
    }

    /// Shows an internal snapshot instead of the active disk: its size, its data and its VM state,
    /// but no bitmaps. The image is only read. After an error it shows what it did.
    fn show_snapshot<'a>(&'a mut self, _queue: &'a Queue, _name: &'a SnapshotName) -> Changing<'a> {
        let error = Error::Refused(format!(
            "Block format '{}' used by device '' does not support temporarily loading internal \
             snapshots",
            self.format().name()
        ));
        Box::pin(std::future::ready(Err(error)))
    }

    /// Whether a snapshot of the image shows what is below it somewhere before `end`.
    fn snapshot_shows_below<'a>(
        &'a self,
        _queue: &'a Queue,
        _snapshot: &'a Snapshot,
        _end: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Takes, applies or deletes an internal snapshot. Durable on return.
    fn change_snapshots<'a>(
        &'a mut self,
        _queue: &'a Queue,
        _change: SnapshotChange<'a>,
    ) -> Changing<'a> {
        unsupported()
    }

    /// The guest offset where the VM state begins, past the end of the disk; None: the format has
    /// none. It is read as the disk is.
    fn vm_state_offset(&self) -> Option<u64> {
        None
    }

    /// Writes to the VM state, from a guest offset on.
    fn write_vm_state<'a>(
        &'a mut self,
        _context: Context<'a>,
        _offset: u64,
        _iov: &'a Iov,
    ) -> Changing<'a> {
        unsupported()
    }

    /// Whether the guest's data are encrypted.
    fn is_encrypted(&self) -> bool {
        false
    }

    /// The backing file, as the image names it.
    fn backing(&self) -> Option<BackingName<'_>> {
        None
    }

    /// The external data file, as the image names it; empty: it has one and does not name it.
    fn data_file(&self) -> Option<&[u8]> {
        None
    }

    /// What identifies the content of the disk, if the format has that. It changes before the
    /// content does.
    fn content_id(&self) -> Option<&[u8]> {
        None
    }

    /// Refuses a backing file with another content than the image was made for, if it can tell.
    fn check_backing(&self, _backing: &dyn FormatImage) -> Result<()> {
        Ok(())
    }

    /// The epochs of its requests, if it gives space another use while they last.
    fn epochs(&self) -> Option<Arc<Epochs>> {
        None
    }

    /// The map step of a write: where its bytes go, if they have one place, and nothing else
    /// changes. Asked for every write, within an epoch; the caller writes there at once. No I/O, no
    /// allocation. None: by [`FormatImage::write`].
    fn in_place(&self, _guest: u64, _length: u64) -> Option<(StorageId, HostOffset)> {
        None
    }

    /// Writes a range of the disk, which is not empty. What the image lies on, it may copy. As of
    /// all changes, only called for an image that is open for writing; those of images that are
    /// written through are durable on return.
    fn write<'a>(&'a self, _context: Context<'a>, _offset: u64, _iov: &'a Iov) -> Changing<'a> {
        unsupported()
    }

    /// Takes the content of a range of the disk, which is not empty, away.
    fn clear<'a>(&'a self, _context: Context<'a>, _range: Range<u64>, _how: Clear) -> Changing<'a> {
        unsupported()
    }

    /// See [`Device::write_compressed`](crate::Device::write_compressed).
    fn write_compressed<'a>(
        &'a self,
        _context: Context<'a>,
        _offset: u64,
        _iov: &'a Iov,
    ) -> Changing<'a> {
        unsupported()
    }

    /// See [`Device::write_packed`](crate::Device::write_packed).
    fn write_packed<'a>(
        &'a self,
        _context: Context<'a>,
        _clusters: &'a [(u64, Range<usize>)],
        _data: &'a [u8],
    ) -> Changing<'a> {
        unsupported()
    }

    /// Makes every change durable that had ended before the call.
    fn flush<'a>(&'a self, _context: Context<'a>) -> Changing<'a> {
        unsupported()
    }

    /// Gives the disk another size in bytes. What is behind a smaller end is lost, what a larger size
    /// adds reads as zeroes. As of all changes by `&mut`, no request is in flight.
    fn resize<'a>(
        &'a mut self,
        _context: Context<'a>,
        _size: u64,
        _preallocation: Preallocation,
    ) -> Changing<'a> {
        let why = "Image format driver does not support resize";
        Box::pin(std::future::ready(Err(refused(why))))
    }

    /// Drops the content of the image, so that it shows what is below. Durable on return. With
    /// `unmap` the space of zeroes may be freed.
    fn make_empty<'a>(&'a mut self, _context: Context<'a>, _unmap: bool) -> Changing<'a> {
        unsupported()
    }

    /// Records another backing file, with the name of its format, or none. Durable on return, and
    /// all data before it.
    fn set_backing<'a>(
        &'a mut self,
        _context: Context<'a>,
        _name: Option<&'a [u8]>,
        _format: Option<&'a [u8]>,
    ) -> Changing<'a> {
        unsupported()
    }

    /// Ends the writing of the image, which was flushed. It may be read from then on. Also called for
    /// one that is only read. After an error it may be written still: see [`FormatImage::reopen`].
    fn close<'a>(&'a mut self, _context: Context<'a>) -> Changing<'a> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Makes an image writable again that was open for writing and was closed, or whose close has
    /// failed. No other program has written to it meanwhile.
    fn reopen<'a>(&'a mut self, _context: Context<'a>) -> Changing<'a> {
        unsupported()
    }

    /// Changes the options with which the image was created, as far as it is done while the image
    /// is open. Everything is checked before anything is changed.
    fn amend<'a>(
        &'a mut self,
        _context: Context<'a>,
        _options: &'a AmendOptions,
        _report: &'a dyn Report,
    ) -> Changing<'a> {
        let format = self.format().name();
        let why = format!("Format driver '{format}' does not support option amendment");
        Box::pin(std::future::ready(Err(refused(why))))
    }

    /// The last step of a job, with an image that was closed.
    fn after_close<'a>(&'a self, _queue: &'a Queue, _step: AfterClose<'a>) -> Changing<'a> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// The image, if it is qcow2.
    fn as_qcow2(&self) -> Option<&qcow2::Image> {
        None
    }

    /// The image, if it is raw.
    fn as_raw(&self) -> Option<&Raw> {
        None
    }

    /// The image itself, if its type is one that programs know ([`Layer::get`](crate::Layer::get)).
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// What is done with an image that was closed, by the format that needs it.
#[derive(Clone, Copy)]
pub enum AfterClose<'a> {
    /// What [`FormatImage::amend`] has left to be done.
    Amend(&'a AmendOptions, &'a dyn Report),
    /// The end of the file that nothing uses is cut off.
    CutEnd,
    /// A new image that was opened before it was finished, and was filled, becomes a whole one.
    FinishNew,
}

/// The result of what a format does not have.
pub(crate) fn unsupported<'a>() -> Changing<'a> {
    Box::pin(std::future::ready(Err(Error::os(libc::ENOTSUP))))
}

/// The error of an image, or of options, that a driver refuses.
pub fn refused(why: impl Into<String>) -> Error {
    Error::Refused(why.into())
}

/// The error of data at `guest` that would be at `host`, past the end of the file.
pub fn past_end(guest: u64, host: u64) -> Error {
    Error::Corrupt {
        guest,
        what: format!("Data offset {host:#x} is past the end of the file"),
    }
}

/// The meaning of a hole of the storage where an image has data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    /// None: holes are not looked for.
    Ignored,
    /// Nothing is stored there: the range reads as zeroes and is no data.
    Unallocated,
    /// Space was preallocated there: the range is data that reads as zeroes.
    ZeroData,
}

/// The name of a backing file, as it is in the image.
#[derive(Clone, Copy, Debug)]
pub struct BackingName<'a> {
    /// The name.
    pub name: &'a [u8],
    /// The name of its format, if the image has that.
    pub format: Option<&'a [u8]>,
}
