//! Why a conversion fails.

use crate::Error;

/// Which side failed, and where.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The source could not be read.
    #[error("error while reading at byte {offset}: {source}")]
    Read {
        /// Offset in the concatenated sources, in bytes.
        offset: u64,
        /// Why.
        source: Error,
    },
    /// The target could not be written.
    #[error("error while writing at byte {offset}: {source}")]
    Write {
        /// Offset in the target, in bytes.
        offset: u64,
        /// Why.
        source: Error,
    },
    /// The stream could not be read, or is not what it should be.
    #[error("error while reading at byte {offset} of the stream: {source}")]
    Stream {
        /// How much of the stream was read, in bytes after decompression.
        offset: u64,
        /// Why.
        source: Error,
    },
    /// The sources have more than 2^64 bytes together.
    #[error("the images are too large together")]
    TooLarge,
    /// The target does not store compressed data: only qcow2 images without an external data file
    /// do, and new images with [`NewImage::zlib_block`](crate::jobs::NewImage::zlib_block).
    #[error("Compression not supported for this file format")]
    NotCompressible,
    /// The I/O engine could not be started.
    #[error(transparent)]
    Engine(std::io::Error),
}

impl ConvertError {
    /// Where it failed; 0 if it was nowhere.
    pub(super) fn offset(&self) -> u64 {
        match self {
            ConvertError::Read { offset, .. } | ConvertError::Write { offset, .. } => *offset,
            ConvertError::Stream { .. }
            | ConvertError::TooLarge
            | ConvertError::NotCompressible
            | ConvertError::Engine(_) => 0,
        }
    }
}
