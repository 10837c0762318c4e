//! Exclusive access to the top image, for changes of the image as a whole.

use super::device::Device;
use crate::drivers::qcow2::{Image, Whole};
use crate::{Error, Result};

impl Device {
    /// The top image, exclusively; `EBUSY` while tasks share it, which
    /// [`Device::wait_for_tasks`] waits for.
    pub(super) fn own_image(&mut self) -> Result<&mut Image> {
        let Some(image) = self.layers_mut()[0].image.as_qcow2_mut() else {
            return Err(Error::Refused("The image is not a qcow2 image".into()));
        };
        let busy = || Error::Io(std::io::Error::from_raw_os_error(libc::EBUSY));
        image.get_mut().ok_or_else(busy)
    }

    /// Waits for the tasks that dropped requests left behind.
    pub(super) async fn wait_for_tasks(&mut self) {
        if let Some(image) = self.layers_mut()[0].image.as_qcow2_mut() {
            image.wait_for_tasks().await;
        }
    }

    /// As [`Device::wait_for_tasks`], and begins a change of a whole image; see [`Whole`].
    pub(super) async fn begin_whole(&mut self) -> Option<Whole> {
        self.wait_for_tasks().await;
        let writer = self.top().as_qcow2()?.writer().ok()?;
        Some(writer.whole())
    }
}

/// Ends a change of a whole image, whether it succeeded or failed.
pub(super) fn end_whole(whole: Option<Whole>) {
    if let Some(whole) = whole {
        whole.end();
    }
}
