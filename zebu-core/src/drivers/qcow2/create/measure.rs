//! How large the file of a new image is, by its options.

use super::{CreateQcow2, NewEncryption};
use crate::drivers::qcow2::structures::{BitmapEntry, MAX_L1_BYTES, RefcountSpace};
use crate::drivers::{BitmapInfo, Preallocation};
use crate::{Error, Result};

options! {
    /// The options of a qcow2 image that its size depends on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Qcow2Target {
        /// Version: 2 or 3.
        pub version: u32,
        /// Cluster size as a power of two.
        pub cluster_bits: u32,
        /// Refcount width as a power of two of bits.
        pub refcount_order: u32,
        /// Extended L2 entries.
        pub extended_l2: bool,
        /// Every cluster gets its space at once.
        pub preallocated: bool,
        /// It gets a backing file whose content is not known.
        pub backing: bool,
        /// Bytes of the header of its encryption.
        pub encryption: u64,
    }
}

impl From<&CreateQcow2> for Qcow2Target {
    /// The image that would be made.
    fn from(image: &CreateQcow2) -> Self {
        Qcow2Target {
            version: image.version,
            cluster_bits: image.cluster_bits,
            refcount_order: image.refcount_order,
            extended_l2: image.extended_l2,
            preallocated: matches!(
                image.preallocation,
                Preallocation::Falloc | Preallocation::Full
            ),
            backing: image.backing.is_some(),
            encryption: image.encryption.as_ref().map_or(0, NewEncryption::length),
        }
    }
}

impl Default for Qcow2Target {
    /// QEMU's defaults.
    fn default() -> Self {
        Qcow2Target {
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            preallocated: false,
            backing: false,
            encryption: 0,
        }
    }
}

pub(crate) fn too_large() -> Error {
    Error::Refused("The image size is too large (try using a larger cluster size)".into())
}

impl Qcow2Target {
    const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of all clusters of a disk of `size` bytes.
    pub(crate) fn disk_bytes(&self, size: u64) -> Result<u64> {
        size.checked_next_multiple_of(self.cluster_size())
            .ok_or_else(too_large)
    }

    /// Bytes of header, tables and refcounts of a disk of `size` bytes, all of it allocated.
    pub(crate) fn metadata_bytes(&self, size: u64) -> Result<u64> {
        let clusters = self.disk_bytes(size)? >> self.cluster_bits;
        let l2_entry = if self.extended_l2 { 16 } else { 8 };
        let l2_tables = clusters.div_ceil(self.cluster_size() / l2_entry);
        if l2_tables * 8 > MAX_L1_BYTES {
            return Err(too_large());
        }
        let l1_clusters = (l2_tables * 8).div_ceil(self.cluster_size());
        let others = 1 + l1_clusters + l2_tables;
        let (bits, order) = (self.cluster_bits, self.refcount_order);
        let refcounts = RefcountSpace::of_file(others + clusters, bits, order);
        let encryption = self.encryption.next_multiple_of(self.cluster_size());
        Ok(((others + refcounts.clusters()) << bits) + encryption)
    }

    /// Bytes of copies of these bitmaps of a disk of `size` bytes.
    pub(crate) fn bitmap_bytes(&self, size: u64, bitmaps: &[BitmapInfo]) -> u64 {
        let cluster_size = self.cluster_size();
        let (mut bytes, mut directory) = (0u64, 0u64);
        for bitmap in bitmaps {
            let bits = size.div_ceil(bitmap.granularity.max(1));
            let clusters = bits.div_ceil(8).div_ceil(cluster_size);
            let table = (clusters * 8).next_multiple_of(cluster_size);
            bytes = bytes.saturating_add(clusters * cluster_size + table);
            directory += BitmapEntry::stored_len(bitmap.name.len(), 0) as u64;
        }
        bytes.saturating_add(directory.next_multiple_of(cluster_size))
    }
}
