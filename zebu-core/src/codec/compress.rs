//! From one cluster to a compressed stream.

use zebu_deflate::{Encoder, Level};
use zstd_safe::{CCtx, CParameter};

use super::{CodecError, Compression, is_dst_too_small};

/// The default level of zstd (QEMU's is 3): see `docs/codec.md`.
const ZSTD_DEFAULT: i32 = 2;

/// Compresses clusters, one after another. It holds what the codecs can reuse,
/// so make one per thread or queue and keep it.
///
/// The same cluster at the same level gives the same stream, whatever was
/// compressed before it.
pub struct Compressor {
    deflate: Option<Encoder>,
    zstd: Option<CCtx<'static>>,
    zstd_level: Option<i32>,
}

impl Compressor {
    /// The state of a codec is allocated when it is first used.
    pub fn new() -> Self {
        Self {
            deflate: None,
            zstd: None,
            zstd_level: None,
        }
    }

    /// Compresses `src`, one cluster, into one stream at the start of `dst`,
    /// and returns its length; `None` when it does not fit. A cluster is worth
    /// storing compressed only if its stream is shorter than itself, so let
    /// `dst` be a byte shorter than `src`.
    ///
    /// Levels are 1 (fastest) to 9 (smallest) for zlib and zstd's own for
    /// zstd; `None` is the level that serves best. After `Ok(None)` or an
    /// error the contents of `dst` are unspecified.
    pub fn compress(
        &mut self,
        kind: Compression,
        level: Option<i32>,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<Option<usize>, CodecError> {
        match kind {
            Compression::Zlib => {
                let level = deflate_level(level)?;
                let encoder = self.deflate.get_or_insert_with(Encoder::new);
                Ok(encoder.compress(level, src, dst))
            }
            Compression::Zstd => self.zstd(level.unwrap_or(ZSTD_DEFAULT), src, dst),
        }
    }

    /// Compresses `src` into one zlib stream (RFC 1950) at the start of `dst`, which has at least
    /// [`zlib_bound`] bytes, and returns its length. What cannot be compressed becomes longer.
    /// Levels are those of [`Compressor::compress`].
    pub fn compress_to_zlib(
        &mut self,
        level: Option<i32>,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<usize, CodecError> {
        let level = deflate_level(level)?;
        let encoder = self.deflate.get_or_insert_with(Encoder::new);
        let length = encoder.compress_zlib(level, src, dst);
        length.ok_or(CodecError::Compressor)
    }

    fn zstd(
        &mut self,
        level: i32,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<Option<usize>, CodecError> {
        if !(zstd_safe::min_c_level()..=zstd_safe::max_c_level()).contains(&level) {
            return Err(CodecError::Level { level });
        }
        let context = match &mut self.zstd {
            Some(context) => context,
            none => none.insert(CCtx::try_create().ok_or(CodecError::Compressor)?),
        };
        if self.zstd_level != Some(level) {
            context
                .set_parameter(CParameter::CompressionLevel(level))
                .map_err(|_| CodecError::Compressor)?;
            self.zstd_level = Some(level);
        }
        // In one step: zstd then chooses its tables to match the size.
        match context.compress2(dst, src) {
            Ok(len) => Ok(Some(len)),
            Err(code) if is_dst_too_small(code) => Ok(None),
            Err(_) => Err(CodecError::Compressor),
        }
    }
}

/// The most bytes of a zlib stream of `length` bytes: a part of the data may be stored as it is, in
/// blocks that have some bytes of their own.
pub fn zlib_bound(length: usize) -> usize {
    length + length / 64 + 64
}

fn deflate_level(level: Option<i32>) -> Result<Level, CodecError> {
    match level {
        None => Ok(Level::DEFAULT),
        Some(level) => Level::new(level).ok_or(CodecError::Level { level }),
    }
}

impl Default for Compressor {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    //! Guards against lost data: a cluster that does not round-trip, a stream that is longer than
    //! its buffer.

    use super::*;
    use crate::codec::Decompressor;

    fn noise(len: usize) -> Vec<u8> {
        let mut seed = 5u64;
        let mut byte = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed as u8
        };
        (0..len).map(|_| byte()).collect()
    }

    fn text(len: usize) -> Vec<u8> {
        let lines =
            (0u32..).map(|i| format!("line {} of {}\n", i, i.wrapping_mul(2654435761) >> 20));
        lines.flat_map(String::into_bytes).take(len).collect()
    }

    #[test]
    fn is_send() {
        fn send<T: Send>() {}
        send::<Compressor>();
    }

    #[test]
    fn a_stream_that_does_not_fit_is_none() {
        let mut c = Compressor::new();
        let (hard, easy) = (noise(65536), text(65536));
        for kind in [Compression::Zlib, Compression::Zstd] {
            assert_eq!(c.compress(kind, None, &hard, &mut [0; 65535]), Ok(None));
            let len = c.compress(kind, None, &easy, &mut [0; 65535]).unwrap();
            assert!(len.is_some());
            assert_eq!(c.compress(kind, None, &easy, &mut []), Ok(None));
        }
    }

    #[test]
    fn levels_that_do_not_exist() {
        let mut c = Compressor::new();
        for (kind, level) in [
            (Compression::Zlib, 0),
            (Compression::Zlib, 10),
            (Compression::Zlib, -1),
            (Compression::Zstd, 23),
            (Compression::Zstd, i32::MIN),
        ] {
            assert_eq!(
                c.compress(kind, Some(level), &[0; 512], &mut [0; 512]),
                Err(CodecError::Level { level })
            );
        }
    }

    #[test]
    fn any_data_become_a_zlib_stream() {
        let mut c = Compressor::new();
        let mut inflate = libdeflater::Decompressor::new();
        for data in [
            vec![],
            vec![1],
            noise(512),
            noise(65536),
            noise(300_000),
            text(65536),
        ] {
            for level in [None, Some(1), Some(9)] {
                let mut dst = vec![0; zlib_bound(data.len())];
                let length = c.compress_to_zlib(level, &data, &mut dst).unwrap();
                let mut back = vec![0; data.len()];
                let got = inflate.zlib_decompress(&dst[..length], &mut back).unwrap();
                assert!(got == data.len() && back == data);
            }
        }
        let wrong = c.compress_to_zlib(Some(0), &[0; 9], &mut [0; 99]);
        assert_eq!(wrong, Err(CodecError::Level { level: 0 }));
    }

    #[test]
    fn a_compressed_cluster_round_trips() {
        let mut c = Compressor::new();
        let mut d = Decompressor::new();
        let zstd = [None, Some(1), Some(3), Some(-5), Some(19), Some(22), None];
        let zstd = zstd.map(|level| (Compression::Zstd, level));
        let zlib = [None, Some(1), Some(9)].map(|level| (Compression::Zlib, level));
        for (kind, level) in zstd.into_iter().chain(zlib) {
            for data in [vec![0; 65536], text(65536), text(512), vec![7; 2 << 20]] {
                let mut dst = vec![0; data.len()];
                let len = c.compress(kind, level, &data, &mut dst).unwrap().unwrap();
                let mut back = vec![1; data.len()];
                d.decompress(kind, &dst[..len], &mut back).unwrap();
                assert!(back == data);
            }
        }
    }
}
