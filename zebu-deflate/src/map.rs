//! The fast levels: a map of the matches of all positions, then a walk.
//!
//! To look for a match only where one is needed makes each step wait for the
//! length of the match before it. So all positions are looked at, a strip at a
//! time, and what is done with each does not depend on the others:
//! - [`Map::enter`] puts positions into the tables, takes out what was there,
//!   and counts the bytes that are equal: loads and stores without a branch;
//! - [`Map::choose`] picks the best candidate, and takes a match unless the
//!   next position has a longer one: 32 bits a position, done in vectors.
//!
//! The walk then only follows the steps. Few candidates do: the last position
//! with the same 3 bytes for near and short matches, and the last with the
//! same 7 for long ones. A third, the last with the same 4, costs a seventh of
//! the time, and is worth it where there are many matches of middling length:
//! see [`Third`].
//!
//! An empty place holds position 0, which is a place like any other, from
//! position 1 on: that its bytes are equal is always checked.

use std::ops::Range;

use super::tokens::{LITERALS, LOW_BITS, Sink, Token};
use super::{Buffer, MIN_MATCH, WINDOW, extend, load8};

/// How many positions are mapped at a time: few, for the first-level cache.
const STRIP: usize = 256;

const LONG_BITS: u32 = 13;
const FOUR_BITS: u32 = 12;
const THREE_BITS: u32 = 13;

/// Longer matches are mapped as this long.
const LONGEST: usize = 8;
/// The bits of a token that say a literal or a length, and what they are for [`LONGEST`].
const LOW: Token = (1 << LOW_BITS) - 1;
const LONGEST_LOW: Token = (LITERALS - MIN_MATCH + LONGEST) as Token;

/// By position: where a candidate is, and how many bits there are equal, up to 64. (Two stores,
/// since to make one of them takes two instructions, which vectors have for nothing.)
struct Candidates {
    from: [u16; STRIP],
    equal: [u8; STRIP],
}

/// From a candidate to how many bytes are equal.
const BYTES_SHIFT: u32 = 16 + 3;
/// A candidate without the bits of a byte that is equal in part.
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

    /// The candidate, and in the high half how many bits are equal, of whole bytes, so that of
    /// two the larger is the longer match, and of equals the nearer. 0 if it is before `lowest`.
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
    /// In those that follow one with neither few tokens nor many: where few do,
    /// the matches are long ones, where many do there are hardly any, and both
    /// kinds are likely to go on. A quarter to two thirds of the strips have it, and
    /// half to four fifths of what it saves is kept.
    WhereItHelps,
    Always,
}

impl Third {
    /// Whether the strip after one of so many tokens has it. (A strip that was
    /// not looked at in the table leaves out its positions there, no more: what
    /// is found is always compared.)
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
    /// Of the positions from the strip's second to the one behind it.
    by_long: Candidates,
    by_four: Candidates,
    by_three: Candidates,
    /// Of the strip's positions and the one behind it: the best candidate.
    best: [u32; STRIP + 1],
    /// Of the strip's positions: a token, of which [`LONGEST`] ones are to be extended, and
    /// the position behind it, counted from the strip's start, too.
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

/// Strips in a row with hardly a match. Where there are many the data is likely
/// to be of the kind that does not compress, and most of it is passed unseen. (Not
/// before a whole window of it: it may be about to repeat.)
struct Quiet(usize);

impl Quiet {
    /// How many strips to pass, after one of so many bytes and tokens.
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
        // The first position is a literal, since nothing lies before it.
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
                // What was found for the next position is of another strip.
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
            // Not counted in `usize`, so that the vectors are of 32 bits.
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

    /// Follows the steps of `strip` from `at` on, and returns where that ends.
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
        // Past this a match could be cut by the end.
        let last = stop.min(end.saturating_sub(LONGEST));
        let last = last.saturating_sub(start).min(STRIP);
        // Each step waits for one load, of where it leads.
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
