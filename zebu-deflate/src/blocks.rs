//! From tokens to blocks.

use super::huffman::{Codes, FIXED_DIST_LENS, FIXED_LENS, FIXED_SYMBOLS, Header, MAX_CODE_BITS};
use super::huffman::{bits_of, code_lengths};
use super::tokens::{CHUNK, Chunk, Counts, DIST_EXTRA, DIST_SYMBOLS, DISTS};
use super::tokens::{
    END_OF_BLOCK, LENGTH_EXTRA, LENGTHS, LITLEN_SYMBOLS, LOW_BITS, SYMBOLS, Token,
};
use super::writer::BitWriter;

/// Bytes in a stored block.
const MAX_STORED: usize = 65535;

/// Cuts the tokens of a segment, which represent the bytes from `history` on, into blocks, and writes
/// them.
#[inline(always)]
pub(super) fn write_blocks(
    writer: &mut BitWriter,
    codes: &mut Codes,
    chunks: &[Chunk],
    tokens: &[Token],
    segment: &[u8],
    history: usize,
    last: bool,
) {
    let mut from = history;
    let mut start = 0;
    let mut i = 0;
    while i < chunks.len() {
        // Grow the block while the next chunk fits its statistics.
        let (mut tail, mut at) = (start, from);
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
            (tail, at) = (chunk.end, chunk.at);
            i += 1;
        }
        write_block(
            writer,
            codes,
            &mut counts,
            &tokens[start..tail],
            &segment[from..at],
            last && i == chunks.len(),
        );
        (start, from) = (tail, at);
    }
}

/// n * log2(n), in 1/16 bits
fn nlogn(n: u32) -> u32 {
    (n as f32 * (n.max(1) as f32).log2() * 16.0) as u32
}

static NLOGN: std::sync::LazyLock<[u32; 4096]> =
    std::sync::LazyLock::new(|| std::array::from_fn(|n| nlogn(n as u32)));

/// The approximate size of the block with its header, in sixteenths of a bit.
// Not inlined into code for AVX2, where gathers from the table are slower.
#[inline(never)]
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

/// Writes `block`, which represents `raw`.
#[inline(always)]
fn write_block(
    writer: &mut BitWriter,
    codes: &mut Codes,
    counts: &mut Counts<u32>,
    block: &[Token],
    raw: &[u8],
    last: bool,
) {
    counts[END_OF_BLOCK] = 1;
    let freq = &counts[..LITLEN_SYMBOLS];
    let dist_freq = &counts[DISTS..DISTS + DIST_SYMBOLS];
    let mut lens = [0; FIXED_SYMBOLS];
    let mut dist_lens = [0; DIST_SYMBOLS];
    code_lengths(freq, &mut lens[..LITLEN_SYMBOLS], MAX_CODE_BITS);
    code_lengths(dist_freq, &mut dist_lens, MAX_CODE_BITS);
    let header = Header::new(&lens[..LITLEN_SYMBOLS], &dist_lens);

    let extra = bits_of(&freq[LENGTHS..], &LENGTH_EXTRA) + bits_of(dist_freq, &DIST_EXTRA);
    let dynamic = header.bits + bits_of(freq, &lens) + bits_of(dist_freq, &dist_lens) + extra;
    let fixed = bits_of(freq, &FIXED_LENS) + bits_of(dist_freq, &FIXED_DIST_LENS) + extra;
    let stored = (raw.len() * 8 + 40 * raw.len().div_ceil(MAX_STORED).max(1)) as u32;

    if stored <= dynamic.min(fixed) {
        write_stored(writer, raw, last);
        return;
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

#[inline(always)]
fn write_tokens(writer: &mut BitWriter, codes: &Codes, block: &[Token]) {
    let BitWriter {
        out,
        len,
        bits,
        count,
    } = writer;
    let (mut at, mut bits_now, mut count_now) = (*len, *bits, *count);
    let out = &mut out[..];
    // At most 56 bits, behind at most 7.
    let mut put = |bits: u64, count: u32| {
        bits_now |= bits << (count_now & 63);
        count_now += count;
        if let Some(out) = out.get_mut(at..at + 8) {
            out.copy_from_slice(&bits_now.to_le_bytes());
        }
        at += (count_now >> 3) as usize;
        bits_now >>= count_now & 56;
        count_now &= 7;
    };
    // Two are written together unless both are long, which is rare.
    let (pairs, rest) = block.as_chunks::<2>();
    for &[first, second] in pairs {
        let (first, count) = code_of(codes, first);
        let (second, more) = code_of(codes, second);
        if count + more <= 56 {
            put(first | second << (count & 63), count + more);
        } else {
            put(first, count);
            put(second, more);
        }
    }
    for &token in rest {
        let (bits, count) = code_of(codes, token);
        put(bits, count);
    }
    (*len, *bits, *count) = (at, bits_now, count_now);
}

/// A token's codes and extra bits, and their number: at most 20 + 25.
#[inline(always)]
fn code_of(codes: &Codes, token: Token) -> (u64, u32) {
    let low = codes.litlen[token as usize & ((1 << LOW_BITS) - 1)];
    let high = codes.dist[(token >> LOW_BITS) as usize & 31];
    let more = u64::from((token >> 16).wrapping_sub(high.base)) << (high.code_bits & 63);
    let bits = (more | u64::from(high.code)) << (low.bits & 63) | u64::from(low.code);
    (bits, low.bits + high.bits)
}
