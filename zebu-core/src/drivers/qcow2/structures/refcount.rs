//! The refcount table and its blocks. Section "Host cluster management".

use super::geometry::Geometry;
use crate::error::FormatError;
use crate::offset::HostOffset;

/// Bits of the block offset in a refcount table entry: 9 to 63.
const OFFSET_MASK: u64 = !0x1ff;

/// One entry of the refcount table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RefcountTableEntry(pub u64);

impl RefcountTableEntry {
    /// Size of an entry in bytes.
    pub const SIZE: usize = 8;

    /// No block: all refcounts that it would hold are 0.
    pub const UNALLOCATED: Self = Self(0);

    /// An entry that points to the refcount block at `block`.
    pub fn new(block: HostOffset, geometry: &Geometry) -> Result<Self, FormatError> {
        geometry.check_storable("refcount table entry", block, i64::MAX as u64)?;
        Ok(Self(block.0))
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

    /// The offset in the entry as it is, unchecked; 0 for none.
    #[must_use]
    pub const fn raw_offset(self) -> HostOffset {
        HostOffset(self.0 & OFFSET_MASK)
    }

    /// The reserved bits that are set, which should be none.
    #[must_use]
    pub const fn reserved_bits(self) -> u64 {
        self.0 & !OFFSET_MASK
    }

    /// The same entry without its reserved bits.
    #[must_use]
    pub const fn without_reserved(self) -> Self {
        Self(self.0 & OFFSET_MASK)
    }

    /// Where the refcount block is; `None` if there is none. Refuses reserved
    /// bits and an offset that is not aligned to a cluster or above 2^63.
    ///
    /// QEMU ignores reserved bits here; for that, call
    /// [`RefcountTableEntry::without_reserved`] first.
    pub fn block(self, geometry: &Geometry) -> Result<Option<HostOffset>, FormatError> {
        const WHAT: &str = "refcount table entry";
        FormatError::check_reserved(WHAT, self.0, self.reserved_bits())?;
        let offset = self.raw_offset();
        geometry.check_aligned(WHAT, self.0, offset)?;
        if offset.0 > i64::MAX as u64 {
            return Err(FormatError::TableOffsetInvalid {
                name: "Refcount block",
                offset: offset.0,
            });
        }
        Ok((offset.0 != 0).then_some(offset))
    }
}

/// A refcount block over its bytes (`&[u8]`, `&mut [u8]` or `Vec<u8>`), which
/// may also be a part of one that starts at an entry 0 of its own.
#[derive(Clone, Copy, Debug)]
pub struct RefcountBlock<B> {
    bytes: B,
    order: u32,
}

impl<B: AsRef<[u8]>> RefcountBlock<B> {
    /// A view of `bytes` with the refcount width of `geometry`.
    pub const fn new(bytes: B, geometry: &Geometry) -> Self {
        Self {
            bytes,
            order: geometry.refcount_order(),
        }
    }

    /// The bytes.
    pub fn into_inner(self) -> B {
        self.bytes
    }

    /// Number of entries.
    #[must_use]
    pub fn entries(&self) -> usize {
        let bytes = self.bytes.as_ref().len();
        if self.order >= 3 {
            bytes >> (self.order - 3)
        } else {
            bytes.saturating_mul(8 >> self.order)
        }
    }

    /// Width of an entry in bits.
    #[must_use]
    pub const fn bits(&self) -> u32 {
        1 << self.order
    }

    /// The largest refcount that an entry holds.
    #[must_use]
    pub const fn max(&self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// The bytes that hold entry `index`, as offsets in the block.
    #[must_use]
    pub const fn byte_range(&self, index: usize) -> std::ops::Range<usize> {
        if self.order >= 3 {
            let size = 1 << (self.order - 3);
            let at = index.saturating_mul(size);
            at..at.saturating_add(size)
        } else {
            let at = index >> (3 - self.order);
            at..at + 1
        }
    }

    /// The refcount of entry `index`; `None` past the end.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<u64> {
        if index >= self.entries() {
            return None;
        }
        let place = self.bytes.as_ref().get(self.byte_range(index))?;
        let mut value = 0;
        for byte in place {
            value = (value << 8) | u64::from(*byte);
        }
        // Entries of less than a byte: the first is in the lowest bits.
        Some((value >> self.shift(index)) & self.max())
    }

