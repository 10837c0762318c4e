//! A new image and its device in one call.

use std::path::Path;

use super::Creation;
use crate::Result;
use crate::block::{Device, Format};
use crate::spelling::path::as_name;
use crate::storage::Queue;

impl Device {
    /// Makes a qcow2 image of `size` bytes, a multiple of 512, in a new file, and opens it for
    /// writing. Blocks. [`create_qcow2`](crate::jobs::create_qcow2) has all options.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("disk.qcow2");
    /// use zebu::{Device, Queue, QueueOptions};
    ///
    /// let queue = Queue::new(QueueOptions::default())?;
    /// let device = Device::create(&queue, &path, 64 << 20)?;
    /// device.write_blocking(&queue, 0, b"boot")?;
    /// queue.block_on(device.close(&queue))?;
    /// # Ok::<(), zebu::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `EEXIST` ([`Error::errno`](crate::Error::errno)) if there is a file of this name, which is not touched.
    /// Those of making and opening the image; then there is no file, unless another program has made it.
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn create(queue: &Queue, path: impl AsRef<Path>, size: u64) -> Result<Device> {
        let name = as_name(path.as_ref());
        Creation::new(&name, Format::QCOW2.name(), &[])?.create_new(queue, size)
    }
}
