//! Exclusive access to the top image, for changes of the image as a whole.

use super::device::Device;
use crate::drivers::qcow2::Image;
use crate::{Error, Result};

impl Device {
    /// The top image, exclusively. Fails with `EBUSY` while tasks share it: call
    /// [`Device::wait_for_tasks`] first.
    pub(super) fn own_image(&mut self) -> Result<&mut Image> {
        let Some(image) = self.layers_mut()[0].image.as_qcow2_mut() else {
            return Err(Error::Refused("The image is not a qcow2 image".into()));
        };
        let busy = || Error::os(libc::EBUSY);
        image.get_mut().ok_or_else(busy)
    }

    /// Waits for the tasks of requests that were dropped.
    pub(super) async fn wait_for_tasks(&mut self) {
        if let Some(image) = self.layers_mut()[0].image.as_qcow2_mut() {
            image.wait_for_tasks().await;
        }
    }

    /// Carries out a change of the whole device, after the tasks of dropped requests have ended. If
    /// the future is dropped midway, every write fails until the image is opened again.
    pub(super) async fn whole<T>(
        &mut self,
        change: impl AsyncFnOnce(&mut Device) -> Result<T>,
    ) -> Result<T> {
        self.top_for_writing(0, 0)?;
        self.wait_for_tasks().await;
        let whole = match self.top().as_qcow2() {
            Some(image) => Some(image.writer()?.whole()),
            None => None,
        };
        let result = change(self).await;
        if let Some(whole) = whole {
            whole.end();
        }
        result
    }
}
