//! New images of all formats.
//!
//! [`Driver::plan`](super::Driver::plan) checks size and options without I/O, so that wrong ones
//! are refused before any file is created. [`ImagePlan::begin`] turns files into a [`NewImage`], which is
//! filled as [`ImagePlan::filling`] says. [`NewImage::finish`] writes what is missing and makes it a whole
//! image.
//!
//! # An image that was cut off
//!
//! Before `finish` has ended, the files must not open as an image, as far as the format allows. So the
//! first bytes that are written are [`ImagePlan::mark`], which probing recognizes and no program opens:
//! without it, what is left would be taken for a raw disk. `finish` ends with [`make_valid`].
//!
//! # How to add a format
//!
//! 1. Add the options to [`Driver::create_options`](super::Driver::create_options), in QEMU's order
//!    and words, followed by those of the file ([`CreateOption::FILE_PREALLOCATION`] and the rest).
//! 2. Write the function `plan`, an [`ImagePlan`] and a [`NewImage`] in `NAME/create.rs`.
//! 3. Add a line to the tests in `zebu-cli/tests/formats/new_formats.rs` and
//!    `zebu/tests/crash/new_images.rs`.
//!
//! In zebu-formats, `NewBlocks` places blocks and writes them, and `Linear` is a disk in one piece;
//! [`write_table`] writes tables of any length. `vdi/create.rs` is an example with both layouts.
//!
//! [`CreateOption::FILE_PREALLOCATION`]: super::CreateOption::FILE_PREALLOCATION

mod identity;
mod making;
mod table;
mod values;

use std::ffi::OsString;
use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub use identity::{random_uuid, seconds_since};
pub use making::{Making, begin_file};
pub use table::write_table;
pub use values::{CreateValue, CreateValues};

use super::BoxFuture;
use crate::broken::{Rule, is_broken};
use crate::codec;
use crate::error::WithErrno;
use crate::storage::{self, Iov, LockRequest, Queue, Secret, Storage};
use crate::{Error, Result};

/// The function by which a driver plans a new image.
///
/// # Errors
/// If the image cannot have the size, or an option has a wrong value: in QEMU's words. The errno of
/// a size beyond the limits of the format is that of QEMU.
pub type PlanImage = fn(&PlanRequest<'_>) -> Result<Box<dyn ImagePlan>>;

/// The request for a new image.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// The path of its file, from which the names of further files follow.
    pub path: &'a Path,
    /// Size of the disk in bytes. The plan may have a larger one.
    pub size: u64,
    /// The options of the format and of the file.
    pub options: &'a CreateValues,
    /// What a new image over a backing file must know of it: its
    /// [`content_id`](crate::block::Layer::content_id).
    pub backing_id: Option<&'a [u8]>,
}

/// A new image that can be made: its size and options are valid.
pub trait ImagePlan: Debug + Send + Sync {
    /// Size of the disk in bytes.
    fn size(&self) -> u64;

    /// The power of two, in bytes, of which all offsets of the disk's data in the files are
    /// multiples. Below the block size of the file system, data are written through the page
    /// cache unless the user demands otherwise.
    fn alignment(&self) -> u64;

    /// How it is filled when it was begun.
    fn filling(&self) -> Filling {
        Filling::New
    }

    /// The locks of its own file until it is filled.
    fn lock(&self) -> LockRequest {
        LockRequest::QCOW2_WRITE
    }

    /// The names of files besides the image's own, in the order in which
    /// [`ImagePlan::begin`] takes them.
    fn other_files(&self) -> Vec<OsString> {
        Vec::new()
    }

    /// Whether these keep what they hold.
    fn keeps_others(&self) -> bool {
        false
    }

    /// Whether its disk is what its file or its data file holds, also where that is a device with any
    /// content. Others read as zeroes at first.
    fn shows_file(&self) -> bool {
        false
    }

    /// What unlocks it, if it is encrypted.
    fn key(&self) -> Option<&Secret> {
        None
    }

    /// Bytes of its file besides the disk, if the file has the whole disk whatever it contains.
    fn overhead(&self) -> Option<u64> {
        None
    }

    /// How its compressed data are stored, if it can have such.
    fn compression(&self) -> Option<codec::Compression> {
        Some(codec::Compression::Zlib)
    }

