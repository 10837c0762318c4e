//! The zlib format (RFC 1950): two bytes before the deflate stream, a checksum behind it.

use crate::Level;

/// Bytes before the stream.
pub(crate) const HEADER: usize = 2;
/// Bytes behind it.
const TRAILER: usize = 4;
/// Method 8, deflate, with a window of 2^(8 + 4) bytes.
const METHOD: u8 = 4 << 4 | 8;

/// Puts the header before a stream of `length` bytes, which begins at [`HEADER`], and the checksum
/// of `src` behind it. Returns the length of all; `None` if it does not fit.
pub(crate) fn wrap(level: Level, src: &[u8], length: usize, dst: &mut [u8]) -> Option<usize> {
    let end = HEADER + length;
    let trailer = dst.get_mut(end..end + TRAILER)?;
    trailer.copy_from_slice(&adler32(src).to_be_bytes());
    // How hard was looked: 0 the fastest, 2 the default, 3 the most.
    let flags = match level.get() {
        1 => 0,
        2..=5 => 1,
        6 => 2,
        _ => 3,
    } << 6;
    let rest = (u16::from(METHOD) << 8 | flags) % 31;
    dst[0] = METHOD;
    dst[1] = flags as u8 + (31 - rest) as u8;
    Some(end + TRAILER)
}

fn adler32(data: &[u8]) -> u32 {
    const MODULUS: u32 = 65521;
    /// After so many bytes the second sum has to be reduced before it overflows.
    const RUN: usize = 5552;
    let (mut a, mut b) = (1u32, 0u32);
    for run in data.chunks(RUN) {
        for byte in run {
            a += u32::from(*byte);
            b += a;
        }
        a %= MODULUS;
        b %= MODULUS;
    }
    b << 16 | a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_the_standard() {
        assert_eq!(adler32(b""), 1);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
        // The greatest sums: no overflow.
        assert_eq!(adler32(&[0xff; 100_000]), adler32_slowly(&[0xff; 100_000]));
    }

    fn adler32_slowly(data: &[u8]) -> u32 {
        let step = |(a, b): (u64, u64), byte: &u8| {
            let a = (a + u64::from(*byte)) % 65521;
            (a, (b + a) % 65521)
        };
        let (a, b) = data.iter().fold((1, 0), step);
        (b << 16 | a) as u32
    }
}
