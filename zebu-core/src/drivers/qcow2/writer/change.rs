//! Changing the mapping of guest clusters.
//!
//! A request that changes the mapping of a cluster holds it (`Writer::clusters`)
//! from before it looks at the entry until after it has set it. So of two writes
//! to one unallocated cluster one allocates, and the other waits and then finds
//! it allocated.
//!
//! The types are the order of the steps: [`Announced`], from which comes
//! [`Change`] (metadata written back if much has gathered, the epoch entered,
//! the range held), from which comes [`NewClusters`] (the entry looked at, host
//! clusters allocated), which sets the entries after the data are written and
//! frees the clusters if that does not happen.
//!
//! A write in place holds nothing. It may overtake a change of the mapping, or
//! be overtaken, just as the two requests might; the host cluster that it goes
//! to cannot get another use meanwhile (`epoch.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::allocation::Allocation;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::allocation::protect::L2_TABLE;
use crate::drivers::qcow2::map::table::Slice;
use crate::drivers::qcow2::map::target::{Fill, Step};
use crate::drivers::qcow2::structures::{ClusterKind, L1Entry, L2Entry};
use crate::drivers::qcow2::writer::Announced;
use crate::drivers::{Held, Stay};
use crate::offset::{GuestOffset, HostOffset};
use crate::storage::{self, Queue};
use crate::{Error, Result};

/// Slices of a new L2 table that are put into the cache at once.
const NEW_SLICES: u64 = 16;

/// The guard of a range of guest clusters: no other request changes their mapping until it is
/// dropped.
pub(crate) struct Change<'a> {
    image: &'a Image,
    // Given up before the epoch is left.
    _held: Hold<'a>,
    _stay: Option<Stay<'a>>,
}

/// The next step of a write that holds the guard.
pub(crate) enum NextWrite<'a> {
    /// It writes to the host clusters that are mapped.
    InPlace {
        /// Where.
        host: HostOffset,
        /// Bytes.
        length: u64,
    },
    /// It fills clusters, and maps them then.
    Fill(NewClusters<'a>),
}

/// Clusters that are to be filled and mapped. If they are not mapped, those that
/// were allocated for it are free when this is dropped.
pub(crate) struct NewClusters<'a> {
    image: &'a Image,
    slice: Arc<Slice>,
    pub fill: Fill,
    /// Where they go.
    pub host: HostOffset,
    /// What was allocated for it.
    pub allocation: Option<Allocation<'a>>,
}

impl<'a> Announced<'a> {
    /// Begins a change of the mapping of a range. The caller must hold no guard: writing metadata
    /// back may wait for the changes of other requests.
    pub(crate) async fn change(self, queue: &Queue, guest: u64, length: u64) -> Result<Change<'a>> {
        let image = self.0;
        image.write_back_if_needed(queue).await?;
        let stay = image.enter();
        Ok(Change {
            image,
            _held: image.hold(guest, length).await?,
            _stay: stay,
        })
    }
}

impl<'a> Change<'a> {
    /// The next step of a write of at most `limit` bytes at `guest`, inside the range. Allocates
    /// the host clusters that it needs.
    pub(crate) async fn next_write(
        &self,
        queue: &Queue,
        guest: u64,
        limit: u64,
    ) -> Result<NextWrite<'_>> {
        let image = self.image;
        let slice = image.own_slice(queue, guest).await?;
        let limit = limit.min(image.to_slice_end(guest));
        let mut fill = match image.step(&slice, guest, limit)? {
            Step::InPlace { host, length } => return Ok(NextWrite::InPlace { host, length }),
            Step::Fill(fill) => fill,
        };
        let allocation = match fill.host {
            None if !image.geometry().has_data_file() => {
                let allocation = image.allocate_place(queue, fill.clusters).await?;
                fill.shorten(allocation.clusters(), image.geometry());
                Some(allocation)
            }
            _ => None,
        };
        let host = match &allocation {
            Some(allocation) => allocation.host(),
            // In an external data file host offsets equal guest offsets.
            None => fill.host.unwrap_or(HostOffset(fill.cluster)),
        };
        Ok(NextWrite::Fill(NewClusters {
            image,
            slice,
            fill,
            host,
            allocation,
        }))
    }

    /// See [`Image::zero`].
    pub(crate) async fn zero(
        &self,
        queue: &Queue,
        guest: u64,
        length: u64,
        unmap: bool,
    ) -> Result<u64> {
        self.image.zero(queue, guest, length, unmap).await
    }

    /// See [`Image::drop_clusters`].
    pub(crate) async fn drop_clusters(
        &self,
        queue: &Queue,
        guest: u64,
        length: u64,
        has_backing: bool,
    ) -> Result<()> {
        let dropping = self.image.drop_clusters(queue, guest, length, has_backing);
        dropping.await
    }
}