    /// The first entry at or after `from` whose refcount is 0.
    #[must_use]
    pub fn next_free(&self, from: usize) -> Option<usize> {
        self.next(from, true)
    }

    /// The first entry at or after `from` whose refcount is not 0.
    #[must_use]
    pub fn next_used(&self, from: usize) -> Option<usize> {
        self.next(from, false)
    }

    fn next(&self, from: usize, free: bool) -> Option<usize> {
        let entries = self.entries();
        let per_word = 64 >> self.order;
        let bytes = self.bytes.as_ref();
        let mut index = from;
        while index < entries {
            // A word of zeros holds free entries only, and a word of ones
            // used ones only: pass over those at once.
            if index.is_multiple_of(per_word) {
                let at = index / per_word * 8;
                let word = super::bytes::be64(bytes, at);
                if word == Some(if free { u64::MAX } else { 0 }) {
                    index += per_word;
                    continue;
                }
            }
            if (self.get(index)? == 0) == free {
                return Some(index);
            }
            index += 1;
        }
        None
    }

    const fn shift(&self, index: usize) -> u32 {
        if self.order >= 3 {
            0
        } else {
            ((index & ((8 >> self.order) - 1)) as u32) << self.order
        }
    }
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> RefcountBlock<B> {
    /// Sets the refcount of entry `index`. Refuses a refcount that does not
    /// fit in the width, and an index past the end; then nothing changes.
    pub fn set(&mut self, index: usize, refcount: u64) -> Result<(), FormatError> {
        let entries = self.entries();
        if index >= entries {
            return Err(FormatError::IndexOutOfRange {
                what: "refcount block",
                index: index as u64,
                entries: entries as u64,
            });
        }
        let max = self.max();
        if refcount > max {
            return Err(FormatError::RefcountOverflow {
                value: refcount,
                bits: self.bits(),
                index,
            });
        }
        let shift = self.shift(index);
        let range = self.byte_range(index);
        let Some(place) = self.bytes.as_mut().get_mut(range) else {
            return Err(FormatError::IndexOutOfRange {
                what: "refcount block",
                index: index as u64,
                entries: entries as u64,
            });
        };
        match place {
            [byte] => {
                let others = u64::from(*byte) & !(max << shift);
                *byte = (others | (refcount << shift)) as u8;
            }
            wide => {
                let all = refcount.to_be_bytes();
                wide.copy_from_slice(&all[8 - wide.len()..]);
            }
        }
        Ok(())
    }
}

/// Space for refcount blocks and for a refcount table, in clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefcountSpace {
    /// Refcount blocks.
    pub blocks: u64,
    /// Clusters of the refcount table.
    pub table: u64,
}

impl RefcountSpace {
    /// The least space whose blocks, of `per_block` refcounts each, count `others` clusters, themselves and
    /// the table. `table` gives the clusters of the table for a number of these blocks: more for more.
    pub fn counting(others: u64, per_block: u64, table: impl Fn(u64) -> u64) -> RefcountSpace {
        let mut space = RefcountSpace {
            blocks: 0,
            table: table(0),
        };
        // Each round adds a small fraction of the round before.
        loop {
            let blocks = (others + space.clusters()).div_ceil(per_block);
            if blocks == space.blocks {
                return space;
            }
            space = RefcountSpace {
                blocks,
                table: table(blocks),
            };
        }
    }

    /// The least space in a file without gaps, of `others` clusters of `1 << cluster_bits` bytes besides
    /// it, with refcounts of `1 << order` bits.
    pub fn of_file(others: u64, cluster_bits: u32, order: u32) -> RefcountSpace {
        let cluster = 1u64 << cluster_bits;
        let table = |blocks: u64| (blocks * 8).div_ceil(cluster);
        RefcountSpace::counting(others, (cluster * 8) >> order, table)
    }

