//! How often the hash is iterated that makes a key of a passphrase.

use std::time::{Duration, Instant};

use zebu_core::parts::drivers::structures::LuksHash;

use crate::{CryptError, hash};

/// The fewest iterations of any key.
const FEWEST: u64 = 1000;
/// So long is counted at least.
const COUNTED: Duration = Duration::from_millis(50);

/// The iterations that take about `time` on this machine, for a key of so many bytes.
///
/// # Errors
/// If the hash is not supported.
pub fn iterations(hash: LuksHash, key_bytes: usize, time: Duration) -> Result<u32, CryptError> {
    let mut count: u32 = 4096;
    loop {
        let start = Instant::now();
        hash::pbkdf2(hash, b"passphrase", &[0x5a; 32], count, key_bytes)?;
        let taken = start.elapsed();
        if taken >= COUNTED.min(time) || count > u32::MAX / 2 {
            let wanted =
                u64::from(count) * time.as_micros() as u64 / taken.as_micros().max(1) as u64;
            return Ok(wanted.clamp(FEWEST, u32::MAX.into()) as u32);
        }
        count *= 2;
    }
}

#[cfg(test)]
mod tests {
    //! Guards against keys that are found too fast.
    use super::*;

    #[test]
    fn a_longer_time_is_more_iterations() {
        let of = |ms| iterations(LuksHash::Sha1, 20, Duration::from_millis(ms)).unwrap();
        assert_eq!(of(0), 1000);
        assert!(of(20_000) > 100_000);
    }
}
