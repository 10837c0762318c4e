//! Internal snapshots: taken, applied, deleted, and shown.
//!
//! A snapshot is a copy of the active L1 table, and shares the L2 tables and
//! the clusters of the guest with the active disk until one of them is written:
//! their refcounts say how many L1 tables lead to them.
//!
//! A change of snapshots has exclusive access to the image. The order on the disk
//! keeps the image consistent whenever the machine stops:
//! - refcounts are raised, durably, before anything new leads to a cluster, and
//!   lowered only when what led there is durably gone: between the two they are
//!   too high, which costs space until a check repairs it;
//! - copied flags are cleared, durably, before a snapshot can lead to a cluster,
//!   and set only after the refcount of 1 is durable: between the two a write
//!   copies for nothing;
//! - a new table is written where nothing is, and durable before the one header
//!   write that makes it valid. What fails before it fails the change; what
//!   fails after it costs space.
//!
//! `name`: how one is named; `view`: the disk at a snapshot, as it is read; `create`, `apply`, `delete`: the
//! changes; they share `references` and `counts` (what tables refer to, and its refcounts), `copied` (flags) and
//! `store` (the table).

mod apply;
mod copied;
mod counts;
mod create;
mod delete;
mod name;
mod references;
mod store;
mod view;

pub use name::SnapshotChange;
pub use name::SnapshotName;

use super::Image;
use super::map::table::L1Table;
use crate::drivers::qcow2::structures::{AUTOCLEAR_KNOWN, Snapshot};
use crate::storage::Queue;
use crate::{Error, Result};

impl Image {
    /// Makes memory and disk agree, and refuses images whose snapshots cannot
    /// be changed.
    async fn begin_snapshots(&mut self, queue: &Queue) -> Result<()> {
        self.writer()?.check()?;
        // Nothing was about to be written there, so the image is not marked as corrupt.
        if let Some(flaw) = self.writer()?.protected.flaw() {
            return Err(Error::Refused(flaw.to_string()));
        }
        self.refuse_damage(queue).await?;
        if self.header.has_data_file() {
            return Err(Error::os(libc::ENOTSUP));
        }
        self.finish_writing(queue).await?;
        self.round_length(queue).await?;
        // Bitmaps stay true: no content changes. (See `apply` for when it does.)
        if self.header.autoclear & !AUTOCLEAR_KNOWN != 0 {
            self.rewrite_header(queue, |header| header.autoclear &= AUTOCLEAR_KNOWN)
                .await?;
        }
        let table = self.snapshot_table();
        let own = self.writer()?.protected.is_alone("snapshot table", &table);
        if !table.is_empty() && !own {
            return Err(Error::Refused(
                "The snapshot table overlaps other tables of the image".into(),
            ));
        }
        Ok(())
    }

    /// Logs a failure to free space after the header write that made a change
    /// valid. An error would mean that nothing has changed.
    pub(super) fn log_not_freed(&self, freed: Result<()>) {
        if let Err(error) = freed {
            tracing::warn!("space that is not needed any more is not freed: {error}");
        }
    }

    /// Refuses a snapshot whose L1 table, which was read, cannot be followed everywhere.
    fn check_snapshot_l1(&self, snapshot: &Snapshot, l1: &L1Table) -> Result<()> {
        let start = snapshot.l1_offset;
        let place = start..start + l1.len() as u64 * 8;
        let protected = &self.writer()?.protected;
        if !place.is_empty() && !protected.is_alone("inactive L1 table", &place) {
            return Err(Error::Refused(format!(
                "Snapshot L1 table at {start:#x} overlaps other tables of the image"
            )));
        }
        self.check_l1(l1, 0)
    }
}
