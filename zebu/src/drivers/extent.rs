//! What a driver's map step says: guest range in, extent out.

use crate::format::{CompressedCluster, HostOffset};

/// One of an image's storages: an index into
/// [`FormatImage::storages`](super::FormatImage::storages).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageId(pub u32);

impl StorageId {
    /// The image's own file.
    pub const FILE: StorageId = StorageId(0);
}

/// What the bytes of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// The image says nothing: the backing file's bytes, or zeroes.
    Unallocated {
        /// Where they would be: subclusters of a cluster of which others are
        /// allocated.
        host: Option<HostOffset>,
    },
    /// Zeroes, whatever the backing file has.
    Zero {
        /// Where space is kept for them.
        host: Option<HostOffset>,
    },
    /// Data, contiguous from here.
    Data {
        /// Of the first byte.
        host: HostOffset,
    },
    /// A part of one compressed cluster.
    Compressed {
        /// Where the whole cluster's data are.
        cluster: CompressedCluster,
        /// Bytes of the inflated cluster before the extent.
        skip: u64,
    },
}

/// A range of the disk that is mapped alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes, at least 1.
    pub length: u64,
    /// The storage that host offsets of the mapping are in.
    pub storage: StorageId,
    /// To what.
    pub mapping: Mapping,
}
