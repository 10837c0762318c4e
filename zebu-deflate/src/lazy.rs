//! The slower levels: many candidates, and lazy matching.
//!
//! A bucket is one `u64` that holds the last four positions with the same hash:
//! to insert is a shift, to search is to compare them without a branch.

use std::hint::select_unpredictable;

use super::tokens::{Match, Sink};
use super::{Buffer, MIN_MATCH, WINDOW, extend, load8};

/// Bits of the hashes of both tables.
const HASH_BITS: u32 = 12;

/// The number of positions that are entered into the tables at a time.
const BATCH: usize = 256;
/// The number of positions whose candidates are kept.
const RING: usize = 2 * BATCH;

/// Finds matches. Positions are entered in batches, ahead of the parse, in a loop without a branch.
/// The former content of their buckets is kept, so that a search reads no table.
///
/// An empty bucket has position 0, which is a candidate like any other from position 1 on, since its
/// bytes are always compared.
pub(super) struct Finder {
    /// The last four positions with each hash of 4 bytes, newest lowest.
    four: [u64; 1 << HASH_BITS],
    three: [u16; 1 << HASH_BITS],
    before4: [u64; RING],
    before3: [u16; RING],
    /// Positions below this are entered.
    entered: usize,
}

impl Finder {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            four: [0; 1 << HASH_BITS],
            three: [0; 1 << HASH_BITS],
            before4: [0; RING],
            before3: [0; RING],
            entered: 0,
        })
    }

    fn clear(&mut self) {
        self.four.fill(0);
        self.three.fill(0);
        self.entered = 0;
    }

    /// Enters batches until the candidates of `at` are known.
    #[inline(always)]
    fn enter(&mut self, buf: &Buffer, at: usize) {
        while self.entered <= at {
            self.enter_batch(buf);
        }
    }

    #[inline(never)]
    fn enter_batch(&mut self, buf: &Buffer) {
        let at = self.entered;
        let half = at & (RING - 1) & !(BATCH - 1);
        let before4 = &mut self.before4[half..half + BATCH];
        let before3 = &mut self.before3[half..half + BATCH];
        for (i, (before4, before3)) in before4.iter_mut().zip(before3).enumerate() {
            let at = (at + i) as u16;
            let word = load8(buf, at) as u32;
            let hash4 = word.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS);
            let hash3 = (word << 8).wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS);
            let bucket = &mut self.four[hash4 as usize];
            *before4 = *bucket;
            *bucket = *bucket << 16 | u64::from(at);
            let place = &mut self.three[hash3 as usize];
            *before3 = *place;
            *place = at;
        }
        self.entered += BATCH;
    }

    /// The best candidate for `at`, which is not 0: the length of its match
    /// (7 means 7 or more) above, and its position below. Less than 3 is none.
    #[inline(always)]
    fn rank<const WAYS: u32>(&self, buf: &Buffer, at: u16) -> u32 {
        let word = load8(buf, at);
        let lowest = at.saturating_sub(WINDOW as u16);
        let rank = |candidate: u16| {
            let differ = load8(buf, candidate) ^ word;
            let len = ((differ | 1 << 63).trailing_zeros() & 0x38) << 13;
            select_unpredictable(candidate >= lowest, len | u32::from(candidate), 0)
        };
        let mut best = rank(self.before3[usize::from(at) & (RING - 1)]);
        let mut bucket = self.before4[usize::from(at) & (RING - 1)];
        for _ in 0..WAYS {
            let rank = rank(bucket as u16);
            best = select_unpredictable(rank > best, rank, best);
            bucket >>= 16;
        }
        best
    }

    /// The longest match for `at`, if any, in a segment that ends at `end`.
    #[inline(always)]
    fn search<const WAYS: u32>(&self, buf: &Buffer, at: usize, end: usize) -> Option<Match> {
        let best = self.rank::<WAYS>(buf, at as u16);
        let mut len = (best >> 16) as usize;
        let mut from = (best & 0xffff) as usize;
        if len == 7 {
            // Several candidates may be that long, and one of them longer.
            len = extend(buf, at, from);
            let mut bucket = self.before4[at & (RING - 1)];
            for _ in 0..WAYS {
                let candidate = bucket as u16 as usize;
                bucket >>= 16;
                let near = candidate < from && candidate + WINDOW >= at;
                let differ = load8(buf, candidate as u16) ^ load8(buf, at as u16);
                if near && differ << 8 == 0 {
                    let longer = extend(buf, at, candidate);
                    if longer > len {
                        len = longer;
                        from = candidate;
                    }
                }
            }
        }
        len = len.min(end - at);
        (len >= MIN_MATCH).then_some(Match {
            len,
            dist: at - from,
        })
    }
}

/// The number of literals since the last match. If there are many, the data are likely to be
/// incompressible, and positions are skipped at an increasing rate.
struct Drought(usize);

impl Drought {
    #[inline(always)]
    fn pass(&mut self, n: usize, sink: &mut Sink<'_>, buf: &Buffer, at: &mut usize, end: usize) {
        self.0 += n;
        if self.0 >= 256 {
            let until = end.min(*at + (self.0 / 256).min(64));
            for &byte in &buf[*at..until] {
                sink.literal(byte);
            }
            *at = until;
        }
    }
}

/// Takes a match unless the next position has a better one.
#[inline(never)]
pub(super) fn parse_lazy<const WAYS: u32>(
    finder: &mut Finder,
    buf: &Buffer,
    mut at: usize,
    end: usize,
    patience: usize,
    mut sink: Sink<'_>,
) {
    finder.clear();
    if at == 0 && end > 0 {
        // There are no candidates before it.
        sink.literal(buf[0]);
        at = 1;
    }
    let mut drought = Drought(0);
    while at < end {
        finder.enter(buf, at);
        let Some(mut found) = finder.search::<WAYS>(buf, at, end) else {
            sink.literal(buf[at]);
            at += 1;
            drought.pass(1, &mut sink, buf, &mut at, end);
            sink.end_step(at);
            continue;
        };
        drought = Drought(0);
        while found.len < patience && at + 1 < end {
            finder.enter(buf, at + 1);
            let Some(next) = finder.search::<WAYS>(buf, at + 1, end) else {
                break;
            };
            // Four bits a byte, against the bits of the distance, and the
            // literal.
            let gain = 4 * (next.len as isize - found.len as isize)
                + (found.dist.ilog2() as isize - next.dist.ilog2() as isize);
            if next.len < found.len || gain <= 2 {
                break;
            }
            sink.literal(buf[at]);
            at += 1;
            found = next;
        }
        sink.found(found);
        at += found.len;
        sink.end_step(at);
    }
    sink.finish(at);
}
