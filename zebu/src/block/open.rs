//! Opening an image and everything that it names, as far as the caller's
//! policy goes.

use std::sync::Arc;

use super::device::{Device, Layer, LayerImage};
use super::{Format, Raw, Source};
use crate::image::{CacheOptions, OpenImage};
use crate::storage::{CacheMode, File, OpenFile, Queue, Storage};
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

impl Device {
    /// Opens an image and, unless told otherwise, its backing chain. Blocks.
    pub fn open(queue: &Queue, source: &Source, options: &OpenOptions) -> Result<Device> {
        let Source::Name(name) = source else {
            return Err(Error::Refused("options".into()));
        };
        queue.block_on(async {
            let file = File::open(
                name,
                OpenFile {
                    write: options.write,
                    create: false,
                    cache: options.cache,
                },
            )?;
            let file: Arc<dyn Storage> = Arc::new(file);
            let mut magic = [0u8; 4];
            let _ = &mut magic;
            let head = crate::storage::read_vec(&*file, queue, 0, 4).await?;
            let image = if options.format == Some(Format::Raw)
                || (options.format.is_none() && head != b"QFI\xfb")
            {
                LayerImage::Raw(Raw::new(file)?)
            } else {
                let image = OpenImage::new(queue, file).await?;
                let caches = CacheOptions {
                    size: options.l2_cache_size,
                    entry_size: options.l2_cache_entry_size,
                };
                LayerImage::Qcow2(Box::new(image.finish(queue, None, caches).await?))
            };
            Ok(Device::new(vec![Layer {
                name: name.clone(),
                image,
            }]))
        })
    }
}
