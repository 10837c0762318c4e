//! Finding zeroes in data.

pub(crate) use crate::storage::is_zero;

/// Splits `bytes` into runs that are zero and runs that are to be written.
///
/// Zeroes are looked for in blocks of `block` bytes, counted from the start;
/// a run of them counts as zero if it has at least `min_run` bytes (shorter
/// ones are written with their neighbours) or reaches an end of `bytes`.
/// Yields `(start, length, is_zero)` in order, without gaps.
pub fn runs(bytes: &[u8], block: usize, min_run: usize) -> Vec<(usize, usize, bool)> {
    let mut runs: Vec<(usize, usize, bool)> = Vec::new();
    let mut push = |start: usize, length: usize, zero: bool| match runs.last_mut() {
        Some(last) if last.2 == zero => last.1 += length,
        _ => runs.push((start, length, zero)),
    };
    let mut at = 0;
    while at < bytes.len() {
        let zero_end = skip(bytes, at, block, true);
        if zero_end > at {
            let at_an_end = at == 0 || zero_end == bytes.len();
            push(at, zero_end - at, at_an_end || zero_end - at >= min_run);
            at = zero_end;
        }
        let data_end = skip(bytes, at, block, false);
        if data_end > at {
            push(at, data_end - at, false);
            at = data_end;
        }
    }
    runs
}

/// The end of the blocks from `at` on that are zero, or that are not.
fn skip(bytes: &[u8], mut at: usize, block: usize, zero: bool) -> usize {
    while at < bytes.len() {
        let end = (at + block).min(bytes.len());
        if is_zero(&bytes[at..end]) != zero {
            break;
        }
        at = end;
    }
    at
}

#[cfg(test)]
mod tests {
    //! Guards against data that are taken for zeroes: a single byte that is not zero must be found, and
    //! the runs must cover everything in order.
    use super::*;

    #[test]
    fn one_byte_anywhere_is_found() {
        for length in [0, 1, 7, 127, 128, 129, 512, 1000] {
            let mut bytes = vec![0u8; length];
            assert!(is_zero(&bytes));
            for i in 0..length {
                bytes[i] = 1;
                assert!(!is_zero(&bytes), "byte {i} of {length}");
                bytes[i] = 0;
            }
        }
    }

    #[test]
    fn runs_cover_and_short_zeroes_in_the_middle_are_data() {
        let mut bytes = vec![0u8; 64];
        bytes[17] = 1; // block 4
        bytes[24] = 1; // block 6
        bytes[50] = 1; // block 12
        assert_eq!(
            runs(&bytes, 4, 8),
            [
                (0, 16, true),
                (16, 12, false),
                (28, 20, true),
                (48, 4, false),
                (52, 12, true)
            ]
        );
        assert_eq!(runs(&[0; 10], 4, 8), [(0, 10, true)]);
        assert_eq!(runs(&[1; 10], 4, 8), [(0, 10, false)]);
    }
}
