//! The result of a driver's map step: guest range in, extent out.

use crate::Error;
use crate::codec::{CodecError, Inflater};
use crate::offset::HostOffset;

/// One of an image's storages: its file, or another file that the image names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageId(pub u32);

impl StorageId {
    /// The image's own file.
    pub const FILE: StorageId = StorageId(0);
}

/// What the bytes of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// Not mapped by this image: the backing file's bytes, or zeroes.
    Unallocated {
        /// Preallocated space: subclusters of a cluster of which others are allocated.
        host: Option<HostOffset>,
    },
    /// Zeroes, whatever the backing file has.
    Zero {
        /// Preallocated space.
        host: Option<HostOffset>,
    },
    /// Data, contiguous from here.
    Data {
        /// Of the first byte.
        host: HostOffset,
    },
    /// A part of one compressed cluster.
    Compressed {
        /// The data of the whole cluster.
        data: CompressedData,
        /// Bytes of the inflated cluster before the extent.
        skip: u64,
    },
}

/// Compressed data of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedData {
    /// Where they start in the extent's storage; not aligned to anything.
    pub host: HostOffset,
    /// Their length in bytes, or an upper bound on it.
    pub length: u32,
    /// The data may be shorter than `length` by less than this many bytes, and the storage may end
    /// there. 0 if the length is exact.
    pub slack: u32,
    /// How they are inflated, and to how many bytes.
    pub inflater: Inflater,
}

impl CompressedData {
    /// The work of inflating them.
    #[doc(hidden)]
    pub fn work(&self) -> u64 {
        self.inflater.work(self.length)
    }

    /// The offset after the last byte.
    pub const fn end(&self) -> HostOffset {
        HostOffset(self.host.0.saturating_add(self.length as u64))
    }

    /// The offset of the last byte that the storage must have.
    pub(crate) fn last(&self) -> u64 {
        let slack = u64::from(self.slack.max(1));
        self.end().0.saturating_sub(slack).max(self.host.0)
    }

    /// The part that a storage of `storage_len` bytes has: what it lacks must not be taken for
    /// zeroes, from which other data could be inflated.
    pub(crate) fn within(self, storage_len: u64) -> Self {
        let there = storage_len.saturating_sub(self.host.0);
        CompressedData {
            length: there.min(self.length.into()) as u32,
            ..self
        }
    }

    /// The error of data past the end of the storage; `guest` is where they are mapped.
    pub(crate) fn past_end(&self, guest: u64) -> Error {
        let what = format!(
            "Compressed data at {:#x} are past the end of the file",
            self.host.0
        );
        Error::Corrupt { guest, what }
    }

    /// The error of data that do not inflate; `guest` is where they are mapped.
    pub(crate) fn error(&self, guest: u64, source: CodecError) -> Error {
        Error::Compressed {
            guest,
            host: self.host.0,
            source: source.into(),
        }
    }
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

impl Extent {
    /// An extent whose host offsets are in the image's own file.
    #[doc(hidden)]
    pub const fn in_file(length: u64, mapping: Mapping) -> Self {
        Extent {
            length,
            storage: StorageId::FILE,
            mapping,
        }
    }
}
