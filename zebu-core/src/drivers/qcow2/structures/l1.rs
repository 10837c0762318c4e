//! Entries of the L1 table: where the L2 tables are. Section "Cluster
//! mapping", "L1 table entry".

use super::geometry::{Geometry, OFFSET_MASK};
use crate::error::FormatError;
use crate::offset::HostOffset;

/// Bit 63 of L1 and L2 entries: the refcount of what they point to is
/// exactly one, so it may be written in place.
pub const COPIED: u64 = 1 << 63;

/// Reserved bits of an L1 entry.
const RESERVED: u64 = !(OFFSET_MASK | COPIED);

/// One entry of an L1 table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// Size of an entry in bytes.
    pub const SIZE: usize = 8;

    /// No L2 table: all that the entry covers is unallocated.
    pub const UNALLOCATED: Self = Self(0);

    /// An entry that points to the L2 table at `l2`.
    pub fn new(l2: HostOffset, copied: bool, geometry: &Geometry) -> Result<Self, FormatError> {
        geometry.check_storable("L1 entry", l2, OFFSET_MASK)?;
        Ok(Self(l2.0).with_copied(copied))
    }

    /// The entry from its stored form.
    #[must_use]
    pub const fn from_be_bytes(bytes: [u8; 8]) -> Self {
        Self(u64::from_be_bytes(bytes))
    }

    /// The stored form.
    #[must_use]
    pub const fn to_be_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    /// Whether the refcount of the L2 table is exactly one. Accurate only in
    /// the active L1 table.
    #[must_use]
    pub const fn copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// The same entry with the copied flag set or clear.
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        if copied {
            Self(self.0 | COPIED)
        } else {
            Self(self.0 & !COPIED)
        }
    }

    /// The offset in the entry as it is, unchecked; 0 for none.
    #[must_use]
    pub const fn raw_offset(self) -> HostOffset {
        HostOffset(self.0 & OFFSET_MASK)
    }

    /// The reserved bits that are set, which should be none.
    #[must_use]
    pub const fn reserved_bits(self) -> u64 {
        self.0 & RESERVED
    }

    /// The same entry without its reserved bits.
    #[must_use]
    pub const fn without_reserved(self) -> Self {
        Self(self.0 & !RESERVED)
    }

    /// Where the L2 table is; `None` if there is none. Refuses reserved bits
    /// and an offset that is not aligned to a cluster.
    ///
    /// QEMU passes over reserved bits here and only its check reports them;
    /// for that, call [`L1Entry::without_reserved`] first.
    pub fn l2_table(self, geometry: &Geometry) -> Result<Option<HostOffset>, FormatError> {
        FormatError::check_reserved("L1 entry", self.0, self.reserved_bits())?;
        let offset = self.raw_offset();
        geometry.check_aligned("L1 entry", self.0, offset)?;
        Ok((offset.0 != 0).then_some(offset))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against invalid L1 entries that are accepted.
    use super::super::header::Header;
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Geometry::new(&Header::new(16, 0)).unwrap()
    }

    #[test]
    fn known_entries() {
        let g = geometry();
        let entry = L1Entry(0x8000_0000_0004_0000);
        assert_eq!(entry.l2_table(&g), Ok(Some(HostOffset(0x4_0000))));
        assert!(entry.copied());
        assert_eq!(L1Entry(COPIED).l2_table(&g), Ok(None));
        assert_eq!(
            L1Entry(0x1_0200)
                .l2_table(&g)
                .unwrap_err()
                .at("L1 table", 3)
                .to_string(),
            "L1 table 3: L1 entry 0x10200: host offset 0x10200 unaligned to cluster boundary"
        );
        assert!(matches!(
            L1Entry(0x0100_0000_0001_0001).l2_table(&g),
            Err(FormatError::ReservedBits {
                bits: 0x0100_0000_0000_0001,
                ..
            })
        ));
        assert!(L1Entry::new(HostOffset(1 << 56), true, &g).is_err());
        assert!(L1Entry::new(HostOffset(0), true, &g).is_err());
    }

    proptest! {
        #[test]
        fn any_bits(raw: u64) {
            let g = geometry();
            let entry = L1Entry(raw);
            if let Ok(Some(at)) = entry.l2_table(&g) {
                prop_assert_eq!(L1Entry::new(at, entry.copied(), &g), Ok(entry));
            }
            let _ = entry.without_reserved().l2_table(&g);
            prop_assert_eq!(L1Entry::from_be_bytes(entry.to_be_bytes()), entry);
        }
    }
}
