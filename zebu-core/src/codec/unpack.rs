//! Compressed streams of any length (gzip, zstd, xz, bzip2), told by their first bytes.

use std::io::{self, BufRead, BufReader, Read};

use zlib_rs::{Inflate, InflateFlush, Status};
use zstd_safe::{DCtx, InBuffer, OutBuffer};

/// Compressed bytes that are read at a time.
const READ: usize = 256 << 10;
/// Bytes that tell a compression.
const TOLD_BYTES: usize = 10;
/// The start of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// MiB of the window that a zstd frame may have: the default of the decoder.
const ZSTD_WINDOW: u64 = 128;
/// Bytes of the longest header of a zstd frame.
const ZSTD_HEADER: usize = 18;
/// KiB of memory that an xz stream may need: its presets need up to 65 MiB.
#[cfg(feature = "xz")]
const XZ_MEMORY: u32 = 80 << 10;

/// The compression of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamCompression {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
    /// The .xz file format 1.2.
    Xz,
    /// bzip2.
    Bzip2,
}

impl StreamCompression {
    /// Bytes of the start of a stream that [`StreamCompression::of`] needs, as far as `head`, the
    /// first ones, says: more if they are skippable frames.
    pub fn needed(head: &[u8]) -> u64 {
        skipped(head) + TOLD_BYTES as u64
    }

    /// The compression of a stream that begins with `head`, if it is compressed. The stream is
    /// shorter if these are fewer bytes than [`StreamCompression::needed`].
    pub fn of(head: &[u8]) -> Option<Self> {
        let block = |magic: &[u8]| head.get(4..).is_some_and(|rest| rest.starts_with(magic));
        let skipped = skipped(head);
        if skipped > 0 {
            // LZ4 has the same skippable frames, so the frame that follows decides.
            let rest = head.get(skipped as usize..).unwrap_or_default();
            let is_zstd = ZSTD_MAGIC
                .iter()
                .zip(rest)
                .all(|(magic, byte)| magic == byte);
            return is_zstd.then_some(Self::Zstd);
        }
        match head {
            [0x1f, 0x8b, 8, ..] => Some(Self::Gzip),
            _ if head.starts_with(&ZSTD_MAGIC) => Some(Self::Zstd),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Self::Xz),
            // A block follows, or the end of an empty stream.
            [b'B', b'Z', b'h', b'1'..=b'9', ..]
                if block(b"\x31\x41\x59\x26\x53\x59") || block(b"\x17\x72\x45\x38\x50\x90") =>
            {
                Some(Self::Bzip2)
            }
            _ => None,
        }
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
        }
    }

    fn error(self, kind: io::ErrorKind, what: &str) -> io::Error {
        io::Error::new(kind, format!("The {} stream {what}", self.name()))
    }

    fn damaged(self) -> io::Error {
        self.error(io::ErrorKind::InvalidData, "is damaged")
    }

    fn cut_off(self) -> io::Error {
        self.error(io::ErrorKind::UnexpectedEof, "is cut off")
    }

    fn has_more(self) -> io::Error {
        self.error(io::ErrorKind::InvalidData, "is followed by something else")
    }
}

/// The end of the skippable frames (RFC 8878 section 3.1.2) that `head` begins with, which may be
/// behind its own.
fn skipped(head: &[u8]) -> u64 {
    let mut at = 0;
    while let Some([a, 0x2a, 0x4d, 0x18, b, c, d, e, ..]) = head.get(at as usize..)
        && a & 0xf0 == 0x50
    {
        at += 8 + u64::from(u32::from_le_bytes([*b, *c, *d, *e]));
    }
    at
}

/// What compressed streams, one after the other, inflate to. Memory is bounded, whatever they
/// hold. Checksums are verified; a stream that is cut off, or is followed by something else, is an
/// error.
pub struct Unpack<R: Read> {
    compression: StreamCompression,
    codec: Codec<R>,
}

enum Codec<R: Read> {
    Members(BufReader<R>, Member, Count),
    #[cfg(feature = "xz")]
    Xz(Box<lzma_rust2::XzReader<BufReader<R>>>),
}

/// A stream of those that follow each other.
enum Member {
    Gzip(Between<Inflate>),
    Zstd(Box<ZstdFrames>),
    #[cfg(feature = "bzip2")]
    Bzip2(Between<bzip2::Decompress>),
}

/// The decoder of a member, or none between two of them.
struct Between<D> {
    decoder: Option<D>,
    /// Whether a member has ended.
    had_one: bool,
}

struct ZstdFrames {
    context: DCtx<'static>,
    /// Whether the last frame has ended, and all of it was given out.
    at_end: bool,
    /// The first bytes of the present frame.
    header: Vec<u8>,
}

