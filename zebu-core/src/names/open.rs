//! Opening a device by a name in QEMU's spelling.

use std::sync::Arc;

use super::Source;
use crate::Result;
use crate::block::{Device, ImageSpec, JustMade, OpenOptions, OpenedFile};
use crate::storage::{Queue, Storage};

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
        Device::open_with(queue, spec, options).await
    }

    /// [`Device::open_over`] of what a name means.
    pub(crate) async fn open_source_over(
        queue: &Queue,
        source: &Source,
        options: &OpenOptions,
        file: &OpenedFile,
        data: Option<Arc<dyn Storage>>,
        made: JustMade,
    ) -> Result<Device> {
        options.policy.check_source(source)?;
        let spec = source.resolve(None, options.format)?;
        Device::open_over(queue, spec, options, file, data, made).await
    }
}
