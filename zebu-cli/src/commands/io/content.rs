//! What a command writes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;

use super::number::MAX_REQUEST;
use crate::output::Shown;

/// What a command writes.
#[derive(Debug)]
pub enum Content {
    /// One byte, everywhere.
    Byte(u8),
    /// The same bytes, again and again.
    Bytes(Vec<u8>),
}

impl Content {
    /// The default pattern of writes.
    pub const DEFAULT: u8 = 0xcd;

    /// The content of a file, up to the largest request. The error is a message.
    pub fn of_file(name: &OsStr) -> Result<Content, String> {
        let mut bytes = Vec::new();
        let read = File::open(name).and_then(|file| file.take(MAX_REQUEST).read_to_end(&mut bytes));
        match read {
            Ok(0) => Err(format!("{}: file is empty", name.shown())),
            Ok(_) => Ok(Content::Bytes(bytes)),
            Err(error) => Err(format!("{}: {}", name.shown(), zebu::strerror(&error))),
        }
    }

    /// Fills memory with it.
    pub fn fill(&self, memory: &mut [u8]) {
        match self {
            Content::Byte(byte) => memory.fill(*byte),
            Content::Bytes(bytes) => {
                for part in memory.chunks_mut(bytes.len()) {
                    part.copy_from_slice(&bytes[..part.len()]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a pattern that does not repeat where it ends.
    use super::*;

    #[test]
    fn bytes_repeat() {
        let mut memory = [0; 7];
        Content::Bytes(b"abc".to_vec()).fill(&mut memory);
        assert_eq!(&memory, b"abcabca");
        Content::Bytes(b"0123456789".to_vec()).fill(&mut memory);
        assert_eq!(&memory, b"0123456");
        Content::Byte(9).fill(&mut memory);
        assert_eq!(memory, [9; 7]);
        Content::Bytes(b"abc".to_vec()).fill(&mut []);
    }
}
