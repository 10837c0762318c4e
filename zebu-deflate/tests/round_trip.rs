//! Guards against lost data: a stream that does not round-trip with each inflater, a distance of more
//! than the window of 4 KiB, a stream that is longer than its buffer.

use std::io::Write;

use proptest::prelude::*;
use zebu_deflate::{Encoder, Level};
use zlib_rs::{Inflate, InflateFlush};

/// Inflates one byte of output at a time, so that the inflater can only copy from its window of
/// 4 KiB.
fn inflate_narrow(stream: &[u8], len: usize) -> Vec<u8> {
    let mut inflate = Inflate::new(false, 12);
    let mut out = Vec::new();
    let mut rest = stream;
    let mut piece = [0; 61];
    loop {
        let (was_in, was_out) = (inflate.total_in(), inflate.total_out());
        let status = inflate
            .decompress(rest, &mut piece, InflateFlush::NoFlush)
            .expect("a valid stream without too large a distance");
        rest = &rest[(inflate.total_in() - was_in) as usize..];
        let n = (inflate.total_out() - was_out) as usize;
        out.extend_from_slice(&piece[..n]);
        if status == zlib_rs::Status::StreamEnd {
            assert!(rest.is_empty(), "bytes after the stream");
            break;
        }
        assert!(n > 0, "the stream has no end");
        assert!(out.len() <= len, "the stream is too long");
    }
    out
}

fn level(number: i32) -> Level {
    Level::new(number).expect("a level from 1 to 9")
}

/// Compresses into a large buffer, checks the stream, and returns its length.
fn round_trip(encoder: &mut Encoder, number: i32, src: &[u8]) -> usize {
    let mut dst = vec![0; src.len() + src.len() / 1000 + 100];
    let len = encoder
        .compress(level(number), src, &mut dst)
        .expect("space for stored blocks");
    assert!(inflate_narrow(&dst[..len], src.len()) == src);
    let mut back = vec![0; src.len()];
    let mut inflater = libdeflater::Decompressor::new();
    let got = inflater.deflate_decompress(&dst[..len], &mut back).unwrap();
    assert!(got == src.len() && back == src);
    len
}

fn noise(len: usize, mut seed: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        out.extend(seed.to_le_bytes());
    }
    out.truncate(len);
    out
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

#[test]
fn every_length_near_a_boundary() {
    let data = text((2 << 20) + 10);
    let mut c = Encoder::new();
    let lens = (0..40)
        .chain(4090..4110)
        .chain(65520..65550)
        .chain(65536 + 61430..65536 + 61450)
        .chain([1 << 20, 2 << 20, (2 << 20) + 7]);
    for len in lens {
        round_trip(&mut c, 2, &data[..len]);
        round_trip(&mut c, 6, &data[..len]);
    }
}

#[test]
fn every_level() {
    let mut c = Encoder::new();
    let mixed: Vec<u8> = (0..8)
        .flat_map(|i| [noise(3000 * i, 7), text(2000), vec![i as u8; 4000]].concat())
        .collect();
    let cases = [
        vec![],
        vec![0x80],
        vec![0; 65536],
        vec![0xff; 2 << 20],
        b"ab".repeat(32768),
        b"abc".repeat(21845),
        text(65536),
        noise(65536, 1),
        // A match of one byte more than the window must not be used.
        noise(4097, 2).repeat(16),
        noise(4096, 2).repeat(16),
        (0..=255).cycle().take(65536).collect(),
        // Frequencies whose optimal codes have more than 15 bits.
        (0..24u32)
            .flat_map(|i| vec![(i * 7) as u8; 1 << (i / 2)])
            .collect(),
        mixed,
    ];
    for case in &cases {
        let lens: Vec<_> = (1..=9)
            .map(|level| round_trip(&mut c, level, case))
            .collect();
        assert!(lens[8] <= lens[0] + lens[0] / 50, "{lens:?}");
    }
    assert!(round_trip(&mut c, 2, &[0; 65536]) < 300);
    assert!(round_trip(&mut c, 2, &noise(4096, 2).repeat(16)) < 6000);
    assert!(round_trip(&mut c, 2, &noise(65536, 1)) <= 65536 + 10);
}

