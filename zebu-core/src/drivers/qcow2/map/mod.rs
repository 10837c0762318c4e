//! The one map step: guest range in, extent out. Read, status, convert and
//! compare are built on it.
//!
//! With the L2 slice in the cache it does no I/O and waits for nothing.
//!
//! - `table`: L1 table and slices of L2 tables in memory; `target`: where a write goes;
//! - `zero`: mappings without data; `inflate`: compressed clusters;
//! - `preallocation`: whether holes of the file are data.

pub(in crate::drivers::qcow2) mod inflate;
pub(in crate::drivers::qcow2) mod preallocation;
pub(in crate::drivers::qcow2) mod table;
pub(in crate::drivers::qcow2) mod target;
mod zero;

use std::sync::Arc;

use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::map::table::Slice;
use crate::drivers::qcow2::structures::SubclusterKind;
use crate::drivers::{Extent, LOOKUP_WORK, Mapping, StorageId};
use crate::offset::{GuestOffset, HostOffset};
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Image {
    /// The extent at `guest`, as long as it is known alike and at most `limit`
    /// bytes (at least 1). Ends at the latest where the L2 slice does.
    ///
    /// `guest` is inside the disk. While others write to the image, a host offset in
    /// the answer may be out of date at once.
    #[doc(hidden)]
    pub async fn extent(&self, queue: &Queue, guest: u64, limit: u64) -> Result<Extent> {
        self.spend(LOOKUP_WORK)?;
        match self.cached_extent(guest, limit) {
            Some(extent) => extent,
            None => self.load_extent(queue, guest, limit).await,
        }
    }

    /// As [`Image::extent`] if that needs no I/O. Does not count as work.
    #[inline]
    pub(crate) fn cached_extent(&self, guest: u64, limit: u64) -> Option<Result<Extent>> {
        let entry = self.l1.get(self.geometry.l1_index(GuestOffset(guest)));
        if entry.raw_offset().0 == 0 {
            let to_end = self.l2_bytes() - (guest & (self.l2_bytes() - 1));
            return Some(Ok(Extent {
                length: to_end.min(limit),
                storage: self.data_storage(),
                mapping: Mapping::Unallocated { host: None },
            }));
        }
        let slice = self.slices.get(self.slice_number(guest))?;
        Some(self.extent_in(&slice, guest, limit))
    }

    pub(in crate::drivers::qcow2) async fn load_extent(
        &self,
        queue: &Queue,
        guest: u64,
        limit: u64,
    ) -> Result<Extent> {
        let slice = self.slice(queue, guest).await?;
        self.extent_in(&slice, guest, limit)
    }

    /// The slice of `guest`, where there is an L2 table.
    pub(in crate::drivers::qcow2) async fn slice(
        &self,
        queue: &Queue,
        guest: u64,
    ) -> Result<Arc<Slice>> {
        let number = self.slice_number(guest);
        if let Some(slice) = self.slices.get(number) {
            return Ok(slice);
        }
        self.as_task(queue, async move |image, queue| {
            // The table is not reused while it is read.
            let _stay = image.enter();
            let load = || image.load_slice(queue, guest);
            image.slices.get_or_load(number, load).await
        })
        .await
    }

    /// Bytes of the disk from `guest` to the end of what its slice maps.
    pub(crate) fn to_slice_end(&self, guest: u64) -> u64 {
        let bytes = 1u64 << self.slice_bits;
        bytes - (guest & (bytes - 1))
    }

    /// The place of the entry of `guest` in its slice.
    pub(in crate::drivers::qcow2) fn index_in_slice(&self, guest: u64) -> usize {
        self.geometry.l2_index(GuestOffset(guest)) & (self.slice_entries - 1)
    }

    /// Bytes of the disk that one L2 table maps; a power of two.
    fn l2_bytes(&self) -> u64 {
        self.geometry.l2_coverage()
    }

    pub(in crate::drivers::qcow2) fn slice_number(&self, guest: u64) -> u64 {
        guest >> self.slice_bits
    }

    async fn load_slice(&self, queue: &Queue, guest: u64) -> Result<Slice> {
        let l1_index = self.geometry.l1_index(GuestOffset(guest));
        let entry = self.l1.get(l1_index).without_reserved();
        let corrupt = |what| Error::Corrupt { guest, what };
        let table = match entry.l2_table(&self.geometry) {
            Ok(Some(table)) => table,
            Ok(None) => return Err(corrupt("The L2 table is gone".into())),
            Err(e) => return Err(corrupt(e.at("L1 entry", l1_index).to_string())),
        };
        let slice_bytes = self.slice_entries as u64 * self.geometry.l2_entry_size() as u64;
        let first = self.geometry.l2_index(GuestOffset(guest)) / self.slice_entries;
        let offset = table.0 + first as u64 * slice_bytes;
        if self.is_past_end(offset)? {
            return Err(corrupt(format!(
                "L2 table offset {:#x} is past the end of the file (L1 index: {l1_index:#x})",
                table.0
            )));
        }
        storage::event(&*self.file, storage::Event::L2Load);
        let mut bytes = storage::read_vec(&*self.file, queue, offset, slice_bytes as usize).await?;
        // The file has not grown over the slice since it was read: an image with a truncated table is
        // not written, and a new table is whole before an L1 entry refers to it.
        if self.is_past_end(offset + slice_bytes - 1)? {
            self.mark_missing(&mut bytes, self.file.len()?.saturating_sub(offset));
        }
        Ok(Slice::decode(&bytes))
    }

    /// Makes the entries of a slice invalid that the file lacks, of which it has `there` bytes: as
    /// zeroes they would be unallocated clusters.
    fn mark_missing(&self, slice: &mut [u8], there: u64) {
        // At an offset that no file reaches; in an extended entry all subclusters are allocated.
        const MISSING: [u64; 2] = [0x00ff_ffff_ffff_fe00, 0xffff_ffff];
        let size = self.geometry.l2_entry_size();
        let there = usize::try_from(there).map_or(slice.len(), |bytes| bytes.min(slice.len()));
        for entry in slice[there / size * size..].chunks_exact_mut(size) {
            for (word, missing) in entry.chunks_exact_mut(8).zip(MISSING) {
                word.copy_from_slice(&missing.to_be_bytes());
            }
        }
    }

    fn extent_in(&self, slice: &Slice, guest: u64, limit: u64) -> Result<Extent> {
        let geometry = &self.geometry;
        let mut index = self.index_in_slice(guest);
        let within = guest & (geometry.subcluster_size() - 1);
        let subcluster = geometry.subcluster_index(GuestOffset(guest));
        let (mapping, mut length) = self.run_at(slice, index, subcluster, guest)?;
        let mapping = skip(mapping, within, geometry.offset_in_cluster(guest));
        length -= within;
        if matches!(mapping, Mapping::Compressed { .. }) {
            return Ok(Extent {
                length: length.min(limit),
                storage: StorageId::FILE,
                mapping,
            });
        }
        // Go on over whole clusters while they continue the extent.
        while length < limit && (guest + length) & (geometry.cluster_size() - 1) == 0 {
            index += 1;
            if index == self.slice_entries {
                break;
            }
            // Damage further on is reported by the request that reaches it.
            let Ok((next, more)) = self.run_at(slice, index, 0, guest + length) else {
                break;
            };
            if !continues(mapping, length, next) {
                break;
            }
            length += more;
        }
        Ok(Extent {
            length: length.min(limit),
            storage: self.data_storage(),
            mapping,
        })
    }

    /// The storage of clusters that are not compressed.
    #[inline]
    pub(in crate::drivers::qcow2) fn data_storage(&self) -> StorageId {
        StorageId(u32::from(self.has_own_data))
    }

    /// Refuses a host cluster that is not where the disk has it, of an image with an external
    /// data file: it would be another cluster's.
    pub(in crate::drivers::qcow2) fn check_place(
        &self,
        host: HostOffset,
        guest: u64,
    ) -> Result<()> {
        let place = self.cluster_start(guest);
        if !self.geometry.has_data_file() || host.0 == place {
            return Ok(());
        }
        Err(Error::Corrupt {
            guest,
            what: format!(
                "External data file host cluster offset {:#x} does not match guest cluster offset: \
                 {place:#x}",
                host.0
            ),
        })
    }

    /// What starts at a subcluster, and for how many bytes of its cluster.
    fn run_at(
        &self,
        slice: &Slice,
        index: usize,
        subcluster: u32,
        guest: u64,
    ) -> Result<(Mapping, u64)> {
        let geometry = &self.geometry;
        let entry = slice.get(index, geometry).without_reserved(geometry);
        let corrupt = |what| Error::Corrupt { guest, what };
        let (kind, count) = entry
            .subcluster_run(subcluster, geometry)
            .map_err(|e| corrupt(e.to_string()))?;
        let mapping = match kind {
            SubclusterKind::Unallocated { host } => Mapping::Unallocated { host },
            SubclusterKind::Zero { host } => Mapping::Zero { host },
            SubclusterKind::Data { host } => Mapping::Data { host },
            SubclusterKind::Compressed(cluster) => Mapping::Compressed {
                data: self.compressed_data(cluster),
                skip: 0,
            },
            SubclusterKind::Invalid => {
                return Err(corrupt("Invalid cluster entry found".to_string()));
            }
        };
        if geometry.has_data_file()
            && let Mapping::Unallocated { host: Some(host) }
            | Mapping::Zero { host: Some(host) }
            | Mapping::Data { host } = mapping
        {
            let within = u64::from(subcluster) * geometry.subcluster_size();
            self.check_place(HostOffset(host.0 - within), guest)?;
        }
        Ok((mapping, u64::from(count) << geometry.subcluster_bits()))
    }
}

