//! Internal snapshots of the top image.

use super::device::{Device, Resizing};
use crate::Result;
use crate::drivers::SnapshotChange;
use crate::drivers::qcow2::SnapshotName;
use crate::storage::Queue;

impl Device {
    /// Takes an internal snapshot of the disk, with the next free number as its id. Several may
    /// have the same name, of at most 255 bytes. Durable on return.
    ///
    /// # Errors
    ///
    /// `ENOTSUP` if the image cannot have snapshots. Those of [`Device::write`]. There is no
    /// snapshot then.
    pub async fn snapshot_create(&mut self, queue: &Queue, name: impl AsRef<[u8]>) -> Result<()> {
        let change = SnapshotChange::Create(name.as_ref());
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
        self.change_snapshots(queue, SnapshotChange::Apply(name))
            .await
    }

    /// Deletes an internal snapshot and frees the clusters that only it used. Durable on return.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot. Those of [`Device::write`].
    pub async fn snapshot_delete(&mut self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        self.change_snapshots(queue, SnapshotChange::Delete(name))
            .await
    }

    /// Changes the snapshots of the top image, if it can have some.
    async fn change_snapshots(&mut self, queue: &Queue, change: SnapshotChange<'_>) -> Result<()> {
        self.top_for_writing(0, 0)?;
        let device = Resizing(self);
        let image = device.0.top_mut().0;
        image.change_snapshots(queue, change).await
    }
}
