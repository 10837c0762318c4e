//! Deflate for one cluster, with no distance above 4096.
//!
//! QEMU's window is 4 KiB (`windowBits` is -12), and that is what this encoder
//! is made for. Everything it looks at fits the first-level cache:
//! - positions are `u16`: the input is taken in segments of at most 64 KiB;
//! - the match finder is a table of buckets, and a bucket is one `u32` or `u64`
//!   that holds the last two or four positions with the same hash. To insert is
//!   a shift; to search is to compare the candidates without a branch.
//!
//! A segment is parsed whole into tokens, then cut into blocks where the
//! statistics change, and each block is written with its own Huffman codes (or
//! with the fixed codes, or stored).

use std::hint::select_unpredictable;

/// No match reaches farther back.
const WINDOW: usize = 4096;
/// Positions are `u16`.
const SEGMENT: usize = 1 << 16;
/// Room behind a segment, so that loads need no care at its end.
const PAD: usize = 512;
const MIN_MATCH: usize = 3;
const MAX_MATCH: usize = 258;

/// Of both tables. With two positions a bucket they take 24 KiB.
const HASH_BITS: u32 = 12;

/// A token: in the low half a literal (0..=255) or 256 + length - 3; in the
/// high half the distance, 0 for a literal.
type Token = u32;

const LITERALS: usize = 256;
const END_OF_BLOCK: usize = 256;
const LITLEN_SYMBOLS: usize = 286;
const DIST_SYMBOLS: usize = 30;
/// Where a literal's absent distance is counted, so that counting needs no
/// branch.
const NO_DIST: usize = 30;

const MAX_CODE_BITS: usize = 15;
const MAX_PRECODE_BITS: usize = 7;

/// With the two that only the fixed code has.
const FIXED_SYMBOLS: usize = 288;
const PRECODE_SYMBOLS: usize = 19;
/// Bytes in a stored block.
const MAX_STORED: usize = 65535;

/// Tokens are cut into blocks at multiples of this many.
const CHUNK: usize = 2048;

const LENGTH_BASE: [u16; 29] = [
    3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131,
    163, 195, 227, 258,
];
const LENGTH_EXTRA: [u8; 29] = [
    0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0,
];
const DIST_BASE: [u16; DIST_SYMBOLS] = [
    1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537,
    2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577,
];
const DIST_EXTRA: [u8; DIST_SYMBOLS] = [
    0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13,
    13,
];
const FIXED_LENS: [u8; FIXED_SYMBOLS] = {
    let mut lens = [8; FIXED_SYMBOLS];
    let mut symbol = 144;
    while symbol < 280 {
        lens[symbol] = if symbol < 256 { 9 } else { 7 };
        symbol += 1;
    }
    lens
};
const FIXED_DIST_LENS: [u8; DIST_SYMBOLS] = [5; DIST_SYMBOLS];
const PRECODE_ORDER: [u8; PRECODE_SYMBOLS] = [
    16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15,
];

