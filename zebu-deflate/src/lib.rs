//! A deflate encoder for readers with a window of 4 KiB, such as qcow2's.
//!
//! No distance in its streams is above 4096, so they can be inflated with the smallest memory
//! (`windowBits` 12 in zlib's terms). It is several times as fast as zlib at its default level, with
//! streams within 2 % of its size. It is safe Rust but for the calls of functions that are
//! compiled for AVX2, and has no dependency.
//!
//! ```
//! use zebu_deflate::{Encoder, Level};
//!
//! let mut encoder = Encoder::new(); // keep it: it holds 0.5 MiB of tables
//! let cluster = b"the same words, ".repeat(4096);
//! // A byte less than the input: what does not become shorter is stored as it is.
//! let mut stream = vec![0; cluster.len() - 1];
//! match encoder.compress(Level::DEFAULT, &cluster, &mut stream) {
//!     Some(length) => assert!(length < 1000),
//!     None => println!("store the cluster as it is"),
//! }
//! ```
//!
//! # How it works
//!
//! Positions are `u16`, so the input is taken in segments of at most 64 KiB, and the tables of
//! positions fit the first-level cache. A segment is parsed whole into tokens, then cut into
//! blocks where the statistics change, and each block is written with its own Huffman codes (or
//! with the fixed codes, or stored).
#![deny(unsafe_code)]

mod blocks;
mod huffman;
mod lazy;
mod map;
mod tokens;
mod writer;
mod zlib;

use blocks::write_blocks;
use huffman::Codes;
use lazy::{Finder, parse_lazy};
use map::{Map, Third};
use tokens::{Chunk, Sink, Token};
use writer::BitWriter;

/// No match reaches farther back.
const WINDOW: usize = 4096;
/// Positions are `u16`.
const SEGMENT: usize = 1 << 16;
/// Padding behind a segment, so that loads need no checks at its end.
const PAD: usize = 512;
const MIN_MATCH: usize = 3;
const MAX_MATCH: usize = 258;

/// A compression level as zlib's: 1 is the fastest, 9 gives the shortest streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(u8);

impl Level {
    /// Level 1.
    pub const FASTEST: Self = Self(1);
    /// Level 2: within 2 % of the size that zlib's default level has.
    pub const DEFAULT: Self = Self(2);
    /// Level 9.
    pub const SMALLEST: Self = Self(9);

    /// The level of that number; `None` if it is not 1 to 9.
    pub const fn new(level: i32) -> Option<Self> {
        match level {
            1..=9 => Some(Self(level as u8)),
            _ => None,
        }
    }

    /// Its number, 1 to 9.
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl Default for Level {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// How hard to look for matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effort {
    /// Two or three candidates for every position, and a match gives way to a
    /// longer one at the next position.
    Map(Third),
    /// Up to four candidates, and a match gives way to a better one at the
    /// next position as long as it is shorter than `patience`.
    Lazy {
        /// Candidates for a match of 4 or more: 3 or 4.
        ways: u32,
        /// A match this long is taken at once.
        patience: u32,
    },
}

impl From<Level> for Effort {
    fn from(level: Level) -> Self {
        let lazy = |ways, patience| Self::Lazy { ways, patience };
        match level.0 {
            ..=1 => Self::Map(Third::Never),
            2 => Self::Map(Third::WhereItHelps),
            3 => Self::Map(Third::Always),
            4 => lazy(3, 8),
            5 => lazy(4, 8),
            6 => lazy(4, 16),
            7 => lazy(4, 32),
            8 => lazy(4, 64),
            9.. => lazy(4, 258),
        }
    }
}

/// Compresses buffers, one after another, each into a stream of its own. It holds tables that are
/// used again, so make one per thread and keep it.
///
/// The same buffer at the same level gives the same stream on every processor, whatever was
/// compressed before it.
pub struct Encoder {
    /// The segment: history, then new bytes, then padding.
    buf: Box<Buffer>,
    map: Option<Box<Map>>,
    finder: Option<Box<Finder>>,
    tokens: Box<Tokens>,
    chunks: Vec<Chunk>,
    writer: BitWriter,
    codes: Box<Codes>,
}

type Buffer = [u8; SEGMENT + PAD];
type Tokens = [Token; SEGMENT];

#[inline(always)]
fn load8(buf: &Buffer, at: u16) -> u64 {
    let at = usize::from(at);
    u64::from_le_bytes(buf[at..at + 8].try_into().unwrap_or_default())
}

/// How long a match is, of which 7 bytes are known to be equal.
#[inline(always)]
fn extend(buf: &Buffer, at: usize, from: usize) -> usize {
    const REACH: usize = MAX_MATCH + 16;
    let (Some(a), Some(b)) = (
        buf[at..].first_chunk::<REACH>(),
        buf[from..].first_chunk::<REACH>(),
    ) else {
        return 7;
    };
    let word = |bytes: &[u8; REACH], at: usize| {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
    };
    let mut len = 7;
    while len < MAX_MATCH {
        let differ = word(a, len) ^ word(b, len);
        if differ != 0 {
            len += (differ.trailing_zeros() >> 3) as usize;
            break;
        }
        len += 8;
    }
    len.min(MAX_MATCH)
}

/// Whether the processor has what [`Encoder::compress_avx2`] is compiled for.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
}

