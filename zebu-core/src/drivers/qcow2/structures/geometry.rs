//! The numbers that follow from a header: how large things are and which
//! entry of which table belongs to an offset.

use super::bounds::{self, MAX_REFCOUNT_ORDER};
use super::header::Header;
use crate::error::FormatError;
use crate::offset::{GuestOffset, HostOffset};

/// Bits of a host offset that L1, standard L2 and bitmap table entries can
/// hold: 9 to 55. Section "Cluster mapping".
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// Subclusters in a cluster of an image with extended L2 entries. Section
/// "Extended L2 Entries".
pub const SUBCLUSTERS: u32 = 32;

/// The sizes of one image. Small, `Copy`, and computed once: a request needs only shifts and masks.
///
/// All numbers are checked in [`Geometry::new`], so no method overflows on any offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    version: u32,
    cluster_bits: u32,
    refcount_order: u32,
    extended_l2: bool,
    data_file: bool,
    size: u64,
}

impl Header {
    /// The sizes that follow from this header.
    ///
    /// # Errors
    ///
    /// Those of [`Geometry::new`].
    pub fn geometry(&self) -> Result<Geometry, FormatError> {
        Geometry::new(self)
    }
}

impl Geometry {
    /// The geometry of a header. Refuses a version, cluster size, subcluster
    /// size or refcount width that is out of range, so that a geometry that
    /// exists is a sane one.
    pub fn new(header: &Header) -> Result<Self, FormatError> {
        bounds::check_version(header.version)?;
        bounds::check_cluster_bits(header.cluster_bits)?;
        bounds::check_subclusters(header.cluster_bits, header.has_extended_l2())?;
        if header.refcount_order > MAX_REFCOUNT_ORDER {
            return Err(FormatError::RefcountWidth);
        }
        Ok(Self {
            version: header.version,
            cluster_bits: header.cluster_bits,
            refcount_order: header.refcount_order,
            extended_l2: header.has_extended_l2(),
            data_file: header.has_data_file(),
            size: header.size,
        })
    }

    /// The same image with another virtual size in bytes (resize, or a
    /// snapshot of another size).
    #[must_use]
    pub const fn with_virtual_size(mut self, bytes: u64) -> Self {
        self.size = bytes;
        self
    }

    /// Version of the image: 2 or 3.
    #[must_use]
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// The same geometry with another version.
    #[must_use]
    pub(crate) const fn with_version(self, version: u32) -> Self {
        Geometry { version, ..self }
    }

    /// Cluster size as a power of two: 9 to 21.
    #[must_use]
    pub const fn cluster_bits(&self) -> u32 {
        self.cluster_bits
    }

    /// Cluster size in bytes.
    #[must_use]
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Size of the virtual disk in bytes. A header may give a size that is
    /// no multiple of 512; QEMU then shows the guest whole sectors only, and
    /// so does this. [`Header::size`] has the number as it is stored.
    #[must_use]
    pub const fn virtual_size(&self) -> u64 {
        self.size & !511
    }

    /// Clusters that the virtual disk has; the last may be partial.
    #[must_use]
    pub const fn guest_clusters(&self) -> u64 {
        self.virtual_size().div_ceil(self.cluster_size())
    }

    /// Whether L2 entries are of 16 bytes, with a subcluster bitmap.
    #[must_use]
    pub const fn has_extended_l2(&self) -> bool {
        self.extended_l2
    }

    /// Whether guest data lies in an external data file.
    #[must_use]
    pub const fn has_data_file(&self) -> bool {
        self.data_file
    }

    /// Subclusters in a cluster: 32 with extended L2 entries, else 1 (the
    /// cluster itself).
    #[must_use]
    pub const fn subclusters_per_cluster(&self) -> u32 {
        if self.extended_l2 { SUBCLUSTERS } else { 1 }
    }

    /// Subcluster size as a power of two.
    #[must_use]
    pub const fn subcluster_bits(&self) -> u32 {
        if self.extended_l2 {
            self.cluster_bits - 5
        } else {
            self.cluster_bits
        }
    }

    /// Subcluster size in bytes.
    #[must_use]
    pub const fn subcluster_size(&self) -> u64 {
        1 << self.subcluster_bits()
    }