/// What was read of streams that follow each other.
#[derive(Default)]
struct Count {
    members: u64,
    /// Read and given out.
    bytes: u64,
}

impl Count {
    /// Streams of bzip2 that may be as short as they like.
    const FREE: u64 = 4096;
    /// Bytes of each of the others, on average.
    const LEAST: u64 = 1024;

    /// Whether the time goes into beginning streams: each of bzip2 takes memory of megabytes, for
    /// 14 bytes if it is empty.
    fn is_too_slow(&self, compression: StreamCompression) -> bool {
        compression == StreamCompression::Bzip2
            && self.members > Self::FREE
            && self.bytes / self.members < Self::LEAST
    }
}

/// What a step of a decoder did.
struct Step {
    consumed: usize,
    produced: usize,
    /// A member has ended.
    ended: bool,
}

impl<R: Read> Unpack<R> {
    /// Of what `reader` reads.
    ///
    /// # Errors
    /// `Unsupported` if the compression is not part of this build.
    pub fn new(reader: R, compression: StreamCompression) -> io::Result<Self> {
        let reader = BufReader::with_capacity(READ, reader);
        let codec = match compression {
            StreamCompression::Gzip => {
                Codec::Members(reader, Member::Gzip(Between::start()), Count::default())
            }
            StreamCompression::Zstd => {
                let frames = ZstdFrames {
                    context: DCtx::try_create().ok_or(io::ErrorKind::OutOfMemory)?,
                    at_end: false,
                    header: Vec::new(),
                };
                Codec::Members(reader, Member::Zstd(Box::new(frames)), Count::default())
            }
            #[cfg(feature = "xz")]
            StreamCompression::Xz => {
                let xz = lzma_rust2::XzReader::new_mem_limit(reader, true, XZ_MEMORY);
                Codec::Xz(Box::new(xz))
            }
            #[cfg(feature = "bzip2")]
            StreamCompression::Bzip2 => {
                Codec::Members(reader, Member::Bzip2(Between::start()), Count::default())
            }
            #[cfg(not(all(feature = "xz", feature = "bzip2")))]
            other => {
                return Err(other.error(
                    io::ErrorKind::Unsupported,
                    "cannot be read: this build has no such decoder",
                ));
            }
        };
        Ok(Unpack { compression, codec })
    }
}

impl<R: Read> Read for Unpack<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        let compression = self.compression;
        match &mut self.codec {
            Codec::Members(reader, member, count) => member.read(reader, out, compression, count),
            #[cfg(feature = "xz")]
            Codec::Xz(xz) => read_xz(xz, out),
        }
    }
}

#[cfg(feature = "xz")]
fn read_xz<R: Read>(
    xz: &mut lzma_rust2::XzReader<BufReader<R>>,
    out: &mut [u8],
) -> io::Result<usize> {
    let this = StreamCompression::Xz;
    match xz.read(out) {
        Ok(0) => match xz.inner_mut().fill_buf()?.is_empty() {
            true => Ok(0),
            false => Err(this.has_more()),
        },
        Ok(count) => Ok(count),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(this.cut_off()),
        Err(e) if e.kind() == io::ErrorKind::OutOfMemory => {
            let most = XZ_MEMORY >> 10;
            let what = format!("needs more than {most} MiB of memory");
            Err(this.error(io::ErrorKind::OutOfMemory, &what))
        }
        // An error of the reader below.
        Err(e) if e.raw_os_error().is_some() => Err(e),
        Err(_) => Err(this.damaged()),
    }
}

impl<D> Between<D> {
    fn start() -> Self {
        Between {
            decoder: None,
            had_one: false,
        }
    }
}

