//! Code lengths and codes, and the header that stores them.

use super::MIN_MATCH;
use super::tokens::{DIST_BASE, DIST_EXTRA, DIST_SYMBOLS, END_OF_BLOCK, LENGTH_BASE, LENGTH_EXTRA};
use super::tokens::{LENGTH_SLOT, LENGTHS, LITERALS, LITLEN_SYMBOLS, NO_DIST};
use super::writer::BitWriter;

pub(super) const MAX_CODE_BITS: usize = 15;
const MAX_PRECODE_BITS: usize = 7;

/// Includes the two symbols that only the fixed code has.
pub(super) const FIXED_SYMBOLS: usize = 288;
const PRECODE_SYMBOLS: usize = 19;
pub(super) const FIXED_LENS: [u8; FIXED_SYMBOLS] = {
    let mut lens = [8; FIXED_SYMBOLS];
    let mut symbol = 144;
    while symbol < 280 {
        lens[symbol] = if symbol < 256 { 9 } else { 7 };
        symbol += 1;
    }
    lens
};
pub(super) const FIXED_DIST_LENS: [u8; DIST_SYMBOLS] = [5; DIST_SYMBOLS];
const PRECODE_ORDER: [u8; PRECODE_SYMBOLS] = [
    16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15,
];

/// The codes of one block, ready to be written.
pub(super) struct Codes {
    /// By a token's lowest nine bits.
    pub(super) litlen: [Code; 512],
    /// By distance code.
    pub(super) dist: [DistCode; 32],
    pub(super) end_of_block: (u16, u8),
}

/// A code with its extra bits, and its number of bits.
#[derive(Clone, Copy)]
pub(super) struct Code {
    pub(super) code: u32,
    pub(super) bits: u32,
}

/// A distance code.
#[derive(Clone, Copy)]
pub(super) struct DistCode {
    pub(super) code: u32,
    pub(super) code_bits: u32,
    /// With the extra bits.
    pub(super) bits: u32,
    /// The shortest distance.
    pub(super) base: u32,
}

impl DistCode {
    const NONE: Self = Self {
        code: 0,
        code_bits: 0,
        bits: 0,
        base: 0,
    };
}

impl Codes {
    pub(super) const EMPTY: Self = Self {
        litlen: [Code { code: 0, bits: 0 }; 512],
        dist: [DistCode::NONE; 32],
        end_of_block: (0, 0),
    };

    pub(super) fn set(&mut self, lens: &[u8; FIXED_SYMBOLS], dist_lens: &[u8; DIST_SYMBOLS]) {
        let mut codes = [0; FIXED_SYMBOLS];
        assign_codes(lens, &mut codes);
        for ((entry, &code), &len) in self.litlen.iter_mut().zip(&codes).zip(&lens[..LITERALS]) {
            *entry = Code {
                code: code.into(),
                bits: len.into(),
            };
        }
        for (i, (entry, &slot)) in self.litlen[LITERALS..]
            .iter_mut()
            .zip(&LENGTH_SLOT)
            .enumerate()
        {
            let slot = usize::from(slot);
            let len = u32::from(lens[LENGTHS + slot]);
            let extra = (i + MIN_MATCH) as u32 - u32::from(LENGTH_BASE[slot]);
            *entry = Code {
                code: u32::from(codes[LENGTHS + slot]) | extra << len,
                bits: len + u32::from(LENGTH_EXTRA[slot]),
            };
        }
        self.end_of_block = (codes[END_OF_BLOCK], lens[END_OF_BLOCK]);

        let mut codes = [0; DIST_SYMBOLS];
        assign_codes(dist_lens, &mut codes);
        for (slot, &code) in codes.iter().enumerate() {
            let len = u32::from(dist_lens[slot]);
            self.dist[slot] = DistCode {
                code: code.into(),
                code_bits: len,
                bits: len + u32::from(DIST_EXTRA[slot]),
                base: DIST_BASE[slot].into(),
            };
        }
        self.dist[NO_DIST] = DistCode::NONE;
    }
}

/// Code lengths of at most `limit` bits for symbols that occur `freq` times.
pub(super) fn code_lengths(freq: &[u32], lens: &mut [u8], limit: usize) {
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
        // One bit each. zlib needs a complete code of literals with at least one symbol.
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
    // Codes above the limit get the limit as their length. Then the longest of the others are
    // lengthened until the sum is 1 again.
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

/// Both sets of code lengths, which begin a dynamic block.
pub(super) struct Header {
    litlens: usize,
    dists: usize,
    /// Run-length coded: a symbol of the precode and its extra bits.
    items: [(u8, u8); LITLEN_SYMBOLS + DIST_SYMBOLS],
    n_items: usize,
    lens: [u8; PRECODE_SYMBOLS],
    n_lens: usize,
    /// Its length in bits.
    pub(super) bits: u32,
}

impl Header {
    pub(super) fn new(lens: &[u8], dist_lens: &[u8]) -> Self {
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

    pub(super) fn write(&self, writer: &mut BitWriter) {
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

/// The number of bits that the codes take.
pub(super) fn bits_of(freq: &[u32], lens: &[u8]) -> u32 {
    freq.iter().zip(lens).map(|(n, &l)| n * u32::from(l)).sum()
}
