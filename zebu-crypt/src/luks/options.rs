//! Options of new LUKS1 containers, as QEMU names them.

use std::time::Duration;

use zebu_core::Result;
use zebu_core::parts::drivers::structures::{
    LuksAlgorithm, LuksCipher, LuksHash, LuksIvGenerator, LuksMode,
};
use zebu_core::parts::drivers::{CreateOption, CreateValues, OptionKind, refused};

use super::failed;
use crate::sectors::Sectors;

/// In the order in which they are shown.
pub(super) static CREATE_OPTIONS: [CreateOption; 11] = [
    text("cipher-alg", "Name of encryption cipher algorithm"),
    text("cipher-mode", "Name of encryption cipher mode"),
    text("hash-alg", "Name of encryption hash algorithm"),
    CreateOption::new(
        "iter-time",
        OptionKind::Number,
        "Time to spend in PBKDF in milliseconds",
    ),
    text("ivgen-alg", "Name of IV generator algorithm"),
    text("ivgen-hash-alg", "Name of IV generator hash algorithm"),
    text(
        "key-secret",
        "ID of the secret that provides the keyslot passphrase",
    ),
    CreateOption::SIZE,
    CreateOption::NOCOW,
    CreateOption::FILE_PREALLOCATION,
    CreateOption::EXTENT_SIZE_HINT,
];

const fn text(name: &'static str, help: &'static str) -> CreateOption {
    CreateOption::new(name, OptionKind::Text, help)
}

/// In bytes.
pub(super) const SECTOR: u64 = 512;
/// Milliseconds that a passphrase takes if nothing else is asked for, as in QEMU.
const TIME: u64 = 2000;

/// How a new container is encrypted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub cipher: LuksCipher,
    pub mode: LuksMode,
    pub iv: LuksIvGenerator,
    pub hash: LuksHash,
    pub time: Duration,
}

impl Kind {
    pub fn of(options: Named<'_>) -> Result<Kind> {
        let cipher = match options.word("cipher-alg") {
            None => cipher("aes-256"),
            Some(name) => cipher(name),
        };
        let cipher = cipher.ok_or_else(|| options.unknown("cipher-alg"))?;
        let mode = options
            .find("cipher-mode", LuksMode::find)?
            .unwrap_or(LuksMode::Xts);
        let hash = options
            .find("hash-alg", LuksHash::find)?
            .unwrap_or(LuksHash::Sha256);
        let iv_hash = options.find("ivgen-hash-alg", LuksHash::find)?;
        let iv = match options.word("ivgen-alg") {
            None | Some("plain64") => LuksIvGenerator::Plain64,
            Some("plain") => LuksIvGenerator::Plain,
            Some("essiv") => LuksIvGenerator::Essiv(iv_hash.unwrap_or(LuksHash::Sha256)),
            Some(_) => return Err(options.unknown("ivgen-alg")),
        };
        let time = match options.values.number(&options.name("iter-time")) {
            None => TIME,
            Some(time) => time,
        };
        let kind = Kind {
            cipher,
            mode,
            iv,
            hash,
            time: Duration::from_millis(time),
        };
        // Whether there are these ciphers and hashes.
        let key = vec![0; kind.key_bytes() as usize];
        let sectors = Sectors::new(cipher, mode, iv, &key, SECTOR as usize);
        sectors.map_err(failed)?;
        crate::hash::digest(hash, &[]).map_err(failed)?;
        Ok(kind)
    }

    pub fn key_bytes(&self) -> u32 {
        match self.mode {
            LuksMode::Xts => 2 * self.cipher.key_bytes,
            LuksMode::Ecb | LuksMode::Cbc | LuksMode::Ctr => self.cipher.key_bytes,
        }
    }
}

/// The cipher of a name like `aes-256`.
fn cipher(name: &str) -> Option<LuksCipher> {
    let (algorithm, bits) = name.rsplit_once('-')?;
    let algorithm = LuksAlgorithm::find(algorithm.as_bytes())?;
    let bits: u32 = bits.parse().ok()?;
    let key_bytes = bits / 8;
    let cipher = LuksCipher {
        algorithm,
        key_bytes,
    };
    (algorithm.takes_key(key_bytes) && cipher.to_string() == name).then_some(cipher)
}

/// The values of options whose names begin alike.
#[derive(Clone, Copy)]
pub(super) struct Named<'a> {
    pub values: &'a CreateValues,
    pub prefix: &'static str,
}

impl<'a> Named<'a> {
    pub fn name(self, option: &str) -> String {
        format!("{}{option}", self.prefix)
    }

    fn word(self, option: &str) -> Option<&'a str> {
        self.values.word(&self.name(option))
    }

    /// The value of an option by its name.
    fn find<T>(self, option: &str, find: fn(&[u8]) -> Option<T>) -> Result<Option<T>> {
        let Some(name) = self.word(option) else {
            return Ok(None);
        };
        match find(name.as_bytes()) {
            None => Err(self.unknown(option)),
            found => Ok(found),
        }
    }

    /// The error of a name that an option does not have.
    fn unknown(self, option: &str) -> zebu_core::Error {
        let name = self.word(option).unwrap_or_default();
        refused(format!(
            "Parameter '{option}' does not accept value '{name}'"
        ))
    }
}
