//! Changing the header of an open image.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::device::Device;
use super::read::over;
use crate::Result;
use crate::drivers::qcow2::amend::AmendOptions;
use crate::drivers::{AfterClose, check_recorded};
use crate::progress::Report;
use crate::storage::Queue;

impl Device {
    /// Gives the top image another backing file, with the name of its format, or none. Nothing is
    /// opened: the device keeps the chain that it was opened with, and should be closed afterwards.
    ///
    /// All data are durable before the header changes. The header is durable on return.
    ///
    /// # Errors
    ///
    /// `ENOTSUP` if the format has no backing files. `EINVAL` if a name is too long, or if the external data
    /// file is a raw image. [`Error::Refused`](crate::Error::Refused) if the names do not fit into the header. Those of
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

    /// Changes the options with which the top image was created, and closes the device.
    pub(crate) async fn amend(
        mut self,
        queue: &Queue,
        options: &AmendOptions,
        report: &dyn Report,
    ) -> Result<()> {
        let (image, below) = self.top_mut();
        let amended = image.amend(over(queue, &below), options, report).await;
        let rest = (amended.is_ok()).then_some(AfterClose::Amend(options, report));
        let closed = self.close_then(queue, rest).await;
        amended.and(closed)
    }
}
