//! What a header must promise.

use super::super::bounds::{
    MAX_L1_BYTES, MAX_REFCOUNT_ORDER, MAX_REFCOUNT_TABLE_BYTES, MAX_SNAPSHOTS,
    SNAPSHOT_HEADER_BYTES, check_subclusters, validate_table,
};
use super::super::extensions::Extension;
use super::super::features::{Compression, CryptMethod, INCOMPATIBLE_COMPRESSION};
use super::{COMPRESSION_AT, HEADER_LENGTH_MIN, HEADER_LENGTH_V2, Header};
use crate::error::FormatError;

/// How much a header must promise.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Strictness {
    /// To use the image.
    Open,
    /// To check and repair it: a missing refcount table and a bad snapshot
    /// table are for the check to find.
    Check,
}

impl Header {
    pub(super) fn check_compression(&self) -> Result<(), FormatError> {
        let bit = self.incompatible & INCOMPATIBLE_COMPRESSION != 0;
        match (self.compression, bit) {
            (Compression::Zlib, true) => Err(FormatError::CompressionBitSet),
            (Compression::Zstd, false) => Err(FormatError::CompressionBitClear),
            _ => Ok(()),
        }
    }

    /// The checks that QEMU makes when it opens, in its order.
    pub(super) fn check_numbers(&self, strictness: Strictness) -> Result<(), FormatError> {
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

    pub(super) fn check_extensions(&self) -> Result<(), FormatError> {
        let cluster_size = self.cluster_size();
        for extension in &self.extensions {
            if let Extension::Crypto(crypto) = extension {
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
        }
        if self.is_data_file_raw() && !self.has_data_file() {
            return Err(FormatError::RawWithoutDataFile);
        }
        Ok(())
    }

    /// What only a header that was put together by hand can get wrong.
    pub(super) fn check_layout(&self) -> Result<(), FormatError> {
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
}
