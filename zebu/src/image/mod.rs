//! One qcow2 image: map, then read; caches.

mod cache;
mod inflate;
mod luks;
mod map;
mod open;
mod preallocation;
mod snapshot;
mod table;

use std::sync::Arc;

use crate::Result;
use crate::format::{Geometry, Header, Snapshot};
use crate::storage::Storage;

pub use map::{Extent, Mapping};
pub use open::OpenImage;
pub use snapshot::SnapshotName;

/// How much of the tables is kept in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheOptions {
    /// Bytes of L2 tables; None: enough for the whole disk, up to 32 MiB.
    pub size: Option<u64>,
    /// Bytes of one slice, the unit of caching: a power of two from 512 to the
    /// cluster size; None: 4096, or the cluster size if that is smaller.
    pub entry_size: Option<u64>,
}

/// An open qcow2 image.
///
/// Shared by reference between any number of threads, each with its queue.
#[derive(Debug)]
pub struct Image {
    file: Arc<dyn Storage>,
    /// The same as `file` without an external data file.
    data: Arc<dyn Storage>,
    /// Bytes of `file` when it was opened.
    file_len: u64,
    header: Header,
    geometry: Geometry,
    snapshots: Vec<Snapshot>,
    l1: table::L1Table,
    /// Entries of a slice; a power of two.
    slice_entries: usize,
    /// Logarithm of the bytes of the disk that a slice maps.
    slice_bits: u32,
    /// By slice number: guest offset over what a slice maps.
    slices: cache::Cache<table::Slice>,
    /// Inflated clusters by the host offset and length of their data.
    inflated: cache::Cache<Vec<u8>>,
    preallocated: preallocation::Known,
}

impl Image {
    /// The header, as it was read.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What the header's numbers mean.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The file that holds the metadata (and the data, unless there is an
    /// external data file).
    pub fn file(&self) -> &Arc<dyn Storage> {
        &self.file
    }

    /// Where the guest's clusters are: an external data file, or the file.
    pub fn data(&self) -> &Arc<dyn Storage> {
        &self.data
    }

    /// Size of the disk in bytes: the header's, rounded down to 512.
    pub fn size(&self) -> u64 {
        self.geometry.virtual_size()
    }

    /// Where the VM state starts: the guest offset of the first L2 table past
    /// the end of the disk.
    pub fn vm_state_offset(&self) -> u64 {
        self.size().next_multiple_of(self.geometry.l2_coverage())
    }

    /// The internal snapshots.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// Whether the whole cluster at `offset` of `storage` is past its end.
    /// (A file may end within a cluster: the rest of that reads as zeroes.)
    pub(crate) fn is_past_end(&self, storage: &dyn Storage, offset: u64) -> Result<bool> {
        // The file only grows while it is open, so the common case needs no
        // look at it.
        if offset < self.file_len && std::ptr::addr_eq(storage, Arc::as_ptr(&self.file)) {
            return Ok(false);
        }
        Ok(offset >= storage.len()?)
    }
}
