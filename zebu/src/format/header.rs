//! The header: the first cluster of an image. Section "Header".

use super::bytes::{be32, be64, slice};
use super::error::FormatError;
use super::extensions::{
    self, EXTENSION_BACKING_FORMAT, EXTENSION_BITMAPS, EXTENSION_CRYPTO, EXTENSION_DATA_FILE,
    EXTENSION_FEATURE_NAMES, Extension, Extensions, FeatureNames,
};
use super::geometry::Geometry;
use super::offset::HostOffset;

/// "QFI\xfb", the first four bytes of every image.
pub const MAGIC: u32 = 0x5146_49fb;
/// The version by which a new image that was not finished is marked.
pub const INCOMPLETE_VERSION: u32 = u32::MAX;
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

/// Smallest cluster size as a power of two.
pub const MIN_CLUSTER_BITS: u32 = 9;
/// Largest cluster size as a power of two. A limit of QEMU.
pub const MAX_CLUSTER_BITS: u32 = 21;
/// Smallest cluster size of an image with extended L2 entries, as a power of two.
pub const MIN_EXTENDED_L2_CLUSTER_BITS: u32 = 14;
/// Widest refcount as a power of two of bits.
pub const MAX_REFCOUNT_ORDER: u32 = 6;
/// Longest backing file name in bytes.
pub const MAX_BACKING_NAME: usize = 1023;
/// Largest L1 table in bytes. A limit of QEMU.
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// Largest refcount table in bytes. A limit of QEMU.
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Most snapshots in an image. A limit of QEMU.
pub const MAX_SNAPSHOTS: u32 = 65536;
/// Most bitmaps in an image. A limit of QEMU.
pub const MAX_BITMAPS: u32 = 65535;
/// Largest bitmap directory in bytes. A limit of QEMU.
pub const MAX_BITMAP_DIRECTORY_BYTES: u64 = 1024 * 65535;
/// Size of the fixed part of a snapshot table entry, in bytes.
pub const SNAPSHOT_HEADER_BYTES: u64 = 40;

/// Incompatible bit 0: refcounts may be inconsistent.
pub const INCOMPATIBLE_DIRTY: u64 = 1;
/// Incompatible bit 1: any structure may be corrupt; not to be written to.
pub const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
/// Incompatible bit 2: guest data is in an external data file.
pub const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
/// Incompatible bit 3: the compression type is not zlib.
pub const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
/// Incompatible bit 4: extended L2 entries.
pub const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
/// All incompatible bits that are known here.
pub const INCOMPATIBLE_KNOWN: u64 = INCOMPATIBLE_DIRTY
    | INCOMPATIBLE_CORRUPT
    | INCOMPATIBLE_DATA_FILE
    | INCOMPATIBLE_COMPRESSION
    | INCOMPATIBLE_EXTENDED_L2;
/// Compatible bit 0: refcount updates may be postponed.
pub const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1;
/// Autoclear bit 0: the bitmaps extension is consistent.
pub const AUTOCLEAR_BITMAPS: u64 = 1;
/// Autoclear bit 1: the external data file is a raw image by itself.
pub const AUTOCLEAR_DATA_FILE_RAW: u64 = 1 << 1;
/// All autoclear bits that are known here. A writer clears the others.
pub const AUTOCLEAR_KNOWN: u64 = AUTOCLEAR_BITMAPS | AUTOCLEAR_DATA_FILE_RAW;

/// How compressed clusters are compressed. Section "Additional fields".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Raw deflate with a window of 4 KiB.
    #[default]
    Zlib,
    /// Zstandard.
    Zstd,
}

impl Compression {
    fn from_byte(byte: u8) -> Result<Self, FormatError> {
        match byte {
            0 => Ok(Self::Zlib),
            1 => Ok(Self::Zstd),
            other => Err(FormatError::UnknownCompression(other)),
        }
    }

    const fn byte(self) -> u8 {
        match self {
            Self::Zlib => 0,
            Self::Zstd => 1,
        }
    }

    /// The name that options and reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// How guest data is encrypted. Section "Data encryption".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CryptMethod {
    /// Not at all.
    None,
    /// AES-CBC, the old way.
    Aes,
    /// LUKS.
    Luks,
    /// A method that is not known.
    Unknown(u32),
}

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
}

