//! The name of a differencing image's parent.
//!
//! The header has the parent's name, and up to eight locators: its path in the forms of several
//! systems. Names are those of Windows for the most part, and become names of this system here: a
//! path with a drive or a server is reduced to its last part, since the parent was moved anyway.

use crate::Result;
use crate::drivers::open::{from_windows, relative};
use crate::storage::{self, Queue, Storage};
use crate::table::array;

/// The locators in the header: their offset, their number, and the bytes of each.
const LOCATORS: (usize, usize, usize) = (576, 8, 24);
/// The parent's name in the header, in UTF-16.
const NAME: std::ops::Range<usize> = 64..576;
/// Bytes of a path at most.
const MAX_PATH: u32 = 64 << 10;

/// Reads the path of a locator.
type ReadPath = fn(&[u8]) -> String;

/// Kinds of locators that are used, the best first.
const KINDS: [(&[u8; 4], ReadPath); 3] = [
    // Relative to this image.
    (b"W2ru", |bytes| {
        from_windows(&utf16(bytes, u16::from_le_bytes))
    }),
    // A URL.
    (b"MacX", from_url),
    // Absolute.
    (b"W2ku", |bytes| {
        from_windows(&utf16(bytes, u16::from_le_bytes))
    }),
];

/// The name of the file, relative to the image; empty if there is none. Never opens it. `header` is
/// the second header.
pub(super) async fn name(queue: &Queue, file: &dyn Storage, header: &[u8]) -> Result<Vec<u8>> {
    for (kind, decode) in KINDS {
        if let Some(bytes) = locator(queue, file, header, kind).await? {
            let name = decode(&bytes);
            if !name.is_empty() {
                return Ok(name.into_bytes());
            }
        }
    }
    let name = header.get(NAME).unwrap_or_default();
    Ok(from_windows(&utf16(name, u16::from_be_bytes)).into_bytes())
}

/// The bytes of the first locator of this kind that the file has.
async fn locator(
    queue: &Queue,
    file: &dyn Storage,
    header: &[u8],
    kind: &[u8; 4],
) -> Result<Option<Vec<u8>>> {
    let file_len = file.len()?;
    let (start, count, size) = LOCATORS;
    for at in (start..).step_by(size).take(count) {
        let length = u32::from_be_bytes(array(header, at + 8));
        let offset = u64::from_be_bytes(array(header, at + 16));
        let end = offset.checked_add(length.into());
        let is_there = length <= MAX_PATH && end.is_some_and(|end| end <= file_len);
        if array(header, at) == *kind && is_there {
            let bytes = storage::read_vec(file, queue, offset, length as usize).await?;
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// The text up to its first zero.
fn utf16(bytes: &[u8], number: fn([u8; 2]) -> u16) -> String {
    let (units, _) = bytes.as_chunks();
    let units = units.iter().map(|unit| number(*unit));
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    String::from_utf16_lossy(&units)
}

/// The path of a `file:` URL.
fn from_url(bytes: &[u8]) -> String {
    let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
    let path = text.strip_prefix(b"file://").unwrap_or(text);
    let path = path.strip_prefix(b"localhost").unwrap_or(path);
    let mut name = Vec::new();
    let mut rest = path;
    while let [first, after @ ..] = rest {
        rest = after;
        let escaped = after.get(..2).filter(|_| *first == b'%');
        let escaped = escaped.and_then(|hex| std::str::from_utf8(hex).ok());
        match escaped.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                name.push(byte);
                rest = &after[2..];
            }
            None => name.push(*first),
        }
    }
    relative(&String::from_utf8_lossy(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_those_of_files() {
        for (windows, name) in [
            (r".\base.vhd", "base.vhd"),
            (r"..\a\base.vhd", "../a/base.vhd"),
            (r"C:\disks\base.vhd", "base.vhd"),
            (r"C:base.vhd", "base.vhd"),
            (r"\\server\share\base.vhd", "base.vhd"),
            ("nbd:unix:x", "./nbd:unix:x"),
            (r"json:{}", "./json:{}"),
            ("", ""),
        ] {
            assert_eq!(from_windows(windows), name, "{windows}");
        }
        for (url, name) in [
            ("file://./base.vhd", "base.vhd"),
            ("file:///a%20b/base.vhd\0x", "/a b/base.vhd"),
            ("file://localhost/base%.vhd", "/base%.vhd"),
            ("nbd://host/x", "./nbd://host/x"),
        ] {
            assert_eq!(from_url(url.as_bytes()), name, "{url}");
        }
        assert_eq!(utf16(b"a\0b\0\0\0c\0", u16::from_le_bytes), "ab");
    }
}
