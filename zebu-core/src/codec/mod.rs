//! Compressed clusters, which are short and decompressed in one step, and compressed streams of any
//! length ([`Unpack`]).
//!
//! What follows is about clusters of qcow2; see [`Stream`] for those of other formats.
//!
//! The length of a stream in a qcow2 image is known only in sectors. So up to 511 unrelated bytes
//! may follow it, and at the end of the file some bytes may be missing. A cluster is good if QEMU
//! accepts it: see [`Decompressor::decompress`].

#[cfg(feature = "bzip2")]
mod bzip2;
mod compress;
mod decompress;
mod inflater;
mod unpack;
pub(crate) mod workers;

use std::cell::RefCell;

pub use compress::{Compressor, zlib_bound};
pub use decompress::Decompressor;
pub(crate) use inflater::inflate_each;
pub use inflater::{Inflater, Stream};
pub use unpack::{StreamCompression, Unpack};

thread_local! {
    static KEPT: RefCell<Decompressor> = RefCell::new(Decompressor::new());
}

/// [`Decompressor::decompress`] with the one that this thread keeps.
pub fn decompress(kind: Compression, src: &[u8], dst: &mut [u8]) -> Result<(), CodecError> {
    KEPT.with_borrow_mut(|kept| kept.decompress(kind, src, dst))
}

/// [`Decompressor::inflate_zlib`] with the one that this thread keeps.
fn inflate_zlib(src: &[u8], dst: &mut [u8], most: usize) -> Result<(), CodecError> {
    KEPT.with_borrow_mut(|kept| kept.inflate_zlib(src, dst, most))
}

/// How an image's compressed clusters are stored: the header's compression
/// type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Type 0: a raw deflate stream (no zlib header), no distance above 4096.
    Zlib,
    /// Type 1: zstd frames.
    Zstd,
}

/// Why a compressed cluster could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The stream is damaged, or not of its compression type.
    #[error("the compressed stream is damaged")]
    Damaged,
    /// The stream ends before the cluster is full.
    #[error("the compressed stream yields {got} bytes of a cluster of {expected}")]
    Short {
        /// Bytes that came out.
        got: usize,
        /// Bytes in a cluster.
        expected: usize,
    },
    /// A zstd frame, a whole zlib stream or a bzip2 stream holds more than a cluster.
    #[error("the compressed stream yields more than a cluster of {expected} bytes")]
    Long {
        /// Bytes in a cluster.
        expected: usize,
    },
    /// The compression type has no such level.
    #[error("there is no compression level {level}")]
    Level {
        /// The level.
        level: i32,
    },
    /// The compressor could not allocate memory.
    #[error("the compressor failed")]
    Compressor,
}

/// `ZSTD_error_dstSize_tooSmall`, which is stable, as zstd returns it.
fn is_dst_too_small(code: zstd_safe::ErrorCode) -> bool {
    const DST_SIZE_TOO_SMALL: usize = 70;
    code == 0usize.wrapping_sub(DST_SIZE_TOO_SMALL)
}