impl Member {
    fn read(
        &mut self,
        reader: &mut impl BufRead,
        out: &mut [u8],
        compression: StreamCompression,
        count: &mut Count,
    ) -> io::Result<usize> {
        loop {
            let input = match reader.fill_buf() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                filled => filled?,
            };
            let at_end = input.is_empty();
            if at_end && self.is_whole() {
                return Ok(0);
            }
            let began = self.has_had_one();
            let step = match self.step(input, out) {
                Ok(step) => step,
                Err(BadStep::Window(bytes)) => {
                    let size = bytes.div_ceil(1 << 20);
                    let what = format!(
                        "needs a window of {size} MiB, and at most {ZSTD_WINDOW} MiB are allowed"
                    );
                    return Err(compression.error(io::ErrorKind::OutOfMemory, &what));
                }
                Err(BadStep::Damage) if began && self.is_at_start() => {
                    return Err(compression.has_more());
                }
                Err(BadStep::Damage) => return Err(compression.damaged()),
            };
            let Step {
                consumed,
                produced,
                ended,
            } = step;
            reader.consume(consumed);
            count.bytes += (consumed + produced) as u64;
            count.members += u64::from(ended);
            if count.is_too_slow(compression) {
                let what = "consists of very many parts with hardly any data in them";
                return Err(compression.error(io::ErrorKind::InvalidData, what));
            }
            if produced > 0 {
                return Ok(produced);
            }
            if at_end && consumed == 0 && !ended {
                return Err(compression.cut_off());
            }
        }
    }

    /// Whether the stream may end here.
    fn is_whole(&self) -> bool {
        match self {
            Member::Gzip(between) => between.decoder.is_none() && between.had_one,
            Member::Zstd(frames) => frames.at_end,
            #[cfg(feature = "bzip2")]
            Member::Bzip2(between) => between.decoder.is_none() && between.had_one,
        }
    }

    fn has_had_one(&self) -> bool {
        match self {
            Member::Gzip(between) => between.had_one,
            Member::Zstd(frames) => frames.at_end,
            #[cfg(feature = "bzip2")]
            Member::Bzip2(between) => between.had_one,
        }
    }

    /// Whether nothing of the present member was accepted.
    fn is_at_start(&self) -> bool {
        match self {
            Member::Gzip(between) => between.decoder.as_ref().is_none_or(|d| d.total_out() == 0),
            Member::Zstd(_) => true,
            #[cfg(feature = "bzip2")]
            Member::Bzip2(between) => between.decoder.as_ref().is_none_or(|d| d.total_out() == 0),
        }
    }

    fn step(&mut self, input: &[u8], out: &mut [u8]) -> Result<Step, BadStep> {
        match self {
            Member::Gzip(between) => {
                if between.decoder.is_none() && between.had_one {
                    // Tapes and block devices end in zeroes.
                    let zeroes = input.iter().take_while(|b| **b == 0).count();
                    if zeroes > 0 {
                        return Ok(Step::consumed(zeroes));
                    }
                }
                // A gzip header, and the largest window.
                let new = || Inflate::new(true, 16 + 15);
                let inflate = between.decoder.get_or_insert_with(new);
                let before = (inflate.total_in(), inflate.total_out());
                let status = inflate.decompress(input, out, InflateFlush::NoFlush);
                let step = Step {
                    consumed: (inflate.total_in() - before.0) as usize,
                    produced: (inflate.total_out() - before.1) as usize,
                    ended: status == Ok(Status::StreamEnd),
                };
                between.after(step, status.is_err())
            }
            Member::Zstd(frames) => frames.step(input, out),
            #[cfg(feature = "bzip2")]
            Member::Bzip2(between) => {
                let new = || bzip2::Decompress::new(false);
                let decoder = between.decoder.get_or_insert_with(new);
                let before = (decoder.total_in(), decoder.total_out());
                let status = decoder.decompress(input, out);
                let step = Step {
                    consumed: (decoder.total_in() - before.0) as usize,
                    produced: (decoder.total_out() - before.1) as usize,
                    ended: matches!(status, Ok(bzip2::Status::StreamEnd)),
                };
                between.after(step, status.is_err())
            }
        }
    }
}

/// A decoder has refused its input.
enum BadStep {
    Damage,
    /// A zstd frame that needs a window of so many bytes, which are too many.
    Window(u64),
}

impl ZstdFrames {
    fn step(&mut self, input: &[u8], out: &mut [u8]) -> Result<Step, BadStep> {
        if self.at_end {
            self.header.clear();
        }
        let mut from = InBuffer::around(input);
        let mut to = OutBuffer::around(out);
        let hint = self.context.decompress_stream(&mut to, &mut from);
        let taken = match hint {
            Ok(_) => from.pos,
            Err(_) => input.len(),
        };
        let wanted = taken.min(ZSTD_HEADER - self.header.len());
        self.header.extend(&input[..wanted]);
        let hint = hint.map_err(|_| match zstd_window(&self.header) {
            Some(bytes) if bytes > (ZSTD_WINDOW << 20) + 1 => BadStep::Window(bytes),
            _ => BadStep::Damage,
        })?;
        if !input.is_empty() || to.pos() > 0 {
            self.at_end = hint == 0;
        }
        Ok(Step {
            consumed: from.pos,
            produced: to.pos(),
            ended: self.at_end,
        })
    }
}

