//! Reading a header.

use super::super::bounds::{MAX_BACKING_NAME, check_cluster_bits, check_version};
use super::super::bytes::{be32, be64, slice};
use super::super::extensions::{self, Extensions};
use super::super::features::{Compression, INCOMPATIBLE_KNOWN};
use super::check::Strictness;
use super::{COMPRESSION_AT, FixedHeader, HEADER_LENGTH_MIN, HEADER_LENGTH_V2, Header, MAGIC};
use crate::error::FormatError;

impl Header {
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
    /// [`check_table`](crate::drivers::qcow2::structures::check_table). An encrypted image decodes.
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
            unfinished: false,
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
}
