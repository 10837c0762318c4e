//! Inflating a piece of compressed data of any format.

#[cfg(feature = "bzip2")]
use super::bzip2::inflate_bzip2;
use super::{CodecError, Compression, decompress, inflate_zlib, workers};

/// How a piece of compressed data is inflated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inflater {
    /// What it is.
    pub stream: Stream,
    /// Bytes that it inflates to.
    pub size: u32,
}

/// The compressed streams of image formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// A cluster of a qcow2 image.
    Cluster(Compression),
    /// A whole zlib stream (RFC 1950), whose checksum is verified.
    Zlib {
        /// Bytes that it may inflate to at most. Those after the first [`Inflater::size`] are
        /// dropped.
        most: u32,
    },
    /// A whole bzip2 stream, whose checksums are verified.
    #[cfg(feature = "bzip2")]
    Bzip2,
}

impl Inflater {
    /// Bytes that the data inflate to.
    pub fn output_len(&self) -> usize {
        self.size as usize
    }

    /// Fills `out`, which is as long as the data inflate to.
    pub fn inflate(&self, source: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        match self.stream {
            Stream::Cluster(compression) => decompress(compression, source, out),
            Stream::Zlib { most } => inflate_zlib(source, out, most as usize),
            #[cfg(feature = "bzip2")]
            Stream::Bzip2 => inflate_bzip2(source, out),
        }
    }

    /// The inflated bytes of `source`, by a worker of the codec, or by this thread if `inline`.
    pub(crate) async fn inflated(
        self,
        source: Vec<u8>,
        inline: bool,
    ) -> Result<Vec<u8>, CodecError> {
        let inflate = move || {
            let mut bytes = vec![0; self.output_len()];
            self.inflate(&source, &mut bytes).map(|()| bytes)
        };
        match inline {
            true => inflate(),
            false => workers::run(inflate).await,
        }
    }
}