impl NewClusters<'_> {
    /// Before the clusters are written.
    pub(in crate::drivers::qcow2) fn begin(&self) -> Result<()> {
        match is_broken(Rule::DataBeforeEntry) {
            true => self.image.map_fill(&self.slice, &self.fill, self.host),
            false => Ok(()),
        }
    }

    /// Maps the clusters, after they are written. Returns the bytes of the request that this
    /// covers.
    pub(in crate::drivers::qcow2) fn map(self) -> Result<u64> {
        self.image.map_fill(&self.slice, &self.fill, self.host)?;
        if let Some(allocation) = self.allocation {
            allocation.keep();
        }
        Ok(self.fill.length)
    }
}

/// The range lock of guest clusters.
pub(in crate::drivers::qcow2) struct Hold<'a> {
    _held: Held<'a>,
    changing: &'a AtomicU64,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.changing.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Image {
    /// Waits until no other request changes the clusters of a range, and locks them.
    pub(in crate::drivers::qcow2) async fn hold(
        &self,
        guest: u64,
        length: u64,
    ) -> Result<Hold<'_>> {
        let bits = self.geometry.cluster_bits();
        let range = guest >> bits..(guest + length).div_ceil(1 << bits);
        let writer = self.writer()?;
        let held = writer.clusters.hold(range).await;
        writer.changing.fetch_add(1, Ordering::Relaxed);
        Ok(Hold {
            _held: held,
            changing: &writer.changing,
        })
    }

    /// The slice of `guest`, in a table that the active disk alone has: one is
    /// made if need be. The caller holds the cluster of `guest`.
    pub(in crate::drivers::qcow2) async fn own_slice(
        &self,
        queue: &Queue,
        guest: u64,
    ) -> Result<Arc<Slice>> {
        let index = self.geometry.l1_index(GuestOffset(guest));
        if index >= self.l1.len() as u64 {
            return Err(Error::Refused(format!(
                "The L1 table has no entry for guest offset {guest:#x}"
            )));
        }
        let entry = self.l1.get(index);
        if entry.raw_offset().0 == 0 || !entry.copied() {
            // A task: requests for other clusters may need the table, too.
            self.as_task(queue, async move |image, queue| {
                image.make_table(queue, index, guest).await
            })
            .await?;
        }
        self.slice(queue, guest).await
    }

    /// Gives the entry `index` of the L1 table an L2 table of its own.
    async fn make_table(&self, queue: &Queue, index: u64, guest: u64) -> Result<()> {
        let writer = self.writer()?;
        let size = self.geometry.cluster_size();
        // Before the table is held. A copy is in memory twice.
        let _memory = match self.l1.get(index).without_reserved().raw_offset().0 {
            0 => None,
            _ => {
                queue
                    .reserve(storage::Step::Margins, 2 * size as usize)
                    .await
            }
        };
        let _held = writer.tables.hold(index..index + 1).await;
        let entry = self.l1.get(index).without_reserved();
        if entry.raw_offset().0 != 0 && entry.copied() {
            return Ok(());
        }
        let before = entry
            .l2_table(&self.geometry)
            .map_err(|e| Error::Format(e.at("L1 entry", index)))?;
        self.reserve_l1_entries(queue, index).await?;
        let allocation = self.allocate(queue, 1).await?;
        let table = allocation.host();
        match before {
            // The table on the disk is whole before anything can point to it.
            Some(old) => {
                if self.is_past_end(old.0)? {
                    return Err(Error::Corrupt {
                        guest,
                        what: format!("L2 table offset {:#x} is past the end of the file", old.0),
                    });
                }
                // None of its slices is dirty: while a snapshot has the table
                // too, no request sets an entry.
                storage::event(&*self.file, storage::Event::L2AllocCowRead);
                let bytes = storage::read_vec(&*self.file, queue, old.0, size as usize).await?;
                storage::event(&*self.file, storage::Event::L2AllocWrite);
                storage::write_slice(&*self.file, queue, table.0, &bytes).await?;
            }
            None => {
                storage::event(&*self.file, storage::Event::L2AllocWrite);
                self.reserve_table(queue, table.0, allocation.fresh).await?;
                self.cache_new_slices(guest);
            }
        }
        writer.protected.add_table(table.0, L2_TABLE);
        let entry = L1Entry::new(table, true, &self.geometry)?;
        writer.dirty.note_l1(index, || self.l1.set(index, entry));
        allocation.keep();
        if let Some(old) = before {
            writer.frees.push(self.table_reference(old.0, false));
        }
        Ok(())
    }

    /// Puts slices of a new table, all unallocated, into the cache: no request
    /// need read these from the disk.
    fn cache_new_slices(&self, guest: u64) {
        let bytes = self.slice_entries * self.geometry.l2_entry_size();
        let slices = self.geometry.cluster_size() / bytes as u64;
        let number = self.slice_number(guest);
        let group = match self.slices.capacity() as u64 > 2 * NEW_SLICES {
            true => NEW_SLICES.min(slices),
            false => 1,
        };
        let first = number & !(group - 1);
        let empty = vec![0; bytes];
        for number in first..first + group {
            self.slices.insert(number, Arc::new(Slice::decode(&empty)));
        }
    }

    /// Sets the entry of the cluster of `guest`, which the caller holds, and
    /// drops what the old one referred to and the new one does not.
    ///
    /// Everything that the new entry points to is written, and its refcount
    /// raised.
    pub(in crate::drivers::qcow2) fn set_entry(
        &self,
        slice: &Arc<Slice>,
        guest: u64,
        new: L2Entry,
        punch: bool,
    ) -> Result<()> {
        let writer = self.writer()?;
        let old = self.entry(slice, guest);
        if old == new {
            return Ok(());
        }
        slice.set(self.index_in_slice(guest), new, &self.geometry);
        writer.dirty.note_slice(self.slice_number(guest), slice);
        // Only now: what is dropped is in no copy of the slice made later.
        if let Some(freed) = self.referred(old, punch)
            && self.referred(new, punch) != Some(freed)
        {
            writer.frees.push(freed);
        }
        Ok(())
    }

    /// The clusters of the file that an entry refers to. (Those of an external
    /// data file are not counted.)
    pub(in crate::drivers::qcow2) fn referred(&self, entry: L2Entry, punch: bool) -> Option<Freed> {
        match entry.kind(&self.geometry).ok()? {
            ClusterKind::Compressed(cluster) => {
                Some(self.reference(cluster.offset.0, cluster.length, punch))
            }
            ClusterKind::Data { host } | ClusterKind::Zero { host: Some(host) } => {
                let counted = !self.geometry.has_data_file();
                counted.then(|| self.reference(host.0, 1, punch))
            }
            _ => None,
        }
    }

    /// Maps the clusters of a fill to host clusters from `host` on, after
    /// everything of it was written there.
    pub(in crate::drivers::qcow2) fn map_fill(
        &self,
        slice: &Arc<Slice>,
        fill: &Fill,
        host: HostOffset,
    ) -> Result<()> {
        let size = self.geometry.cluster_size();
        let punch = self.writer()?.options.punch_other;
        for nth in 0..fill.clusters {
            let cluster = fill.cluster + nth * size;
            let host = HostOffset(host.0 + nth * size);
            let from = fill.guest.max(cluster);
            let to = (fill.guest + fill.length).min(cluster + size);
            let old = self.entry(slice, cluster);
            let new = self.filled(old, host, from, to)?;
            self.set_entry(slice, cluster, new, punch)?;
        }
        Ok(())
    }

    /// The entry of a cluster that was `old`, after bytes `from` to `to` of it
    /// were written at `host`.
    fn filled(&self, old: L2Entry, host: HostOffset, from: u64, to: u64) -> Result<L2Entry> {
        let geometry = &self.geometry;
        if !geometry.has_extended_l2() {
            return Ok(L2Entry::data(host, true, geometry)?);
        }
        let allocated = match old.is_compressed() {
            true => u32::MAX,
            false => old.allocated_bits() | self.touched(from, to),
        };
        let zero = old.zero_bits() & !allocated;
        Ok(L2Entry::subclusters(
            Some(host),
            true,
            allocated,
            zero,
            geometry,
        )?)
    }
}
