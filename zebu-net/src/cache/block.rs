//! The file of a block: a header with a checksum, and the data.
//!
//! | bytes | |
//! |---|---|
//! | 0–7 | `zebublk1` |
//! | 8–39 | the key |
//! | 40–47 | the number of the block |
//! | 48–55 | bytes of data |
//! | 56–59 | zero |
//! | 60–63 | CRC-32 of the bytes before it and of the data |
//!
//! Numbers are little-endian.

use libdeflater::Crc;
use sha2::{Digest, Sha256};

/// Bytes before the data.
pub(super) const HEADER: usize = 64;
const MAGIC: &[u8; 8] = b"zebublk1";

/// What a block belongs to: an object in a state that does not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    hash: [u8; 32],
    /// The folder of its blocks.
    folder: String,
}

impl Key {
    /// That of an object which these words name. A hash, since names may have secrets in them; one
    /// for which no two names with the same hash can be found.
    pub fn new(version: &[&str]) -> Key {
        let mut hash = Sha256::new();
        hash.update(MAGIC);
        hash.update(super::BLOCK.to_le_bytes());
        for word in version {
            hash.update((word.len() as u64).to_le_bytes());
            hash.update(word.as_bytes());
        }
        let hash: [u8; 32] = hash.finalize().into();
        let folder = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        Key { hash, folder }
    }

    /// The name of the folder of its blocks.
    pub fn folder(&self) -> &str {
        &self.folder
    }

    /// The name of the file of a block, from the cache's folder on.
    pub fn file(&self, nth: u64) -> String {
        format!("{}/{}", self.folder, file_name(nth))
    }
}

/// The name of a block's file.
pub(super) fn file_name(nth: u64) -> String {
    format!("{nth:016x}")
}

/// The number of the block in the file of this name, if it is one.
pub(super) fn number(name: &str) -> Option<u64> {
    let nth = u64::from_str_radix(name, 16).ok()?;
    (file_name(nth) == name).then_some(nth)
}

/// Whether a folder may be that of a key.
pub(super) fn is_folder(name: &str) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.len() == 64 && name.bytes().all(is_digit)
}

/// The header of a block.
pub(super) fn header(key: &Key, nth: u64, data: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..40].copy_from_slice(&key.hash);
    header[40..48].copy_from_slice(&nth.to_le_bytes());
    header[48..56].copy_from_slice(&(data.len() as u64).to_le_bytes());
    let mut crc = Crc::new();
    crc.update(&header[..60]);
    crc.update(data);
    header[60..].copy_from_slice(&crc.sum().to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    //! Guards against blocks that are taken for others.
    use super::*;

    #[test]
    fn words_are_told_apart() {
        let lists: [&[&str]; 6] = [
            &[],
            &[""],
            &["ab", "c"],
            &["a", "bc"],
            &["abc"],
            &["abc", ""],
        ];
        for (place, list) in lists.iter().enumerate() {
            for other in &lists[..place] {
                assert_ne!(Key::new(list), Key::new(other), "{list:?} {other:?}");
            }
            assert!(is_folder(Key::new(list).folder()));
        }
    }

    #[test]
    fn names_of_files_are_numbers() {
        for nth in [0, 1, 0xabc, u64::MAX] {
            assert_eq!(number(&file_name(nth)), Some(nth));
        }
        for name in [
            "",
            "0",
            "+000000000000001",
            "000000000000000A",
            "00000000000000000",
        ] {
            assert_eq!(number(name), None, "{name}");
        }
        assert!(!is_folder("abc") && !is_folder(&"A".repeat(64)));
    }

    #[test]
    fn every_part_is_in_the_checksum() {
        let key = Key::new(&["a"]);
        let whole = header(&key, 1, b"data");
        assert_eq!(whole, header(&key, 1, b"data"));
        for other in [
            header(&Key::new(&["b"]), 1, b"data"),
            header(&key, 2, b"data"),
            header(&key, 1, b"Data"),
            header(&key, 1, b"data\0"),
        ] {
            assert_ne!(whole[60..], other[60..]);
        }
    }
}
