//! The bounds of numbers in a header and of tables: the specification's, or QEMU's.

use crate::error::FormatError;

/// The version by which a new image that was not finished is marked.
pub const INCOMPLETE_VERSION: u32 = u32::MAX;
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
