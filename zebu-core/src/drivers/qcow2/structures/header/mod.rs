//! The header: the first cluster of an image. Section "Header".

mod change;
mod check;
mod decode;
mod encode;

use super::bounds::MAX_CLUSTER_BITS;
use super::extensions::{self, BitmapsExtension, Extension, Extensions, FeatureNames};
use super::features::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_DATA_FILE_RAW, COMPATIBLE_LAZY_REFCOUNTS, Compression,
    CryptMethod, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY,
    INCOMPATIBLE_EXTENDED_L2,
};
use crate::error::FormatError;
use crate::offset::HostOffset;

/// "QFI\xfb", the first four bytes of every image.
pub const MAGIC: u32 = 0x5146_49fb;
/// Length of a version 2 header in bytes.
pub const HEADER_LENGTH_V2: u32 = 72;
/// Least length of a version 3 header in bytes.
pub const HEADER_LENGTH_MIN: u32 = 104;
/// Length in bytes of the version 3 header that QEMU writes today: with the
/// compression type and its padding.
pub const HEADER_LENGTH_V3: u32 = 112;
/// Where the compression type is, in bytes from the start of the file.
const COMPRESSION_AT: usize = 104;
/// QEMU writes no feature name table if clusters are of this size (as a power
/// of two) or less.
const FEATURE_NAMES_ABOVE_BITS: u32 = 12;

/// The header of an image with its extensions and the backing file name:
/// all that the first cluster holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version: 2 or 3.
    pub version: u32,
    /// Where the backing file name is stored, in bytes from the start of the
    /// file; 0 if there is none. When writing, the name stays there if it
    /// can, and otherwise goes right after the extensions (see
    /// [`Header::place_backing_name`]).
    pub backing_offset: u64,
    /// Name of the backing file as it is stored; never empty.
    pub backing_name: Option<Vec<u8>>,
    /// Cluster size as a power of two: 9 to 21.
    pub cluster_bits: u32,
    /// Size of the virtual disk in bytes.
    pub size: u64,
    /// Encryption: 0 none, 1 AES, 2 LUKS. See [`Header::crypt`].
    pub crypt_method: u32,
    /// Entries of the active L1 table.
    pub l1_size: u32,
    /// Offset of the active L1 table in bytes.
    pub l1_offset: u64,
    /// Offset of the refcount table in bytes.
    pub refcount_table_offset: u64,
    /// Clusters that the refcount table occupies.
    pub refcount_table_clusters: u32,
    /// Number of internal snapshots.
    pub nb_snapshots: u32,
    /// Offset of the snapshot table in bytes.
    pub snapshots_offset: u64,
    /// Incompatible feature bits, `INCOMPATIBLE_*`. 0 in version 2.
    pub incompatible: u64,
    /// Compatible feature bits, `COMPATIBLE_*`. 0 in version 2.
    pub compatible: u64,
    /// Autoclear feature bits, `AUTOCLEAR_*`. 0 in version 2.
    pub autoclear: u64,
    /// Width of a refcount as a power of two of bits. 4 in version 2.
    pub refcount_order: u32,
    /// Length of the header in bytes, extensions not included. 72 in version 2.
    pub header_length: u32,
    /// Compression of compressed clusters.
    pub compression: Compression,
    /// Header bytes after the compression type (from byte 105 to
    /// `header_length`): padding, and fields that are not known here.
    pub unknown_fields: Vec<u8>,
    /// The extensions.
    pub extensions: Extensions,
    /// Whether it is written with a version that no program opens. An image that has it is refused.
    pub unfinished: bool,
}

/// The first fields, which determine how many bytes must be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedHeader {
    /// Version: 2 or 3.
    pub version: u32,
    /// Cluster size as a power of two: 9 to 21.
    pub cluster_bits: u32,
}

impl FixedHeader {
    /// Cluster size in bytes: so many [`Header::decode`] needs.
    #[must_use]
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }
}

impl Header {
    /// A version 3 header with QEMU's defaults and no tables yet: refcounts
    /// of 16 bits, zlib, and the standard feature name table unless clusters
    /// are of 4 KiB or less, where QEMU saves the space for a backing file
    /// name. `size` is the virtual size in bytes.
    #[must_use]
    pub fn new(cluster_bits: u32, size: u64) -> Self {
        let mut header = Self {
            version: 3,
            backing_offset: 0,
            backing_name: None,
            cluster_bits,
            size,
            crypt_method: 0,
            l1_size: 0,
            l1_offset: 0,
            refcount_table_offset: 0,
            refcount_table_clusters: 0,
            nb_snapshots: 0,
            snapshots_offset: 0,
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            header_length: HEADER_LENGTH_V3,
            compression: Compression::Zlib,
            unknown_fields: vec![0; HEADER_LENGTH_V3 as usize - COMPRESSION_AT - 1],
            extensions: Extensions::new(),
            unfinished: false,
        };
        if cluster_bits > FEATURE_NAMES_ABOVE_BITS {
            header
                .extensions
                .set(Extension::FeatureNames(FeatureNames::standard()));
        }
        header
    }

