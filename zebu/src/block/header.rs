//! Changing the header of an open image.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::device::Device;
use super::read::over;
use crate::drivers::qcow2::structures::Header;
use crate::drivers::qcow2::{Image, SharedImage, check_recorded};
use crate::storage::Queue;
use crate::{Error, Result};

impl Device {
    /// Gives the top image another backing file, with the name of its format, or none. Nothing is
    /// opened: the device keeps the chain that it was opened with, and should be closed afterwards.
    ///
    /// All data are durable before the header changes. The header is durable on return.
    ///
    /// # Errors
    ///
    /// `ENOTSUP` unless the image is qcow2. `EINVAL` if a name is too long, or if the external data
    /// file is a raw image. [`Error::Refused`] if the names do not fit into the header. Those of
    /// [`Device::flush`].
    pub async fn set_backing(
        &mut self,
        queue: &Queue,
        name: Option<&OsStr>,
        format: Option<&str>,
    ) -> Result<()> {
        self.top_for_writing(0, 0)?;
        name.map_or(Ok(()), check_recorded)?;
        let name = name.filter(|name| !name.is_empty()).map(OsStr::as_bytes);
        let format = format.map(str::as_bytes);
        let (image, below) = self.top_mut();
        image.set_backing(over(queue, &below), name, format).await
    }

    /// Changes the header of the top image, after everything that it refers to is durable.
    pub(crate) async fn change_header(
        &mut self,
        queue: &Queue,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        self.top_qcow2_mut()?.replace_header(queue, change).await
    }

    /// Makes the top image one of version 3, durably.
    pub(crate) async fn upgrade(&mut self, queue: &Queue) -> Result<()> {
        self.top_qcow2_mut()?.upgrade(queue).await
    }

    /// Replaces the zero clusters of the top image and of its snapshots by what version 2 has for
    /// them. The content stays the same. Durable on return.
    pub(crate) async fn expand_zeroes(&mut self, queue: &Queue) -> Result<()> {
        self.flush(queue).await?;
        let image = self.top_qcow2()?;
        let has_backing = self.layers().len() > 1 || image.header().backing_file().is_some();
        image.expand_zeroes(queue, has_backing).await
    }

    fn top_qcow2_mut(&mut self) -> Result<&mut SharedImage> {
        let image = self.top_mut().0.as_qcow2_mut();
        image.ok_or_else(|| Error::os(libc::ENOTSUP))
    }

    /// The top image; an error unless it is qcow2.
    pub(crate) fn top_qcow2(&self) -> Result<&Image> {
        let image = self.top().as_qcow2();
        image.ok_or_else(|| Error::os(libc::ENOTSUP))
    }
}