/// The content of the first bytes: enough to know how much to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedHeader {
    /// Version: 2 or 3.
    pub version: u32,
    /// Cluster size as a power of two: 9 to 21.
    pub cluster_bits: u32,
}

impl FixedHeader {
    /// Cluster size in bytes: how many bytes [`Header::decode`] wants.
    #[must_use]
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }
}

/// How much a header must promise.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strictness {
    /// To use the image.
    Open,
    /// To check and repair it: a missing refcount table and a bad snapshot
    /// table are for the check to find.
    Check,
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

    /// Reads version and cluster size from the start of the file. 112 bytes
    /// are more than enough; fewer are an image that is not qcow2.
    pub fn decode_fixed(bytes: &[u8]) -> Result<FixedHeader, FormatError> {
        if be32(bytes, 0) != Some(MAGIC) {
            return Err(FormatError::NotQcow2);
        }
        let version = be32(bytes, 4).unwrap_or(0);
        check_version(version)?;
        let cluster_bits = be32(bytes, 20).unwrap_or(0);
        check_cluster_bits(cluster_bits)?;
        Ok(FixedHeader {
            version,
            cluster_bits,
        })
    }

    /// Reads the header, its extensions and the backing file name from the
    /// start of the file, and refuses what QEMU refuses to open.
    ///
    /// `bytes` is the first cluster, or the whole file if that is shorter.
    /// Offsets are not compared with the length of the file: see
    /// [`check_table`]. An encrypted image decodes.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        Self::decode_as(bytes, Strictness::Open)
    }

    /// The same for a check that may repair: an image without a refcount
    /// table and one whose snapshot table cannot be right decode too.
    pub fn decode_for_check(bytes: &[u8]) -> Result<Self, FormatError> {
        Self::decode_as(bytes, Strictness::Check)
    }

    fn decode_as(bytes: &[u8], strictness: Strictness) -> Result<Self, FormatError> {
        let fixed = Self::decode_fixed(bytes)?;
        // What a file too short for a header lacks reads as zeros, as it
        // does in QEMU.
        let u32_at = |at| be32(bytes, at).unwrap_or(0);
        let u64_at = |at| be64(bytes, at).unwrap_or(0);
        let cluster_size = fixed.cluster_size();
        let mut header = Self {
            version: fixed.version,
            backing_offset: u64_at(8),
            backing_name: None,
            cluster_bits: fixed.cluster_bits,
            size: u64_at(24),
            crypt_method: u32_at(32),
            l1_size: u32_at(36),
            l1_offset: u64_at(40),
            refcount_table_offset: u64_at(48),
            refcount_table_clusters: u32_at(56),
            nb_snapshots: u32_at(60),
            snapshots_offset: u64_at(64),
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            header_length: HEADER_LENGTH_V2,
            compression: Compression::Zlib,
            unknown_fields: Vec::new(),
            extensions: Extensions::new(),
        };
        if header.version >= 3 {
            header.incompatible = u64_at(72);
            header.compatible = u64_at(80);
            header.autoclear = u64_at(88);
            header.refcount_order = u32_at(96);
            header.header_length = u32_at(100);
            if header.header_length < HEADER_LENGTH_MIN {
                return Err(FormatError::HeaderTooShort);
            }
        }
        if u64::from(header.header_length) > cluster_size {
            return Err(FormatError::HeaderExceedsCluster);
        }
        let header_length = header.header_length as usize;
        if header_length > COMPRESSION_AT + 1 {
            let from = COMPRESSION_AT + 1;
            let len = header_length - from;
            header.unknown_fields = slice(bytes, from, len)
                .ok_or(FormatError::Truncated {
                    what: "qcow2 header",
                    offset: 0,
                    need: header_length as u64,
                    have: bytes.len() as u64,
                })?
                .to_vec();
        }
        if header.backing_offset > cluster_size {
            return Err(FormatError::BackingOffsetInvalid);
        }
        // At most one cluster: 2 MiB.
        let extensions_end = match header.backing_offset {
            0 => cluster_size as usize,
            offset => offset as usize,
        };
        if header_length > COMPRESSION_AT {
            let byte = bytes.get(COMPRESSION_AT).copied().unwrap_or(0);
            header.compression = Compression::from_byte(byte)?;
        }
        header.check_compression()?;
        let unknown = header.incompatible & !INCOMPATIBLE_KNOWN;
        if unknown != 0 {
            return Err(extensions::unsupported_features(
                bytes,
                header_length,
                extensions_end,
                unknown,
            ));
        }
        header.check_numbers(strictness)?;
        header.extensions = Extensions::decode(bytes, header_length, extensions_end)?;
        header.check_extensions()?;

        if header.backing_offset != 0 {
            let len = u64::from(u32_at(16));
            if len > (MAX_BACKING_NAME as u64).min(cluster_size - header.backing_offset) {
                return Err(FormatError::BackingNameTooLong);
            }
            let name =
                slice(bytes, header.backing_offset as usize, len as usize).ok_or_else(|| {
                    FormatError::Truncated {
                        what: "backing file name",
                        offset: header.backing_offset,
                        need: len,
                        have: (bytes.len() as u64).saturating_sub(header.backing_offset),
                    }
                })?;
            if name.is_empty() {
                // No name is no backing file.
                header.backing_offset = 0;
            } else {
                header.backing_name = Some(name.to_vec());
            }
        }
        Ok(header)
    }

    /// The first cluster: header, extensions, backing file name, and zeros to
    /// the end of the cluster.
    ///
    /// Refuses a header that could not be opened again, except that tables
    /// which only a check may miss (see [`Header::decode_for_check`]) may be
    /// missing, so that an image can be built and repaired step by step.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        check_version(self.version)?;
        check_cluster_bits(self.cluster_bits)?;
        self.check_layout()?;
        self.check_compression()?;
        if self.incompatible & !INCOMPATIBLE_KNOWN != 0 {
            return Err(FormatError::UnsupportedFeatures(format!(
                "Unknown incompatible feature: {:x}",
                self.incompatible & !INCOMPATIBLE_KNOWN
            )));
        }
        self.check_numbers(Strictness::Check)?;
        self.check_extensions()?;
        let cluster_size = self.cluster_size();
        let (backing_offset, need) = self.backing_place()?;
        if need > cluster_size {
            return Err(FormatError::HeaderDoesNotFit { need, cluster_size });
        }
        let name = self.backing_name.as_deref().unwrap_or(&[]);

        let mut out = Vec::with_capacity(cluster_size as usize);
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&self.version.to_be_bytes());
        out.extend_from_slice(&backing_offset.to_be_bytes());
        // Fits: at most 1023, see `backing_place`.
        out.extend_from_slice(&(name.len() as u32).to_be_bytes());
        out.extend_from_slice(&self.cluster_bits.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.crypt_method.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&self.l1_offset.to_be_bytes());
        out.extend_from_slice(&self.refcount_table_offset.to_be_bytes());
        out.extend_from_slice(&self.refcount_table_clusters.to_be_bytes());
        out.extend_from_slice(&self.nb_snapshots.to_be_bytes());
        out.extend_from_slice(&self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            out.extend_from_slice(&self.incompatible.to_be_bytes());
            out.extend_from_slice(&self.compatible.to_be_bytes());
            out.extend_from_slice(&self.autoclear.to_be_bytes());
            out.extend_from_slice(&self.refcount_order.to_be_bytes());
            out.extend_from_slice(&self.header_length.to_be_bytes());
            if self.header_length > HEADER_LENGTH_MIN {
                out.push(self.compression.byte());
                out.extend_from_slice(&self.unknown_fields);
            }
        }
        self.extensions.put(&mut out)?;
        out.resize(cluster_size as usize, 0);
        // In range: `need` is at least the end of the name.
        let at = backing_offset as usize;
        if let Some(space) = out.get_mut(at..at + name.len()) {
            space.copy_from_slice(name);
        }
        Ok(out)
    }

    /// Sets [`Header::backing_offset`] to where [`Header::encode`] would put
    /// the name, and says how many bytes of the first cluster are used then.
    pub fn place_backing_name(&mut self) -> Result<u64, FormatError> {
        let (offset, need) = self.backing_place()?;
        self.backing_offset = offset;
        Ok(need)
    }

    /// Makes the header fit in its cluster: the feature name table, which is
    /// informative only, is left out if there is no space for it. Places the
    /// backing file name anew.
    pub fn fit(&mut self) -> Result<(), FormatError> {
        let cluster_size = self.cluster_size();
        self.backing_offset = 0;
        if self.place_backing_name()? > cluster_size {
            self.extensions.remove(EXTENSION_FEATURE_NAMES);
            self.backing_offset = 0;
        }
        let need = self.place_backing_name()?;
        if need > cluster_size {
            return Err(FormatError::HeaderDoesNotFit { need, cluster_size });
        }
        Ok(())
    }

    /// Where the backing file name goes (0 without one), and where the used
    /// part of the cluster ends.
    fn backing_place(&self) -> Result<(u64, u64), FormatError> {
        let extensions_end =
            u64::from(self.header_length).saturating_add(self.extensions.encoded_len() as u64);
        let Some(name) = &self.backing_name else {
            return Ok((0, extensions_end));
        };
        if name.len() > MAX_BACKING_NAME {
            return Err(FormatError::BackingNameTooLong);
        }
        let len = name.len() as u64;
        let kept = self.backing_offset;
        let stays = kept >= extensions_end && kept.saturating_add(len) <= self.cluster_size();
        let at = if stays { kept } else { extensions_end };
        Ok((at, at.saturating_add(len)))
    }

    /// Gives the image a backing file, with the name of its format, or takes
    /// it away. The name is placed anew, right after the extensions.
    pub fn set_backing(&mut self, name: Option<&[u8]>, format: Option<&[u8]>) {
        self.backing_offset = 0;
        self.backing_name = name.filter(|n| !n.is_empty()).map(<[u8]>::to_vec);
        match format.filter(|_| self.backing_name.is_some()) {
            Some(format) => self
                .extensions
                .set(Extension::BackingFormat(format.to_vec())),
            None => {
                self.extensions.remove(EXTENSION_BACKING_FORMAT);
            }
        }
        if let Ok((offset, _)) = self.backing_place() {
            self.backing_offset = offset;
        }
    }

    /// Gives the image an external data file by name, or takes the name away.
    /// The feature bit is left as it is.
    pub fn set_data_file_name(&mut self, name: Option<&[u8]>) {
        match name {
            Some(name) => self.extensions.set(Extension::DataFile(name.to_vec())),
            None => {
                self.extensions.remove(EXTENSION_DATA_FILE);
            }
        }
    }

    /// Makes it a header of version 2 or 3. Version 2 has no features and no
    /// refcounts but those of 16 bits, which is the caller's business; what a
    /// version 3 header has besides is left out. The backing file name is placed
    /// anew.
    pub fn set_version(&mut self, version: u32) {
        let model = match version {
            2 => Self::new_v2(self.cluster_bits, self.size),
            _ => Self::new(self.cluster_bits, self.size),
        };
        self.version = model.version;
        self.header_length = model.header_length;
        self.unknown_fields = model.unknown_fields;
        if version < 3 {
            self.incompatible = 0;
            self.compatible = 0;
            self.autoclear = 0;
            self.extensions.remove(EXTENSION_FEATURE_NAMES);
            self.extensions.remove(EXTENSION_BITMAPS);
        }
        for extension in &model.extensions {
            self.extensions.set(extension.clone());
        }
        // If even that does not help, `encode` says so.
        let _ = self.fit();
    }

    /// Sets the compression type together with its feature bit. Zstandard
    /// needs a header with space for the field, which is extended if necessary.
    pub fn set_compression(&mut self, compression: Compression) {
        self.compression = compression;
        self.set_incompatible(INCOMPATIBLE_COMPRESSION, compression != Compression::Zlib);
        if compression != Compression::Zlib && self.header_length == HEADER_LENGTH_MIN {
            self.header_length = HEADER_LENGTH_V3;
            self.unknown_fields = vec![0; HEADER_LENGTH_V3 as usize - COMPRESSION_AT - 1];
        }
    }

    /// Sets or clears the extended L2 entries bit.
    pub fn set_extended_l2(&mut self, on: bool) {
        self.set_incompatible(INCOMPATIBLE_EXTENDED_L2, on);
    }

    /// Sets or clears incompatible feature bits.
    pub fn set_incompatible(&mut self, bits: u64, on: bool) {
        if on {
            self.incompatible |= bits;
        } else {
            self.incompatible &= !bits;
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

    /// Whether the bitmaps extension is there and consistent.
    #[must_use]
    pub fn has_bitmaps(&self) -> bool {
        self.autoclear & AUTOCLEAR_BITMAPS != 0 && self.extensions.bitmaps().is_some()
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

    /// The sizes that follow from this header.
    pub fn geometry(&self) -> Result<Geometry, FormatError> {
        Geometry::new(self)
    }

    fn check_compression(&self) -> Result<(), FormatError> {
        let bit = self.incompatible & INCOMPATIBLE_COMPRESSION != 0;
        match (self.compression, bit) {
            (Compression::Zlib, true) => Err(FormatError::CompressionBitSet),
            (Compression::Zstd, false) => Err(FormatError::CompressionBitClear),
            _ => Ok(()),
        }
    }

    /// The checks that QEMU makes when it opens, in its order.
    fn check_numbers(&self, strictness: Strictness) -> Result<(), FormatError> {
        check_subclusters(self.cluster_bits, self.has_extended_l2())?;
        if self.refcount_order > MAX_REFCOUNT_ORDER {
            return Err(FormatError::RefcountWidth);
        }
        let cluster_size = self.cluster_size();
        if strictness == Strictness::Open && self.refcount_table_clusters == 0 {
            return Err(FormatError::NoRefcountTable);
        }
        validate_table(
            "Reference count table",
            self.refcount_table_offset,
            u64::from(self.refcount_table_clusters),
            cluster_size,
            cluster_size,
            MAX_REFCOUNT_TABLE_BYTES,
        )?;
        if strictness == Strictness::Open {
            validate_table(
                "Snapshot table",
                self.snapshots_offset,
                u64::from(self.nb_snapshots),
                SNAPSHOT_HEADER_BYTES,
                cluster_size,
                SNAPSHOT_HEADER_BYTES * u64::from(MAX_SNAPSHOTS),
            )?;
        }
        validate_table(
            "Active L1 table",
            self.l1_offset,
            u64::from(self.l1_size),
            8,
            cluster_size,
            MAX_L1_BYTES,
        )?;
        let l2_entry_bits = if self.has_extended_l2() { 4 } else { 3 };
        let coverage_bits = 2 * self.cluster_bits - l2_entry_bits;
        let l1_needed = self.size.div_ceil(1 << coverage_bits);
        if l1_needed > i32::MAX as u64 {
            return Err(FormatError::ImageTooBig);
        }
        if u64::from(self.l1_size) < l1_needed {
            return Err(FormatError::L1TooSmall);
        }
        Ok(())
    }

    fn check_extensions(&self) -> Result<(), FormatError> {
        let cluster_size = self.cluster_size();
        for extension in &self.extensions {
            match extension {
                Extension::Crypto(crypto) => {
                    if self.crypt() != CryptMethod::Luks {
                        return Err(FormatError::CryptoUnexpected);
                    }
                    if !crypto.offset.is_multiple_of(cluster_size) {
                        return Err(FormatError::CryptoOffset {
                            offset: crypto.offset,
                            cluster_size,
                        });
                    }
                }
                // Without its autoclear bit the extension means nothing.
                Extension::Bitmaps(bitmaps) if self.autoclear & AUTOCLEAR_BITMAPS != 0 => {
                    if bitmaps.reserved != 0 {
                        return Err(FormatError::BitmapsReserved);
                    }
                    if bitmaps.count > MAX_BITMAPS {
                        return Err(FormatError::TooManyBitmaps(bitmaps.count));
                    }
                    if bitmaps.count == 0 {
                        return Err(FormatError::ZeroBitmaps);
                    }
                    if !bitmaps.directory_offset.is_multiple_of(cluster_size)
                        || bitmaps.directory_offset > i64::MAX as u64 - MAX_BITMAP_DIRECTORY_BYTES
                    {
                        return Err(FormatError::BitmapDirectoryOffset(bitmaps.directory_offset));
                    }
                    if bitmaps.directory_size > MAX_BITMAP_DIRECTORY_BYTES {
                        return Err(FormatError::BitmapDirectoryTooLarge(bitmaps.directory_size));
                    }
                }
                _ => {}
            }
        }
        if self.is_data_file_raw() && !self.has_data_file() {
            return Err(FormatError::RawWithoutDataFile);
        }
        Ok(())
    }

    /// What only a header that was put together by hand can get wrong.
    fn check_layout(&self) -> Result<(), FormatError> {
        if self.backing_name.as_ref().is_some_and(Vec::is_empty) {
            return Err(FormatError::Inconsistent("the backing file name is empty"));
        }
        if self.version < 3 {
            let plain = self.incompatible == 0
                && self.compatible == 0
                && self.autoclear == 0
                && self.refcount_order == 4
                && self.header_length == HEADER_LENGTH_V2
                && self.unknown_fields.is_empty();
            if !plain {
                return Err(FormatError::Inconsistent(
                    "version 2 images have no features, 16-bit refcounts and a header of 72 bytes",
                ));
            }
            return Ok(());
        }
        if self.header_length < HEADER_LENGTH_MIN {
            return Err(FormatError::HeaderTooShort);
        }
        let room = u64::from(self.header_length).saturating_sub(COMPRESSION_AT as u64 + 1);
        if self.unknown_fields.len() as u64 != room {
            return Err(FormatError::Inconsistent(
                "the unknown header fields do not fill the header length",
            ));
        }
        if self.header_length == HEADER_LENGTH_MIN && self.compression != Compression::Zlib {
            return Err(FormatError::Inconsistent(
                "a header of 104 bytes has no room for a compression type",
            ));
        }
        Ok(())
    }

    /// Takes away the encryption header pointer.
    pub fn remove_crypto(&mut self) {
        self.extensions.remove(EXTENSION_CRYPTO);
        self.crypt_method = 0;
    }
}

pub(super) fn check_version(version: u32) -> Result<(), FormatError> {
    match version {
        2 | 3 => Ok(()),
        INCOMPLETE_VERSION => Err(FormatError::Incomplete),
        other => Err(FormatError::UnsupportedVersion(other)),
    }
}

pub(super) fn check_cluster_bits(bits: u32) -> Result<(), FormatError> {
    if (MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&bits) {
        Ok(())
    } else {
        Err(FormatError::UnsupportedClusterSize(bits))
    }
}

/// `cluster_bits` is in range already.
pub(super) fn check_subclusters(cluster_bits: u32, extended_l2: bool) -> Result<(), FormatError> {
    if extended_l2 && cluster_bits < MIN_EXTENDED_L2_CLUSTER_BITS {
        return Err(FormatError::UnsupportedSubclusterSize(
            (1 << cluster_bits) / 32,
        ));
    }
    Ok(())
}

/// Checks a table that the image points to, without the length of the file:
/// at most `max_bytes` long, aligned to a cluster, ending below 2^63.
///
/// `entries` and `entry_size` (bytes) give its length. A size of zero
/// entries is checked too, as QEMU does.
pub fn validate_table(
    name: &'static str,
    offset: u64,
    entries: u64,
    entry_size: u64,
    cluster_size: u64,
    max_bytes: u64,
) -> Result<(), FormatError> {
    if entries > max_bytes.checked_div(entry_size).unwrap_or(u64::MAX) {
        return Err(FormatError::TableTooLarge(name));
    }
    table_end(name, offset, entries, entry_size, cluster_size).map(|_| ())
}

/// Checks a table that the image points to against the file: aligned to a
/// cluster, and wholly before `file_len` (bytes). An empty table lies
/// anywhere.
pub fn check_table(
    name: &'static str,
    offset: u64,
    entries: u64,
    entry_size: u64,
    cluster_size: u64,
    file_len: u64,
) -> Result<(), FormatError> {
    let end = table_end(name, offset, entries, entry_size, cluster_size)?;
    if end > file_len && end > offset {
        return Err(FormatError::TableBeyondFile {
            name,
            offset,
            bytes: end - offset,
            file_len,
        });
    }
    Ok(())
}

/// The offset after the last byte of a table, at most 2^63 - 1.
fn table_end(
    name: &'static str,
    offset: u64,
    entries: u64,
    entry_size: u64,
    cluster_size: u64,
) -> Result<u64, FormatError> {
    entries
        .checked_mul(entry_size)
        .and_then(|bytes| bytes.checked_add(offset))
        .filter(|end| *end <= i64::MAX as u64 && offset.is_multiple_of(cluster_size))
        .ok_or(FormatError::TableOffsetInvalid { name, offset })
}
