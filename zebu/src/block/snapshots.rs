//! Internal snapshots of the top image.

use super::device::Device;
use super::write::Top;
use crate::drivers::qcow2::{Image, SnapshotName};
use crate::storage::Queue;
use crate::{Error, Result};

impl Device {
    /// Takes an internal snapshot of the disk, with the next free number as its id. Several may
    /// have the same name, of at most 255 bytes. Durable on return.
    ///
    /// # Errors
    ///
    /// `ENOTSUP` if the image cannot have snapshots. Those of [`Device::write`]. There is no
    /// snapshot then.
    pub async fn snapshot_create(&mut self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<()> {
        self.whole(async |device| {
            let image = device.image_with_snapshots()?;
            let result = image.snapshot_create(queue, name.as_ref()).await;
            mark_if_corrupt(queue, image, result).await
        })
        .await
    }

    /// Makes the disk, with its size, what it was when an internal snapshot was taken. The snapshot
    /// stays. What was written since is lost. Durable on return.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot. Those of [`Device::write`].
    pub async fn snapshot_apply(&mut self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        self.whole(async |device| {
            let image = device.image_with_snapshots()?;
            let result = image.snapshot_apply(queue, name).await;
            let result = mark_if_corrupt(queue, image, result).await;
            let size = image.size();
            device.set_size(size);
            result
        })
        .await
    }

    /// Deletes an internal snapshot and frees the clusters that only it used. Durable on return.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot. Those of [`Device::write`].
    pub async fn snapshot_delete(&mut self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        self.whole(async |device| {
            let image = device.image_with_snapshots()?;
            let result = image.snapshot_delete(queue, name).await;
            mark_if_corrupt(queue, image, result).await
        })
        .await
    }

    /// The top image, if it can have snapshots and is open for writing.
    fn image_with_snapshots(&mut self) -> Result<&mut Image> {
        if let Top::Raw(_) = self.top_for_writing(0, 0)? {
            return Err(Error::os(libc::ENOTSUP));
        }
        self.own_image()
    }
}

/// Marks the image if the result shows that it is corrupt.
async fn mark_if_corrupt(queue: &Queue, image: &Image, result: Result<()>) -> Result<()> {
    if result.as_ref().is_err_and(Error::shows_corruption) {
        image.mark_corrupt(queue).await?;
    }
    result
}
