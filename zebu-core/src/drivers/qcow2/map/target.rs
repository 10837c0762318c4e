//! The map step of writers: guest range in, target out.
//!
//! A write goes in place, to a host cluster to which only the active disk refers, or the mapping
//! must change first (`change.rs`).

use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::map::table::Slice;
use crate::drivers::qcow2::structures::{ClusterKind, Geometry, L2Entry};
use crate::offset::{GuestOffset, HostOffset};
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// The target of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// To this host offset, `length` bytes.
    InPlace { host: HostOffset, length: u64 },
    /// The mapping of `length` bytes must change first.
    Change { length: u64 },
}

/// Clusters that are mapped anew by a write, all of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    /// Guest offset of the first cluster.
    pub cluster: u64,
    /// How many.
    pub clusters: u64,
    /// The host clusters that they have; None: they need some.
    pub host: Option<HostOffset>,
    /// Guest offset of the first byte that is written.
    pub guest: u64,
    /// Bytes that are written.
    pub length: u64,
    /// Guest offset, at most `guest`, from which on the old content is kept.
    pub head: u64,
    /// Guest offset, at least `guest + length`, up to which it is.
    pub tail: u64,
}

impl Fill {
    /// Leaves all but the first `clusters` clusters for later.
    pub(crate) fn shorten(&mut self, clusters: u64, geometry: &Geometry) {
        if clusters < self.clusters {
            let end = self.cluster + clusters * geometry.cluster_size();
            self.clusters = clusters;
            self.length = end - self.guest;
            self.tail = end;
        }
    }
}

/// The next step of a writer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Write in place.
    InPlace { host: HostOffset, length: u64 },
    /// Write and map.
    Fill(Fill),
}

impl Image {
    /// The target of a write of at most `limit` bytes at `guest`.
    pub(crate) async fn target(&self, queue: &Queue, guest: u64, limit: u64) -> Result<Target> {
        let limit = limit.min(self.to_slice_end(guest));
        let entry = self.l1.get(self.geometry.l1_index(GuestOffset(guest)));
        // A table that a snapshot shares is copied first.
        if entry.raw_offset().0 == 0 || !entry.copied() {
            return Ok(Target::Change { length: limit });
        }
        let slice = self.slice(queue, guest).await?;
        match self.step(&slice, guest, limit)? {
            Step::InPlace { host, length } => Ok(Target::InPlace { host, length }),
            Step::Fill(fill) => Ok(Target::Change {
                length: fill.length,
            }),
        }
    }

    /// Where a write goes if all of it has one place in a cluster of its own, and finding that out
    /// needs no I/O. It is announced then.
    pub(in crate::drivers::qcow2) fn in_place(
        &self,
        guest: u64,
        length: u64,
    ) -> Option<HostOffset> {
        let writer = self.writer.as_deref()?;
        if writer.check().is_err() || self.file.cache_mode().is_write_through() {
            return None;
        }
        self.announced(writer, &(guest..guest + length))?;
        let entry = self.l1.get(self.geometry.l1_index(GuestOffset(guest)));
        if length > self.to_slice_end(guest) || entry.raw_offset().0 == 0 || !entry.copied() {
            return None;
        }
        let slice = self.slices.get(self.slice_number(guest))?;
        let host = match self.step(&slice, guest, length) {
            Ok(Step::InPlace { host, length: all }) if all == length => host,
            _ => return None,
        };
        self.check_data_write(host, length).ok()?;
        let is_inside = self.geometry.has_data_file() || host.0 + length <= self.file_len();
        if is_inside {
            storage::event(&*self.file, storage::Event::WriteAio);
        }
        is_inside.then_some(host)
    }

    /// The next step of a write of at most `limit` bytes at `guest`, inside the slice. For a `Fill`
    /// the caller must hold its clusters.
    pub(crate) fn step(&self, slice: &Slice, guest: u64, limit: u64) -> Result<Step> {
        let cluster_size = self.geometry.cluster_size();
        let end = guest + limit;
        let first = self.cluster_start(guest);
        let mut at = self.look(slice, guest, end)?;
        let mut clusters = 1;
        let mut stop = end.min(first + cluster_size);
        let (head, mut tail) = self.margins(&at, guest, stop);
        while stop < end {
            // Damage further on is reported by the step that reaches it.
            let Ok(next) = self.look(slice, stop, end) else {
                break;
            };
            let follows = match (at.own, next.own) {
                (Some(_), Some(host)) => at.first_own.0 + clusters * cluster_size == host.0,
                (None, None) => true,
                _ => false,
            };
            if next.in_place != at.in_place || !follows {
                break;
            }
            let from = stop;
            stop = end.min(stop + cluster_size);
            (_, tail) = self.margins(&next, from, stop);
            at = Look {
                first_own: at.first_own,
                ..next
            };
            clusters += 1;
        }
        let length = stop - guest;
        if at.in_place {
            return Ok(Step::InPlace {
                host: HostOffset(at.first_own.0 + (guest - first)),
                length,
            });
        }
        Ok(Step::Fill(Fill {
            cluster: first,
            clusters,
            host: at.own.map(|_| at.first_own),
            guest,
            length,
            head,
            tail,
        }))
    }

