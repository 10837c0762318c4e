//! Opening a device by a name in QEMU's spelling.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use super::blkdebug;
use super::parse;
#[cfg(feature = "rbd")]
use super::rbd;
use super::source::{Source, refused};
use crate::Result;
use crate::block::{
    BackingOptions, Device, FileSpec, Format, ImageSpec, NameResolver, OpenOptions, OpenedFile,
};
use crate::storage::{Queue, Rule, Storage};

impl Device {
    /// Opens an image and, unless disabled, its backing chain. Blocks.
    ///
    /// # Errors
    ///
    /// What fits after `Could not open 'NAME': `, if any file of the chain cannot be opened or
    /// locked, is damaged, or is refused by [`OpenOptions::policy`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn open(queue: &Queue, source: &Source, options: &OpenOptions) -> Result<Device> {
        queue.block_on(Device::open_async(queue, source, options))
    }

    /// [`Device::open`] as a future of `queue`. Reading is asynchronous; opening and locking
    /// files, and connecting to servers, blocks the thread.
    ///
    /// # Errors
    ///
    /// Those of [`Device::open`].
    pub async fn open_async(
        queue: &Queue,
        source: &Source,
        options: &OpenOptions,
    ) -> Result<Device> {
        options.policy.check_source(source)?;
        Device::open_spec_async(queue, source.resolve(None, options.format)?, options).await
    }

    /// [`Device::open`] of an image that is described already. [`OpenOptions::format`] is
    /// ignored: the description has the format.
    ///
    /// # Errors
    ///
    /// Those of [`Device::open`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn open_spec(queue: &Queue, spec: ImageSpec, options: &OpenOptions) -> Result<Device> {
        queue.block_on(Device::open_spec_async(queue, spec, options))
    }

    /// [`Device::open_spec`] as a future of `queue`; see [`Device::open_async`].
    ///
    /// # Errors
    ///
    /// Those of [`Device::open`].
    pub async fn open_spec_async(
        queue: &Queue,
        spec: ImageSpec,
        options: &OpenOptions,
    ) -> Result<Device> {
        Device::open_with(queue, spec, options, &QemuNames).await
    }

    /// [`Device::open_over`] of what a name means.
    pub(crate) async fn open_source_over(
        queue: &Queue,
        source: &Source,
        options: &OpenOptions,
        file: &OpenedFile,
        data: Option<Arc<dyn Storage>>,
    ) -> Result<Device> {
        options.policy.check_source(source)?;
        let spec = source.resolve(None, options.format)?;
        Device::open_over(queue, spec, options, &QemuNames, file, data).await
    }
}

/// Names in headers are in QEMU's spelling.
struct QemuNames;

impl NameResolver for QemuNames {
    fn backing(
        &self,
        name: Option<&OsStr>,
        of: &OsStr,
        format: Option<Format>,
        options: Option<&BackingOptions>,
    ) -> Result<ImageSpec> {
        #[cfg(feature = "rbd")]
        name.map_or(Ok(()), rbd::check_name_in_image)
            .map_err(refused)?;
        match options {
            None => Source::Name(name.unwrap_or_default().into()).resolve(Some(of), format),
            Some(options) => options.resolve(name, Some(of), format),
        }
    }

    fn data_file(&self, name: &OsStr) -> Result<FileSpec> {
        #[cfg(feature = "rbd")]
        rbd::check_name_in_image(name).map_err(refused)?;
        // As in QEMU, relative to the current directory and not to the image's.
        FileSpec::resolve(name, None)
    }

    fn format_options(&self, spec: &mut ImageSpec, format: Format) -> Result<()> {
        parse::format_options(spec, format).map_err(refused)
    }

    fn blkdebug_rules(&self, config: &Path) -> Result<Vec<Rule>> {
        blkdebug::read_config(config).map_err(refused)
    }
}
