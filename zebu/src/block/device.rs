//! An image and the chain of images behind it, as one device.

use super::{Format, Raw, Source, Status};
use crate::image::Image;
use crate::storage::{CacheMode, Iov, Queue};
use crate::{Error, Result};

/// What an image that is opened may make the library open besides itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// Whatever it names, as qemu-img does.
    #[default]
    Follow,
    /// Nothing: a backing file or a data file is an error.
    Nothing,
}

/// How to open a [`Device`].
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The format; None: look at the content.
    pub format: Option<Format>,
    /// For writing too.
    pub write: bool,
    /// How the page cache takes part.
    pub cache: CacheMode,
    /// Open also what another process writes to (`-U`).
    pub force_share: bool,
    /// What else may be opened.
    pub policy: Policy,
    /// Leave the backing file closed; its data read as unallocated.
    pub no_backing: bool,
    /// Bytes of L2 tables to keep; None: enough for the disk, up to 32 MiB.
    pub l2_cache_size: Option<u64>,
    /// Bytes of one slice of an L2 table, the unit of that cache; None: 4 KiB.
    pub l2_cache_entry_size: Option<u64>,
    /// Read this internal snapshot (id or name) instead of the active disk.
    pub snapshot: Option<String>,
}

/// One image of a chain.
#[derive(Debug)]
pub struct Layer {
    /// Its name, as messages and `info` show it.
    pub name: String,
    /// The image.
    pub image: LayerImage,
}

/// An image of any format.
#[derive(Debug)]
pub enum LayerImage {
    /// raw
    Raw(Raw),
    /// qcow2
    Qcow2(Box<Image>),
}

/// A block device: an image with everything that its data come from.
///
/// Shared by reference between any number of threads, each with its queue.
#[derive(Debug)]
pub struct Device {
    layers: Vec<Layer>,
}

impl Device {
    /// Opens an image and, unless told otherwise, its backing chain. Blocks.
    pub fn open(queue: &Queue, source: &Source, options: &OpenOptions) -> Result<Device> {
        let _ = (queue, source, options);
        Err(Error::Refused("being built".into()))
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        0
    }

    /// The images of the chain, the top one first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Fills `iov` with the bytes of the disk from `offset` on.
    pub async fn read(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let _ = (queue, offset, iov);
        Err(Error::Refused("being built".into()))
    }

    /// Fills `buffer` with the bytes from `offset` on, and waits for it.
    pub fn read_blocking(&self, queue: &Queue, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let _ = (queue, offset, buffer);
        Err(Error::Refused("being built".into()))
    }

    /// What the first bytes of `length` from `offset` on are made of: the
    /// longest range found alike without undue work, at least one byte.
    pub async fn status(&self, queue: &Queue, offset: u64, length: u64) -> Result<Status> {
        let _ = (queue, offset, length);
        Err(Error::Refused("being built".into()))
    }
}