    /// All of it.
    #[must_use]
    pub const fn clusters(&self) -> u64 {
        self.blocks + self.table
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a refcount that changes its neighbour, overflows, or is read from the wrong
    //! bits of a byte.
    use super::super::header::Header;
    use super::*;
    use proptest::prelude::*;

    fn geometry(order: u32) -> Geometry {
        let mut header = Header::new(16, 0);
        header.refcount_order = order;
        Geometry::new(&header).unwrap()
    }

    #[test]
    fn known_bytes() {
        // Four clusters in use, as qemu-img leaves them in a new image.
        let one_bit = RefcountBlock::new([0x0fu8, 0], &geometry(0));
        assert_eq!(
            (0..6).map(|i| one_bit.get(i).unwrap()).collect::<Vec<_>>(),
            [1, 1, 1, 1, 0, 0]
        );
        assert_eq!(one_bit.next_free(0), Some(4));
        assert_eq!(one_bit.next_used(4), None);
        let sixteen = RefcountBlock::new([0u8, 1, 0x12, 0x34], &geometry(4));
        assert_eq!(sixteen.get(1), Some(0x1234));
        assert_eq!(sixteen.get(2), None);
        let mut nibbles = RefcountBlock::new([0xa5u8], &geometry(2));
        assert_eq!((nibbles.get(0), nibbles.get(1)), (Some(5), Some(10)));
        nibbles.set(1, 3).unwrap();
        assert_eq!(nibbles.into_inner(), [0x35]);
    }

    #[test]
    fn refuses_overflow() {
        for order in 0..6 {
            let g = geometry(order);
            let mut block = RefcountBlock::new(vec![0u8; 16], &g);
            block.set(1, g.refcount_max()).unwrap();
            let before = block.clone().into_inner();
            assert!(matches!(
                block.set(1, g.refcount_max() + 1),
                Err(FormatError::RefcountOverflow { .. })
            ));
            assert!(block.set(block.entries(), 0).is_err());
            assert_eq!(block.into_inner(), before);
        }
    }

    #[test]
    fn table_entries() {
        let g = geometry(4);
        assert_eq!(RefcountTableEntry(0).block(&g), Ok(None));
        assert_eq!(
            RefcountTableEntry(0x2_0000).block(&g),
            Ok(Some(HostOffset(0x2_0000)))
        );
        assert!(RefcountTableEntry(0x2_0001).block(&g).is_err());
        assert!(RefcountTableEntry(0x2_0200).block(&g).is_err());
        assert!(RefcountTableEntry(1 << 63).block(&g).is_err());
    }

    proptest! {
        #[test]
        fn as_an_array(
            order in 0u32..=6,
            sets in prop::collection::vec((0usize..70, any::<u64>()), 0..40),
            from in 0usize..70,
        ) {
            let g = geometry(order);
            let mut bytes = [0u8; 64];
            let mut block = RefcountBlock::new(&mut bytes[..], &g);
            let entries = block.entries();
            let mut model = vec![0; entries];
            for (index, value) in sets {
                let value = value & g.refcount_max();
                match model.get_mut(index) {
                    Some(place) => {
                        *place = value;
                        block.set(index, value).unwrap();
                    }
                    None => prop_assert!(block.set(index, value).is_err()),
                }
            }
            for (i, value) in model.iter().enumerate() {
                prop_assert_eq!(block.get(i), Some(*value));
            }
            let found = |zero: bool| (from..entries).find(|i| (model[*i] == 0) == zero);
            prop_assert_eq!(block.next_free(from), found(true));
            prop_assert_eq!(block.next_used(from), found(false));
        }

        #[test]
        fn space_is_the_least_that_counts_itself(
            others in prop_oneof![0u64..5000, 0u64..1 << 40],
            cluster_bits in 9u32..=21,
            order in 0u32..=6,
            old in 0u64..1 << 20,
            half in any::<bool>(),
        ) {
            let cluster = 1u64 << cluster_bits;
            let per_block = (cluster * 8) >> order;
            let table = |blocks: u64| {
                let entries = old + blocks;
                (entries + if half { entries / 2 } else { 0 }).div_ceil(cluster / 8)
            };
            let space = RefcountSpace::counting(others, per_block, table);
            prop_assert_eq!(space.table, table(space.blocks));
            let is_enough = |blocks: u64| others + blocks + table(blocks) <= blocks * per_block;
            prop_assert!(is_enough(space.blocks));
            prop_assert!(space.blocks == 0 || !is_enough(space.blocks - 1));
        }

        #[test]
        fn any_bits(raw: u64, index: usize, order in 0u32..=6, bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let g = geometry(order);
            let entry = RefcountTableEntry(raw);
            if let Ok(Some(at)) = entry.block(&g) {
                prop_assert_eq!(RefcountTableEntry::new(at, &g), Ok(entry));
            }
            let block = RefcountBlock::new(&bytes, &g);
            let _ = (block.get(index), block.next_free(index), block.next_used(index % 64));
        }
    }
}
