//! From a compressed stream to one cluster.

use libdeflater::DecompressionError;
use zlib_rs::{Inflate, InflateFlush};
use zstd_safe::DCtx;

use super::{CodecError, Compression, is_dst_too_small};

/// QEMU inflates with a window of 4 KiB.
const WINDOW_BITS: u8 = 12;

/// Decompresses clusters, one after another. It holds state that the codecs reuse, so make one for
/// each thread or queue. Its memory does not depend on the streams.
pub struct Decompressor {
    inflate: libdeflater::Decompressor,
    zstd: DCtx<'static>,
}

impl Decompressor {
    /// Allocates the state of both codecs.
    pub fn new() -> Self {
        Self {
            inflate: libdeflater::Decompressor::new(),
            zstd: DCtx::create(),
        }
    }

    /// Fills `dst`, exactly one cluster, from the stream that starts at the
    /// first byte of `src`.
    ///
    /// `src` is what the descriptor covers: after the stream there may be
    /// anything. As in QEMU,
    /// - a zlib stream is good once it has filled `dst`: it may hold more, and
    ///   its end may be missing;
    /// - a zstd stream is one or more frames, the last of which must end
    ///   exactly where `dst` is full.
    ///
    /// After an error the contents of `dst` are unspecified.
    pub fn decompress(
        &mut self,
        kind: Compression,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<(), CodecError> {
        match kind {
            Compression::Zlib => match self.inflate.deflate_decompress(src, dst) {
                Ok(got) if got == dst.len() => Ok(()),
                Ok(got) => Err(CodecError::Short {
                    got,
                    expected: dst.len(),
                }),
                // libdeflate needs the whole stream, and that it fits. QEMU does not, so zlib
                // decides how far it is good.
                Err(DecompressionError::InsufficientSpace | DecompressionError::BadData) => {
                    inflate_prefix(src, dst)
                }
            },
            Compression::Zstd => self.zstd_frames(src, dst),
        }
    }

    /// Fills `dst` with the first bytes of the zlib stream (RFC 1950) that starts at the first byte
    /// of `src`. The stream must be whole, its checksum right, and its content no longer than
    /// `most`. After it there may be anything.
    ///
    /// After an error the contents of `dst` are unspecified.
    pub fn inflate_zlib(
        &mut self,
        src: &[u8],
        dst: &mut [u8],
        most: usize,
    ) -> Result<(), CodecError> {
        let expected = dst.len();
        match self.inflate.zlib_decompress(src, dst) {
            Ok(got) if got == expected => Ok(()),
            Ok(got) => Err(CodecError::Short { got, expected }),
            Err(DecompressionError::InsufficientSpace) if most > expected => {
                let mut all = vec![0; most];
                self.inflate_zlib(src, &mut all, most)
                    .or_else(|e| match e {
                        CodecError::Short { got, .. } if got >= expected => Ok(()),
                        e => Err(e),
                    })?;
                dst.copy_from_slice(&all[..expected]);
                Ok(())
            }
            Err(DecompressionError::InsufficientSpace) => Err(CodecError::Long { expected: most }),
            Err(DecompressionError::BadData) => Err(CodecError::Damaged),
        }
    }

    /// QEMU decodes until `dst` is full, and requires that the frame has ended then, so only whole
    /// frames count. With their ends found first, each is decoded in one step into `dst`, and no
    /// window is allocated, whatever its size in the frame.
    fn zstd_frames(&mut self, src: &[u8], dst: &mut [u8]) -> Result<(), CodecError> {
        let expected = dst.len();
        let mut rest = src;
        let mut got = 0;
        while got < expected {
            if rest.is_empty() {
                return Err(CodecError::Short { got, expected });
            }
            let frame = zstd_safe::find_frame_compressed_size(rest)
                .ok()
                .and_then(|len| rest.split_at_checked(len))
                .filter(|(frame, _)| !frame.is_empty());
            let Some((frame, after)) = frame else {
                // No whole frame here: cut off, or not a frame.
                return Err(if got > 0 {
                    CodecError::Short { got, expected }
                } else {
                    CodecError::Damaged
                });
            };
            match self.zstd.decompress(&mut dst[got..], frame) {
                Ok(n) => got += n,
                Err(code) if is_dst_too_small(code) => return Err(CodecError::Long { expected }),
                Err(_) => return Err(CodecError::Damaged),
            }
            rest = after;
        }
        Ok(())
    }
}

impl Default for Decompressor {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decompressor").finish_non_exhaustive()
    }
}

