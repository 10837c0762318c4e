//! Entries of an L2 table: what a cluster of the virtual disk is. Sections
//! "Cluster mapping" and "Extended L2 Entries".

use super::bytes::be64;
use super::geometry::{Geometry, OFFSET_MASK};
use super::l1::COPIED;
use crate::error::FormatError;
use crate::offset::HostOffset;

/// Bit 62: the cluster is compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard cluster descriptor: the cluster reads as zeros.
pub const ZERO: u64 = 1;
/// A subcluster bitmap that has all subclusters allocated.
pub const ALL_ALLOCATED: u64 = 0xffff_ffff;
/// A subcluster bitmap that has all subclusters read as zeros.
pub const ALL_ZERO: u64 = 0xffff_ffff_0000_0000;

/// Reserved bits of a standard cluster descriptor, bit 0 not among them.
const RESERVED: u64 = !(OFFSET_MASK | COPIED | COMPRESSED | ZERO);
/// Compressed data is counted in sectors of this many bytes.
const SECTOR: u64 = 512;

/// One entry of an L2 table: the descriptor, and with extended L2 entries the
/// subcluster bitmap (0 without).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct L2Entry {
    /// The cluster descriptor with its two flags.
    pub desc: u64,
    /// Subcluster bitmap: bits 0 to 31 allocated, bits 32 to 63 reads as zeros.
    pub bitmap: u64,
}

/// Compressed data of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompressedCluster {
    /// Where the data starts in the image file; not aligned to anything.
    pub offset: HostOffset,
    /// Bytes from `offset` to the end of the last sector that the data
    /// touches: at least 1, at most two clusters. The stream may end earlier.
    pub length: u64,
}

impl CompressedCluster {
    /// The offset after the last byte.
    #[must_use]
    pub const fn end(&self) -> HostOffset {
        HostOffset(self.offset.0.saturating_add(self.length))
    }
}

/// The kind of a cluster of the virtual disk, by its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClusterKind {
    /// Reads come from the backing file, or are zeros without one. With
    /// extended L2 entries: no host cluster, ask the subclusters.
    Unallocated,
    /// Reads as zeros. Never with extended L2 entries.
    Zero {
        /// A host cluster that is reserved for it.
        host: Option<HostOffset>,
    },
    /// Data at `host`. With extended L2 entries: a host cluster is there,
    /// ask the subclusters what of it holds data.
    Data {
        /// Start of the host cluster.
        host: HostOffset,
    },
    /// Compressed data.
    Compressed(CompressedCluster),
}

/// What a subcluster is. Without extended L2 entries the whole cluster is
/// one subcluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SubclusterKind {
    /// Reads come from the backing file, or are zeros without one.
    Unallocated {
        /// Where the subcluster would lie in the host cluster that is there.
        host: Option<HostOffset>,
    },
    /// Reads as zeros.
    Zero {
        /// Where the subcluster would lie in the host cluster that is there.
        host: Option<HostOffset>,
    },
    /// Data.
    Data {
        /// Where the subcluster (not its cluster) starts.
        host: HostOffset,
    },
    /// The whole cluster is compressed.
    Compressed(CompressedCluster),
    /// The bitmap contradicts itself or the descriptor: the cluster must not
    /// be used.
    Invalid,
}

impl L2Entry {
    /// Nothing allocated.
    pub const UNALLOCATED: Self = Self { desc: 0, bitmap: 0 };

    /// Entry `index` of an L2 table, or of a slice of one. `None` past its end.
    #[must_use]
    pub fn read(table: &[u8], index: usize, geometry: &Geometry) -> Option<Self> {
        let at = index.checked_mul(geometry.l2_entry_size())?;
        Some(Self {
            desc: be64(table, at)?,
            bitmap: if geometry.has_extended_l2() {
                be64(table, at.checked_add(8)?)?
            } else {
                0
            },
        })
    }