/// Bytes of the window of a zstd frame with this header (RFC 8878 section 3.1.1.1).
fn zstd_window(header: &[u8]) -> Option<u64> {
    let fields = header.strip_prefix(&ZSTD_MAGIC)?;
    let (descriptor, fields) = fields.split_first()?;
    if descriptor & 0x20 == 0 {
        let window = *fields.first()?;
        let base = 1u64 << (10 + (window >> 3));
        return Some(base + base / 8 * u64::from(window & 7));
    }
    // The window is the content, whose size is behind the dictionary's ID.
    let size = fields.get([0, 1, 2, 4][usize::from(descriptor & 3)]..)?;
    let length = 1 << (descriptor >> 6);
    let bytes = size.get(..length)?.iter().rev();
    let number = bytes.fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    Some(number + if length == 2 { 256 } else { 0 })
}

impl Step {
    fn consumed(consumed: usize) -> Self {
        Step {
            consumed,
            produced: 0,
            ended: false,
        }
    }
}

impl<D> Between<D> {
    /// Takes note of a step of the decoder, which has failed or not.
    fn after(&mut self, step: Step, failed: bool) -> Result<Step, BadStep> {
        if step.ended {
            self.decoder = None;
            self.had_one = true;
        }
        match failed {
            true => Err(BadStep::Damage),
            false => Ok(step),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against damage that is not noticed, an end that is taken for the end of the content,
    //! and bytes that differ with the sizes of reads.
    use std::io::Write;

    use super::*;

    fn content() -> Vec<u8> {
        let mut seed = 7u32;
        (0..300_000u32)
            .map(|n| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                match n / 5000 % 3 {
                    0 => (seed >> 24) as u8,
                    1 => 0,
                    _ => (n / 7) as u8,
                }
            })
            .collect()
    }

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut out = vec![0; data.len() + 1000];
        let mut deflate = zlib_rs::Deflate::new(6, true, 16 + 15);
        let status = deflate.compress(data, &mut out, zlib_rs::DeflateFlush::Finish);
        assert_eq!(status, Ok(Status::StreamEnd));
        out.truncate(deflate.total_out() as usize);
        out
    }

