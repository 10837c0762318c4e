//! From one cluster to a compressed stream.

use zstd::zstd_safe::{CCtx, CParameter};

use super::deflate::{Deflate, Effort};
use super::{CodecError, Compression, is_dst_too_small};

/// The zlib level that is meant when none is named: within 2 % of the size
/// that QEMU writes, at several times its speed. `docs/codec.md` says why.
const ZLIB_DEFAULT: i32 = 2;

/// Likewise for zstd, where QEMU takes 3.
const ZSTD_DEFAULT: i32 = 2;

/// Compresses clusters, one after another. It holds what the codecs can reuse,
/// so make one per thread or queue and keep it.
///
/// The same cluster at the same level gives the same stream, whatever was
/// compressed before it.
pub struct Compressor {
    deflate: Option<Deflate>,
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
                let level = level.unwrap_or(ZLIB_DEFAULT);
                if !(1..=9).contains(&level) {
                    return Err(CodecError::Level { level });
                }
                let deflate = self.deflate.get_or_insert_with(Deflate::new);
                Ok(deflate.compress(Effort::of_level(level), src, dst))
            }
            Compression::Zstd => self.zstd(level.unwrap_or(ZSTD_DEFAULT), src, dst),
        }
    }

    fn zstd(
        &mut self,
        level: i32,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<Option<usize>, CodecError> {
        if !zstd::compression_level_range().contains(&level) {
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
        // In one step, zstd knows the size and chooses its tables to match.
        match context.compress2(dst, src) {
            Ok(len) => Ok(Some(len)),
            Err(code) if is_dst_too_small(code) => Ok(None),
            Err(_) => Err(CodecError::Compressor),
        }
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
    //! Guards against a guest losing data: a stream that does not give back
    //! its cluster, in this decompressor or another; a distance that QEMU's
    //! 4 KiB window does not reach; a stream longer than the room it was given.

    use std::io::Write;

    use proptest::prelude::*;
    use zlib_rs::{Inflate, InflateFlush};

    use super::*;
    use crate::codec::Decompressor;

    /// Inflates byte by byte of output, so that the inflater has nothing but
    /// its 4 KiB window to copy from.
    fn inflate_narrow(stream: &[u8], len: usize) -> Vec<u8> {
        let mut inflate = Inflate::new(false, 12);
        let mut out = Vec::new();
        let mut rest = stream;
        let mut piece = [0; 61];
        loop {
            let (was_in, was_out) = (inflate.total_in(), inflate.total_out());
            let status = inflate
                .decompress(rest, &mut piece, InflateFlush::NoFlush)
                .expect("a good stream with no far distance");
            rest = &rest[(inflate.total_in() - was_in) as usize..];
            let n = (inflate.total_out() - was_out) as usize;
            out.extend_from_slice(&piece[..n]);
            if status == zlib_rs::Status::StreamEnd {
                assert!(rest.is_empty(), "bytes after the stream");
                break;
            }
            assert!(n > 0, "the stream has no end");
            assert!(out.len() <= len, "the stream is too long");
        }
        out
    }

    /// Compresses with room to spare, checks the stream, returns its length.
    fn round_trip(compressor: &mut Compressor, level: i32, src: &[u8]) -> usize {
        let mut dst = vec![0; src.len() + src.len() / 1000 + 100];
        let len = compressor
            .compress(Compression::Zlib, Some(level), src, &mut dst)
            .unwrap()
            .expect("room for stored blocks");
        assert!(inflate_narrow(&dst[..len], src.len()) == src);
        let mut back = vec![0; src.len()];
        let got = libdeflater::Decompressor::new()
            .deflate_decompress(&dst[..len], &mut back)
            .unwrap();
        assert!(got == src.len() && back == src);
        len
    }

    fn noise(len: usize, mut seed: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            out.extend(seed.to_le_bytes());
        }
        out.truncate(len);
        out
    }

    fn text(len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for i in 0u32.. {
            if out.len() >= len {
                break;
            }
            writeln!(out, "line {} of {}", i, i.wrapping_mul(2654435761) >> 20).unwrap();
        }
        out.truncate(len);
        out
    }

    #[test]
    fn is_send() {
        fn send<T: Send>() {}
        send::<Compressor>();
    }

    #[test]
    fn every_length_near_a_boundary() {
        let data = text((2 << 20) + 10);
        let mut c = Compressor::new();
        let lens = (0..40)
            .chain(4090..4110)
            .chain(65520..65550)
            .chain(65536 + 61430..65536 + 61450)
            .chain([1 << 20, 2 << 20, (2 << 20) + 7]);
        for len in lens {
            round_trip(&mut c, 2, &data[..len]);
            round_trip(&mut c, 6, &data[..len]);
        }
    }

    #[test]
    fn every_level() {
        let mut c = Compressor::new();
        let mixed: Vec<u8> = (0..8)
            .flat_map(|i| [noise(3000 * i, 7), text(2000), vec![i as u8; 4000]].concat())
            .collect();
        let cases = [
            vec![],
            vec![0x80],
            vec![0; 65536],
            vec![0xff; 2 << 20],
            b"ab".repeat(32768),
            b"abc".repeat(21845),
            text(65536),
            noise(65536, 1),
            // One byte more than the window apart: must not be found.
            noise(4097, 2).repeat(16),
            noise(4096, 2).repeat(16),
            (0..=255).cycle().take(65536).collect(),
            // Frequencies that want codes of more than 15 bits.
            (0..24u32)
                .flat_map(|i| vec![(i * 7) as u8; 1 << (i / 2)])
                .collect(),
            mixed,
        ];
        for case in &cases {
            let lens: Vec<_> = (1..=9)
                .map(|level| round_trip(&mut c, level, case))
                .collect();
            assert!(lens[8] <= lens[0] + lens[0] / 50, "{lens:?}");
        }
        assert!(round_trip(&mut c, 2, &[0; 65536]) < 300);
        assert!(round_trip(&mut c, 2, &noise(4096, 2).repeat(16)) < 6000);
        assert!(round_trip(&mut c, 2, &noise(65536, 1)) <= 65536 + 10);
    }

    /// Fibonacci frequencies in an order without matches: the deepest codes
    /// that a block can ask for.
    #[test]
    fn deep_codes_are_limited() {
        let (mut a, mut b) = (1usize, 1usize);
        let mut data = Vec::new();
        for symbol in 0..22u8 {
            data.extend(std::iter::repeat_n(symbol.wrapping_mul(37), a));
            (a, b) = (b, a + b);
        }
        let keys = noise(data.len() * 8, 3);
        let mut order: Vec<_> = keys.chunks(8).zip(data).collect();
        order.sort();
        let data: Vec<u8> = order.into_iter().map(|(_, symbol)| symbol).collect();
        let mut c = Compressor::new();
        for level in [1, 2, 6] {
            round_trip(&mut c, level, &data);
        }
    }

    #[test]
    fn what_does_not_fit_is_none() {
        let mut c = Compressor::new();
        let hard = noise(65536, 5);
        for kind in [Compression::Zlib, Compression::Zstd] {
            assert_eq!(c.compress(kind, None, &hard, &mut [0; 65535]), Ok(None));
            let easy = text(65536);
            let mut dst = vec![0; 65535];
            let len = c.compress(kind, None, &easy, &mut dst).unwrap().unwrap();
            if kind == Compression::Zlib {
                // To the byte. (zstd wants some room to work in.)
                let mut exact = vec![0; len];
                assert_eq!(c.compress(kind, None, &easy, &mut exact), Ok(Some(len)));
                assert_eq!(exact, dst[..len]);
                assert_eq!(c.compress(kind, None, &easy, &mut exact[1..]), Ok(None));
            }
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
    fn zstd_gives_back_what_it_took() {
        let mut c = Compressor::new();
        let mut d = Decompressor::new();
        for level in [None, Some(1), Some(3), Some(-5), Some(19), Some(22), None] {
            for data in [vec![0; 65536], text(65536), text(512), vec![7; 2 << 20]] {
                let mut dst = vec![0; data.len()];
                let len = c.compress(Compression::Zstd, level, &data, &mut dst);
                let len = len.unwrap().unwrap();
                let mut back = vec![1; data.len()];
                d.decompress(Compression::Zstd, &dst[..len], &mut back)
                    .unwrap();
                assert!(back == data);
            }
        }
    }

    fn any_data() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            (0usize..5000, any::<u64>()).prop_map(|(n, seed)| noise(n, seed | 1)),
            // From few symbols, so that short matches abound.
            (0usize..9000, any::<u64>(), 1u8..5).prop_map(|(n, seed, bits)| noise(n, seed | 1)
                .iter()
                .map(|b| b >> (8 - bits))
                .collect()),
            (any::<u8>(), 1usize..9000).prop_map(|(b, n)| vec![b; n]),
            (1usize..6000).prop_map(text),
            (1usize..5000, 2usize..12).prop_map(|(n, times)| noise(n, 99).repeat(times)),
        ];
        prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_data_any_level(data in any_data(), level in 1..=9) {
            round_trip(&mut Compressor::new(), level, &data);
        }

        /// What came before leaves no trace.
        #[test]
        fn same_stream_from_a_used_compressor(first in any_data(), data in any_data(), level in 1..=9) {
            let mut used = Compressor::new();
            let mut a = vec![0; data.len() + 1000];
            let mut b = a.clone();
            let _ = used.compress(Compression::Zlib, Some(level), &first, &mut a);
            let n = used.compress(Compression::Zlib, Some(level), &data, &mut a).unwrap().unwrap();
            let m = Compressor::new().compress(Compression::Zlib, Some(level), &data, &mut b).unwrap().unwrap();
            prop_assert!(a[..n] == b[..m]);
        }
    }
}
