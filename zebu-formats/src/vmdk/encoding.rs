//! The names of files in a descriptor: their encoding, and the paths of Windows.

use crate::drivers::open::from_windows;
use crate::printable;
use crate::spelling::encoding;
use crate::{Error, Result};

/// How names are written.
#[derive(Clone, Debug)]
pub enum Encoding {
    /// In UTF-8, or as bytes that are names here.
    Bytes,
    /// One byte for each character.
    Table(encoding::Table),
    /// This one, which is not known.
    Unknown(String),
}

impl Encoding {
    /// The one that `encoding=` names.
    pub fn named(name: &[u8]) -> Encoding {
        let plain = encoding::plain(name);
        match (&*plain, encoding::table(&plain)) {
            (b"" | b"utf8" | b"ascii" | b"usascii", _) => Encoding::Bytes,
            (_, Some(table)) => Encoding::Table(table),
            _ => Encoding::Unknown(printable(name)),
        }
    }

    /// A name in UTF-8. None: its encoding is not known.
    fn decode(&self, name: &[u8]) -> Option<Vec<u8>> {
        if name.is_ascii() {
            return Some(name.to_vec());
        }
        match self {
            Encoding::Bytes => Some(name.to_vec()),
            Encoding::Table(table) => {
                let text: String = name.iter().map(|byte| table(*byte)).collect();
                Some(text.into_bytes())
            }
            Encoding::Unknown(_) => None,
        }
    }

    /// The error for a name that cannot be decoded.
    pub fn unknown(&self) -> Error {
        let name = match self {
            Encoding::Unknown(name) => name,
            _ => "",
        };
        Error::Refused(format!(
            "The descriptor has names in the encoding '{name}', which is not supported: write the \
             descriptor in UTF-8"
        ))
    }

    /// The names that an extent's file may have, the first one that there is: as QEMU takes it, byte for
    /// byte, only after what it means. Empty: its encoding is not known, and the bytes are no name here.
    pub fn extents(&self, name: &[u8]) -> Vec<Vec<u8>> {
        let decoded = self.decode(name);
        let windows = decoded.as_deref().and_then(windows);
        let mut names: Vec<_> = decoded.into_iter().collect();
        names.push(name.to_vec());
        names.extend(windows);
        names.dedup();
        names
    }

    /// The name of a parent: a path of Windows becomes one of this system.
    pub fn parent(&self, name: &[u8]) -> Result<Vec<u8>> {
        let decoded = match self.decode(name) {
            // Bytes in UTF-8 are a name here, whatever was said of them.
            None if str::from_utf8(name).is_ok() => name.to_vec(),
            None => return Err(self.unknown()),
            Some(decoded) => decoded,
        };
        Ok(windows(&decoded).unwrap_or(decoded))
    }
}

/// The name here of what is a path of Windows.
fn windows(name: &[u8]) -> Option<Vec<u8>> {
    let text = str::from_utf8(name).ok()?;
    let has_drive = matches!(name, [drive, b':', ..] if drive.is_ascii_alphabetic());
    (has_drive || text.contains('\\')).then(|| from_windows(text).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded() {
        let parent = |encoding: &str, name: &[u8]| {
            let name = Encoding::named(encoding.as_bytes()).parent(name).ok()?;
            Some(String::from_utf8_lossy(&name).into_owned())
        };
        for (encoding, name, expected) in [
            ("", &b"a\xc3\xa4.vmdk"[..], Some("a\u{e4}.vmdk")),
            ("UTF-8", b"a\xc3\xa4.vmdk", Some("a\u{e4}.vmdk")),
            (
                "windows-1252",
                b"a\xe4\x80.vmdk",
                Some("a\u{e4}\u{20ac}.vmdk"),
            ),
            ("ISO-8859-1", b"\xdf", Some("\u{df}")),
            ("iso_8859-15", b"\xa4", Some("\u{20ac}")),
            ("GBK", b"plain.vmdk", Some("plain.vmdk")),
            ("GBK", b"C:\\vm\\plain.vmdk", Some("plain.vmdk")),
            ("GBK", b"\xb4\xc5.vmdk", None),
            ("UTF-8", b"sub\\base.vmdk", Some("sub/base.vmdk")),
            ("UTF-8", b".\\base.vmdk", Some("base.vmdk")),
            ("UTF-8", b"\\\\server\\share\\base.vmdk", Some("base.vmdk")),
            ("UTF-8", b"c:base.vmdk", Some("base.vmdk")),
            ("UTF-8", b"nbd:unix:x", Some("nbd:unix:x")),
        ] {
            assert_eq!(
                parent(encoding, name).as_deref(),
                expected,
                "{encoding} {name:?}"
            );
        }
        let names = Encoding::named(b"windows-1252").extents(b"a\xe4\\b");
        let expected = [&b"a\xc3\xa4\\b"[..], b"a\xe4\\b", b"a\xc3\xa4/b"];
        assert_eq!(names, expected);
        assert_eq!(Encoding::named(b"UTF-8").extents(b"a"), [b"a"]);
    }
}