/// The slow way, for streams that libdeflate rejects and QEMU may not.
#[cold]
fn inflate_prefix(src: &[u8], dst: &mut [u8]) -> Result<(), CodecError> {
    let mut inflate = Inflate::new(false, WINDOW_BITS);
    let expected = dst.len();
    match inflate.decompress(src, dst, InflateFlush::Finish) {
        // Ok and BufError mean "cannot go on": for lack of input, or of space.
        Ok(_) if inflate.total_out() == expected as u64 => Ok(()),
        Ok(_) => Err(CodecError::Short {
            got: usize::try_from(inflate.total_out()).unwrap_or(expected),
            expected,
        }),
        Err(_) => Err(CodecError::Damaged),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against wrong bytes, or an error, for a cluster that QEMU reads; against a damaged
    //! cluster that is accepted; and against a hostile stream that causes a panic.

    use std::io::Write;

    use proptest::prelude::*;
    use zlib_rs::{Deflate, DeflateFlush};

    use super::*;

    const CLUSTER: usize = 65536;

    fn deflate(data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; data.len() + data.len() / 8 + 512];
        let mut deflate = Deflate::new(6, false, WINDOW_BITS);
        deflate
            .compress(data, &mut out, DeflateFlush::Finish)
            .unwrap();
        out.truncate(deflate.total_out() as usize);
        out
    }

    fn zstd_frame(data: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(data, 3).unwrap()
    }

    /// A frame without the size of its content that is not a single segment.
    fn zstd_frame_unsized(data: &[u8], window_log: u32) -> Vec<u8> {
        let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.window_log(window_log).unwrap();
        encoder.include_contentsize(false).unwrap();
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn encode(kind: Compression, data: &[u8]) -> Vec<u8> {
        match kind {
            Compression::Zlib => deflate(data),
            Compression::Zstd => zstd_frame(data),
        }
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

    fn decompress(kind: Compression, src: &[u8], len: usize) -> Result<Vec<u8>, CodecError> {
        let mut dst = vec![0xa5; len];
        Decompressor::new().decompress(kind, src, &mut dst)?;
        Ok(dst)
    }

    #[test]
    fn is_send() {
        fn send<T: Send>() {}
        send::<Decompressor>();
    }

    #[test]
    fn garbage_after_the_stream_is_ignored() {
        let data = text(CLUSTER);
        for kind in [Compression::Zlib, Compression::Zstd] {
            for fill in [0, 0xff, 0x28] {
                let mut src = encode(kind, &data);
                src.resize(src.len() + 511, fill);
                assert_eq!(decompress(kind, &src, CLUSTER).unwrap(), data);
            }
        }
    }

    #[test]
    fn a_stream_that_is_too_short_is_an_error() {
        let data = text(CLUSTER);
        for kind in [Compression::Zlib, Compression::Zstd] {
            let src = encode(kind, &data);
            assert_eq!(
                decompress(kind, &src, CLUSTER + 1),
                Err(CodecError::Short {
                    got: CLUSTER,
                    expected: CLUSTER + 1
                })
            );
            assert!(decompress(kind, &[], CLUSTER).is_err());
        }
    }

    #[test]
    fn a_zlib_stream_may_be_longer_than_a_cluster() {
        let data = text(CLUSTER);
        let src = deflate(&data);
        for len in [1, 512, CLUSTER - 1] {
            assert_eq!(
                decompress(Compression::Zlib, &src, len).unwrap(),
                data[..len]
            );
        }
    }

    #[test]
    fn a_zlib_stream_may_lack_its_end() {
        // Stored blocks, truncated after the last literal byte.
        let mut src = vec![0, 0, 2, 0xff, 0xfd];
        src.extend(text(512));
        assert_eq!(decompress(Compression::Zlib, &src, 512).unwrap(), text(512));
        // Huffman codes: without the end-of-block code no data are lost.
        let data = text(CLUSTER);
        let whole = deflate(&data);
        let cut = &whole[..whole.len() - 1];
        match decompress(Compression::Zlib, cut, CLUSTER) {
            Ok(got) => assert_eq!(got, data),
            Err(e) => assert!(matches!(e, CodecError::Short { got, .. } if got + 300 > CLUSTER)),
        }
        assert!(decompress(Compression::Zlib, &whole[..whole.len() / 2], CLUSTER).is_err());
    }

    #[test]
    fn a_zstd_frame_needs_no_content_size() {
        let data = text(CLUSTER);
        // The window of the last is 128 MiB, which must not be allocated.
        for window_log in [10, 17, 27] {
            let src = zstd_frame_unsized(&data, window_log);
            assert_eq!(decompress(Compression::Zstd, &src, CLUSTER).unwrap(), data);
        }
    }

    #[test]
    fn zstd_frames_are_concatenated() {
        let data = text(CLUSTER);
        let (a, b) = data.split_at(1000);
        let skippable = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        let mut src = skippable.to_vec();
        src.extend(zstd_frame(a));
        src.extend(zstd_frame(&[]));
        src.extend(skippable);
        src.extend(zstd_frame_unsized(b, 17));
        src.extend([0xff; 100]);
        assert_eq!(decompress(Compression::Zstd, &src, CLUSTER).unwrap(), data);
    }

    #[test]
    fn a_zstd_frame_longer_than_a_cluster_is_an_error() {
        let data = text(CLUSTER);
        for src in [zstd_frame(&data), zstd_frame_unsized(&data, 17)] {
            for len in [1, 1000, CLUSTER - 1] {
                assert_eq!(
                    decompress(Compression::Zstd, &src, len),
                    Err(CodecError::Long { expected: len })
                );
            }
        }
    }

    #[test]
    fn a_truncated_zstd_frame_is_an_error() {
        let data = text(4096);
        let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.include_checksum(true).unwrap();
        encoder.write_all(&data).unwrap();
        let src = encoder.finish().unwrap();
        assert_eq!(decompress(Compression::Zstd, &src, 4096).unwrap(), data);
        for len in 0..src.len() {
            assert!(decompress(Compression::Zstd, &src[..len], 4096).is_err());
        }
        // A checksum that does not match is damage.
        let mut bad = src.clone();
        *bad.last_mut().unwrap() ^= 1;
        assert_eq!(
            decompress(Compression::Zstd, &bad, 4096),
            Err(CodecError::Damaged)
        );
    }

    #[test]
    fn a_decompressor_is_usable_after_errors() {
        let data = text(CLUSTER);
        let mut d = Decompressor::new();
        let mut dst = vec![0; CLUSTER];
        for kind in [Compression::Zlib, Compression::Zstd] {
            let src = encode(kind, &data);
            assert!(d.decompress(kind, &src[..src.len() / 2], &mut dst).is_err());
            assert!(d.decompress(kind, &[0xff; 100], &mut dst).is_err());
            d.decompress(kind, &src, &mut dst).unwrap();
            assert_eq!(dst, data);
        }
    }

    fn zlib(data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; data.len() + data.len() / 8 + 512];
        let mut deflate = Deflate::new(6, true, 15);
        deflate
            .compress(data, &mut out, DeflateFlush::Finish)
            .unwrap();
        out.truncate(deflate.total_out() as usize);
        out
    }

    #[test]
    fn a_zlib_stream_with_a_checksum_must_be_whole() {
        let data = text(CLUSTER);
        let whole = zlib(&data);
        let mut d = Decompressor::new();
        let mut inflate = |src: &[u8], len: usize, most: usize| {
            let mut dst = vec![0xa5; len];
            d.inflate_zlib(src, &mut dst, most).map(|()| dst)
        };
        let padded = [&whole[..], &[0x78; 500]].concat();
        assert_eq!(inflate(&padded, CLUSTER, CLUSTER).unwrap(), data);
        for len in [0, 1, 512, CLUSTER - 1] {
            assert_eq!(inflate(&whole, len, CLUSTER).unwrap(), data[..len]);
            assert_eq!(inflate(&whole, len, CLUSTER + 7).unwrap(), data[..len]);
            let long = CodecError::Long {
                expected: CLUSTER - 1,
            };
            assert_eq!(inflate(&whole, len, CLUSTER - 1), Err(long));
        }
        assert!(matches!(
            inflate(&whole, CLUSTER + 1, CLUSTER + 1),
            Err(CodecError::Short { got: CLUSTER, .. })
        ));
        // Each missing or wrong byte is noticed, also where what is wanted is complete.
        for cut in [0, 1, 2, whole.len() / 2, whole.len() - 4, whole.len() - 1] {
            assert!(inflate(&whole[..cut], CLUSTER, CLUSTER).is_err(), "{cut}");
        }
        for at in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
            let mut bad = whole.clone();
            bad[at] ^= 0x10;
            assert!(inflate(&bad, CLUSTER, CLUSTER).is_err(), "{at}");
            assert!(inflate(&bad, 512, CLUSTER).is_err(), "{at}");
        }
        assert!(inflate(&deflate(&data), CLUSTER, CLUSTER).is_err());
    }

    fn any_kind() -> impl Strategy<Value = Compression> {
        prop_oneof![Just(Compression::Zlib), Just(Compression::Zstd)]
    }

    /// Runs of random and of repeated bytes.
    fn any_data() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            prop::collection::vec(any::<u8>(), 1..400),
            (any::<u8>(), 1usize..2000).prop_map(|(b, n)| vec![b; n]),
            (1usize..3000).prop_map(text),
        ];
        prop::collection::vec(piece, 1..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn round_trip(kind in any_kind(), data in any_data(), tail in prop::collection::vec(any::<u8>(), 0..512)) {
            let mut src = encode(kind, &data);
            src.extend(tail);
            prop_assert_eq!(decompress(kind, &src, data.len()).unwrap(), data);
        }

        /// A prefix of a valid stream gives an error or the right bytes.
        #[test]
        fn cut(kind in any_kind(), data in any_data(), at in any::<prop::sample::Index>()) {
            let src = encode(kind, &data);
            let cut = &src[..at.index(src.len())];
            if let Ok(got) = decompress(kind, cut, data.len()) {
                prop_assert_eq!(got, data);
            }
        }

        /// A valid zlib stream gives any prefix of its content.
        #[test]
        fn long(data in any_data(), at in any::<prop::sample::Index>()) {
            let len = at.index(data.len()) + 1;
            let got = decompress(Compression::Zlib, &deflate(&data), len).unwrap();
            prop_assert_eq!(&got[..], &data[..len]);
        }

        /// A damaged stream gives an error or some bytes. If libdeflate accepts it, zlib gives the
        /// same bytes.
        #[test]
        fn mutated(
            kind in any_kind(),
            data in any_data(),
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut src = encode(kind, &data);
            for (at, byte) in edits {
                let at = at.index(src.len());
                src[at] ^= byte;
            }
            let got = decompress(kind, &src, data.len());
            if kind == Compression::Zlib {
                let mut slow = vec![0; data.len()];
                if inflate_prefix(&src, &mut slow).is_ok() {
                    prop_assert_eq!(got.unwrap(), slow);
                }
            }
        }

        #[test]
        fn noise(kind in any_kind(), src in prop::collection::vec(any::<u8>(), 0..2000), len in 1usize..5000) {
            let _ = decompress(kind, &src, len);
        }
    }
}
