//! Internal snapshots of the top image.

use super::device::{Device, Resizing};
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
        let change = async |image: &mut Image| image.snapshot_create(queue, name.as_ref()).await;
        self.change_snapshots(queue, change).await
    }

    /// Makes the disk, with its size, what it was when an internal snapshot was taken. The snapshot
    /// stays. What was written since is lost. Durable on return.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot. Those of [`Device::write`].
    pub async fn snapshot_apply(&mut self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        let _hooked = self.hooked(queue, 0..self.size()).await?;
        let change = async |image: &mut Image| image.snapshot_apply(queue, name).await;
        self.change_snapshots(queue, change).await
    }

    /// Deletes an internal snapshot and frees the clusters that only it used. Durable on return.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot. Those of [`Device::write`].
    pub async fn snapshot_delete(&mut self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        let change = async |image: &mut Image| image.snapshot_delete(queue, name).await;
        self.change_snapshots(queue, change).await
    }

    /// Changes the snapshots of the top image, if it can have some.
    async fn change_snapshots(
        &mut self,
        queue: &Queue,
        change: impl AsyncFnOnce(&mut Image) -> Result<()>,
    ) -> Result<()> {
        self.top_for_writing(0, 0)?;
        let device = Resizing(self);
        let Some(image) = device.0.top_mut().0.as_qcow2_mut() else {
            return Err(Error::os(libc::ENOTSUP));
        };
        let change = async |image: &mut Image| {
            let result = change(image).await;
            image.mark_if_corrupt(queue, result).await
        };
        image.whole(change).await
    }
}