/// From length - 3 to its code.
static LENGTH_SLOT: [u8; 256] = {
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
static DIST_SLOT: [u8; 2 * WINDOW] = {
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

/// How hard to look for matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    /// One or two candidates for each of two neighbouring positions, and the
    /// better of the two matches.
    Pairs {
        /// Candidates for a match of 4 or more: 1 or 2.
        ways: u32,
    },
    /// Up to four candidates, and a match gives way to a better one at the
    /// next position as long as it is shorter than `patience`.
    Lazy {
        /// Candidates for a match of 4 or more: 3 or 4.
        ways: u32,
        /// A match this long is taken at once.
        patience: u32,
    },
}

impl Effort {
    /// Levels as zlib's: 1 is fastest, 9 smallest.
    pub(super) fn of_level(level: i32) -> Self {
        match level {
            ..=1 => Self::Pairs { ways: 1 },
            2..=3 => Self::Pairs { ways: 2 },
            4 => Self::Lazy {
                ways: 3,
                patience: 8,
            },
            5 => Self::Lazy {
                ways: 4,
                patience: 8,
            },
            6 => Self::Lazy {
                ways: 4,
                patience: 16,
            },
            7 => Self::Lazy {
                ways: 4,
                patience: 32,
            },
            8 => Self::Lazy {
                ways: 4,
                patience: 64,
            },
            _ => Self::Lazy {
                ways: 4,
                patience: 258,
            },
        }
    }
}

/// How often each symbol occurs: literals, end of block and lengths; and from
/// [`DISTS`] on the distances.
type Counts<T> = [T; SYMBOLS];
const SYMBOLS: usize = 320;
const LENGTHS: usize = 257;
const DISTS: usize = 288;

/// Compresses one stream after another.
pub(super) struct Deflate {
    /// The segment: history, then new bytes, then padding.
    buf: Box<Buffer>,
    two: Option<Box<Finder<u32>>>,
    four: Option<Box<Finder<u64>>>,
    tokens: Box<Tokens>,
    chunks: Vec<Chunk>,
    writer: BitWriter,
    codes: Box<Codes>,
}

type Buffer = [u8; SEGMENT + PAD];
type Tokens = [Token; SEGMENT];

/// How many positions are entered into the tables at a time.
const BATCH: usize = 256;
/// Of how many positions the candidates are kept.
const RING: usize = 2 * BATCH;

/// The positions last seen with one hash, newest first.
trait Bucket: Copy {
    const EMPTY: Self;
    fn push(self, at: u16) -> Self;
    fn bits(self) -> u64;
}

impl Bucket for u32 {
    const EMPTY: Self = 0;
    #[inline(always)]
    fn push(self, at: u16) -> Self {
        self << 16 | u32::from(at)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        self.into()
    }
}

impl Bucket for u64 {
    const EMPTY: Self = 0;
    #[inline(always)]
    fn push(self, at: u16) -> Self {
        self << 16 | u64::from(at)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        self
    }
}

/// Finds matches. Positions are entered in batches, ahead of the parse, in a
/// loop without a branch; what their buckets held before is kept beside them,
/// so that to search touches no table.
///
/// An empty place holds position 0, which is a place like any other, from
/// position 1 on: that its bytes are equal is always checked.
struct Finder<B> {
    four: [B; 1 << HASH_BITS],
    three: [u16; 1 << HASH_BITS],
    before4: [B; RING],
    before3: [u16; RING],
    /// Positions below this are entered.
    entered: usize,
}

#[derive(Clone, Copy)]
struct Match {
    len: usize,
    dist: usize,
}

#[inline(always)]
fn load8(buf: &Buffer, at: u16) -> u64 {
    let at = usize::from(at);
    u64::from_le_bytes(buf[at..at + 8].try_into().unwrap_or_default())
}

impl<B: Bucket> Finder<B> {
    fn new() -> Box<Self> {
        Box::new(Self {
            four: [B::EMPTY; 1 << HASH_BITS],
            three: [0; 1 << HASH_BITS],
            before4: [B::EMPTY; RING],
            before3: [0; RING],
            entered: 0,
        })
    }

    fn clear(&mut self) {
        self.four.fill(B::EMPTY);
        self.three.fill(0);
        self.entered = 0;
    }

    /// Makes sure that the candidates of `at` are known.
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
            *bucket = bucket.push(at);
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
        let mut bucket = self.before4[usize::from(at) & (RING - 1)].bits();
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
            // Several may be that long, and one of them longer.
            len = extend(buf, at, from);
            let mut bucket = self.before4[at & (RING - 1)].bits();
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

/// How long a match is, of which 7 bytes are known to be equal.
#[inline]
fn extend(buf: &Buffer, at: usize, from: usize) -> usize {
    let mut len = 7;
    while len < MAX_MATCH {
        let (Some(a), Some(b)) = (
            buf.get(at + len..at + len + 8),
            buf.get(from + len..from + len + 8),
        ) else {
            break;
        };
        let a = u64::from_le_bytes(a.try_into().unwrap_or_default());
        let b = u64::from_le_bytes(b.try_into().unwrap_or_default());
        if a != b {
            len += ((a ^ b).trailing_zeros() >> 3) as usize;
            break;
        }
        len += 8;
    }
    len.min(MAX_MATCH)
}

/// Where the parse puts its tokens, and counts them.
struct Sink<'a> {
    tokens: &'a mut Tokens,
    chunks: &'a mut Vec<Chunk>,
    counts: Counts<u16>,
    /// How many tokens there are.
    len: usize,
    chunk_end: usize,
}

/// Some tokens in a row: how often each symbol occurs, and where they end.
struct Chunk {
    counts: Counts<u16>,
    end: usize,
}

impl<'a> Sink<'a> {
    fn new(tokens: &'a mut Tokens, chunks: &'a mut Vec<Chunk>) -> Self {
        chunks.clear();
        Self {
            tokens,
            chunks,
            counts: [0; SYMBOLS],
            len: 0,
            chunk_end: CHUNK,
        }
    }

    #[inline(always)]
    fn literal(&mut self, byte: u8) {
        self.literal_if(true, byte);
    }

    /// With `take` false it leaves no trace.
    #[inline(always)]
    fn literal_if(&mut self, take: bool, byte: u8) {
        self.counts[usize::from(byte)] += u16::from(take);
        self.tokens[self.len % SEGMENT] = byte.into();
        self.len += usize::from(take);
    }

    #[inline(always)]
    fn found(&mut self, found: Match) {
        let len = found.len.wrapping_sub(MIN_MATCH) & 0xff;
        let dist = found.dist & (2 * WINDOW - 1);
        self.counts[LENGTHS + usize::from(LENGTH_SLOT[len] & 31)] += 1;
        self.counts[DISTS + usize::from(DIST_SLOT[dist] & 31)] += 1;
        self.tokens[self.len % SEGMENT] = ((LITERALS + len) | (dist << 16)) as Token;
        self.len += 1;
    }

    #[inline(always)]
    fn end_step(&mut self) {
        if self.len >= self.chunk_end {
            self.end_chunk();
        }
    }

    #[inline(always)]
    fn end_chunk(&mut self) {
        end_chunk(self.chunks, &mut self.counts, self.len);
        self.chunk_end = self.len + CHUNK;
    }

    fn finish(&mut self) {
        if self.chunks.last().is_none_or(|last| last.end < self.len) {
            self.end_chunk();
        }
    }
}

/// Out of line and away from [`Sink`], which shall live in registers.
#[cold]
#[inline(never)]
fn end_chunk(chunks: &mut Vec<Chunk>, counts: &mut Counts<u16>, end: usize) {
    chunks.push(Chunk {
        counts: *counts,
        end,
    });
    counts.fill(0);
}

/// Literals passed since the last match. Where there are many the data is
/// likely to be of the kind that does not compress, and it is passed faster
/// and faster.
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

/// Looks at positions two at a time, and takes the longer of two matches. The
/// one branch that is hard to predict is whether there is any.
#[inline(never)]
fn parse_pairs<const WAYS: u32, B: Bucket>(
    finder: &mut Finder<B>,
    buf: &Buffer,
    mut at: usize,
    end: usize,
    mut sink: Sink<'_>,
) {
    let mut drought = Drought(0);
    // Past this a match could be cut by the end.
    while at + 16 < end {
        finder.enter(buf, at + 1);
        let first = finder.rank::<WAYS>(buf, at as u16);
        let second = finder.rank::<WAYS>(buf, (at + 1) as u16);
        if first.max(second) < (MIN_MATCH as u32) << 16 {
            sink.literal(buf[at]);
            sink.literal(buf[at + 1]);
            at += 2;
            drought.pass(2, &mut sink, buf, &mut at, end);
        } else {
            drought = Drought(0);
            let later = second >> 16 > first >> 16;
            sink.literal_if(later, buf[at]);
            at += usize::from(later);
            let best = select_unpredictable(later, second, first);
            let mut len = (best >> 16) as usize;
            let from = (best & 0xffff) as usize;
            if len == 7 {
                len = extend(buf, at, from).min(end - at);
            }
            sink.found(Match {
                len,
                dist: at - from,
            });
            at += len;
        }
        sink.end_step();
    }
    for &byte in &buf[at..end] {
        sink.literal(byte);
    }
    sink.finish();
}

/// Takes a match unless the next position has a better one.
#[inline(never)]
fn parse_lazy<const WAYS: u32, B: Bucket>(
    finder: &mut Finder<B>,
    buf: &Buffer,
    mut at: usize,
    end: usize,
    patience: usize,
    mut sink: Sink<'_>,
) {
    let mut drought = Drought(0);
    while at < end {
        finder.enter(buf, at);
        let Some(mut found) = finder.search::<WAYS>(buf, at, end) else {
            sink.literal(buf[at]);
            at += 1;
            drought.pass(1, &mut sink, buf, &mut at, end);
            sink.end_step();
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
        sink.end_step();
    }
    sink.finish();
}

impl Deflate {
    pub(super) fn new() -> Self {
        Self {
            buf: Box::new([0; SEGMENT + PAD]),
            two: None,
            four: None,
            tokens: Box::new([0; SEGMENT]),
            chunks: Vec::new(),
            writer: BitWriter::default(),
            codes: Box::new(Codes::EMPTY),
        }
    }

    /// Compresses `src` into one raw deflate stream at the start of `dst`, and
    /// returns its length; `None` when it does not fit.
    pub(super) fn compress(&mut self, effort: Effort, src: &[u8], dst: &mut [u8]) -> Option<usize> {
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
            self.write_blocks(history, end, done == src.len());
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
    fn parse(&mut self, effort: Effort, history: usize, end: usize) {
        let buf = &*self.buf;
        let mut sink = Sink::new(&mut self.tokens, &mut self.chunks);
        let mut at = history;
        if at == 0 && end > 0 {
            // Nothing lies before it.
            sink.literal(buf[0]);
            at = 1;
        }
        match effort {
            Effort::Pairs { ways } => {
                let finder = self.two.get_or_insert_with(Finder::new);
                finder.clear();
                match ways {
                    ..=1 => parse_pairs::<1, _>(finder, buf, at, end, sink),
                    _ => parse_pairs::<2, _>(finder, buf, at, end, sink),
                }
            }
            Effort::Lazy { ways, patience } => {
                let finder = self.four.get_or_insert_with(Finder::new);
                finder.clear();
                let patience = patience as usize;
                match ways {
                    ..=3 => parse_lazy::<3, _>(finder, buf, at, end, patience, sink),
                    _ => parse_lazy::<4, _>(finder, buf, at, end, patience, sink),
                }
            }
        }
    }

    /// Cuts the tokens of the segment into blocks and writes them.
    fn write_blocks(&mut self, history: usize, end: usize, last: bool) {
        let Self {
            tokens,
            chunks,
            writer,
            codes,
            buf,
            ..
        } = self;
        let mut at = history;
        let mut start = 0;
        let mut i = 0;
        while i < chunks.len() {
            // Grow the block while the next chunk fits its statistics.
            let mut tail = start;
            let mut counts = [0u32; SYMBOLS];
            let mut cost = 0;
            while let Some(chunk) = chunks.get(i) {
                let mut both = counts;
                for (a, &b) in both.iter_mut().zip(&chunk.counts) {
                    *a += b as u32;
                }
                let both_cost = entropy(&both);
                if tail > start
                    && chunk.end - tail > CHUNK / 2
                    && both_cost > cost + entropy(&chunk.counts.map(u32::from))
                {
                    break;
                }
                counts = both;
                cost = both_cost;
                tail = chunk.end;
                i += 1;
            }
            at += write_block(
                writer,
                codes,
                &mut counts,
                &tokens[start..tail],
                &buf[at..end],
                last && i == chunks.len(),
            );
            start = tail;
        }
    }
}

/// n * log2(n), in 1/16 bits
fn nlogn(n: u32) -> u32 {
    (n as f32 * (n.max(1) as f32).log2() * 16.0) as u32
}

static NLOGN: std::sync::LazyLock<[u32; 4096]> =
    std::sync::LazyLock::new(|| std::array::from_fn(|n| nlogn(n as u32)));

/// About how many bits (in sixteenths) the block takes, its header included.
fn entropy(counts: &Counts<u32>) -> u32 {
    let table = &*NLOGN;
    let of = |counts: &[u32]| {
        let (mut sum, mut total, mut used) = (0, 0, 0);
        for &n in counts {
            sum += table.get(n as usize).copied().unwrap_or_else(|| nlogn(n));
            total += n;
            used += (n != 0) as u32;
        }
        nlogn(total).saturating_sub(sum) + 16 * 3 * used
    };
    let mut extra = 0;
    for (&n, &e) in counts[LENGTHS..].iter().zip(&LENGTH_EXTRA) {
        extra += n * e as u32;
    }
    of(&counts[..DISTS]) + of(&counts[DISTS..]) + 16 * (extra + 60)
}

#[derive(Default)]
struct BitWriter {
    out: Vec<u8>,
    /// Bytes of `out` that are written.
    len: usize,
    bits: u64,
    count: u32,
}

impl BitWriter {
    fn clear(&mut self) {
        self.len = 0;
        self.bits = 0;
        self.count = 0;
    }

    fn reserve(&mut self, bytes: usize) {
        let need = self.len + bytes + 16;
        if self.out.len() < need {
            self.out.resize(need.next_power_of_two(), 0);
        }
    }

    fn len(&self) -> usize {
        self.len + self.count.div_ceil(8) as usize
    }

    /// At most 56 - 7 bits between flushes.
    #[inline(always)]
    fn put(&mut self, bits: u64, count: u32) {
        self.bits |= bits << (self.count & 63);
        self.count += count;
    }

    #[inline(always)]
    fn flush(&mut self) {
        if let Some(out) = self.out.get_mut(self.len..self.len + 8) {
            out.copy_from_slice(&self.bits.to_le_bytes());
        }
        let bytes = self.count >> 3;
        self.len += bytes as usize;
        self.bits >>= (bytes * 8) & 63;
        self.count &= 7;
    }

    fn align(&mut self) {
        self.count = self.count.next_multiple_of(8);
        self.flush();
    }

    fn finish(&mut self) -> &[u8] {
        self.align();
        &self.out[..self.len]
    }
}

/// The codes of one block, ready to be written.
struct Codes {
    /// By a token's low half: code and extra bits, and from bit 24 how many.
    litlen: [u32; 512],
    /// By distance code: the code, from bit 16 its length, from bit 24 that
    /// and the extra bits; and the shortest distance.
    dist: [(u32, u16); 32],
    end_of_block: (u16, u8),
}

impl Codes {
    const EMPTY: Self = Self {
        litlen: [0; 512],
        dist: [(0, 0); 32],
        end_of_block: (0, 0),
    };

    fn set(&mut self, lens: &[u8; FIXED_SYMBOLS], dist_lens: &[u8; DIST_SYMBOLS]) {
        let mut codes = [0; FIXED_SYMBOLS];
        assign_codes(lens, &mut codes);
        for ((entry, &code), &len) in self.litlen.iter_mut().zip(&codes).zip(&lens[..LITERALS]) {
            *entry = u32::from(code) | u32::from(len) << 24;
        }
        for (i, (entry, &slot)) in self.litlen[LITERALS..]
            .iter_mut()
            .zip(&LENGTH_SLOT)
            .enumerate()
        {
            let slot = usize::from(slot);
            let len = u32::from(lens[LENGTHS + slot]);
            let extra = (i + MIN_MATCH) as u32 - u32::from(LENGTH_BASE[slot]);
            let bits = len + u32::from(LENGTH_EXTRA[slot]);
            *entry = u32::from(codes[LENGTHS + slot]) | extra << len | bits << 24;
        }
        self.end_of_block = (codes[END_OF_BLOCK], lens[END_OF_BLOCK]);

        let mut codes = [0; DIST_SYMBOLS];
        assign_codes(dist_lens, &mut codes);
        for (slot, &code) in codes.iter().enumerate() {
            let len = u32::from(dist_lens[slot]);
            let bits = len + u32::from(DIST_EXTRA[slot]);
            self.dist[slot] = (u32::from(code) | len << 16 | bits << 24, DIST_BASE[slot]);
        }
        self.dist[NO_DIST] = (0, 0);
    }
}

/// Code lengths of at most `limit` bits for symbols that occur `freq` times.
fn code_lengths(freq: &[u32], lens: &mut [u8], limit: usize) {
    let mut keys = [0u32; LITLEN_SYMBOLS + 2];
    let mut n = 0;
    lens.fill(0);
    for (symbol, &f) in freq.iter().enumerate() {
        if f != 0 {
            keys[n] = f.min((1 << 22) - 1) << 9 | symbol as u32;
            n += 1;
        }
    }
    if n <= 2 {
        // One bit each; zlib wants a complete code of literals, and at least
        // one symbol.
        for &k in &keys[..n] {
            lens[(k & 0x1ff) as usize] = 1;
        }
        let mut spare = 0;
        while n < 2 {
            if lens[spare] == 0 {
                lens[spare] = 1;
                n += 1;
            }
            spare += 1;
        }
        return;
    }
    let keys = &mut keys[..n];
    keys.sort_unstable();
    // Moffat and Katajainen: lengths in place, from frequencies in order.
    let mut a = [0u32; LITLEN_SYMBOLS + 2];
    for (a, k) in a.iter_mut().zip(&*keys) {
        *a = k >> 9;
    }
    let (mut leaf, mut root) = (2, 0);
    a[0] += a[1];
    for next in 1..n - 1 {
        let mut take = |a: &mut [u32]| {
            if leaf >= n || (root < next && a[root] < a[leaf]) {
                let f = a[root];
                a[root] = next as u32;
                root += 1;
                f
            } else {
                leaf += 1;
                a[leaf - 1]
            }
        };
        let first = take(&mut a);
        let second = take(&mut a);
        a[next] = first + second;
    }
    // Parents to depths of inner nodes, then how many leaves at each depth.
    let mut per_len = [0u32; 64];
    a[n - 2] = 0;
    for i in (0..n - 2).rev() {
        a[i] = a[a[i] as usize] + 1;
    }
    let (mut avail, mut depth, mut inner) = (1i64, 0usize, n as isize - 2);
    let mut left = n as i64;
    while avail > 0 && left > 0 {
        let mut used = 0;
        while inner >= 0 && a[inner as usize] as usize == depth {
            used += 1;
            inner -= 1;
        }
        let leaves = (avail - used).min(left);
        per_len[depth.min(limit)] += leaves as u32;
        left -= leaves;
        avail = 2 * used;
        depth += 1;
    }
    // Too deep: lengthen the longest of the others until the sum is 1 again.
    let one = 1u64 << limit;
    let mut sum: u64 = (1..=limit)
        .map(|l| (per_len[l] as u64) << (limit - l))
        .sum();
    while sum > one {
        per_len[limit] -= 1;
        for l in (1..limit).rev() {
            if per_len[l] > 0 {
                per_len[l] -= 1;
                per_len[l + 1] += 2;
                break;
            }
        }
        sum -= 1;
    }
    let mut i = 0;
    for l in (1..=limit).rev() {
        for _ in 0..per_len[l] {
            lens[(keys[i] & 0x1ff) as usize] = l as u8;
            i += 1;
        }
    }
}

/// Canonical codes, bit-reversed as deflate writes them.
fn assign_codes(lens: &[u8], codes: &mut [u16]) {
    let mut per_len = [0u16; MAX_CODE_BITS + 1];
    for &l in lens {
        per_len[l as usize & 15] += 1;
    }
    per_len[0] = 0;
    let mut next = [0u16; MAX_CODE_BITS + 1];
    let mut code = 0u16;
    for l in 1..=MAX_CODE_BITS {
        code = (code + per_len[l - 1]) << 1;
        next[l] = code;
    }
    for (&l, c) in lens.iter().zip(codes) {
        if l != 0 {
            let n = &mut next[l as usize & 15];
            *c = n.reverse_bits() >> (16 - l);
            *n = n.wrapping_add(1);
        }
    }
}

/// Both sets of code lengths, as a dynamic block begins with.
struct Header {
    litlens: usize,
    dists: usize,
    /// Run-length coded: a symbol of the precode and its extra bits.
    items: [(u8, u8); LITLEN_SYMBOLS + DIST_SYMBOLS],
    n_items: usize,
    lens: [u8; PRECODE_SYMBOLS],
    n_lens: usize,
    /// Its length in bits.
    bits: u32,
}

impl Header {
    fn new(lens: &[u8], dist_lens: &[u8]) -> Self {
        let used = |lens: &[u8]| {
            lens.iter()
                .rposition(|&l| l != 0)
                .map_or(0, |last| last + 1)
        };
        let litlens = used(lens).max(LENGTHS);
        let dists = used(dist_lens).max(1);
        let mut both = [0; LITLEN_SYMBOLS + DIST_SYMBOLS];
        both[..litlens].copy_from_slice(&lens[..litlens]);
        both[litlens..litlens + dists].copy_from_slice(&dist_lens[..dists]);
        let both = &both[..litlens + dists];

        let mut items = [(0, 0); LITLEN_SYMBOLS + DIST_SYMBOLS];
        let mut n_items = 0;
        let mut freq = [0; PRECODE_SYMBOLS];
        let mut at = 0;
        while at < both.len() {
            let len = both[at];
            let run = both[at..].iter().take_while(|&&l| l == len).count();
            let repeats = at > 0 && both[at - 1] == len;
            let (item, taken) = match (len, run) {
                (0, 11..) => ((18, (run.min(138) - 11) as u8), run.min(138)),
                (0, 3..) => ((17, (run - 3) as u8), run),
                (_, 3..) if repeats => ((16, (run.min(6) - 3) as u8), run.min(6)),
                _ => ((len, 0), 1),
            };
            freq[usize::from(item.0)] += 1;
            items[n_items] = item;
            n_items += 1;
            at += taken;
        }
        let mut lens = [0; PRECODE_SYMBOLS];
        code_lengths(&freq, &mut lens, MAX_PRECODE_BITS);
        let n_lens = PRECODE_ORDER
            .iter()
            .rposition(|&s| lens[usize::from(s)] != 0)
            .map_or(4, |last| (last + 1).max(4));
        let extra: u32 = (0..).zip(&freq).map(|(s, &n)| n * precode_extra(s)).sum();
        Self {
            litlens,
            dists,
            items,
            n_items,
            lens,
            n_lens,
            bits: 14 + 3 * n_lens as u32 + bits_of(&freq, &lens) + extra,
        }
    }

    fn write(&self, writer: &mut BitWriter) {
        writer.put((self.litlens - LENGTHS) as u64, 5);
        writer.put((self.dists - 1) as u64, 5);
        writer.put((self.n_lens - 4) as u64, 4);
        writer.flush();
        for &symbol in &PRECODE_ORDER[..self.n_lens] {
            writer.put(self.lens[usize::from(symbol)].into(), 3);
            writer.flush();
        }
        let mut codes = [0; PRECODE_SYMBOLS];
        assign_codes(&self.lens, &mut codes);
        for &(symbol, extra) in &self.items[..self.n_items] {
            let at = usize::from(symbol);
            writer.put(codes[at].into(), self.lens[at].into());
            writer.put(extra.into(), precode_extra(symbol));
            writer.flush();
        }
    }
}

fn precode_extra(symbol: u8) -> u32 {
    match symbol {
        16 => 2,
        17 => 3,
        18 => 7,
        _ => 0,
    }
}

/// How many bits the codes take.
fn bits_of(freq: &[u32], lens: &[u8]) -> u32 {
    freq.iter().zip(lens).map(|(n, &l)| n * u32::from(l)).sum()
}

/// Writes `block`, which stands for the first bytes of `raw`, and returns how
/// many.
fn write_block(
    writer: &mut BitWriter,
    codes: &mut Codes,
    counts: &mut Counts<u32>,
    block: &[Token],
    raw: &[u8],
    last: bool,
) -> usize {
    counts[END_OF_BLOCK] = 1;
    let freq = &counts[..LITLEN_SYMBOLS];
    let dist_freq = &counts[DISTS..DISTS + DIST_SYMBOLS];
    let covered = block.iter().map(|&token| {
        let low = token as usize & 0x1ff;
        if low < LITERALS {
            1
        } else {
            low - LITERALS + MIN_MATCH
        }
    });
    let covered: usize = covered.sum();

    let mut lens = [0; FIXED_SYMBOLS];
    let mut dist_lens = [0; DIST_SYMBOLS];
    code_lengths(freq, &mut lens[..LITLEN_SYMBOLS], MAX_CODE_BITS);
    code_lengths(dist_freq, &mut dist_lens, MAX_CODE_BITS);
    let header = Header::new(&lens[..LITLEN_SYMBOLS], &dist_lens);

    let extra = bits_of(&freq[LENGTHS..], &LENGTH_EXTRA) + bits_of(dist_freq, &DIST_EXTRA);
    let dynamic = header.bits + bits_of(freq, &lens) + bits_of(dist_freq, &dist_lens) + extra;
    let fixed = bits_of(freq, &FIXED_LENS) + bits_of(dist_freq, &FIXED_DIST_LENS) + extra;
    let stored = (covered * 8 + 40 * covered.div_ceil(MAX_STORED).max(1)) as u32;

    if stored <= dynamic.min(fixed) {
        write_stored(writer, &raw[..covered], last);
        return covered;
    }
    writer.reserve(stored as usize / 8 + 16);
    if fixed <= dynamic {
        writer.put(u64::from(last) | 1 << 1, 3);
        codes.set(&FIXED_LENS, &FIXED_DIST_LENS);
    } else {
        writer.put(u64::from(last) | 2 << 1, 3);
        header.write(writer);
        codes.set(&lens, &dist_lens);
    }
    write_tokens(writer, codes, block);
    let (code, len) = codes.end_of_block;
    writer.put(code.into(), len.into());
    writer.flush();
    covered
}

fn write_stored(writer: &mut BitWriter, raw: &[u8], last: bool) {
    let mut pieces = raw.chunks(MAX_STORED).peekable();
    while let Some(piece) = pieces.next() {
        writer.reserve(piece.len() + 16);
        writer.put(u64::from(last && pieces.peek().is_none()), 3);
        writer.align();
        let len = piece.len() as u64;
        writer.put(len | (len ^ 0xffff) << 16, 32);
        writer.flush();
        writer.out[writer.len..writer.len + piece.len()].copy_from_slice(piece);
        writer.len += piece.len();
    }
}

#[inline(never)]
fn write_tokens(writer: &mut BitWriter, codes: &Codes, block: &[Token]) {
    let BitWriter {
        out,
        len,
        bits,
        count,
    } = writer;
    let (mut at, mut bits_now, mut count_now) = (*len, *bits, *count);
    let out = &mut out[..];
    for &token in block {
        let low = codes.litlen[token as usize & 0x1ff];
        let dist = token >> 16;
        let slot = DIST_SLOT[dist as usize & (2 * WINDOW - 1)];
        let (high, base) = codes.dist[usize::from(slot & 31)];
        let far =
            u64::from(high & 0xffff) | u64::from(dist - u32::from(base)) << ((high >> 16) & 31);
        let both = u64::from(low & 0xff_ffff) | far << (low >> 24);
        // At most 20 + 25 bits, behind at most 7.
        bits_now |= both << count_now;
        count_now += (low >> 24) + (high >> 24);
        if let Some(out) = out.get_mut(at..at + 8) {
            out.copy_from_slice(&bits_now.to_le_bytes());
        }
        let bytes = count_now >> 3;
        at += bytes as usize;
        bits_now >>= bytes * 8;
        count_now &= 7;
    }
    (*len, *bits, *count) = (at, bits_now, count_now);
}
