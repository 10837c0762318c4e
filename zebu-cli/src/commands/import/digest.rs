//! Checksums of the source: those that it must have, and those that it has.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::output::Shown;
use sha2::{Digest as _, Sha256, Sha512};

/// A kind of checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digest {
    Sha256,
    Sha512,
}

impl Digest {
    /// Its name, as in the options and in the verdict.
    pub fn name(self) -> &'static str {
        match self {
            Digest::Sha256 => "sha256",
            Digest::Sha512 => "sha512",
        }
    }

    /// The kind with so many digits.
    fn of_length(digits: usize) -> Option<Digest> {
        match digits {
            64 => Some(Digest::Sha256),
            128 => Some(Digest::Sha512),
            _ => None,
        }
    }
}

/// Checksums in lower-case hexadecimal digits, one of a kind at most.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Digests(pub Vec<(Digest, String)>);

impl Digests {
    /// The one of this kind.
    pub fn get(&self, kind: Digest) -> Option<&str> {
        let found = self.0.iter().find(|(of, _)| *of == kind);
        found.map(|(_, hex)| hex.as_str())
    }

    /// Adds one. It must not differ from one of the same kind.
    ///
    /// # Errors
    /// If it does, or is none of this kind.
    pub fn add(&mut self, kind: Digest, hex: &str) -> Result<(), String> {
        let name = kind.name();
        let hex = hex.trim().to_ascii_lowercase();
        if Digest::of_length(hex.len()) != Some(kind) || !hex.bytes().all(|b| b.is_ascii_hexdigit())
        {
            return Err(format!(
                "'{hex}' is no {name} checksum in hexadecimal digits"
            ));
        }
        match self.get(kind) {
            None => self.0.push((kind, hex)),
            Some(other) if other == hex => {}
            Some(other) => return Err(format!("two {name} checksums are given: {other}, {hex}")),
        }
        Ok(())
    }

    /// Adds those that a list has for a file of this name: lines as sha256sum and sha512sum write
    /// them, with `--tag` or without; others have no meaning.
    ///
    /// # Errors
    /// If there is none, or two differ.
    pub fn add_listed(&mut self, list: &[u8], name: &OsStr) -> Result<(), String> {
        let mut is_found = false;
        for line in list.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let escaped = line.strip_prefix(b"\\");
            let line = escaped.unwrap_or(line);
            let Some((hex, listed)) = tagged(line).or_else(|| plain(line)) else {
                continue;
            };
            let listed = match escaped {
                Some(_) => unescaped(listed),
                None => listed.to_vec(),
            };
            let base = listed
                .rsplit(|byte| *byte == b'/')
                .next()
                .unwrap_or(&listed);
            let hex = std::str::from_utf8(hex).unwrap_or_default();
            if let Some(kind) = Digest::of_length(hex.len()).filter(|_| base == name.as_bytes()) {
                self.add(kind, hex)?;
                is_found = true;
            }
        }
        let name = name.shown();
        match is_found {
            true => Ok(()),
            false => Err(format!("the list of checksums has none for '{name}'")),
        }
    }

    /// The kinds that were compared with what the source has. `self` is what it must have.
    ///
    /// # Errors
    /// The first that differs.
    pub fn verify(&self, found: &Digests) -> Result<Vec<Digest>, String> {
        for (kind, expected) in &self.0 {
            let name = kind.name();
            let has = found.get(*kind).unwrap_or_default();
            if has != expected {
                return Err(format!("the {name} checksum is {has}, not {expected}"));
            }
        }
        Ok(self.0.iter().map(|(kind, _)| *kind).collect())
    }
}

/// `HEX  NAME`, `HEX *NAME`
fn plain(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = line.iter().position(|byte| *byte == b' ')?;
    let (hex, rest) = line.split_at(space);
    let name = rest.strip_prefix(b"  ").or(rest.strip_prefix(b" *"))?;
    Some((hex, name))
}

/// `SHA256 (NAME) = HEX`
fn tagged(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = line
        .strip_prefix(b"SHA256 (")
        .or(line.strip_prefix(b"SHA512 ("))?;
    let end = rest.windows(4).rposition(|part| part == b") = ")?;
    Some((&rest[end + 4..], &rest[..end]))
}

/// A name in a line that begins with a backslash, as sha256sum writes those with a backslash or a
/// line break.
fn unescaped(name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut bytes = name.iter();
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'\\' => match bytes.next() {
                Some(b'n') => b'\n',
                Some(b'r') => b'\r',
                other => *other.unwrap_or(byte),
            },
            other => *other,
        });
    }
    plain
}

/// Computes the checksums of bytes that come: SHA-256 always, others if they are wanted.
pub struct Hashing {
    sha256: Sha256,
    sha512: Option<Sha512>,
}

impl Hashing {
    pub fn new(wanted: &Digests) -> Hashing {
        Hashing {
            sha256: Sha256::new(),
            sha512: wanted.get(Digest::Sha512).map(|_| Sha512::new()),
        }
    }

    pub fn add(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        if let Some(sha512) = &mut self.sha512 {
            sha512.update(bytes);
        }
    }

    pub fn finish(self) -> Digests {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut digests = vec![(Digest::Sha256, hex(&self.sha256.finalize()))];
        if let Some(sha512) = self.sha512 {
            digests.push((Digest::Sha512, hex(&sha512.finalize())));
        }
        Digests(digests)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a checksum of another file, and a list that is read as having none.
    use super::*;

    #[test]
    fn lists_are_read() {
        let (a, b) = ("a".repeat(64), "B1".repeat(64));
        let list = format!(
            "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\n{a}  other.qcow2\n\
             {a} *disk.qcow2\r\n{b}  ./images/disk.qcow2\nSHA256 (disk.qcow2) = {a}\n\
             {a}  disk.qcow2.xz\n"
        );
        let mut digests = Digests::default();
        digests
            .add_listed(list.as_bytes(), OsStr::new("disk.qcow2"))
            .unwrap();
        assert_eq!(digests.get(Digest::Sha256), Some(&*a));
        assert_eq!(digests.get(Digest::Sha512), Some(&*b.to_lowercase()));
        let escaped = format!("\\{a}  x/a\\\\b\\nc\n");
        let mut digests = Digests::default();
        digests
            .add_listed(escaped.as_bytes(), OsStr::new("a\\b\nc"))
            .unwrap();
        let error = Digests::default().add_listed(list.as_bytes(), OsStr::new("disk"));
        assert!(error.unwrap_err().contains("none for 'disk'"));
        let twice = format!("{a}  x\n{}  x\n", "c".repeat(64));
        let error = Digests::default().add_listed(twice.as_bytes(), OsStr::new("x"));
        assert!(error.unwrap_err().contains("two sha256 checksums"));
        assert!(Digests::default().add(Digest::Sha256, &b).is_err());
        assert!(
            Digests::default()
                .add(Digest::Sha256, &"g".repeat(64))
                .is_err()
        );
    }

    #[test]
    fn what_differs_is_found() {
        let mut wanted = Digests::default();
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        wanted.add(Digest::Sha256, empty).unwrap();
        assert_eq!(
            wanted.verify(&Hashing::new(&wanted).finish()),
            Ok(vec![Digest::Sha256])
        );
        let mut hashing = Hashing::new(&wanted);
        hashing.add(b"x");
        assert!(wanted.verify(&hashing.finish()).is_err());
    }
}
