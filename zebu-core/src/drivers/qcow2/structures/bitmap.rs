//! Bitmaps that are stored in the image. Section "Bitmaps".

use super::bounds::{MAX_BITMAP_DIRECTORY_BYTES, MAX_BITMAPS};
use super::bytes::{be16, be32, be64, pad8, slice};
use super::geometry::{Geometry, OFFSET_MASK};
use crate::error::FormatError;
use crate::offset::HostOffset;
use crate::printable;

/// Flag bit 0: the bitmap was not saved correctly.
pub const BITMAP_IN_USE: u32 = 1;
/// Flag bit 1: the bitmap records every change of the disk.
pub const BITMAP_AUTO: u32 = 1 << 1;
/// Flag bit 2: the bitmap may be used though its extra data is not known.
pub const BITMAP_EXTRA_DATA_COMPATIBLE: u32 = 1 << 2;
/// All flag bits that are known here.
const BITMAP_FLAGS_KNOWN: u32 = BITMAP_IN_USE | BITMAP_AUTO | BITMAP_EXTRA_DATA_COMPATIBLE;

/// The type of dirty tracking bitmaps, the only one there is.
pub const BITMAP_TYPE_DIRTY_TRACKING: u8 = 1;
/// Longest name in bytes. A limit of QEMU.
pub const MAX_BITMAP_NAME: usize = 1023;
/// Finest granularity as a power of two of bytes. A limit of QEMU.
pub const MIN_BITMAP_GRANULARITY_BITS: u8 = 9;
/// Coarsest granularity as a power of two of bytes. A limit of QEMU.
pub const MAX_BITMAP_GRANULARITY_BITS: u8 = 31;
/// Most entries of a bitmap table. A limit of QEMU.
pub const MAX_BITMAP_TABLE_ENTRIES: u32 = 0x0800_0000;
/// Most bytes of the clusters of one bitmap. A limit of QEMU.
pub const MAX_BITMAP_BYTES: u64 = 0x2000_0000;

/// Size of the fixed part of a directory entry in bytes.
const FIXED: usize = 24;

/// One entry of the bitmap directory. Section "Bitmap directory".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BitmapEntry {
    /// Offset of the bitmap table in bytes.
    pub table_offset: u64,
    /// Entries of the bitmap table.
    pub table_size: u32,
    /// Flags, `BITMAP_*`.
    pub flags: u32,
    /// Type; [`BITMAP_TYPE_DIRTY_TRACKING`].
    pub kind: u8,
    /// Bytes of the disk to a bit of the bitmap, as a power of two.
    pub granularity_bits: u8,
    /// Extra data; none is defined yet.
    pub extra_data: Vec<u8>,
    /// The name.
    pub name: Vec<u8>,
}

impl BitmapEntry {
    /// Reads one entry at the start of `bytes`.
    ///
    /// `None` means that more bytes are needed. Otherwise the answer has the
    /// length of the entry with its padding. Only what is needed to find the
    /// next entry is checked here; see [`BitmapEntry::check`].
    #[doc(hidden)]
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FormatError> {
        let Some((name_len, extra_len)) = be16(bytes, 18).zip(be32(bytes, 20)) else {
            return Ok(None);
        };
        if u64::from(extra_len) > MAX_BITMAP_DIRECTORY_BYTES {
            return Err(FormatError::BitmapDirectoryBroken("extra data too long"));
        }
        // A directory is at most 64 MiB, so these are far from overflow.
        let extra_len = extra_len as usize;
        let name_len = usize::from(name_len);
        let used = pad8(FIXED + extra_len + name_len);
        if bytes.len() < used {
            return Ok(None);
        }
        let all = || {
            Some(Self {
                table_offset: be64(bytes, 0)?,
                table_size: be32(bytes, 8)?,
                flags: be32(bytes, 12)?,
                kind: *bytes.get(16)?,
                granularity_bits: *bytes.get(17)?,
                extra_data: slice(bytes, FIXED, extra_len)?.to_vec(),
                name: slice(bytes, FIXED + extra_len, name_len)?.to_vec(),
            })
        };
        Ok(all().map(|entry| (entry, used)))
    }

    /// Length of the entry in bytes, with its padding.
    #[must_use]
    #[doc(hidden)]
    pub fn encoded_len(&self) -> usize {
        Self::stored_len(self.name.len(), self.extra_data.len())
    }