    fn zstd(data: &[u8]) -> Vec<u8> {
        let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.include_checksum(true).unwrap();
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    #[cfg(feature = "bzip2")]
    fn bzip2(data: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(data.len() * 2 + 1000);
        let mut compress = bzip2::Compress::new(bzip2::Compression::fast(), 0);
        let status = compress.compress_vec(data, &mut out, bzip2::Action::Finish);
        assert_eq!(status, Ok(bzip2::Status::StreamEnd));
        out
    }

    #[cfg(feature = "xz")]
    fn xz(data: &[u8]) -> Vec<u8> {
        let options = lzma_rust2::XzOptions::with_preset(1);
        let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
        writer.write_all(data).unwrap();
        writer.finish().unwrap()
    }

    type Encode = fn(&[u8]) -> Vec<u8>;

    fn encoders() -> Vec<(StreamCompression, Encode)> {
        vec![
            (StreamCompression::Gzip, gzip),
            (StreamCompression::Zstd, zstd),
            #[cfg(feature = "xz")]
            (StreamCompression::Xz, xz),
            #[cfg(feature = "bzip2")]
            (StreamCompression::Bzip2, bzip2),
        ]
    }

    /// Reads a few bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(out.len());
            self.0.read(&mut out[..count])
        }
    }

    fn unpack(kind: StreamCompression, src: &[u8], step: usize) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut unpack = Unpack::new(Slow(src, step), kind)?;
        let mut piece = vec![0; 1 + step * 3];
        loop {
            match unpack.read(&mut piece)? {
                0 => return Ok(out),
                count => out.extend(&piece[..count]),
            }
        }
    }

    #[test]
    fn streams_that_follow_each_other_are_one() {
        let data = content();
        for (kind, encode) in encoders() {
            let whole = encode(&data);
            assert_eq!(StreamCompression::of(&whole[..TOLD_BYTES]), Some(kind));
            let (a, b) = data.split_at(100_001);
            let parts = [encode(a), encode(&[]), encode(b)].concat();
            for step in [1, 100, 7000, 1 << 20] {
                assert!(unpack(kind, &whole, step).unwrap() == data, "{kind:?}");
                assert!(unpack(kind, &parts, step).unwrap() == data, "{kind:?}");
            }
            assert_eq!(StreamCompression::of(&encode(&[])), Some(kind));
            assert!(unpack(kind, &encode(&[]), 9).unwrap().is_empty());
        }
        let skippable = |nth: u8, length: u32| {
            let head = [&[0x50 + nth, 0x2a, 0x4d, 0x18], &length.to_le_bytes()[..]].concat();
            [head, vec![0x28; length as usize]].concat()
        };
        let (a, b) = data.split_at(1000);
        let parts = [
            skippable(0, 4),
            skippable(15, 0),
            zstd(a),
            skippable(3, 70_000),
            zstd(b),
            skippable(9, 1),
        ]
        .concat();
        let kind = StreamCompression::Zstd;
        assert_eq!(StreamCompression::needed(&parts[..10]), 22);
        assert_eq!(StreamCompression::needed(&parts[..22]), 30);
        assert_eq!(StreamCompression::of(&parts[..30]), Some(kind));
        for step in [1, 100, 7000, 1 << 20] {
            assert!(unpack(kind, &parts, step).unwrap() == data);
        }
        // A stream that is cut off is zstd, one of something else is not.
        for length in [8, 11, 12, 20, 22, 24] {
            assert_eq!(StreamCompression::of(&parts[..length]), Some(kind));
        }
        let lz4 = [skippable(0, 4), vec![0x04, 0x22, 0x4d, 0x18, 0, 0, 0]].concat();
        assert_eq!(StreamCompression::of(&lz4), None);
        assert_eq!(StreamCompression::of(b"BZh9 and so on"), None);
        assert_eq!(StreamCompression::of(b""), None);
    }

    /// Each part of bzip2 takes memory of megabytes, also for 14 bytes.
    #[test]
    #[cfg(feature = "bzip2")]
    fn many_parts_without_data() {
        let unpacked = |src: &[u8]| unpack(StreamCompression::Bzip2, src, 1 << 16);
        for part in [bzip2(b""), bzip2(b"a")] {
            let few = part.repeat(1000);
            assert!(unpacked(&few).is_ok());
            let error = unpacked(&part.repeat(10_000)).unwrap_err();
            assert!(error.to_string().contains("very many parts"), "{error}");
        }
        // Zeroes compress well.
        let part = bzip2(&[0; 64 << 10]);
        let got = unpacked(&part.repeat(4200)).unwrap();
        assert_eq!(got.len(), 4200 * (64 << 10));
    }

    #[test]
    fn windows_of_zstd() {
        let header = |rest: &[u8]| [&ZSTD_MAGIC, rest].concat();
        for (rest, window) in [
            (&[0, 0x88][..], 128 << 20),
            (&[0xc4, 0x8f, 9, 9], (128 << 20) * 15 / 8),
            (&[4, 0xa8], 2 << 30),
            // The size of the content, behind no ID or one.
            (&[0x20, 7], 7),
            (&[0x61, 1, 2, 1], 0x102 + 256),
            (&[0xa3, 1, 1, 1, 1, 0, 0, 0, 0x20], 512 << 20),
            (&[0xe2, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0], 1 << 32),
        ] {
            assert_eq!(zstd_window(&header(rest)), Some(window), "{rest:x?}");
        }
        assert_eq!(zstd_window(&header(&[0xa3, 1, 1, 1, 1, 0])), None);
        assert_eq!(zstd_window(b"something else"), None);
        let mut frame = zstd(&content());
        frame[5] = 0x90;
        for step in [1, 100, 1 << 20] {
            let error = unpack(StreamCompression::Zstd, &frame, step).unwrap_err();
            let says = "needs a window of 256 MiB, and at most 128 MiB are allowed";
            assert!(error.to_string().ends_with(says), "{error}");
        }
    }

    #[test]
    fn what_is_cut_off_damaged_or_followed_by_something_is_an_error() {
        let data = content();
        for (kind, encode) in encoders() {
            let whole = encode(&data);
            let cuts = (1..12).chain((12..whole.len()).step_by(whole.len() / 40));
            for cut in cuts.chain(whole.len() - 12..whole.len()) {
                let error = unpack(kind, &whole[..cut], 5000).unwrap_err();
                let text = error.to_string();
                assert!(text.contains("cut off"), "{kind:?} at {cut}: {text}");
            }
            for at in (12..whole.len()).step_by(whole.len() / 50) {
                let mut bad = whole.clone();
                bad[at] ^= 0x41;
                if let Ok(got) = unpack(kind, &bad, 5000) {
                    assert!(got == data, "{kind:?} at {at}");
                }
            }
            let more = [&whole[..], b"more than that"].concat();
            let text = unpack(kind, &more, 5000).unwrap_err().to_string();
            assert!(text.contains("stream is"), "{kind:?}: {text}");
        }
        let padded = [&gzip(&data)[..], &[0; 700]].concat();
        assert!(unpack(StreamCompression::Gzip, &padded, 100).unwrap() == data);
    }
}
