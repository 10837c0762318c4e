//! Inflating a piece of compressed data of any format.

use std::ops::Range;

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

/// The work of a codec, in bytes that could be copied or read instead: of each stream, each byte of
/// it, and each byte that it inflates to. A byte of a stream costs most: a few of them may describe
/// tables that are built for the next few.
struct Cost {
    stream: u64,
    input: u64,
    output: u64,
}

impl Stream {
    const fn cost(&self) -> Cost {
        let (stream, input, output) = match self {
            Stream::Cluster(Compression::Zlib) | Stream::Zlib { .. } => (1 << 10, 32, 1),
            Stream::Cluster(Compression::Zstd) => (1 << 10, 32, 1),
            // Each has tables of megabytes, and its bytes are put in order one by one.
            #[cfg(feature = "bzip2")]
            Stream::Bzip2 => (64 << 10, 64, 8),
        };
        Cost {
            stream,
            input,
            output,
        }
    }
}

impl Inflater {
    /// The work, at worst, of inflating a stream of so many bytes, as
    /// [`Limits::work`](crate::block::Limits::work) counts it.
    pub(crate) fn work(&self, length: u32) -> u64 {
        let cost = self.stream.cost();
        let most = match self.stream {
            Stream::Zlib { most } => most.max(self.size),
            _ => self.size,
        };
        cost.stream + cost.input * u64::from(length) + cost.output * u64::from(most)
    }

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

/// Inflates pieces of `source` into `bytes`, one behind the other, which have the space. Returns where each ends;
/// `None`: it does not inflate, and takes no bytes.
pub(crate) fn inflate_each(
    source: &[u8],
    pieces: Vec<(Range<usize>, Inflater)>,
    bytes: &mut [u8],
) -> Vec<Option<usize>> {
    let mut start = 0;
    let mut ends = Vec::with_capacity(pieces.len());
    for (range, inflater) in pieces {
        let end = start + inflater.output_len();
        let inflated = inflater.inflate(&source[range], &mut bytes[start..end]);
        ends.push(inflated.is_ok().then_some(end));
        if inflated.is_ok() {
            start = end;
        }
    }
    ends
}

#[cfg(test)]
mod tests {
    //! Guards against work that costs more time than it counts, and bytes in the place of others.
    use super::*;
    use crate::codec::Compressor;

    #[test]
    fn a_piece_that_does_not_inflate_takes_no_bytes() {
        let mut source = Vec::new();
        let mut pieces = Vec::new();
        for number in 0..9u8 {
            let mut packed = vec![0; 511];
            let kind = Compression::Zlib;
            let length = Compressor::new().compress(kind, None, &[number; 512], &mut packed);
            packed.truncate(length.unwrap().unwrap());
            if number % 4 == 1 {
                packed.fill(0xff);
            }
            let start = source.len();
            source.extend(packed);
            let stream = Stream::Cluster(kind);
            pieces.push((start..source.len(), Inflater { stream, size: 512 }));
        }
        let mut bytes = vec![0; 9 * 512];
        let ends = inflate_each(&source, pieces, &mut bytes);
        let mut start = 0;
        for (number, end) in (0u8..).zip(&ends) {
            assert_eq!(end.is_none(), number % 4 == 1, "{number}");
            if let Some(end) = *end {
                assert_eq!(bytes[start..end], [number; 512]);
                start = end;
            }
        }
        assert_eq!((start, ends.len()), (7 * 512, 9));
    }

    #[test]
    fn codecs_that_are_slower_count_more() {
        let work = |stream| Inflater { stream, size: 4096 }.work(1000);
        let zlib = work(Stream::Cluster(Compression::Zlib));
        assert_eq!(zlib, 1024 + 32_000 + 4096);
        assert_eq!(zlib, work(Stream::Cluster(Compression::Zstd)));
        // What follows the first bytes is inflated, too.
        assert_eq!(work(Stream::Zlib { most: 8192 }), zlib + 4096);
        #[cfg(feature = "bzip2")]
        assert_eq!(work(Stream::Bzip2), 65_536 + 64_000 + 8 * 4096);
    }
}
