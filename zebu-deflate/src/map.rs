//! The fast levels: a map of the matches of all positions, then a walk.
//!
//! A search only where a match is needed would make each step wait for the length of the match before
//! it. So matches of all positions are searched, a strip at a time and independently of each other:
//! - [`Map::enter`] enters positions into the tables, takes out their former content, and counts the
//!   equal bytes: loads and stores without a branch;
//! - [`Map::choose`] picks the best candidate, and takes a match unless the next position has a
//!   longer one: 32 bits a position, in vectors.
//!
//! The walk then only follows the steps. Few candidates are enough: the last position with the same 3
//! bytes for near and short matches, and the last with the same 7 for long ones. A third one, with
//! the same 4, is used where there are many matches of medium length: see [`Third`].
//!
//! An empty bucket has position 0, which is a candidate like any other from position 1 on, since its
//! bytes are always compared.

use std::ops::Range;

use super::tokens::{LITERALS, LOW_BITS, Sink, Token};
use super::{Buffer, MIN_MATCH, WINDOW, extend, load8};

/// The number of positions that are mapped at a time. Few, for the first-level cache.
const STRIP: usize = 256;

const LONG_BITS: u32 = 13;
const FOUR_BITS: u32 = 12;
const THREE_BITS: u32 = 13;

/// The longest match in the map; longer ones are extended later.
const LONGEST: usize = 8;
/// The bits of a token with its literal or length, and their value for [`LONGEST`].
const LOW: Token = (1 << LOW_BITS) - 1;
const LONGEST_LOW: Token = (LITERALS - MIN_MATCH + LONGEST) as Token;

/// By position: a candidate, and the number of its equal bits, up to 64. (Two arrays, since vector
/// instructions combine them at no cost.)
struct Candidates {
    from: [u16; STRIP],
    equal: [u8; STRIP],
}

/// The shift from a candidate to its number of equal bytes.
const BYTES_SHIFT: u32 = 16 + 3;
/// The mask of a candidate without the bits of a partly equal byte.
const WHOLE: u32 = 0x78 << 16 | 0xffff;

impl Candidates {
    const NONE: Self = Self {
        from: [0; STRIP],
        equal: [0; STRIP],
    };

    #[inline(always)]
    fn set(&mut self, i: usize, buf: &Buffer, from: u16, word: u64) {
        self.from[i] = from;
        self.equal[i] = (load8(buf, from) ^ word).trailing_zeros() as u8;
    }

    /// The candidate, with the number of its equal bits (of whole bytes) in the high half. So the
    /// larger of two is the longer match, or the nearer of equal ones. 0 if it is before `lowest`.
    #[inline(always)]
    fn get(&self, i: usize, lowest: i32) -> u32 {
        let both = u32::from(self.from[i]) | u32::from(self.equal[i]) << 16;
        both & WHOLE & mask(i32::from(self.from[i]) >= lowest)
    }
}

/// In which strips a position has a third candidate, for matches of 4 bytes
/// and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Third {
    Never,
    /// In those that follow a strip with a medium number of tokens. With few tokens the matches are
    /// long, and with many there are hardly any; the next strip is likely to be similar.
    WhereItHelps,
    Always,
}

impl Third {
    /// Whether the strip after one of so many tokens has it. (A strip without it does not enter its
    /// positions into that table.)
    fn after(self, tokens: usize) -> bool {
        match self {
            Self::Never => false,
            Self::WhereItHelps => (STRIP / 4..STRIP * 11 / 16).contains(&tokens),
            Self::Always => true,
        }
    }
}

pub(super) struct Map {
    /// The last position with each hash of 7 bytes.
    long: [u16; 1 << LONG_BITS],
    four: [u16; 1 << FOUR_BITS],
    three: [u16; 1 << THREE_BITS],
    /// The candidates of the positions from the strip's second to the one behind it.
    by_long: Candidates,
    by_four: Candidates,
    by_three: Candidates,
    /// The best candidates of the strip's positions and the one behind it.
    best: [u32; STRIP + 1],
    /// For each position of the strip, a token, and the position behind it relative to the strip's
    /// start. Matches of [`LONGEST`] are still to be extended.
    steps: [Token; STRIP],
    nexts: [u16; STRIP],
}

/// All bits or none.
#[inline(always)]
fn mask(yes: bool) -> u32 {
    u32::from(yes).wrapping_neg()
}

#[inline(always)]
fn hash4(bytes: u32, bits: u32) -> usize {
    (bytes.wrapping_mul(0x9e37_79b1) >> (32 - bits)) as usize
}

#[inline(always)]
fn hash8(bytes: u64, bits: u32) -> usize {
    (bytes.wrapping_mul(0x9e37_79b1_7f4a_7c15) >> (64 - bits)) as usize
}

/// The number of consecutive strips with hardly a match. If there are many, the data are likely to be
/// incompressible, and most strips are skipped. (Not before a whole window, which may repeat.)
struct Quiet(usize);

impl Quiet {
    /// The number of strips to skip, after one of so many bytes and tokens.
    fn after(&mut self, bytes: usize, tokens: usize) -> usize {
        if bytes - tokens > STRIP / 128 {
            self.0 = 0;
        } else {
            self.0 += 1;
        }
        (self.0 / (WINDOW / STRIP)).min(4)
    }
}

