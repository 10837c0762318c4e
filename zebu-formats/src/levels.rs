//! The map step of QED and qcow: an L1 table has the offsets of L2 tables, and these have the
//! clusters. Entries have 8 bytes.

use super::pieces::{Pieces, Table};
use super::{Extent, Mapping};
use crate::Result;
use crate::offset::HostOffset;
use crate::storage::Queue;

/// What the entries of an image mean.
pub(super) trait DecodeEntry {
    /// The L2 table of an L1 entry that is not 0, by which `guest` is looked up.
    fn l2_table(&self, guest: u64, entry: [u8; 8]) -> Result<Table>;

    /// The mapping of the whole cluster of an L2 entry. `guest` is looked up.
    fn cluster(&self, guest: u64, entry: [u8; 8]) -> Result<Mapping>;
}

/// The tables of an image.
#[derive(Debug)]
pub(super) struct TwoLevels {
    pub pieces: Pieces,
    pub l1: Table,
    /// Bytes of a cluster.
    pub cluster_size: u64,
    /// Bytes of the disk that an L2 table maps.
    pub l2_range: u64,
}

impl TwoLevels {
    /// The extent at `guest` of at most `limit` bytes, if the tables for it are in memory.
    pub(super) fn cached(
        &self,
        image: &impl DecodeEntry,
        guest: u64,
        limit: u64,
    ) -> Option<Result<Extent>> {
        let l1 = self.pieces.entries(&self.l1, guest / self.l2_range)?;
        if let Some(extent) = self.by_l1(&l1, guest, limit) {
            return Some(Ok(extent));
        }
        match image.l2_table(guest, l1[0]) {
            Ok(table) => {
                let l2 = self.pieces.entries(&table, self.l2_index(guest))?;
                Some(self.by_l2(image, &l2, guest, limit))
            }
            Err(error) => Some(Err(error)),
        }
    }

    /// [`TwoLevels::cached`] with I/O.
    pub(super) async fn load(
        &self,
        queue: &Queue,
        image: &impl DecodeEntry,
        guest: u64,
        limit: u64,
    ) -> Result<Extent> {
        let (pieces, index) = (&self.pieces, guest / self.l2_range);
        let l1 = pieces.load_entries(queue, &self.l1, index).await?;
        if let Some(extent) = self.by_l1(&l1, guest, limit) {
            return Ok(extent);
        }
        let (table, index) = (image.l2_table(guest, l1[0])?, self.l2_index(guest));
        let l2 = pieces.load_entries(queue, &table, index).await?;
        self.by_l2(image, &l2, guest, limit)
    }

    fn l2_index(&self, guest: u64) -> u64 {
        guest % self.l2_range / self.cluster_size
    }

    /// The extent at `guest` by the L1 entries from there on, if the first of them has no table.
    fn by_l1(&self, entries: &[[u8; 8]], guest: u64, limit: u64) -> Option<Extent> {
        let range = self.l2_range;
        let within = guest % range;
        let wanted = (within + limit).div_ceil(range) as usize;
        let missing = entries.iter().take(wanted);
        let missing = missing.take_while(|entry| **entry == [0; 8]).count() as u64;
        let length = limit.min((missing * range).saturating_sub(within));
        let mapping = Mapping::Unallocated { host: None };
        (missing > 0).then(|| Extent::in_file(length, mapping))
    }

    /// The extent at `guest` by the L2 entries from there on.
    fn by_l2(
        &self,
        image: &impl DecodeEntry,
        entries: &[[u8; 8]],
        guest: u64,
        limit: u64,
    ) -> Result<Extent> {
        let size = self.cluster_size;
        let within = guest % size;
        let wanted = (within + limit).div_ceil(size) as usize;
        let first = image.cluster(guest, entries[0])?;
        let follows = |(nth, entry): &(u64, &[u8; 8])| {
            let expected = after(first, nth * size);
            expected.is_some() && image.cluster(guest, **entry).ok() == expected
        };
        let rest = (1..).zip(entries.iter().take(wanted).skip(1));
        let clusters = 1 + rest.take_while(follows).count() as u64;
        let mapping = match first {
            Mapping::Compressed { data, .. } => Mapping::Compressed { data, skip: within },
            first => after(first, within).unwrap_or(first),
        };
        let length = limit.min(clusters * size - within);
        Ok(Extent::in_file(length, mapping))
    }
}

/// The mapping so many bytes further on in an extent that begins with `first`; None: a compressed
/// cluster is an extent of its own.
fn after(first: Mapping, bytes: u64) -> Option<Mapping> {
    match first {
        Mapping::Data { host } => Some(Mapping::Data {
            host: HostOffset(host.0 + bytes),
        }),
        Mapping::Compressed { .. } => None,
        alike => Some(alike),
    }
}