impl Encoder {
    /// An encoder. The tables of a level are allocated when it is first used.
    pub fn new() -> Self {
        Self {
            buf: Box::new([0; SEGMENT + PAD]),
            map: None,
            finder: None,
            tokens: Box::new([0; SEGMENT]),
            chunks: Vec::new(),
            writer: BitWriter::default(),
            codes: Box::new(Codes::EMPTY),
        }
    }

    /// Compresses `src` into one raw deflate stream at the start of `dst`, and returns its length;
    /// `None` if it does not fit. What `dst` holds then is unspecified.
    pub fn compress(&mut self, level: Level, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        self.compress_raw(level.into(), src, dst)
    }

    /// The same with the header and the checksum of the zlib format (RFC 1950), which names the
    /// window of 4 KiB.
    pub fn compress_zlib(&mut self, level: Level, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        let length = self.compress(level, src, dst.get_mut(zlib::HEADER..)?)?;
        zlib::wrap(level, src, length, dst)
    }

    fn compress_raw(&mut self, effort: Effort, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        #[cfg(target_arch = "x86_64")]
        if let Some(fast) = self.compress_fast(effort, src, dst) {
            return fast;
        }
        self.compress_any(effort, src, dst)
    }

    /// The same with the instructions of newer processors (AVX2, BMI), if this one has them.
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    fn compress_fast(
        &mut self,
        effort: Effort,
        src: &[u8],
        dst: &mut [u8],
    ) -> Option<Option<usize>> {
        if !has_avx2() {
            return None;
        }
        // SAFETY: the processor has the features that the function is compiled for.
        Some(unsafe { self.compress_avx2(effort, src, dst) })
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn compress_avx2(&mut self, effort: Effort, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        self.compress_any(effort, src, dst)
    }

    #[inline(always)]
    fn compress_any(&mut self, effort: Effort, src: &[u8], dst: &mut [u8]) -> Option<usize> {
        self.writer.clear();
        let mut done = 0;
        loop {
            let history = done.min(WINDOW);
            let new = (src.len() - done).min(SEGMENT - history);
            let end = history + new;
            self.buf[..end].copy_from_slice(&src[done - history..done + new]);
            self.buf[end..end + PAD].fill(0);
            done += new;
            self.parse(effort, history, end);
            write_blocks(
                &mut self.writer,
                &mut self.codes,
                &self.chunks,
                &self.tokens[..],
                &self.buf[..end],
                history,
                done == src.len(),
            );
            if self.writer.len() > dst.len() {
                return None;
            }
            if done == src.len() {
                break;
            }
        }
        let out = self.writer.finish();
        dst.get_mut(..out.len())?.copy_from_slice(out);
        Some(out.len())
    }

    /// Turns the segment from `history` to `end` into tokens.
    #[inline(always)]
    fn parse(&mut self, effort: Effort, history: usize, end: usize) {
        let buf = &*self.buf;
        let sink = Sink::new(&mut self.tokens, &mut self.chunks);
        match effort {
            Effort::Map(third) => {
                let map = self.map.get_or_insert_with(Map::new);
                map.parse(third, buf, history, end, sink);
            }
            Effort::Lazy { ways, patience } => {
                let finder = self.finder.get_or_insert_with(Finder::new);
                let patience = patience as usize;
                match ways {
                    ..=3 => parse_lazy::<3>(finder, buf, history, end, patience, sink),
                    _ => parse_lazy::<4>(finder, buf, history, end, patience, sink),
                }
            }
        }
    }
}

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    //! Guards against streams that depend on the processor: the other tests only use the code for the
    //! processor that they run on.
    use super::*;

    #[test]
    fn every_processor_gives_the_same_stream() {
        // Words of a small language, then noise, then a byte over and over.
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u8
        };
        let mut data: Vec<u8> = (0..12_000)
            .flat_map(|_| [&b"cluster "[..], b"refcount ", b"of "][usize::from(random()) % 3])
            .copied()
            .collect();
        data.extend(std::iter::repeat_with(&mut random).take(5_000));
        data.resize(data.len() + 70_000, 7);
        for level in 1..=9 {
            let effort = Level(level).into();
            let (mut fast, mut plain) = (vec![0; data.len()], vec![0; data.len()]);
            let mut deflate = Encoder::new();
            let length = deflate.compress_raw(effort, &data, &mut fast);
            assert_eq!(length, deflate.compress_any(effort, &data, &mut plain));
            assert!(length.is_some() && fast == plain, "level {level}");
        }
    }
}
