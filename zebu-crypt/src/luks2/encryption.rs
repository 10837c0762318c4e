//! The name of a cipher, its mode and its initialisation vectors, such as `aes-xts-plain64`.

use std::fmt;

use zebu_core::parts::drivers::structures::{
    LuksAlgorithm, LuksCipher, LuksHash, LuksIvGenerator, LuksMode,
};

use super::error::{Luks2Error, shown};
use crate::{CryptError, Sectors};

const ALGORITHMS: [LuksAlgorithm; 4] = [
    LuksAlgorithm::Aes,
    LuksAlgorithm::Serpent,
    LuksAlgorithm::Twofish,
    LuksAlgorithm::Cast5,
];
const MODES: [LuksMode; 4] = [LuksMode::Xts, LuksMode::Cbc, LuksMode::Ctr, LuksMode::Ecb];
const HASHES: [LuksHash; 6] = [
    LuksHash::Sha1,
    LuksHash::Sha224,
    LuksHash::Sha256,
    LuksHash::Sha384,
    LuksHash::Sha512,
    LuksHash::Ripemd160,
];

/// How sectors are encrypted, without the key. Shown as LUKS2 names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// The family of the cipher.
    pub algorithm: LuksAlgorithm,
    /// Its mode.
    pub mode: LuksMode,
    /// Its initialisation vectors.
    pub iv: LuksIvGenerator,
}

impl fmt::Display for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (algorithm, mode) = (self.algorithm.name(), self.mode.name());
        write!(f, "{algorithm}-{mode}-{}", self.iv.name())?;
        match self.iv.hash() {
            Some(hash) => write!(f, ":{}", hash.name()),
            None => Ok(()),
        }
    }
}

impl Encryption {
    /// The encryption with this name.
    ///
    /// # Errors
    /// If it is not supported.
    pub fn named(name: &str) -> Result<Self, Luks2Error> {
        find(name).ok_or_else(|| Luks2Error::Unsupported {
            what: "encryption",
            name: shown(name),
        })
    }

    /// The cipher with a key, for sectors of so many bytes; `start` is added to the numbers of which the
    /// initialisation vectors are made, in units of 512 bytes.
    pub(super) fn sectors(
        self,
        key: &[u8],
        bytes: usize,
        start: u64,
    ) -> Result<Sectors, CryptError> {
        let key_bytes = match self.mode {
            LuksMode::Xts => key.len() / 2,
            LuksMode::Ecb | LuksMode::Cbc | LuksMode::Ctr => key.len(),
        };
        let cipher = LuksCipher {
            algorithm: self.algorithm,
            key_bytes: key_bytes as u32,
        };
        Ok(Sectors::new(cipher, self.mode, self.iv, key, bytes)?.starting_at(start))
    }

    /// Whether there is such a cipher with a key of so many bytes.
    pub(super) fn check(self, key_bytes: usize) -> Result<(), CryptError> {
        self.sectors(&vec![0; key_bytes], 512, 0).map(|_| ())
    }
}

fn find(name: &str) -> Option<Encryption> {
    let (algorithm, rest) = name.split_once('-')?;
    let (mode, iv) = rest.split_once('-')?;
    Some(Encryption {
        algorithm: ALGORITHMS.into_iter().find(|a| a.name() == algorithm)?,
        mode: MODES.into_iter().find(|m| m.name() == mode)?,
        iv: match iv.split_once(':') {
            None if iv == "plain" => LuksIvGenerator::Plain,
            None if iv == "plain64" => LuksIvGenerator::Plain64,
            Some(("essiv", hash)) => LuksIvGenerator::Essiv(find_hash(hash)?),
            _ => return None,
        },
    })
}

fn find_hash(name: &str) -> Option<LuksHash> {
    HASHES.into_iter().find(|hash| hash.name() == name)
}

/// The hash with this name.
pub(super) fn hash_named(name: &str) -> Result<LuksHash, Luks2Error> {
    find_hash(name).ok_or_else(|| Luks2Error::Unsupported {
        what: "hash",
        name: shown(name),
    })
}
