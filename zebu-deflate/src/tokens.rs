//! The result of parsing a segment: tokens, and the number of occurrences of each symbol.

use super::{MAX_MATCH, MIN_MATCH, SEGMENT, Tokens, WINDOW};

/// A token: in the lowest nine bits a literal (0..=255) or 256 + length - 3; in the high half the
/// distance, 0 for a literal. When it is written, it has the distance's code between them
/// ([`LOW_BITS`]).
pub(super) type Token = u32;

/// Bits of a token's literal or length.
pub(super) const LOW_BITS: u32 = 9;

pub(super) const LITERALS: usize = 256;
pub(super) const END_OF_BLOCK: usize = 256;
pub(super) const LITLEN_SYMBOLS: usize = 286;
pub(super) const DIST_SYMBOLS: usize = 30;
/// The code under which the absent distance of a literal is counted, without a branch.
pub(super) const NO_DIST: usize = 30;

/// Tokens are cut into blocks at multiples of this many.
pub(super) const CHUNK: usize = 2048;

pub(super) const LENGTH_BASE: [u16; 29] = [
    3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131,
    163, 195, 227, 258,
];
pub(super) const LENGTH_EXTRA: [u8; 29] = [
    0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0,
];
pub(super) const DIST_BASE: [u16; DIST_SYMBOLS] = [
    1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537,
    2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577,
];
pub(super) const DIST_EXTRA: [u8; DIST_SYMBOLS] = [
    0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13,
    13,
];
/// From length - 3 to its code.
pub(super) static LENGTH_SLOT: [u8; 256] = {
    let mut table = [0; 256];
    let mut slot = 0;
    while slot < 29 {
        let mut len = LENGTH_BASE[slot] as usize;
        while len <= MAX_MATCH {
            table[len - MIN_MATCH] = slot as u8;
            len += 1;
        }
        slot += 1;
    }
    table
};

/// From distance to its code; a literal's 0 to [`NO_DIST`].
pub(super) static DIST_SLOT: [u8; 2 * WINDOW] = {
    let mut table = [0; 2 * WINDOW];
    let mut slot = 0;
    while slot < 26 {
        let mut dist = DIST_BASE[slot] as usize;
        while dist < 2 * WINDOW {
            table[dist] = slot as u8;
            dist += 1;
        }
        slot += 1;
    }
    table[0] = NO_DIST as u8;
    table
};

/// The number of occurrences of each symbol: literals, end of block and lengths, and from [`DISTS`]
/// on distances.
pub(super) type Counts<T> = [T; SYMBOLS];
pub(super) const SYMBOLS: usize = 320;
pub(super) const LENGTHS: usize = 257;
pub(super) const DISTS: usize = 288;

#[derive(Clone, Copy)]
pub(super) struct Match {
    pub(super) len: usize,
    pub(super) dist: usize,
}

/// The tokens of a parse, and their counts.
pub(super) struct Sink<'a> {
    tokens: &'a mut Tokens,
    chunks: &'a mut Vec<Chunk>,
    /// By the tokens' lowest nine bits.
    lows: [u16; 512],
    /// By distance code.
    dists: [u16; 256],
    /// How many tokens there are.
    len: usize,
    chunk_end: usize,
}

/// Consecutive tokens: the number of occurrences of each symbol, and their end.
pub(super) struct Chunk {
    pub(super) counts: Counts<u16>,
    /// Behind the last token.
    pub(super) end: usize,
    /// The end of their bytes in the segment.
    pub(super) at: usize,
}

impl<'a> Sink<'a> {
    pub(super) fn new(tokens: &'a mut Tokens, chunks: &'a mut Vec<Chunk>) -> Self {
        chunks.clear();
        Self {
            tokens,
            chunks,
            lows: [0; 512],
            dists: [0; 256],
            len: 0,
            chunk_end: CHUNK,
        }
    }

    /// How many tokens there are.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    pub(super) fn literal(&mut self, byte: u8) {
        self.token(byte.into());
    }

    #[inline(always)]
    pub(super) fn found(&mut self, found: Match) {
        let len = found.len.wrapping_sub(MIN_MATCH) & 0xff;
        self.token(((LITERALS + len) | (found.dist << 16)) as Token);
    }

    #[inline(always)]
    pub(super) fn token(&mut self, token: Token) {
        let dist = (token >> 16) as usize & (2 * WINDOW - 1);
        self.lows[token as usize & 511] += 1;
        let slot = DIST_SLOT[dist];
        self.dists[usize::from(slot)] += 1;
        self.tokens[self.len % SEGMENT] = token | Token::from(slot) << LOW_BITS;
        self.len += 1;
    }

    /// The tokens so far stand for the bytes below `at`.
    #[inline(always)]
    pub(super) fn end_step(&mut self, at: usize) {
        if self.len >= self.chunk_end {
            self.end_chunk(at);
        }
    }

    #[inline(always)]
    fn end_chunk(&mut self, at: usize) {
        let (end, counts) = (self.len, counts(&self.lows, &self.dists));
        self.chunks.push(Chunk { counts, end, at });
        self.lows = [0; 512];
        self.dists = [0; 256];
        self.chunk_end = self.len + CHUNK;
    }

    #[inline(always)]
    pub(super) fn finish(&mut self, at: usize) {
        if self.chunks.last().is_none_or(|last| last.end < self.len) {
            self.end_chunk(at);
        }
    }
}

/// From what was counted by tokens to symbols.
#[inline(never)]
fn counts(lows: &[u16; 512], dists: &[u16; 256]) -> Counts<u16> {
    let mut counts = [0; SYMBOLS];
    counts[..LITERALS].copy_from_slice(&lows[..LITERALS]);
    for (&n, &slot) in lows[LITERALS..].iter().zip(&LENGTH_SLOT) {
        counts[LENGTHS + usize::from(slot)] += n;
    }
    counts[DISTS..].copy_from_slice(&dists[..SYMBOLS - DISTS]);
    counts
}
