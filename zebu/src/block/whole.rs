//! Exclusive access to the top image, for changes of the image as a whole.

use super::device::{Device, LayerImage};
use crate::image::{Image, Whole};
use crate::{Error, Result};

impl Device {
    /// The top image, exclusively; `EBUSY` while tasks share it, which
    /// [`Device::wait_for_tasks`] waits for.
    pub(super) fn own_image(&mut self) -> Result<&mut Image> {
        match &mut self.layers_mut()[0].image {
            LayerImage::Qcow2(image) => match image.get_mut() {
                Some(image) => Ok(image),
                None => Err(Error::Io(std::io::Error::from_raw_os_error(libc::EBUSY))),
            },
            LayerImage::Raw(_) => Err(Error::Refused("The image is not a qcow2 image".into())),
        }
    }

    /// Waits for the tasks that dropped requests left behind.
    pub(super) async fn wait_for_tasks(&mut self) {
        if let LayerImage::Qcow2(image) = &mut self.layers_mut()[0].image {
            image.wait_for_tasks().await;
        }
    }

    /// As [`Device::wait_for_tasks`], and begins a change of a whole image; see [`Whole`].
    pub(super) async fn begin_whole(&mut self) -> Option<Whole> {
        self.wait_for_tasks().await;
        match &self.top().image {
            LayerImage::Qcow2(image) => image.writer().ok().map(|writer| writer.whole()),
            LayerImage::Raw(_) => None,
        }
    }
}

/// Ends a change of a whole image, whether it succeeded or failed.
pub(super) fn end_whole(whole: Option<Whole>) {
    if let Some(whole) = whole {
        whole.end();
    }
}
