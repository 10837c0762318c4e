//! The snapshot table, and new tables in general.

use std::ops::Range;

use super::super::Image;
use super::super::allocation::frees::Freed;
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::structures::{Header, Snapshot};
use crate::storage::{self, Queue};

impl Image {
    /// The place of the snapshot table.
    pub(super) fn snapshot_table(&self) -> Range<u64> {
        let length: usize = self.snapshots.iter().map(Snapshot::encoded_len).sum();
        let start = self.header.snapshots_offset;
        start..start + length as u64
    }

    /// Writes a table to new clusters, to which nothing points yet.
    pub(in crate::drivers::qcow2) async fn write_new(
        &mut self,
        queue: &Queue,
        mut bytes: Vec<u8>,
    ) -> Result<Freed> {
        let size = self.geometry.cluster_size();
        let clusters = self.geometry.clusters_for(bytes.len() as u64);
        if clusters == 0 {
            return Ok(self.reference(0, 0, false));
        }
        let host = self.allocate_contiguous(queue, clusters).await?;
        let place = self.reference(host.0, clusters * size, false);
        bytes.resize((clusters * size) as usize, 0);
        match storage::write_slice(&*self.file, queue, host.0, &bytes).await {
            Ok(()) => Ok(place),
            Err(error) => {
                self.writer()?.free_at_commit(place);
                Err(error.into())
            }
        }
    }

    /// Writes a snapshot table, durably, to which nothing points yet.
    pub(super) async fn write_snapshots(
        &mut self,
        queue: &Queue,
        snapshots: &mut [Snapshot],
    ) -> Result<Freed> {
        for snapshot in &mut *snapshots {
            self.complete(snapshot);
        }
        let bytes = Snapshot::encode_table(snapshots)?;
        let place = self.write_new(queue, bytes).await?;
        if is_broken(Rule::SnapshotsBeforeHeader) {
            return Ok(place);
        }
        match self.commit(queue, true).await {
            Ok(()) => Ok(place),
            Err(error) => {
                self.writer()?.free_at_commit(place);
                Err(error)
            }
        }
    }

    /// Gives a snapshot of an old image the fields that it lacks.
    fn complete(&self, snapshot: &mut Snapshot) {
        if snapshot.icount().is_none() || snapshot.disk_size().is_none() {
            let size = snapshot.size_in(&self.geometry);
            snapshot.set_extra(snapshot.vm_state_size(), size, snapshot.icount());
        }
    }

    /// Gives snapshots without a size of their own the size of the disk, which is about to get
    /// another one. Durable on return.
    pub(crate) async fn store_sizes(&mut self, queue: &Queue) -> Result<()> {
        if self.snapshots.iter().any(|s| s.disk_size().is_none()) {
            self.begin_snapshots(queue).await?;
            let mut snapshots = self.snapshots.clone();
            let table = self.write_snapshots(queue, &mut snapshots).await?;
            self.switch_snapshots(queue, table, snapshots).await?;
        }
        Ok(())
    }

    /// Makes it a version 3 image, after adding the fields that snapshots must have
    /// in that version. Durable on return.
    pub(crate) async fn upgrade(&mut self, queue: &Queue) -> Result<()> {
        self.announce(queue, 0..0).await?;
        self.store_sizes(queue).await?;
        self.finish_writing(queue).await?;
        self.rewrite_header(queue, |header| header.set_version(3))
            .await
    }

    /// Makes a snapshot table valid that [`Image::write_snapshots`] wrote, and
    /// frees the one before.
    pub(super) async fn switch_snapshots(
        &mut self,
        queue: &Queue,
        place: Freed,
        snapshots: Vec<Snapshot>,
    ) -> Result<()> {
        let punch = self.writer()?.options.punch_snapshot;
        let old = self.snapshot_table();
        let old = self.reference(old.start, old.end - old.start, punch);
        let offset = place.first * self.geometry.cluster_size();
        self.switch_header(queue, place, |header| {
            header.snapshots_offset = offset;
            header.nb_snapshots = snapshots.len() as u32;
        })
        .await?;
        self.snapshots = snapshots;
        self.protect_tables(self.writer()?);
        // The table is valid now: after an error the caller would lower the refcounts
        // that it needs.
        if let Err(error) = self.protect_inactive(queue).await {
            tracing::warn!("the L2 tables of the snapshots are not protected: {error}");
        }
        self.writer()?.free_at_commit(old);
        Ok(())
    }

    /// Changes the header so that it points to a new table in `place`, which is given back
    /// if that fails.
    pub(in crate::drivers::qcow2) async fn switch_header(
        &mut self,
        queue: &Queue,
        place: Freed,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        let result = self.rewrite_header(queue, change).await;
        let writer = self.writer()?;
        // Where writes are refused from now on, the header may be the new one.
        if result.is_err() && writer.check().is_ok() {
            writer.free_at_commit(place);
        }
        result
    }
}
