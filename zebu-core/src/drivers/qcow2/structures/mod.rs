//! Structures of qcow2 on the disk as pure values: bytes in, values out, no I/O.
//!
//! To be read in this order: `header` with its `features` and `extensions`; `geometry`, the sizes that
//! follow from it; `l1` and `l2`, the mapping; `refcount`; `snapshot`; `bitmap`; `replace`, another header
//! in the place of one. `bounds` has what is too large. What can be wrong is in `error/format.rs`, the LUKS header
//! of an encrypted image in `luks.rs` of the crate.
//!
//! One file a subject. Every structure decodes from a slice and encodes to bytes. Nothing here reads a file or keeps state, and every number is checked. Invalid bytes
//! give a [`FormatError`] that names the place and the reason. No slice makes a decoder panic, or
//! allocate more than a small multiple of its length.
//!
//! "Section" in the documentation is a section of the specification, QEMU's `docs/interop/qcow2`,
//! unless a file names another one. Where QEMU differs from the specification, this code follows
//! QEMU, and a comment marks the place. All numbers on the disk are big-endian. All sizes and
//! offsets here are in bytes unless the name has another unit.

mod bitmap;
mod bounds;
mod bytes;
mod extensions;
mod features;
mod geometry;
mod header;
mod l1;
mod l2;
mod refcount;
mod replace;
mod snapshot;

pub use crate::error::FormatError;
pub use crate::luks::*;
pub use bitmap::*;
pub use bounds::{
    INCOMPLETE_VERSION, MAX_BACKING_NAME, MAX_BITMAP_DIRECTORY_BYTES, MAX_BITMAPS,
    MAX_CLUSTER_BITS, MAX_L1_BYTES, MAX_REFCOUNT_ORDER, MAX_REFCOUNT_TABLE_BYTES, MAX_SNAPSHOTS,
    MIN_CLUSTER_BITS, MIN_EXTENDED_L2_CLUSTER_BITS, SNAPSHOT_HEADER_BYTES, check_table,
    validate_table,
};
pub use extensions::*;
pub use features::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_DATA_FILE_RAW, AUTOCLEAR_KNOWN, COMPATIBLE_LAZY_REFCOUNTS,
    Compression, CryptMethod, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_CORRUPT,
    INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY, INCOMPATIBLE_EXTENDED_L2, INCOMPATIBLE_KNOWN,
};
pub use geometry::{Geometry, OFFSET_MASK, SUBCLUSTERS};
pub use header::{
    FixedHeader, HEADER_LENGTH_MIN, HEADER_LENGTH_V2, HEADER_LENGTH_V3, Header, MAGIC,
};
pub use l1::{COPIED, L1Entry};
pub use l2::{
    ALL_ALLOCATED, ALL_ZERO, COMPRESSED, ClusterKind, CompressedCluster, L2Entry, SubclusterKind,
    ZERO,
};
pub use refcount::{RefcountBlock, RefcountSpace, RefcountTableEntry};
pub use replace::Replacement;
pub use snapshot::*;