    /// The entry of the cluster of `guest`, for a write from there to `end`
    /// or the end of the cluster.
    fn look(&self, slice: &Slice, guest: u64, end: u64) -> Result<Look> {
        let geometry = &self.geometry;
        let entry = self.entry(slice, guest);
        let kind = self.kind(entry, guest)?;
        if entry.allocated_bits() & entry.zero_bits() != 0 {
            return Err(Error::Corrupt {
                guest,
                what: "Invalid cluster entry found".into(),
            });
        }
        let own = match kind {
            ClusterKind::Data { host } | ClusterKind::Zero { host: Some(host) } => {
                entry.copied().then_some(host)
            }
            _ => None,
        };
        let in_place = match kind {
            ClusterKind::Data { .. } if own.is_none() => false,
            ClusterKind::Data { .. } if geometry.has_extended_l2() => {
                let last = end.min(self.cluster_start(guest) + geometry.cluster_size());
                let touched = self.touched(guest, last);
                entry.allocated_bits() & touched == touched
            }
            ClusterKind::Data { .. } => true,
            _ => false,
        };
        Ok(Look {
            entry,
            kind,
            own,
            first_own: own.unwrap_or(HostOffset(0)),
            in_place,
        })
    }

    /// From where and up to where the old content of a cluster must be kept
    /// when `from..to` of it is written.
    fn margins(&self, look: &Look, from: u64, to: u64) -> (u64, u64) {
        let geometry = &self.geometry;
        let cluster = self.cluster_start(from);
        let whole = (cluster, cluster + geometry.cluster_size());
        if !geometry.has_extended_l2() || matches!(look.kind, ClusterKind::Compressed(_)) {
            return whole;
        }
        let sub = geometry.subcluster_size();
        let mut head = from & !(sub - 1);
        let mut tail = to.next_multiple_of(sub);
        let allocated = look.entry.allocated_bits();
        let bit = |at: u64| 1u32 << geometry.subcluster_index(GuestOffset(at));
        if look.own.is_some() {
            // Subclusters that are allocated stay as they are.
            if allocated & bit(head) != 0 {
                head = from;
            }
            if allocated & bit(tail - 1) != 0 {
                tail = to;
            }
        } else if allocated != 0 {
            // All that a snapshot shares is copied with it.
            let first = u64::from(allocated.trailing_zeros()) * sub;
            let last = u64::from(32 - allocated.leading_zeros()) * sub;
            head = head.min(cluster + first);
            tail = tail.max(cluster + last);
        }
        (head, tail)
    }

    /// The bits of the subclusters that the bytes from `from` to `to` touch,
    /// which are of one cluster.
    pub(crate) fn touched(&self, from: u64, to: u64) -> u32 {
        let first = self.geometry.subcluster_index(GuestOffset(from));
        let last = self.geometry.subcluster_index(GuestOffset(to - 1));
        (u32::MAX >> (31 - (last - first))) << first
    }

    /// The L2 entry of the cluster of `guest`, which is in the slice.
    pub(crate) fn entry(&self, slice: &Slice, guest: u64) -> L2Entry {
        let entry = slice.get(self.index_in_slice(guest), &self.geometry);
        entry.without_reserved(&self.geometry)
    }

    /// The kind of an entry, or the error of a damaged one.
    pub(crate) fn kind(&self, entry: L2Entry, guest: u64) -> Result<ClusterKind> {
        let kind = entry.kind(&self.geometry).map_err(|e| Error::Corrupt {
            guest,
            what: e.to_string(),
        })?;
        if let ClusterKind::Data { host } | ClusterKind::Zero { host: Some(host) } = kind {
            self.check_place(host, guest)?;
        }
        Ok(kind)
    }

    /// Refuses a write of data that would hit the image's own tables.
    #[inline]
    pub(crate) fn check_data_write(&self, host: HostOffset, length: u64) -> Result<()> {
        match self.geometry.has_data_file() {
            true => Ok(()),
            false => self.writer()?.protected.check_data(host.0, length),
        }
    }

    /// Prepares a write of data to clusters that the image has. In a file that was cut off they
    /// may lie behind its end, which other requests move meanwhile.
    #[inline]
    pub(crate) async fn prepare_data_write(
        &self,
        queue: &Queue,
        host: HostOffset,
        length: u64,
    ) -> Result<()> {
        self.check_data_write(host, length)?;
        let end = host.0 + length;
        if end > self.file_len() && !self.geometry.has_data_file() {
            Box::pin(self.lengthen(queue, end)).await?;
        }
        Ok(())
    }
}

/// One cluster, in terms of a writer.
#[derive(Clone, Copy, Debug)]
struct Look {
    entry: L2Entry,
    kind: ClusterKind,
    /// The host cluster, if the active disk alone refers to it.
    own: Option<HostOffset>,
    /// That of the first cluster of the run.
    first_own: HostOffset,
    /// The bytes to be written have their place there.
    in_place: bool,
}
