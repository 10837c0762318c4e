//! What makes an image different from all others: a random UUID, and the time.
#![allow(unsafe_code)]

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::Result;

/// A random UUID (RFC 9562, version 4), in the order of its text.
///
/// # Errors
/// Those of getrandom(2).
pub fn random_uuid() -> Result<[u8; 16]> {
    let mut bytes = [0u8; 16];
    loop {
        // SAFETY: the pointer is valid for 16 bytes.
        let read = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(read) {
            Ok(read) if read == bytes.len() => break,
            Ok(_) => {}
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e.into()),
            },
        }
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(bytes)
}

/// Seconds since a moment, given in seconds since 1970; 0 before it.
pub fn seconds_since(epoch: u64) -> u64 {
    let epoch = UNIX_EPOCH + Duration::from_secs(epoch);
    let passed = SystemTime::now().duration_since(epoch);
    passed.map_or(0, |passed| passed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_differ() {
        let (a, b) = (random_uuid().unwrap(), random_uuid().unwrap());
        assert_ne!(a, b);
        assert_eq!((a[6] >> 4, a[8] >> 6), (4, 2));
    }
}
