//! Checksums of files.

use std::fmt;
use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;
use std::path::Path;

use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Sha256, Sha384, Sha512};

use crate::{Error, Result, refused};

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// How a checksum is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// SHA-1 (FIPS 180-4).
    Sha1,
    /// SHA-256 (FIPS 180-4).
    Sha256,
    /// SHA-384 (FIPS 180-4).
    Sha384,
    /// SHA-512 (FIPS 180-4).
    Sha512,
}

impl Algorithm {
    const ALL: [Algorithm; 4] = [
        Algorithm::Sha1,
        Algorithm::Sha256,
        Algorithm::Sha384,
        Algorithm::Sha512,
    ];

    /// The name in a manifest.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Sha1 => "SHA1",
            Algorithm::Sha256 => "SHA256",
            Algorithm::Sha384 => "SHA384",
            Algorithm::Sha512 => "SHA512",
        }
    }

    /// The one with this name.
    pub(crate) fn by_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
    }

    fn start(self) -> Box<dyn DynDigest> {
        match self {
            Algorithm::Sha1 => Box::new(Sha1::default()),
            Algorithm::Sha256 => Box::new(Sha256::default()),
            Algorithm::Sha384 => Box::new(Sha384::default()),
            Algorithm::Sha512 => Box::new(Sha512::default()),
        }
    }
}

/// The checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// How it is computed.
    pub algorithm: Algorithm,
    pub(crate) bytes: Box<[u8]>,
}

impl Checksum {
    /// The checksum in hexadecimal digits.
    pub(crate) fn parse(algorithm: Algorithm, digits: &str) -> Option<Self> {
        let digits = digits.as_bytes();
        if digits.len() != 2 * algorithm.start().output_size() {
            return None;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let pairs = digits.chunks(2);
        let bytes = pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?));
        Some(Checksum {
            algorithm,
            bytes: bytes.collect::<Option<_>>()?,
        })
    }

    /// The checksum of these bytes.
    pub(crate) fn of_bytes(algorithm: Algorithm, bytes: &[u8]) -> Self {
        let mut digest = algorithm.start();
        digest.update(bytes);
        Checksum {
            algorithm,
            bytes: digest.finalize(),
        }
    }

    /// The checksum of a range of a file, which is called `path` in errors. `progress` is given the
    /// bytes that are done.
    pub(crate) fn of_file(
        algorithm: Algorithm,
        file: &File,
        path: &Path,
        range: Range<u64>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut digest = algorithm.start();
        let mut buffer = vec![0; PIECE];
        let mut at = range.start;
        while at < range.end {
            let count = (range.end - at).min(PIECE as u64) as usize;
            let piece = &mut buffer[..count];
            file.read_exact_at(piece, at).map_err(Error::io(path))?;
            digest.update(piece);
            at += count as u64;
            if progress(at - range.start).is_break() {
                return Err(Error::Stopped);
            }
        }
        Ok(Checksum {
            algorithm,
            bytes: digest.finalize(),
        })
    }

    /// Refuses the file `name` if its checksum is not this one.
    pub(crate) fn expect(&self, found: &Checksum, name: &str) -> Result<()> {
        match self == found {
            true => Ok(()),
            false => refused(format!(
                "'{name}' is damaged: its {} is {found}, not {self} as in the manifest",
                self.algorithm.name()
            )),
        }
    }
}

/// In hexadecimal digits.
impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
