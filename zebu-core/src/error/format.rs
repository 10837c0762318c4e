//! What can be wrong with the bytes of a qcow2 image, each in one line. It is here and not with the structures, which
//! give these errors, because [`Error`](crate::Error) holds one, and all layers know that.

use thiserror::Error;

use crate::luks::LuksError;
use crate::printable::printable;

/// An image that cannot be understood, or a value that the format cannot
/// hold. Where QEMU has a message for the case the words are QEMU's, because
/// scripts look for them.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The first four bytes are not the magic.
    #[error("Image is not in qcow2 format")]
    NotQcow2,
    /// Neither version 2 nor 3.
    #[error("Unsupported qcow2 version {0}")]
    UnsupportedVersion(u32),
    /// The version by which `mark_incomplete` marks a new image that was not finished.
    #[error("Image is incomplete: what makes it has not finished")]
    Incomplete,
    /// Fewer than 9 or more than 21 cluster bits.
    #[error("Unsupported cluster size: 2^{0}")]
    UnsupportedClusterSize(u32),
    /// Extended L2 entries with clusters under 16 KiB (subclusters under 512 bytes).
    #[error("Unsupported subcluster size: {0}")]
    UnsupportedSubclusterSize(u64),
    /// A version 3 header length under 104 bytes.
    #[error("qcow2 header too short")]
    HeaderTooShort,
    /// A header length over one cluster.
    #[error("qcow2 header exceeds cluster size")]
    HeaderExceedsCluster,
    /// The backing file name would start after the first cluster.
    #[error("Invalid backing file offset")]
    BackingOffsetInvalid,
    /// The backing file name is over 1023 bytes or leaves the first cluster.
    #[error("Backing file name too long")]
    BackingNameTooLong,
    /// The caller's bytes end before a structure that the header places there.
    #[error("{what} at offset {offset:#x} is cut off: {need} bytes needed, {have} there")]
    Truncated {
        /// The structure.
        what: &'static str,
        /// Where it starts, in bytes from the start of the file or table.
        offset: u64,
        /// Its length in bytes.
        need: u64,
        /// How many bytes are there.
        have: u64,
    },
    /// A compression type that is neither zlib nor zstd.
    #[error("qcow2: unknown compression type: {0}")]
    UnknownCompression(u8),
    /// Compression type zlib, but the feature bit is set.
    #[error("qcow2: Compression type incompatible feature bit must not be set")]
    CompressionBitSet,
    /// A compression type other than zlib, but the feature bit is clear.
    #[error("qcow2: Compression type incompatible feature bit must be set")]
    CompressionBitClear,
    /// Incompatible feature bits that are not known, by their names.
    #[error("Unsupported qcow2 feature(s): {0}")]
    UnsupportedFeatures(String),
    /// A refcount order above 6.
    #[error("Reference count entry width too large; may not exceed 64 bits")]
    RefcountWidth,
    /// Zero clusters of refcount table.
    #[error("Image does not contain a reference count table")]
    NoRefcountTable,
    /// A table above its size limit.
    #[error("{0} too large")]
    TableTooLarge(&'static str),
    /// A table that is not aligned to a cluster or ends past 2^63.
    #[error("{name} offset invalid")]
    TableOffsetInvalid {
        /// The table.
        name: &'static str,
        /// Its offset in bytes.
        offset: u64,
    },
    /// A table that ends after the end of the file.
    #[error(
        "{name} at offset {offset:#x} ({bytes} bytes) ends after the end of the file ({file_len} bytes)"
    )]
    TableBeyondFile {
        /// The table.
        name: &'static str,
        /// Its offset in bytes.
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
        /// The length of the file in bytes.
        file_len: u64,
    },
    /// A virtual size that no L1 table can cover.
    #[error("Image is too big")]
    ImageTooBig,
    /// The L1 table has fewer entries than the virtual size needs.
    #[error("L1 table is too small")]
    L1TooSmall,
    /// The raw external data bit without an external data file.
    #[error("data-file-raw requires a data file")]
    RawWithoutDataFile,
    /// A header extension that ends after the extension area.
    #[error("Header extension too large")]
    ExtensionTooLarge {
        /// Type of the extension.
        kind: u32,
        /// Where its data starts, in bytes from the start of the file.
        offset: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// A backing format name of 16 bytes or more.
    #[error("ERROR: ext_backing_format: len={0} too large (>=16)")]
    BackingFormatTooLong(usize),
    /// An encryption header extension in an image that is not LUKS.
    #[error("CRYPTO header extension only expected with LUKS encryption method")]
    CryptoUnexpected,
    /// No encryption header extension in an image that is LUKS.
    #[error("Missing CRYPTO header for crypt method {0}")]
    CryptoMissing(u32),
    /// An encryption header that makes no sense.
    #[error(transparent)]
    Luks(#[from] LuksError),
    /// An encryption header extension that is not 16 bytes long.
    #[error("CRYPTO header extension size {0}, but expected size 16")]
    CryptoLength(usize),
    /// An encryption header that does not start at a cluster.
    #[error(
        "Encryption header offset '{offset}' is not a multiple of cluster size '{cluster_size}'"
    )]
    CryptoOffset {
        /// The offset in bytes.
        offset: u64,
        /// The cluster size in bytes.
        cluster_size: u64,
    },
    /// A bitmaps extension that is not 24 bytes long.
    #[error("bitmaps_ext: Invalid extension length")]
    BitmapsLength(usize),
    /// A bitmaps extension whose reserved field is not zero.
    #[error("bitmaps_ext: Reserved field is not zero")]
    BitmapsReserved,
    /// More than 65535 bitmaps.
    #[error("bitmaps_ext: Image has {0} bitmaps, exceeding the QEMU supported maximum of 65535")]
    TooManyBitmaps(u32),
    /// A bitmaps extension that counts none.
    #[error("found bitmaps extension with zero bitmaps")]
    ZeroBitmaps,
    /// A bitmap directory that does not start at a cluster.
    #[error("bitmaps_ext: invalid bitmap directory offset")]
    BitmapDirectoryOffset(u64),
    /// A bitmap directory above the limit.
    #[error(
        "bitmaps_ext: bitmap directory size ({0}) exceeds the maximum supported size (67107840)"
    )]
    BitmapDirectoryTooLarge(u64),
    /// The bitmap directory's entries do not fill the directory exactly.
    #[error("Broken bitmap directory: {0}")]
    BitmapDirectoryBroken(&'static str),
    /// A bitmap that QEMU refuses.
    #[error("Bitmap '{}' doesn't satisfy the constraints: {why}", printable(.name.as_bytes()))]
    BitmapConstraint {
        /// The bitmap's name.
        name: String,
        /// The rule that is broken.
        why: &'static str,
    },
    /// Bits that the format reserves are set.
    #[error("{what} {value:#x} has reserved bits set: {bits:#x}")]
    ReservedBits {
        /// The structure.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The reserved bits that are set in it.
        bits: u64,
    },
    /// A pointer to a cluster that is not a multiple of the cluster size.
    #[error("{what} {value:#x}: host offset {offset:#x} unaligned to cluster boundary")]
    Unaligned {
        /// The structure.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The offset in bytes.
        offset: u64,
    },
    /// The zero bit in a version 2 image.
    #[error("Zero cluster entry found in pre-v3 image (L2 entry {0:#x})")]
    ZeroInVersion2(u64),
    /// A compressed cluster in an image with an external data file.
    #[error("Compressed cluster entry found in image with external data file (L2 entry {0:#x})")]
    CompressedInDataFile(u64),
    /// An offset that the field for it cannot hold.
    #[error("{what}: offset {offset:#x} cannot be stored")]
    OffsetUnstorable {
        /// The structure.
        what: &'static str,
        /// The offset in bytes.
        offset: u64,
    },
    /// A subcluster bitmap that contradicts itself or its cluster.
    #[error("Invalid cluster entry found (L2 entry {desc:#x}, bitmap {bitmap:#x})")]
    SubclusterBitmap {
        /// The cluster descriptor.
        desc: u64,
        /// The bitmap.
        bitmap: u64,
    },
    /// A compressed cluster whose length the descriptor cannot hold.
    #[error("compressed cluster at {offset:#x}: {length} bytes cannot be described")]
    CompressedLength {
        /// Where the compressed data starts, in bytes.
        offset: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// A refcount above what the width can hold.
    #[error("refcount {value} does not fit in {bits} bits (entry {index})")]
    RefcountOverflow {
        /// The refcount.
        value: u64,
        /// Width of an entry in bits.
        bits: u32,
        /// Index of the entry in its block.
        index: usize,
    },
    /// An index past the end of a table.
    #[error("{what}: index {index} out of {entries} entries")]
    IndexOutOfRange {
        /// The table.
        what: &'static str,
        /// The index.
        index: u64,
        /// Entries in the table.
        entries: u64,
    },
    /// A snapshot with more than 1024 bytes of extra data.
    #[error("Too much extra metadata in snapshot table entry {0}")]
    SnapshotExtraTooLarge(u64),
    /// A snapshot table above 64 MiB.
    #[error("Snapshot table is too big")]
    SnapshotTableTooBig,
    /// A string too long for its length field.
    #[error("{what} too long: {length} bytes, at most {max}")]
    TooLong {
        /// The string.
        what: &'static str,
        /// Its length in bytes.
        length: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// Header, extensions and backing file name are more than one cluster.
    #[error("the header needs {need} bytes, but its cluster has only {cluster_size}")]
    HeaderDoesNotFit {
        /// Bytes needed.
        need: u64,
        /// The cluster size in bytes.
        cluster_size: u64,
    },
    /// A value that contradicts itself and cannot be written.
    #[error("{0}")]
    Inconsistent(&'static str),
    /// Another error, with the place where it was found.
    #[error("{what} {index}: {source}")]
    At {
        /// The table or structure that holds the faulty entry.
        what: &'static str,
        /// Index of the entry in it, or its offset.
        index: u64,
        /// What is wrong there.
        source: Box<FormatError>,
    },
}

impl FormatError {
    /// Refuses reserved bits that are set.
    pub(crate) fn check_reserved(what: &'static str, value: u64, bits: u64) -> Result<(), Self> {
        match bits {
            0 => Ok(()),
            bits => Err(FormatError::ReservedBits { what, value, bits }),
        }
    }

    /// The same error with the place where it was found: entry `index` of
    /// `what`. An entry does not know its position; the code that walks a table
    /// does.
    #[must_use]
    pub fn at(self, what: &'static str, index: u64) -> Self {
        Self::At {
            what,
            index,
            source: Box::new(self),
        }
    }
}