    /// A version 2 header with no tables yet.
    #[must_use]
    pub fn new_v2(cluster_bits: u32, size: u64) -> Self {
        Self {
            version: 2,
            header_length: HEADER_LENGTH_V2,
            unknown_fields: Vec::new(),
            extensions: Extensions::new(),
            ..Self::new(cluster_bits, size)
        }
    }

    /// Cluster size in bytes; 0 if `cluster_bits` is out of range, which it
    /// is not in a header that was decoded.
    #[must_use]
    pub const fn cluster_size(&self) -> u64 {
        if self.cluster_bits > MAX_CLUSTER_BITS {
            return 0;
        }
        1 << self.cluster_bits
    }

    /// Name of the backing file up to a NUL, which is where it ends for QEMU.
    #[must_use]
    pub fn backing_file(&self) -> Option<&[u8]> {
        self.backing_name
            .as_deref()
            .map(extensions::until_nul)
            .filter(|name| !name.is_empty())
    }

    /// How guest data is encrypted.
    #[must_use]
    pub const fn crypt(&self) -> CryptMethod {
        match self.crypt_method {
            0 => CryptMethod::None,
            1 => CryptMethod::Aes,
            2 => CryptMethod::Luks,
            other => CryptMethod::Unknown(other),
        }
    }

    /// Whether guest data is encrypted.
    #[must_use]
    pub const fn is_encrypted(&self) -> bool {
        self.crypt_method != 0
    }

    /// Whether refcounts may be inconsistent.
    #[must_use]
    pub const fn is_dirty(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DIRTY != 0
    }

    /// Whether any structure may be corrupt: not to be opened for writing.
    #[must_use]
    pub const fn is_corrupt(&self) -> bool {
        self.incompatible & INCOMPATIBLE_CORRUPT != 0
    }

    /// Whether guest data is in an external data file.
    #[must_use]
    pub const fn has_data_file(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DATA_FILE != 0
    }

    /// Whether L2 entries have subcluster bitmaps.
    #[must_use]
    pub const fn has_extended_l2(&self) -> bool {
        self.incompatible & INCOMPATIBLE_EXTENDED_L2 != 0
    }

    /// Whether refcount updates may be postponed.
    #[must_use]
    pub const fn lazy_refcounts(&self) -> bool {
        self.compatible & COMPATIBLE_LAZY_REFCOUNTS != 0
    }

    /// Whether the bitmaps extension is there, damaged or not, and not out of date.
    #[must_use]
    pub fn has_bitmaps(&self) -> bool {
        self.autoclear & AUTOCLEAR_BITMAPS != 0 && self.extensions.bitmaps() != Ok(None)
    }

    /// The bitmaps extension; none if it is out of date: without its autoclear bit it means nothing.
    /// Damage of it is no reason not to use the image.
    ///
    /// # Errors
    ///
    /// If the extension is not valid, or has another length than it must have: QEMU refuses that
    /// also if it is out of date.
    pub fn bitmaps(&self) -> Result<Option<BitmapsExtension>, FormatError> {
        let bitmaps = self.extensions.bitmaps()?;
        let Some(bitmaps) = bitmaps.filter(|_| self.has_bitmaps()) else {
            return Ok(None);
        };
        bitmaps.check(self.cluster_size())?;
        Ok(Some(bitmaps))
    }

    /// Whether the external data file is a raw image by itself.
    #[must_use]
    pub const fn is_data_file_raw(&self) -> bool {
        self.autoclear & AUTOCLEAR_DATA_FILE_RAW != 0
    }

    /// Offset of the active L1 table.
    #[must_use]
    pub const fn l1_table(&self) -> HostOffset {
        HostOffset(self.l1_offset)
    }

    /// Offset of the refcount table.
    #[must_use]
    pub const fn refcount_table(&self) -> HostOffset {
        HostOffset(self.refcount_table_offset)
    }

    /// Offset of the snapshot table.
    #[must_use]
    pub const fn snapshot_table(&self) -> HostOffset {
        HostOffset(self.snapshots_offset)
    }
}