/// Fibonacci frequencies in an order without matches, which give the longest optimal codes.
#[test]
fn deep_codes_are_limited() {
    let (mut a, mut b) = (1usize, 1usize);
    let mut data = Vec::new();
    for symbol in 0..22u8 {
        data.extend(std::iter::repeat_n(symbol.wrapping_mul(37), a));
        (a, b) = (b, a + b);
    }
    let keys = noise(data.len() * 8, 3);
    let mut order: Vec<_> = keys.chunks(8).zip(data).collect();
    order.sort();
    let data: Vec<u8> = order.into_iter().map(|(_, symbol)| symbol).collect();
    let mut c = Encoder::new();
    for level in [1, 2, 6] {
        round_trip(&mut c, level, &data);
    }
}

#[test]
fn a_stream_that_does_not_fit_is_none() {
    let mut c = Encoder::new();
    assert_eq!(
        c.compress(Level::DEFAULT, &noise(65536, 5), &mut [0; 65535]),
        None
    );
    let easy = text(65536);
    let mut dst = vec![0; 65535];
    for encode in [Encoder::compress, Encoder::compress_zlib] {
        let len = encode(&mut c, Level::DEFAULT, &easy, &mut dst).unwrap();
        // A buffer of exactly this length.
        let mut exact = vec![0; len];
        assert_eq!(encode(&mut c, Level::DEFAULT, &easy, &mut exact), Some(len));
        assert_eq!(exact, dst[..len]);
        for short in [0, 1, 2, 5, len - 4, len - 1] {
            let short = &mut exact[..short];
            assert_eq!(encode(&mut c, Level::DEFAULT, &easy, short), None);
        }
    }
}

#[test]
fn levels_are_1_to_9() {
    for number in [i32::MIN, -1, 0, 10, 257, i32::MAX] {
        assert_eq!(Level::new(number), None);
    }
    assert_eq!(Level::new(2), Some(Level::default()));
    assert!(Level::FASTEST < Level::SMALLEST && Level::SMALLEST.get() == 9);
}

#[test]
fn a_zlib_stream_names_the_window() {
    let mut c = Encoder::new();
    for data in [vec![], text(65536), noise(3000, 9)] {
        for number in 1..=9 {
            let mut dst = vec![0; data.len() + 100];
            let len = c.compress_zlib(level(number), &data, &mut dst).unwrap();
            // zlib-rs refuses distances of more than the window of the header.
            let mut inflate = Inflate::new(true, 12);
            let mut back = vec![0; data.len() + 1];
            let status = inflate.decompress(&dst[..len], &mut back, InflateFlush::Finish);
            assert_eq!(status, Ok(zlib_rs::Status::StreamEnd));
            assert_eq!(inflate.total_in() as usize, len);
            assert_eq!(back[..inflate.total_out() as usize], data);
        }
    }
}

fn any_data() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        (0usize..5000, any::<u64>()).prop_map(|(n, seed)| noise(n, seed | 1)),
        // Few symbols, so that there are many short matches.
        (0usize..9000, any::<u64>(), 1u8..5).prop_map(|(n, seed, bits)| noise(n, seed | 1)
            .iter()
            .map(|b| b >> (8 - bits))
            .collect()),
        (any::<u8>(), 1usize..9000).prop_map(|(b, n)| vec![b; n]),
        (1usize..6000).prop_map(text),
        (1usize..5000, 2usize..12).prop_map(|(n, times)| noise(n, 99).repeat(times)),
    ];
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_data_any_level(data in any_data(), number in 1..=9) {
        round_trip(&mut Encoder::new(), number, &data);
    }

    /// Earlier input must not influence a stream.
    #[test]
    fn same_stream_from_a_used_encoder(first in any_data(), data in any_data(), number in 1..=9) {
        let mut used = Encoder::new();
        let mut a = vec![0; data.len() + 1000];
        let mut b = a.clone();
        let _ = used.compress(level(number), &first, &mut a);
        let n = used.compress(level(number), &data, &mut a).unwrap();
        let m = Encoder::new().compress(level(number), &data, &mut b).unwrap();
        prop_assert!(a[..n] == b[..m]);
    }
}
