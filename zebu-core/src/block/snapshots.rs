//! Internal snapshots of the top image.

use super::device::{Device, Resizing};
use crate::Result;
use crate::drivers::SnapshotChange;
use crate::drivers::qcow2::SnapshotName;
use crate::storage::Queue;

impl Device {
    /// Shows an internal snapshot instead of the active disk, as [`OpenOptions::snapshot`] does: with
    /// the size and the data that the disk had, and the VM state of then. The image's bitmaps are
    /// those of the active disk, and are refused. The backing file is that which the image names now:
    /// images do not record another one for a snapshot.
    ///
    /// [`OpenOptions::snapshot`]: crate::OpenOptions::snapshot
    ///
    /// # Errors
    ///
    /// If the device is open for writing, if its format has no snapshots, if there is no such
    /// snapshot, or if its size or tables are damaged. The device shows what it did before.
    pub async fn show_snapshot(&mut self, queue: &Queue, name: &SnapshotName) -> Result<()> {
        let device = Resizing(self);
        let image = device.0.top_mut().0;
        image.show_snapshot(queue, name).await
    }

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