    /// The same of an entry with a name and extra data of so many bytes.
    pub(crate) fn stored_len(name: usize, extra_data: usize) -> usize {
        pad8(FIXED + extra_data + name)
    }

    /// The stored form, with padding to a multiple of 8 bytes.
    #[doc(hidden)]
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        let name_len = u16::try_from(self.name.len()).map_err(|_| FormatError::TooLong {
            what: "bitmap name",
            length: self.name.len(),
            max: MAX_BITMAP_NAME,
        })?;
        let extra_len = u32::try_from(self.extra_data.len())
            .ok()
            .filter(|len| u64::from(*len) <= MAX_BITMAP_DIRECTORY_BYTES)
            .ok_or(FormatError::TooLong {
                what: "bitmap extra data",
                length: self.extra_data.len(),
                max: MAX_BITMAP_DIRECTORY_BYTES as usize,
            })?;
        let mut out = Vec::with_capacity(self.encoded_len());
        out.extend_from_slice(&self.table_offset.to_be_bytes());
        out.extend_from_slice(&self.table_size.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.push(self.kind);
        out.push(self.granularity_bits);
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&extra_len.to_be_bytes());
        out.extend_from_slice(&self.extra_data);
        out.extend_from_slice(&self.name);
        out.resize(self.encoded_len(), 0);
        Ok(out)
    }

    /// Reads a directory of `count` entries that fills `bytes` exactly.
    #[doc(hidden)]
    pub fn decode_directory(bytes: &[u8], count: u32) -> Result<Vec<Self>, FormatError> {
        if count > MAX_BITMAPS {
            return Err(FormatError::TooManyBitmaps(count));
        }
        if bytes.len() as u64 > MAX_BITMAP_DIRECTORY_BYTES {
            return Err(FormatError::BitmapDirectoryTooLarge(bytes.len() as u64));
        }
        let mut list = Vec::new();
        let mut rest = bytes;
        for index in 0..count {
            let Some((entry, used)) =
                Self::decode(rest).map_err(|e| e.at("bitmap", u64::from(index)))?
            else {
                return Err(
                    FormatError::BitmapDirectoryBroken("an entry reaches past its end")
                        .at("bitmap", u64::from(index)),
                );
            };
            rest = rest.get(used..).unwrap_or(&[]);
            list.push(entry);
        }
        if !rest.is_empty() {
            return Err(FormatError::BitmapDirectoryBroken(
                "it is longer than its entries",
            ));
        }
        Ok(list)
    }

    /// The stored form of a whole directory.
    #[doc(hidden)]
    pub fn encode_directory(list: &[Self]) -> Result<Vec<u8>, FormatError> {
        if list.len() > MAX_BITMAPS as usize {
            return Err(FormatError::TooManyBitmaps(
                u32::try_from(list.len()).unwrap_or(u32::MAX),
            ));
        }
        let mut out = Vec::new();
        for (entry, index) in list.iter().zip(0..) {
            out.extend(entry.encode().map_err(|e| e.at("bitmap", index))?);
            if out.len() as u64 > MAX_BITMAP_DIRECTORY_BYTES {
                return Err(FormatError::BitmapDirectoryTooLarge(out.len() as u64));
            }
        }
        Ok(out)
    }

    /// Refuses what QEMU refuses: a bitmap outside its limits, or one that is
    /// not of the size of the disk while it claims to be valid.
    #[doc(hidden)]
    pub fn check(&self, geometry: &Geometry) -> Result<(), FormatError> {
        let entry_bytes = u64::from(self.table_size).checked_mul(geometry.cluster_size());
        let why = if self.table_size == 0 {
            "its table is empty"
        } else if self.table_size > MAX_BITMAP_TABLE_ENTRIES {
            "its table is too large"
        } else if self.table_offset == 0
            || !HostOffset(self.table_offset).is_aligned(geometry.cluster_bits())
            || self.table_offset > i64::MAX as u64 - 8 * u64::from(MAX_BITMAP_TABLE_ENTRIES)
        {
            "the offset of its table is invalid"
        } else if !(MIN_BITMAP_GRANULARITY_BITS..=MAX_BITMAP_GRANULARITY_BITS)
            .contains(&self.granularity_bits)
        {
            "its granularity is not within 9 to 31 bits"
        } else if self.flags & !BITMAP_FLAGS_KNOWN != 0 {
            "it has reserved flags set"
        } else if self.name.is_empty() || self.name.len() > MAX_BITMAP_NAME {
            "its name is empty or longer than 1023 bytes"
        } else if self.kind != BITMAP_TYPE_DIRTY_TRACKING {
            "it is no dirty tracking bitmap"
        } else if entry_bytes.is_none_or(|bytes| bytes > MAX_BITMAP_BYTES) {
            "its clusters are more than 512 MiB"
        } else if !self.in_use()
            && u64::from(self.table_size)
                != bitmap_table_entries(geometry.virtual_size(), self.granularity_bits, geometry)
        {
            "its table is of a disk of another size"
        } else {
            return Ok(());
        };
        Err(FormatError::BitmapConstraint {
            name: printable(&self.name),
            why,
        })
    }

    /// Whether the bitmap was not saved correctly and may be inconsistent.
    #[must_use]
    pub const fn in_use(&self) -> bool {
        self.flags & BITMAP_IN_USE != 0
    }

    /// Whether the bitmap records every change of the disk.
    #[must_use]
    pub const fn auto(&self) -> bool {
        self.flags & BITMAP_AUTO != 0
    }

    /// Whether the bitmap may be used though its extra data is not known.
    #[must_use]
    pub const fn extra_data_compatible(&self) -> bool {
        self.flags & BITMAP_EXTRA_DATA_COMPATIBLE != 0
    }

    /// Bytes of the disk to a bit; `None` above 2^63.
    #[must_use]
    pub const fn granularity(&self) -> Option<u64> {
        1u64.checked_shl(self.granularity_bits as u32)
    }
}

