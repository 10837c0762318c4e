//! An internal snapshot as it is read: the disk that the image was.
//!
//! A view has the size and the data that the disk had, and the VM state behind that. The image's
//! bitmaps are of the active disk: of a view they are refused. The backing file is not recorded: a
//! view lies on the one that the image names now. Jobs that would change what is behind an image
//! ask first whether a snapshot shows it (`jobs/snapshots.rs`).

use super::super::map::table::L1Table;
use super::super::open::read_l1;
use super::super::{CacheOptions, Image, Mapping, OpenImage, SnapshotName};
use crate::drivers::qcow2::structures::{Geometry, Snapshot, check_table};
use crate::storage::Queue;
use crate::{Error, Result};

/// What the image records of the disk at a snapshot.
pub(super) struct View {
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Its clusters, and behind them those of the VM state.
    pub(super) l1: L1Table,
}

impl Image {
    /// The L1 table of a snapshot.
    pub(super) async fn snapshot_l1(&self, queue: &Queue, snapshot: &Snapshot) -> Result<L1Table> {
        let cluster_size = self.geometry.cluster_size();
        let (offset, entries) = (snapshot.l1_offset, u64::from(snapshot.l1_size));
        snapshot.check_l1(cluster_size)?;
        let file_len = self.file.len()?;
        check_table(
            "Snapshot L1 table",
            offset,
            entries,
            8,
            cluster_size,
            file_len,
        )?;
        read_l1(&*self.file, queue, offset, entries).await
    }

    /// The disk at a snapshot of an image whose active disk has this geometry.
    pub(super) async fn snapshot_view(
        &self,
        queue: &Queue,
        snapshot: &Snapshot,
        active: &Geometry,
    ) -> Result<View> {
        let l1 = self.snapshot_l1(queue, snapshot).await?;
        let size = snapshot.size_in(active);
        if size > i64::MAX as u64 || !snapshot.maps_its_disk(active) {
            return Err(Error::Refused(format!(
                "The snapshot's L1 table is too small for its disk of {size} bytes"
            )));
        }
        if let Some(limits) = &self.limits {
            limits.check_size(size)?;
        }
        Ok(View { size, l1 })
    }

    /// Shows the disk as it was at a snapshot instead of the active one. For images that are only
    /// read. After an error it shows what it did.
    pub(in crate::drivers::qcow2) async fn show_snapshot(
        &mut self,
        queue: &Queue,
        name: &SnapshotName,
    ) -> Result<()> {
        if self.writer.is_some() || self.written.is_some() {
            return Err(Error::Refused(
                "Internal snapshots can only be opened read-only".into(),
            ));
        }
        let Some(snapshot) = name.find(&self.snapshots).cloned() else {
            return Err(Error::Refused("Can't find snapshot".into()));
        };
        // The present geometry may be that of another snapshot.
        let active = self.geometry.with_virtual_size(self.header.size & !511);
        let View { size, l1 } = self.snapshot_view(queue, &snapshot, &active).await?;
        self.geometry = self.geometry.with_virtual_size(size);
        self.l1 = l1;
        self.slices.clear();
        self.shown = Some(snapshot);
        Ok(())
    }

    /// Whether a snapshot has nothing of its own somewhere before `end`. The image may be open for
    /// writing; its snapshots do not change meanwhile.
    pub(in crate::drivers::qcow2) async fn snapshot_shows_below(
        &self,
        queue: &Queue,
        snapshot: &Snapshot,
        end: u64,
    ) -> Result<bool> {
        let image = OpenImage::new(queue, self.file.clone()).await?;
        let data = Some(self.data.clone());
        let mut view = image.finish(queue, data, CacheOptions::default()).await?;
        let name = SnapshotName::of(snapshot);
        view.show_snapshot(queue, &name).await?;
        let end = end.min(view.size());
        let mut at = 0;
        while at < end {
            let extent = view.extent(queue, at, end - at).await?;
            if matches!(extent.mapping, Mapping::Unallocated { .. }) {
                return Ok(true);
            }
            at += extent.length;
        }
        Ok(false)
    }
}