    /// Stores the entry at `index` of an L2 table, or of a slice of one.
    /// Says whether the index was within it; if not, nothing is changed.
    #[must_use]
    pub fn write(self, table: &mut [u8], index: usize, geometry: &Geometry) -> bool {
        let size = geometry.l2_entry_size();
        let Some(place) = index
            .checked_mul(size)
            .and_then(|at| table.get_mut(at..at.checked_add(size)?))
        else {
            return false;
        };
        let (desc, bitmap) = place.split_at_mut(8);
        desc.copy_from_slice(&self.desc.to_be_bytes());
        if geometry.has_extended_l2() {
            bitmap.copy_from_slice(&self.bitmap.to_be_bytes());
        }
        true
    }

    /// A cluster that holds data, all of it, at `host`.
    pub fn data(host: HostOffset, copied: bool, geometry: &Geometry) -> Result<Self, FormatError> {
        Self::pointing(host, copied, ALL_ALLOCATED, geometry)
    }

    /// A cluster that reads as zeros and has no host cluster. Version 2
    /// cannot say that.
    pub fn zero_plain(geometry: &Geometry) -> Result<Self, FormatError> {
        if geometry.has_extended_l2() {
            return Ok(Self {
                desc: 0,
                bitmap: ALL_ZERO,
            });
        }
        if geometry.version() < 3 {
            return Err(FormatError::ZeroInVersion2(ZERO));
        }
        Ok(Self {
            desc: ZERO,
            bitmap: 0,
        })
    }

    /// A cluster that reads as zeros and has the host cluster `host`.
    /// Version 2 cannot say that.
    pub fn zero_allocated(
        host: HostOffset,
        copied: bool,
        geometry: &Geometry,
    ) -> Result<Self, FormatError> {
        let mut entry = Self::pointing(host, copied, ALL_ZERO, geometry)?;
        if !geometry.has_extended_l2() {
            if geometry.version() < 3 {
                return Err(FormatError::ZeroInVersion2(entry.desc | ZERO));
            }
            entry.desc |= ZERO;
        }
        Ok(entry)
    }

    /// A cluster with a bitmap of its own, in an image with extended L2
    /// entries: `allocated` and `zero` have a bit for each subcluster.
    pub fn subclusters(
        host: Option<HostOffset>,
        copied: bool,
        allocated: u32,
        zero: u32,
        geometry: &Geometry,
    ) -> Result<Self, FormatError> {
        let bitmap = u64::from(allocated) | (u64::from(zero) << 32);
        let contradiction = allocated & zero != 0 || (host.is_none() && allocated != 0);
        if contradiction || !geometry.has_extended_l2() {
            return Err(FormatError::SubclusterBitmap {
                desc: host.map_or(0, HostOffset::get),
                bitmap,
            });
        }
        match host {
            Some(host) => Self::pointing(host, copied, bitmap, geometry),
            None => Ok(Self { desc: 0, bitmap }),
        }
    }

    /// Compressed data of `length` bytes at `offset`. The descriptor counts
    /// sectors, so the length is rounded up to the end of the last one.
    pub fn compressed(
        offset: HostOffset,
        length: u64,
        geometry: &Geometry,
    ) -> Result<Self, FormatError> {
        if offset.0 == 0 || offset.0 >= geometry.compressed_offset_limit() {
            return Err(FormatError::OffsetUnstorable {
                what: "compressed cluster",
                offset: offset.0,
            });
        }
        let unfit = FormatError::CompressedLength {
            offset: offset.0,
            length,
        };
        let Some(last) = length.checked_sub(1).and_then(|n| offset.0.checked_add(n)) else {
            return Err(unfit);
        };
        let more_sectors = last / SECTOR - offset.0 / SECTOR;
        if more_sectors > geometry.compressed_size_mask() {
            return Err(unfit);
        }
        if geometry.has_data_file() {
            return Err(FormatError::CompressedInDataFile(offset.0));
        }
        Ok(Self {
            desc: COMPRESSED | (more_sectors << geometry.compressed_size_shift()) | offset.0,
            bitmap: 0,
        })
    }