/// Entries of the bitmap table (clusters of bitmap data) for a disk of `size`
/// bytes with one bit to `1 << granularity_bits` bytes.
#[must_use]
pub const fn bitmap_table_entries(size: u64, granularity_bits: u8, geometry: &Geometry) -> u64 {
    let bits = if granularity_bits >= 64 {
        (size != 0) as u64
    } else {
        size.div_ceil(1 << granularity_bits)
    };
    bits.div_ceil(8 << geometry.cluster_bits())
}

/// One entry of a bitmap table. Section "Bitmap table".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BitmapTableEntry(pub u64);

/// What a cluster of bitmap data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BitmapCluster {
    /// Not stored: all bits are 0.
    Zeros,
    /// Not stored: all bits are 1.
    Ones,
    /// Stored at `host`.
    Stored {
        /// Start of the host cluster.
        host: HostOffset,
    },
}

impl BitmapTableEntry {
    /// All bits 0.
    pub const ZEROS: Self = Self(0);
    /// All bits 1.
    pub const ONES: Self = Self(1);

    /// Size of an entry in bytes.
    pub const SIZE: usize = 8;

    /// An entry for bitmap data in the cluster at `host`.
    pub fn stored(host: HostOffset, geometry: &Geometry) -> Result<Self, FormatError> {
        geometry.check_storable("bitmap table entry", host, OFFSET_MASK)?;
        Ok(Self(host.0))
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

    /// What the cluster is. Refuses reserved bits and an offset that is not
    /// aligned to a cluster.
    pub fn kind(self, geometry: &Geometry) -> Result<BitmapCluster, FormatError> {
        const WHAT: &str = "bitmap table entry";
        let host = HostOffset(self.0 & OFFSET_MASK);
        let flags = self.0 & !OFFSET_MASK;
        let allowed = if host.0 == 0 { 1 } else { 0 };
        FormatError::check_reserved(WHAT, self.0, flags & !allowed)?;
        geometry.check_aligned(WHAT, self.0, host)?;
        Ok(match (host.0, flags) {
            (0, 0) => BitmapCluster::Zeros,
            (0, _) => BitmapCluster::Ones,
            _ => BitmapCluster::Stored { host },
        })
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a bitmap that is decoded wrong, so that a backup would miss changes, and a
    //! directory that makes the reader run past its end.
    use super::super::header::Header;
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Geometry::new(&Header::new(16, 1 << 31)).unwrap()
    }

    /// The directory that `qemu-img bitmap --add` wrote.
    const ENTRY: &[u8] = b"\0\0\0\0\0\x08\0\0\0\0\0\x01\0\0\0\x02\
        \x01\x10\0\x02\0\0\0\0bm\0\0\0\0\0\0";

    #[test]
    fn known_directory() {
        let list = BitmapEntry::decode_directory(ENTRY, 1).unwrap();
        let entry = &list[0];
        assert_eq!(entry.name, b"bm");
        assert_eq!(entry.table_offset, 0x8_0000);
        assert!(entry.auto() && !entry.in_use());
        assert_eq!(entry.granularity(), Some(65536));
        assert_eq!(entry.check(&geometry()), Ok(()));
        assert_eq!(BitmapEntry::encode_directory(&list).unwrap(), ENTRY);
        assert!(BitmapEntry::decode_directory(ENTRY, 2).is_err());
        assert!(BitmapEntry::decode_directory(ENTRY, 0).is_err());
        for len in 0..ENTRY.len() {
            assert_eq!(BitmapEntry::decode(&ENTRY[..len]), Ok(None));
        }
    }

    #[test]
    fn constraints() {
        let good = BitmapEntry::decode(ENTRY).unwrap().unwrap().0;
        type Change = fn(&mut BitmapEntry);
        let bad: [Change; 9] = [
            |b| b.table_size = 0,
            |b| b.table_size = u32::MAX,
            |b| b.table_offset += 512,
            |b| b.granularity_bits = 8,
            |b| b.granularity_bits = 32,
            |b| b.flags = 8,
            |b| b.kind = 0,
            |b| b.name = Vec::new(),
            |b| b.name = vec![b'x'; 1024],
        ];
        for change in bad {
            let mut entry = good.clone();
            change(&mut entry);
            assert!(entry.check(&geometry()).is_err(), "{entry:?}");
        }
        // Of a disk of another size, which only a bitmap in use may be.
        let large = geometry().with_virtual_size(1 << 40);
        assert!(good.check(&large).is_err());
        let in_use = BitmapEntry {
            flags: BITMAP_IN_USE,
            ..good
        };
        assert_eq!(in_use.check(&large), Ok(()));
    }

    #[test]
    fn table_entries() {
        let g = geometry();
        assert_eq!(BitmapTableEntry(0).kind(&g), Ok(BitmapCluster::Zeros));
        assert_eq!(BitmapTableEntry(1).kind(&g), Ok(BitmapCluster::Ones));
        assert_eq!(
            BitmapTableEntry(0x7_0000).kind(&g),
            Ok(BitmapCluster::Stored {
                host: HostOffset(0x7_0000)
            })
        );
        for bad in [2, 0x7_0001, 0x7_0200, 1 << 56] {
            assert!(BitmapTableEntry(bad).kind(&g).is_err(), "{bad:#x}");
        }
        assert_eq!(bitmap_table_entries(u64::MAX, 0, &g), 1 << 45);
        assert_eq!(bitmap_table_entries(1, 200, &g), 1);
    }

    fn entries() -> impl Strategy<Value = BitmapEntry> {
        let bytes = |n| prop::collection::vec(any::<u8>(), 0..n);
        (any::<(u64, u32, u32, u8, u8)>(), bytes(30), bytes(30)).prop_map(
            |((table_offset, table_size, flags, kind, granularity_bits), extra_data, name)| {
                BitmapEntry {
                    table_offset,
                    table_size,
                    flags,
                    kind,
                    granularity_bits,
                    extra_data,
                    name,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn round_trip(list in prop::collection::vec(entries(), 0..6)) {
            let bytes = BitmapEntry::encode_directory(&list).unwrap();
            for entry in &list {
                let _ = entry.check(&geometry());
            }
            prop_assert_eq!(BitmapEntry::decode_directory(&bytes, list.len() as u32), Ok(list));
        }

        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300), count: u32, raw: u64) {
            let _ = BitmapEntry::decode_directory(&bytes, count % 70000);
            let _ = BitmapEntry::decode(&bytes);
            let g = geometry();
            if let Ok(BitmapCluster::Stored { host }) = BitmapTableEntry(raw).kind(&g) {
                prop_assert_eq!(BitmapTableEntry::stored(host, &g), Ok(BitmapTableEntry(raw)));
            }
        }

        #[test]
        fn damaged_bytes(list in prop::collection::vec(entries(), 1..4), at: usize, byte: u8) {
            let mut bytes = BitmapEntry::encode_directory(&list).unwrap();
            let len = bytes.len();
            bytes[at % len] = byte;
            let _ = BitmapEntry::decode_directory(&bytes, list.len() as u32);
        }
    }
}