/// The mapping of what lies `within` bytes into a run that starts at a
/// subcluster, `in_cluster` bytes into its cluster.
fn skip(mapping: Mapping, within: u64, in_cluster: u64) -> Mapping {
    match mapping {
        Mapping::Unallocated { host } => Mapping::Unallocated {
            host: host.map(|h| HostOffset(h.0 + within)),
        },
        Mapping::Zero { host } => Mapping::Zero {
            host: host.map(|h| HostOffset(h.0 + within)),
        },
        Mapping::Data { host } => Mapping::Data {
            host: HostOffset(host.0 + within),
        },
        Mapping::Compressed { data, .. } => Mapping::Compressed {
            data,
            skip: in_cluster,
        },
    }
}

/// Whether `next` makes an extent of `length` bytes longer.
fn continues(extent: Mapping, length: u64, next: Mapping) -> bool {
    let after = |host: HostOffset| HostOffset(host.0 + length);
    match (extent, next) {
        (Mapping::Unallocated { host: None }, Mapping::Unallocated { host: None })
        | (Mapping::Zero { host: None }, Mapping::Zero { host: None }) => true,
        (Mapping::Unallocated { host: Some(a) }, Mapping::Unallocated { host: Some(b) })
        | (Mapping::Zero { host: Some(a) }, Mapping::Zero { host: Some(b) })
        | (Mapping::Data { host: a }, Mapping::Data { host: b }) => after(a) == b,
        _ => false,
    }
}