    /// Refuses an image that could not be opened: in some formats that of a disk of 0 bytes, which
    /// QEMU creates nonetheless. For images that are made to be filled.
    ///
    /// # Errors
    /// If it could not be opened.
    fn check_opens(&self) -> Result<()> {
        Ok(())
    }

    /// The start of its own file, in whole sectors, as long as the image is not finished: probing
    /// recognizes the format, and no program opens it. None: the format has no such thing.
    ///
    /// # Errors
    /// If the options have no such image.
    fn mark(&self) -> Result<Option<Vec<u8>>>;

    /// Begins the image in `files`: its own, then [`ImagePlan::other_files`]. They are locked and
    /// open for writing. The first one begins with [`ImagePlan::mark`]. Regular files are empty
    /// otherwise, unless they are kept; devices have any content.
    ///
    /// # Errors
    /// Those of the storages.
    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>>;
}

/// How an image is filled that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Filling {
    /// By [`NewImage::write`].
    New,
    /// By writing to its file, whose bytes are those of the disk.
    Raw,
    /// As a qcow2 image that is open for writing. Its header has this version when it is finished.
    Qcow2(u32),
}

/// An image that is filled once, by any number of threads, each with its queue.
///
/// What was never written reads as zeroes in the finished image (unless [`NewImage::is_filled_whole`]):
/// unallocated ranges, and the rest of a block that was written in part. Each byte is written at most once.
pub trait NewImage: Debug + Send + Sync {
    /// Whether data are placed in the order of the writes. Convert then starts writes in the order
    /// of the disk.
    fn has_order(&self) -> bool;

    /// Whether what is never written of it has no defined content: zeroes are written, too.
    fn is_filled_whole(&self) -> bool {
        false
    }

    /// Bytes of the disk in a block, if every block is stored as a zlib stream (RFC 1950). Each
    /// conversion to the image compresses then, and writes by [`NewImage::write_packed`].
    fn zlib_block(&self) -> Option<u64> {
        None
    }

    /// Writes data at `offset` of the disk. Takes the space of blocks that have none when it is
    /// polled for the first time.
    ///
    /// # Errors
    /// Those of the storages, after which the image must not be finished; or the range is not
    /// inside the disk.
    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>>;

    /// Stores blocks as zlib streams: where each starts on the disk, and where in `data` its stream
    /// is. The last block of the disk is whole, too. Called instead of [`NewImage::write`] if there
    /// is a [`NewImage::zlib_block`].
    ///
    /// # Errors
    /// As [`NewImage::write`].
    fn write_packed<'a>(
        &'a self,
        _queue: &'a Queue,
        _blocks: &'a [(u64, Range<usize>)],
        _data: &'a [u8],
    ) -> BoxFuture<'a, Result<()>> {
        unreachable!("the image stores blocks as they are")
    }

    /// Writes what is missing and makes the image whole and durable. All writes have ended.
    ///
    /// # Errors
    /// Those of the storages. Then the files are no image.
    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>>;
}

/// Makes a new image valid: makes everything else durable, then writes the bytes of one sector that
/// were missing, and makes them durable, too.
///
/// # Errors
/// Those of the storage.
pub async fn make_valid(
    file: &dyn Storage,
    queue: &Queue,
    offset: u64,
    missing: &[u8],
) -> Result<()> {
    if !is_broken(Rule::TablesBeforeNewHeader) {
        storage::flush(file, queue).await?;
    }
    storage::write_slice(file, queue, offset, missing).await?;
    Ok(storage::flush(file, queue).await?)
}

/// Refuses a write behind the end of what there is space for.
pub fn check_inside(offset: u64, iov: &Iov, size: u64) -> Result<()> {
    let length = iov.len() as u64;
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange {
            offset,
            length,
            size,
        }),
    }
}

/// Refuses an image of a disk of 0 bytes, in a format whose readers need at least a sector.
pub fn refuse_empty(size: u64, what: &str) -> Result<()> {
    match size {
        0 => Err(Error::Refused(format!(
            "{what} of 0 bytes could not be opened"
        ))),
        _ => Ok(()),
    }
}

/// The error of a size beyond the limits of a format, with the errno `EFBIG`. For `create` QEMU has
/// a message of its own for that, which the program prints instead.
pub fn too_large(message: impl Into<String>) -> Error {
    let source = message.into().into();
    let errno = libc::EFBIG;
    Error::Io(std::io::Error::other(WithErrno { errno, source }))
}