    /// A standard descriptor that points to a host cluster.
    fn pointing(
        host: HostOffset,
        copied: bool,
        bitmap: u64,
        geometry: &Geometry,
    ) -> Result<Self, FormatError> {
        // Offset 0 is the header, except in an external data file, where the
        // copied flag distinguishes it from an unallocated cluster.
        let zero_is_fine = geometry.has_data_file() && copied;
        if host.0 != 0 || !zero_is_fine {
            geometry.check_storable("L2 entry", host, OFFSET_MASK)?;
        }
        Ok(Self {
            desc: host.0 | if copied { COPIED } else { 0 },
            bitmap: if geometry.has_extended_l2() {
                bitmap
            } else {
                0
            },
        })
    }

    /// Whether the refcount of the host cluster is exactly one. Accurate only
    /// in L2 tables of the active L1 table.
    #[must_use]
    pub const fn copied(self) -> bool {
        self.desc & COPIED != 0
    }

    /// The same entry with the copied flag set or clear.
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        Self {
            desc: if copied {
                self.desc | COPIED
            } else {
                self.desc & !COPIED
            },
            ..self
        }
    }

    /// Whether the cluster is compressed.
    #[must_use]
    pub const fn is_compressed(self) -> bool {
        self.desc & COMPRESSED != 0
    }

    /// The host cluster offset of a standard descriptor as it is, unchecked.
    #[must_use]
    pub const fn raw_offset(self) -> HostOffset {
        HostOffset(self.desc & OFFSET_MASK)
    }

    /// Subclusters that are allocated, a bit each.
    #[must_use]
    pub const fn allocated_bits(self) -> u32 {
        self.bitmap as u32
    }

    /// Subclusters that read as zeros, a bit each.
    #[must_use]
    pub const fn zero_bits(self) -> u32 {
        (self.bitmap >> 32) as u32
    }

    /// The reserved bits of the descriptor that are set, which should be
    /// none.
    #[must_use]
    pub const fn reserved_bits(self, geometry: &Geometry) -> u64 {
        self.desc & Self::reserved_mask(self.desc, geometry)
    }

    /// The same entry without the reserved bits of its descriptor.
    #[must_use]
    pub const fn without_reserved(self, geometry: &Geometry) -> Self {
        Self {
            desc: self.desc & !Self::reserved_mask(self.desc, geometry),
            ..self
        }
    }

    const fn reserved_mask(desc: u64, geometry: &Geometry) -> u64 {
        if desc & COMPRESSED != 0 {
            // Offset bits above 55, where the field reaches that far.
            geometry.compressed_offset_mask() & !(geometry.compressed_offset_limit() - 1)
        } else if geometry.has_extended_l2() {
            RESERVED | ZERO
        } else {
            RESERVED
        }
    }

    /// What the cluster is. Refuses reserved bits, a host offset that is not
    /// aligned to a cluster, the zero bit in version 2, and compressed
    /// clusters in an image with an external data file.
    ///
    /// QEMU passes over reserved bits here and only its check reports them;
    /// for that, call [`L2Entry::without_reserved`] first. A compressed
    /// cluster with the copied flag is for a check to report, and is read.
    pub fn kind(self, geometry: &Geometry) -> Result<ClusterKind, FormatError> {
        FormatError::check_reserved("L2 entry", self.desc, self.reserved_bits(geometry))?;
        if self.is_compressed() {
            if geometry.has_data_file() {
                return Err(FormatError::CompressedInDataFile(self.desc));
            }
            return Ok(ClusterKind::Compressed(self.compressed_extent(geometry)));
        }
        let host = self.raw_offset();
        geometry.check_aligned("L2 entry", self.desc, host)?;
        if self.desc & ZERO != 0 {
            if geometry.version() < 3 {
                return Err(FormatError::ZeroInVersion2(self.desc));
            }
            let there = host.0 != 0 || (geometry.has_data_file() && self.copied());
            return Ok(ClusterKind::Zero {
                host: there.then_some(host),
            });
        }
        if host.0 != 0 || (geometry.has_data_file() && self.copied()) {
            return Ok(ClusterKind::Data { host });
        }
        Ok(ClusterKind::Unallocated)
    }

    fn compressed_extent(self, geometry: &Geometry) -> CompressedCluster {
        let offset = self.desc & geometry.compressed_offset_mask();
        let more_sectors =
            (self.desc >> geometry.compressed_size_shift()) & geometry.compressed_size_mask();
        CompressedCluster {
            offset: HostOffset(offset),
            // At most 2^13 sectors, less what lies before the offset.
            length: (more_sectors + 1) * SECTOR - offset % SECTOR,
        }
    }

    /// What subcluster `index` is (always 0 without extended L2 entries).
    pub fn subcluster(
        self,
        index: u32,
        geometry: &Geometry,
    ) -> Result<SubclusterKind, FormatError> {
        Ok(self.subcluster_run(index, geometry)?.0)
    }

    /// What subcluster `from` is, and how many subclusters from there to the
    /// end of the cluster are of the same kind, itself included. Of data the
    /// run is contiguous in the host cluster.
    ///
    /// A bitmap that contradicts itself anywhere makes the whole cluster
    /// invalid, as it does for QEMU.
    pub fn subcluster_run(
        self,
        from: u32,
        geometry: &Geometry,
    ) -> Result<(SubclusterKind, u32), FormatError> {
        let count = geometry.subclusters_per_cluster();
        if from >= count {
            return Err(FormatError::IndexOutOfRange {
                what: "subcluster",
                index: u64::from(from),
                entries: u64::from(count),
            });
        }
        let kind = self.kind(geometry)?;
        let rest = count - from;
        let host = match kind {
            ClusterKind::Compressed(c) => return Ok((SubclusterKind::Compressed(c), rest)),
            ClusterKind::Zero { host } => return Ok((SubclusterKind::Zero { host }, rest)),
            ClusterKind::Data { host } if !geometry.has_extended_l2() => {
                return Ok((SubclusterKind::Data { host }, rest));
            }
            ClusterKind::Unallocated if !geometry.has_extended_l2() => {
                return Ok((SubclusterKind::Unallocated { host: None }, rest));
            }
            ClusterKind::Data { host } => Some(host),
            ClusterKind::Unallocated => None,
        };
        let allocated = self.allocated_bits();
        let zero = self.zero_bits();
        if allocated & zero != 0 || (host.is_none() && allocated != 0) {
            return Ok((SubclusterKind::Invalid, rest));
        }
        // A host cluster is aligned and below 2^56, so this cannot overflow.
        let place = host.map(|h| HostOffset(h.0 + (u64::from(from) << geometry.subcluster_bits())));
        let here = 1 << from;
        let (kind, others) = match place {
            Some(host) if allocated & here != 0 => (SubclusterKind::Data { host }, !allocated),
            host if zero & here != 0 => (SubclusterKind::Zero { host }, !zero),
            host => (SubclusterKind::Unallocated { host }, allocated | zero),
        };
        Ok((kind, (others >> from).trailing_zeros().min(rest)))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an L2 entry that is decoded wrong, so that a guest would read another cluster,
    //! and a run of subclusters that is too long.
    use super::super::header::Header;
    use super::*;
    use proptest::prelude::*;

    fn geometry(bits: u32, extended: bool, data_file: bool) -> Geometry {
        let mut header = Header::new(bits, 0);
        header.set_extended_l2(extended);
        header.set_incompatible(super::super::INCOMPATIBLE_DATA_FILE, data_file);
        Geometry::new(&header).unwrap()
    }

    fn desc(desc: u64) -> L2Entry {
        L2Entry { desc, bitmap: 0 }
    }

    #[test]
    fn standard_entries() {
        let g = geometry(16, false, false);
        let host = HostOffset(0x5_0000);
        assert_eq!(desc(0).kind(&g), Ok(ClusterKind::Unallocated));
        assert_eq!(desc(1).kind(&g), Ok(ClusterKind::Zero { host: None }));
        assert_eq!(
            desc(0x8000_0000_0005_0001).kind(&g),
            Ok(ClusterKind::Zero { host: Some(host) })
        );
        assert_eq!(
            desc(0x8000_0000_0005_0000).kind(&g),
            Ok(ClusterKind::Data { host })
        );
        // The copied flag alone means nothing without an external data file.
        assert_eq!(desc(COPIED).kind(&g), Ok(ClusterKind::Unallocated));
        assert!(matches!(
            desc(0x5_0200).kind(&g),
            Err(FormatError::Unaligned { .. })
        ));
        assert!(matches!(
            desc(0x5_0002).kind(&g),
            Err(FormatError::ReservedBits { bits: 2, .. })
        ));
        assert!(desc(0x5_0002).without_reserved(&g).kind(&g).is_ok());
    }

    #[test]
    fn version_2_has_no_zero_clusters() {
        let g = Geometry::new(&Header::new_v2(16, 0)).unwrap();
        assert_eq!(
            desc(0x5_0001).kind(&g).unwrap_err().to_string(),
            "Zero cluster entry found in pre-v3 image (L2 entry 0x50001)"
        );
        assert!(L2Entry::zero_plain(&g).is_err());
        assert!(L2Entry::zero_allocated(HostOffset(0x5_0000), true, &g).is_err());
    }

    #[test]
    fn first_cluster_of_a_data_file() {
        let g = geometry(16, false, true);
        assert_eq!(
            desc(COPIED).kind(&g),
            Ok(ClusterKind::Data {
                host: HostOffset(0)
            })
        );
        assert_eq!(desc(0).kind(&g), Ok(ClusterKind::Unallocated));
        assert_eq!(L2Entry::data(HostOffset(0), true, &g), Ok(desc(COPIED)));
        assert!(L2Entry::data(HostOffset(0), false, &g).is_err());
        assert!(matches!(
            desc(COMPRESSED | 0x1234).kind(&g),
            Err(FormatError::CompressedInDataFile(_))
        ));
    }

    #[test]
    fn compressed_entries() {
        let g = geometry(16, false, false);
        // Two more sectors after the one that holds byte 0x50123.
        let entry = desc(COMPRESSED | (2 << 54) | 0x5_0123);
        assert_eq!(
            entry.kind(&g),
            Ok(ClusterKind::Compressed(CompressedCluster {
                offset: HostOffset(0x5_0123),
                length: 3 * 512 - 0x123,
            }))
        );
        assert_eq!(
            L2Entry::compressed(HostOffset(0x5_0123), 1000, &g),
            Ok(entry)
        );
        // With clusters of 2 MiB the offset has only 49 bits.
        let large = geometry(21, false, false);
        assert!(L2Entry::compressed(HostOffset((1 << 49) - 1), 1, &large).is_ok());
        assert!(L2Entry::compressed(HostOffset(1 << 49), 1, &large).is_err());
        // With clusters of 512 bytes it has 61, of which the upper 5 are reserved.
        let small = geometry(9, false, false);
        assert!(matches!(
            desc(COMPRESSED | (1 << 56)).kind(&small),
            Err(FormatError::ReservedBits { .. })
        ));
        assert!(L2Entry::compressed(HostOffset(512), 1025, &small).is_err());
        assert!(L2Entry::compressed(HostOffset(512), 1024, &small).is_ok());
        assert!(L2Entry::compressed(HostOffset(512), 0, &small).is_err());
    }

    #[test]
    fn subclusters_of_an_entry() {
        let g = geometry(16, true, false);
        let host = HostOffset(0x5_0000);
        let entry = L2Entry::subclusters(Some(host), true, 0b0111, 0b1000, &g).unwrap();
        assert_eq!(
            entry.subcluster_run(1, &g),
            Ok((
                SubclusterKind::Data {
                    host: HostOffset(0x5_0800)
                },
                2
            ))
        );
        assert_eq!(
            entry.subcluster_run(3, &g),
            Ok((
                SubclusterKind::Zero {
                    host: Some(HostOffset(0x5_1800))
                },
                1
            ))
        );
        assert_eq!(
            entry.subcluster_run(4, &g),
            Ok((
                SubclusterKind::Unallocated {
                    host: Some(HostOffset(0x5_2000))
                },
                28
            ))
        );
        assert!(entry.subcluster_run(32, &g).is_err());
        let bad = L2Entry {
            bitmap: 0x1_0000_0001,
            ..entry
        };
        assert_eq!(bad.subcluster_run(7, &g), Ok((SubclusterKind::Invalid, 25)));
        assert_eq!(
            L2Entry { desc: 0, bitmap: 1 }.subcluster(9, &g),
            Ok(SubclusterKind::Invalid)
        );
        assert!(L2Entry::subclusters(None, false, 1, 0, &g).is_err());
        assert!(L2Entry::subclusters(Some(host), false, 1, 1, &g).is_err());
    }

    /// The kind of one subcluster, written as the specification has it.
    fn naive(entry: L2Entry, index: u32, g: &Geometry) -> SubclusterKind {
        let place = |host: HostOffset| HostOffset(host.0 + u64::from(index) * g.subcluster_size());
        let host = match entry.kind(g).unwrap() {
            ClusterKind::Compressed(c) => return SubclusterKind::Compressed(c),
            ClusterKind::Data { host } => Some(host),
            _ => None,
        };
        for i in 0..32 {
            let allocated = entry.bitmap & (1 << i) != 0;
            let zero = entry.bitmap & (1 << (i + 32)) != 0;
            if allocated && (zero || host.is_none()) {
                return SubclusterKind::Invalid;
            }
        }
        if entry.bitmap & (1 << index) != 0 {
            SubclusterKind::Data {
                host: place(host.unwrap()),
            }
        } else if entry.bitmap & (1 << (index + 32)) != 0 {
            SubclusterKind::Zero {
                host: host.map(place),
            }
        } else {
            SubclusterKind::Unallocated {
                host: host.map(place),
            }
        }
    }

    proptest! {
        #[test]
        fn runs_match_a_naive_model(
            cluster in 0u64..3, allocated: u32, zero: u32, mix in 0u32..4, from in 0u32..32,
        ) {
            let g = geometry(16, true, false);
            // Mostly valid bitmaps, some with long runs.
            let (allocated, zero) = match mix {
                0 => (allocated, zero),
                1 => (allocated, zero & !allocated),
                2 => (allocated | 0xffff, 0xffff_0000 & zero & !allocated),
                _ => (0, zero | 0xff00),
            };
            let entry = L2Entry {
                desc: cluster << 16,
                bitmap: u64::from(allocated) | (u64::from(zero) << 32),
            };
            let (kind, run) = entry.subcluster_run(from, &g).unwrap();
            prop_assert_eq!(kind, naive(entry, from, &g));
            let same = |i| std::mem::discriminant(&naive(entry, i, &g)) == std::mem::discriminant(&kind);
            let expected = (from..32).take_while(|i| same(*i)).count();
            prop_assert_eq!(run as usize, expected);
        }

        #[test]
        fn any_bits(d: u64, bitmap: u64, bits in 14u32..=21, ext: bool, file: bool, sc in 0u32..40) {
            let g = geometry(bits, ext, file);
            let entry = L2Entry { desc: d, bitmap: if ext { bitmap } else { 0 } };
            for entry in [entry, entry.without_reserved(&g)] {
                let _ = entry.subcluster_run(sc, &g);
                match entry.kind(&g) {
                    Ok(ClusterKind::Compressed(c)) => {
                        prop_assert!(c.length >= 1 && c.length <= 2 * g.cluster_size());
                        if c.offset.0 != 0 {
                            let again = L2Entry::compressed(c.offset, c.length, &g).unwrap();
                            prop_assert_eq!(again.desc, entry.desc & !COPIED);
                        }
                    }
                    Ok(ClusterKind::Data { host }) => prop_assert_eq!(
                        L2Entry::data(host, entry.copied(), &g).unwrap().desc, entry.desc
                    ),
                    Ok(ClusterKind::Zero { host: Some(host) }) => prop_assert_eq!(
                        L2Entry::zero_allocated(host, entry.copied(), &g), Ok(entry)
                    ),
                    _ => {}
                }
            }
        }

        #[test]
        fn table_round_trip(d: u64, bitmap: u64, ext: bool, index in 0usize..20) {
            let g = geometry(16, ext, false);
            let entry = L2Entry { desc: d, bitmap: if ext { bitmap } else { 0 } };
            let mut table = vec![0; 16 * g.l2_entry_size()];
            prop_assert_eq!(entry.write(&mut table, index, &g), index < 16);
            prop_assert_eq!(L2Entry::read(&table, index, &g), (index < 16).then_some(entry));
        }
    }
}
