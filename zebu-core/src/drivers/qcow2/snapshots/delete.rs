//! Deleting a snapshot.

use super::super::allocation::frees::Freed;
use super::super::map::table::L1Table;
use super::super::{Image, SnapshotName};
use crate::broken::{Rule, is_broken};
use crate::storage::Queue;
use crate::{Error, Result};

impl Image {
    /// Deletes a snapshot and frees what only it had. Durable on return; after
    /// an error it is there.
    pub(crate) async fn snapshot_delete(
        &mut self,
        queue: &Queue,
        name: &SnapshotName,
    ) -> Result<()> {
        self.begin_snapshots(queue).await?;
        let Some(index) = name.position(&self.snapshots) else {
            return Err(Error::os(libc::ENOENT));
        };
        let mut rest = self.snapshots.clone();
        let snapshot = rest.remove(index);
        let l1 = self.snapshot_l1(queue, &snapshot).await?;
        self.check_snapshot_l1(&snapshot, &l1)?;
        let punch = self.writer()?.options.punch_snapshot;
        let table = self.reference(snapshot.l1_offset, l1.len() as u64 * 8, punch);
        self.check_references(queue, &l1).await?;
        self.check_counted(queue, table).await?;

        let early = is_broken(Rule::SnapshotGoneBeforeFree);
        if early {
            self.release(queue, &l1, punch).await?;
            self.commit(queue, true).await?;
        }
        let new = self.write_snapshots(queue, &mut rest).await?;
        self.switch_snapshots(queue, new, rest).await?;
        let l1 = (!early).then_some(&l1);
        let freed = self.free_deleted(queue, l1, table, punch).await;
        self.log_not_freed(freed);
        Ok(())
    }

    /// Frees what only a deleted snapshot had: its L1 table, in `table`, and
    /// what that leads to.
    async fn free_deleted(
        &self,
        queue: &Queue,
        l1: Option<&L1Table>,
        table: Freed,
        punch: bool,
    ) -> Result<()> {
        let mut released = match l1 {
            Some(l1) => self.release(queue, l1, punch).await,
            None => Ok(()),
        };
        if released.is_ok() {
            released = self.release_one(queue, table).await;
        }
        // A flag means that the refcount is 1, so that must be durable first.
        self.commit(queue, true).await?;
        self.set_copied(queue).await?;
        self.finish_writing(queue).await?;
        released
    }
}