    /// Size of an L2 entry in bytes: 8, or 16 with extended L2 entries.
    #[must_use]
    pub const fn l2_entry_size(&self) -> usize {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Entries of an L2 table as a power of two.
    #[must_use]
    pub const fn l2_bits(&self) -> u32 {
        self.cluster_bits - if self.extended_l2 { 4 } else { 3 }
    }

    /// Entries of an L2 table, which is one cluster.
    #[must_use]
    pub const fn l2_entries(&self) -> usize {
        1 << self.l2_bits()
    }

    /// Bytes of the virtual disk that one L2 table covers.
    #[must_use]
    pub const fn l2_coverage(&self) -> u64 {
        1 << self.l2_coverage_bits()
    }

    /// Bytes that one L2 table covers, as a power of two (at most 39).
    #[must_use]
    pub const fn l2_coverage_bits(&self) -> u32 {
        self.cluster_bits + self.l2_bits()
    }

    /// L1 entries that a disk of `size` bytes needs.
    #[must_use]
    pub const fn l1_entries_for(&self, size: u64) -> u64 {
        size.div_ceil(self.l2_coverage())
    }

    /// L1 entries that the virtual disk needs. The first entry after them is
    /// where the VM state of snapshots starts.
    #[must_use]
    pub const fn l1_entries(&self) -> u64 {
        self.l1_entries_for(self.size)
    }

    /// Index of the L1 entry that covers `guest`.
    #[must_use]
    pub const fn l1_index(&self, guest: GuestOffset) -> u64 {
        guest.0 >> self.l2_coverage_bits()
    }

    /// Index of the entry of `guest` in its L2 table.
    #[must_use]
    pub const fn l2_index(&self, guest: GuestOffset) -> usize {
        ((guest.0 >> self.cluster_bits) & ((1 << self.l2_bits()) - 1)) as usize
    }

    /// Index of the subcluster of `guest` in its cluster (0 without extended
    /// L2 entries).
    #[must_use]
    pub const fn subcluster_index(&self, guest: GuestOffset) -> u32 {
        (guest.within(self.cluster_bits) >> self.subcluster_bits()) as u32
    }

    /// First byte of the virtual disk that entry `l2_index` of the L2 table
    /// at `l1_index` maps; `None` past 2^64 or past the end of the table.
    #[must_use]
    pub const fn guest_offset(&self, l1_index: u64, l2_index: usize) -> Option<GuestOffset> {
        if l2_index >= self.l2_entries() || l1_index >> (64 - self.l2_coverage_bits()) != 0 {
            return None;
        }
        Some(GuestOffset(
            (l1_index << self.l2_coverage_bits()) | ((l2_index as u64) << self.cluster_bits),
        ))
    }

    /// Bytes from the start of the cluster to `offset` (guest or host alike).
    #[must_use]
    pub const fn offset_in_cluster(&self, offset: u64) -> u64 {
        offset & (self.cluster_size() - 1)
    }

    /// Refuses an offset that an entry cannot hold whose bits of it are `mask`.
    pub(super) fn check_storable(
        &self,
        what: &'static str,
        host: HostOffset,
        mask: u64,
    ) -> Result<(), FormatError> {
        match host.0 != 0 && host.0 & !mask == 0 && host.is_aligned(self.cluster_bits) {
            true => Ok(()),
            false => Err(FormatError::OffsetUnstorable {
                what,
                offset: host.0,
            }),
        }
    }

    /// Refuses the offset `host` of an entry if it is not aligned to a cluster.
    pub(super) fn check_aligned(
        &self,
        what: &'static str,
        value: u64,
        host: HostOffset,
    ) -> Result<(), FormatError> {
        match host.is_aligned(self.cluster_bits) {
            true => Ok(()),
            false => Err(FormatError::Unaligned {
                what,
                value,
                offset: host.0,
            }),
        }
    }

    /// Number of the host cluster that `host` lies in.
    #[must_use]
    pub const fn cluster_index(&self, host: HostOffset) -> u64 {
        host.0 >> self.cluster_bits
    }

    /// The start of host cluster `index`; `None` past 2^64.
    #[must_use]
    pub const fn cluster_offset(&self, index: u64) -> Option<HostOffset> {
        match index.checked_mul(self.cluster_size()) {
            Some(v) => Some(HostOffset(v)),
            None => None,
        }
    }

    /// Clusters that `bytes` bytes need.
    #[must_use]
    pub const fn clusters_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// Width of a refcount as a power of two of bits: 0 to 6.
    #[must_use]
    pub const fn refcount_order(&self) -> u32 {
        self.refcount_order
    }

    /// Width of a refcount in bits: 1 to 64.
    #[must_use]
    pub const fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// The largest refcount that an entry can hold.
    #[must_use]
    pub const fn refcount_max(&self) -> u64 {
        u64::MAX >> (64 - self.refcount_bits())
    }

    /// Entries of a refcount block as a power of two.
    #[must_use]
    pub const fn refcount_block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Entries of a refcount block, which is one cluster. Section "Host
    /// cluster management".
    #[must_use]
    pub const fn refcount_block_entries(&self) -> usize {
        1 << self.refcount_block_bits()
    }

    /// Where the sector count starts in a compressed cluster descriptor, in
    /// bits (the specification's x). Section "Cluster mapping", "Compressed
    /// Clusters Descriptor".
    #[must_use]
    pub const fn compressed_size_shift(&self) -> u32 {
        62 - (self.cluster_bits - 8)
    }

    /// The mask of the sector count of a compressed cluster descriptor, once
    /// shifted down.
    #[must_use]
    pub const fn compressed_size_mask(&self) -> u64 {
        (1 << (self.cluster_bits - 8)) - 1
    }

    /// The mask of the host offset of a compressed cluster descriptor, bits
    /// that must be zero (above 55) included.
    #[must_use]
    pub const fn compressed_offset_mask(&self) -> u64 {
        (1 << self.compressed_size_shift()) - 1
    }

    /// The first host offset where compressed data cannot lie, in bytes.
    #[must_use]
    pub const fn compressed_offset_limit(&self) -> u64 {
        let shift = self.compressed_size_shift();
        1 << if shift < 56 { shift } else { 56 }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against: a wrong shift, which sends a guest offset to another
    //! cluster, in images of unusual cluster size or entry width.
    use super::*;
    use proptest::prelude::*;

    fn geometry(cluster_bits: u32, order: u32, extended: bool) -> Geometry {
        let mut header = Header::new(cluster_bits, 1 << 30);
        header.refcount_order = order;
        header.set_extended_l2(extended);
        Geometry::new(&header).unwrap()
    }

    #[test]
    fn default_image() {
        let g = geometry(16, 4, false);
        assert_eq!(g.l2_entries(), 8192);
        assert_eq!(g.l2_coverage(), 512 << 20);
        assert_eq!(g.l1_entries(), 2);
        assert_eq!(g.refcount_block_entries(), 32768);
        assert_eq!(g.refcount_max(), 65535);
        assert_eq!(g.compressed_size_shift(), 54);
        assert_eq!(g.l1_index(GuestOffset(512 << 20)), 1);
        assert_eq!(g.l2_index(GuestOffset((512 << 20) + 65536 * 3 + 5)), 3);
    }

    #[test]
    fn extended_image() {
        let g = geometry(14, 0, true);
        assert_eq!(g.subcluster_size(), 512);
        assert_eq!(g.l2_entries(), 1024);
        assert_eq!(g.l2_entry_size(), 16);
        assert_eq!(g.subcluster_index(GuestOffset(16384 + 512 * 31)), 31);
        assert_eq!(g.refcount_block_entries(), 131_072);
        assert_eq!(g.refcount_max(), 1);
    }

    #[test]
    fn refuses_small_subclusters() {
        let mut header = Header::new(13, 0);
        header.set_extended_l2(true);
        assert_eq!(
            Geometry::new(&header),
            Err(FormatError::UnsupportedSubclusterSize(256))
        );
    }

    proptest! {
        #[test]
        fn indices_are_the_offset(bits in 14u32..=21, order in 0u32..=6, ext: bool, at: u64) {
            let g = geometry(bits, order, ext);
            let guest = GuestOffset(at);
            let back = g.guest_offset(g.l1_index(guest), g.l2_index(guest)).unwrap();
            prop_assert_eq!(back.0 + g.offset_in_cluster(at), at);
            prop_assert_eq!(
                u64::from(g.subcluster_index(guest)),
                g.offset_in_cluster(at) / g.subcluster_size()
            );
        }
    }
}
