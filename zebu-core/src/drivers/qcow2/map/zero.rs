//! Mappings without data: zeroes and discards.

use std::sync::Arc;

use crate::Result;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::map::table::Slice;
use crate::drivers::qcow2::structures::{ClusterKind, L2Entry};
use crate::offset::HostOffset;
use crate::storage::{self, Queue};

impl Image {
    /// Maps a range of whole subclusters to zeroes; with `unmap`, their host
    /// clusters are dropped where they can be. The caller holds the clusters.
    /// False if the format cannot say that of what is at `guest`; the range up
    /// to there is done then: its length.
    pub(in crate::drivers::qcow2) async fn zero(
        &self,
        queue: &Queue,
        guest: u64,
        length: u64,
        unmap: bool,
    ) -> Result<u64> {
        let options = &self.writer()?.options;
        let (punch, keep) = (options.punch_request, options.keep_discarded);
        let mut kept = Vec::new();
        let done = self
            .for_each_cluster(queue, guest, length, |slice, from, to| {
                let entry = self.entry(slice, from);
                let Some(new) = self.zeroed(entry, from, to, unmap && !keep)? else {
                    return Ok(false);
                };
                self.set_entry(slice, from, new, punch)?;
                if unmap && to - from == self.geometry.cluster_size() {
                    kept.extend(self.zeroed_host(new, from)?);
                }
                Ok(true)
            })
            .await?;
        self.punch(queue, kept).await?;
        Ok(done)
    }

    /// Drops a range of whole clusters, which the caller holds. They read as zeroes afterwards. Not
    /// for version 2 with a backing file, which would show through.
    pub(in crate::drivers::qcow2) async fn drop_clusters(
        &self,
        queue: &Queue,
        guest: u64,
        length: u64,
        has_backing: bool,
    ) -> Result<()> {
        let options = &self.writer()?.options;
        let (punch, keep) = (options.punch_request, options.keep_discarded);
        let mut kept = Vec::new();
        self.for_each_cluster(queue, guest, length, |slice, from, to| {
            let old = self.entry(slice, from);
            let is_free = matches!(self.kind(old, from)?, ClusterKind::Unallocated);
            // As in QEMU: what is unallocated and reads as zeroes stays so.
            if is_free && !has_backing {
                return Ok(true);
            }
            let new = match self.geometry.version() {
                2 => L2Entry::UNALLOCATED,
                _ => match self.zeroed(old, from, to, !keep)? {
                    Some(new) => new,
                    None => L2Entry::zero_plain(&self.geometry)?,
                },
            };
            self.set_entry(slice, from, new, punch)?;
            kept.extend(self.zeroed_host(new, from)?);
            Ok(true)
        })
        .await?;
        self.punch(queue, kept).await
    }

    /// The host cluster that a whole cluster of zeroes keeps for itself: a snapshot may share one
    /// without the copied flag, and has data there.
    fn zeroed_host(&self, entry: L2Entry, guest: u64) -> Result<Option<HostOffset>> {
        match self.kind(entry, guest)? {
            ClusterKind::Zero { host } => Ok(host.filter(|_| entry.copied())),
            _ => Ok(None),
        }
    }

    /// Gives up the space of host clusters that stay allocated and read as zeroes, if that is wanted.
    /// The caller holds the guest clusters, so nothing is written there meanwhile.
    async fn punch(&self, queue: &Queue, hosts: Vec<HostOffset>) -> Result<()> {
        if self.writer()?.options.punch_request && !self.geometry.has_data_file() {
            let size = self.geometry.cluster_size();
            for host in hosts {
                // An error costs only space.
                let _ = storage::deallocate(&*self.file, queue, host.0, size).await;
            }
        }
        Ok(())
    }

    /// Calls `change` with each part of the range that lies in one cluster,
    /// and the slice that it is in; until that returns false. Bytes done.
    async fn for_each_cluster(
        &self,
        queue: &Queue,
        guest: u64,
        length: u64,
        mut change: impl FnMut(&Arc<Slice>, u64, u64) -> Result<bool>,
    ) -> Result<u64> {
        let end = guest + length;
        let mut at = guest;
        while at < end {
            let slice = self.own_slice(queue, at).await?;
            let stop = end.min(at + self.to_slice_end(at));
            while at < stop {
                let to = stop.min(self.cluster_start(at) + self.geometry.cluster_size());
                if !change(&slice, at, to)? {
                    return Ok(at - guest);
                }
                at = to;
            }
        }
        Ok(length)
    }

    /// The entry of a cluster that was `old`, after the subclusters from
    /// `from` to `to` became zeroes. None if the format cannot say it.
    fn zeroed(&self, old: L2Entry, from: u64, to: u64, unmap: bool) -> Result<Option<L2Entry>> {
        let geometry = &self.geometry;
        let kind = self.kind(old, from)?;
        let is_whole = to - from == geometry.cluster_size();
        let compressed = matches!(kind, ClusterKind::Compressed(_));
        if geometry.version() < 3 || (compressed && !is_whole) {
            return Ok(None);
        }
        let host: Option<HostOffset> = match kind {
            ClusterKind::Data { host } => Some(host),
            ClusterKind::Zero { host } => host,
            _ => None,
        };
        if is_whole && (unmap || compressed || host.is_none()) {
            return Ok(Some(L2Entry::zero_plain(geometry)?));
        }
        let Some(host) = host.filter(|_| is_whole) else {
            let touched = self.touched(from, to);
            let allocated = old.allocated_bits() & !touched;
            let zero = old.zero_bits() | touched;
            let entry = L2Entry::subclusters(host, old.copied(), allocated, zero, geometry);
            return Ok(Some(entry?));
        };
        Ok(Some(L2Entry::zero_allocated(host, old.copied(), geometry)?))
    }
}