impl Map {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            long: [0; 1 << LONG_BITS],
            four: [0; 1 << FOUR_BITS],
            three: [0; 1 << THREE_BITS],
            by_long: Candidates::NONE,
            by_four: Candidates::NONE,
            by_three: Candidates::NONE,
            best: [0; STRIP + 1],
            steps: [0; STRIP],
            nexts: [0; STRIP],
        })
    }

    /// Turns the segment from `at` to `end` into tokens.
    #[inline(always)]
    pub(super) fn parse(
        &mut self,
        third: Third,
        buf: &Buffer,
        mut at: usize,
        end: usize,
        mut sink: Sink<'_>,
    ) {
        self.long.fill(0);
        self.four.fill(0);
        self.three.fill(0);
        // The first position is a literal, since it has no candidates.
        self.best[STRIP] = 0;
        let mut start = 0;
        let mut quiet = Quiet(0);
        let mut four = third != Third::Never;
        while start < end {
            if four {
                self.enter::<true>(buf, start + 1);
                self.choose::<true>(buf, start);
            } else {
                self.enter::<false>(buf, start + 1);
                self.choose::<false>(buf, start);
            }
            let strip = start..end.min(start + STRIP);
            let before = (at, sink.len());
            start = strip.end;
            at = self.walk(buf, at, strip, end, &mut sink);
            sink.end_step(at);

            let tokens = sink.len() - before.1;
            four = third.after(tokens);
            let skip = quiet.after(at - before.0, tokens);
            if skip > 0 {
                start = end.min(start + skip * STRIP);
                while at < start {
                    sink.token(buf[at].into());
                    at += 1;
                }
                sink.end_step(at);
                // The best candidate of the next position is of another strip.
                self.best[STRIP] = 0;
            }
        }
        sink.finish(at);
    }

    /// `FOUR`: with the third candidate.
    #[inline(always)]
    fn enter<const FOUR: bool>(&mut self, buf: &Buffer, first: usize) {
        let Some(strip) = buf[first..].first_chunk::<{ STRIP + 8 }>() else {
            return;
        };
        for i in 0..STRIP {
            let at = (first + i) as u16;
            let word = u64::from_le_bytes(strip[i..i + 8].try_into().unwrap_or_default());
            let long = &mut self.long[hash8(word << 8, LONG_BITS)];
            let from_long = std::mem::replace(long, at);
            let three = &mut self.three[hash4((word as u32) << 8, THREE_BITS)];
            let from_three = std::mem::replace(three, at);
            if FOUR {
                let four = &mut self.four[hash4(word as u32, FOUR_BITS)];
                let from_four = std::mem::replace(four, at);
                self.by_four.set(i, buf, from_four, word);
            }
            self.by_long.set(i, buf, from_long, word);
            self.by_three.set(i, buf, from_three, word);
        }
    }

    #[inline(always)]
    fn choose<const FOUR: bool>(&mut self, buf: &Buffer, start: usize) {
        let Some(bytes) = buf[start..].first_chunk::<STRIP>() else {
            return;
        };
        self.best[0] = self.best[STRIP];
        let first = start as i32 + 1 - WINDOW as i32;
        for i in 0..STRIP {
            // No `usize`, so that the vectors have lanes of 32 bits.
            let lowest = first + i as i32;
            let best = self
                .by_three
                .get(i, lowest)
                .max(self.by_long.get(i, lowest));
            self.best[i + 1] = if FOUR {
                best.max(self.by_four.get(i, lowest))
            } else {
                best
            };
        }
        for (i, &byte) in bytes.iter().enumerate() {
            let (best, next) = (self.best[i], self.best[i + 1]);
            let len = best >> BYTES_SHIFT;
            let take = mask(len >= MIN_MATCH as u32) & mask(next >> BYTES_SHIFT <= len);
            let dist = (start as u32)
                .wrapping_add(i as u32)
                .wrapping_sub(best & 0xffff);
            let found = (dist << 16) + (LITERALS - MIN_MATCH) as u32 + len;
            self.steps[i] = found & take | u32::from(byte) & !take;
            self.nexts[i] = (i as u32 + (len & take | 1 & !take)) as u16;
        }
    }

    /// Follows the steps of `strip` from `at` on, and returns the position after the last one.
    #[inline(always)]
    fn walk(
        &self,
        buf: &Buffer,
        at: usize,
        strip: Range<usize>,
        end: usize,
        sink: &mut Sink<'_>,
    ) -> usize {
        let (start, stop) = (strip.start, strip.end);
        // Behind this position, the end may cut off a match.
        let last = stop.min(end.saturating_sub(LONGEST));
        let last = last.saturating_sub(start).min(STRIP);
        // Each step waits for one load, that of its next position.
        let mut i = at - start;
        while i < last {
            let mut token = self.steps[i];
            let mut next = usize::from(self.nexts[i]);
            if token & LOW == LONGEST_LOW {
                let at = start + i;
                let len = extend(buf, at, at - (token >> 16) as usize).min(end - at);
                token += (len - LONGEST) as u32;
                next = i + len;
            }
            sink.token(token);
            i = next;
        }
        let mut at = start + i;
        while at < stop {
            sink.token(buf[at].into());
            at += 1;
        }
        at
    }
}
