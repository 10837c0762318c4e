//! New containers.

use serde_json::{Value, json};
use zebu_core::parts::drivers::structures::{LuksAlgorithm, LuksHash, LuksIvGenerator, LuksMode};
use zeroize::Zeroizing;

use super::Luks2;
use super::binary::{BINARY_BYTES, Binary, SALT_BYTES, Which};
use super::change::{Change, NewSlot, Random, SLOT_SALT_BYTES};
use super::encryption::Encryption;
use super::error::Luks2Error;
use super::json::base64;
use super::kdf::{Argon2Variant, Kdf};
use super::search::Copy;
use super::slot::Slot;
use crate::MasterKey;

const UUID_BYTES: usize = 16;

/// What a new container is like. The default has the sizes of cryptsetup's: 16 MiB before the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewLuks2 {
    /// Bytes of each copy of the header: a power of two from 16 KiB to 4 MiB.
    pub header_bytes: u64,
    /// Bytes for key material: a multiple of 4096, at most 128 MiB.
    pub slot_area_bytes: u64,
    /// Where the payload starts; None: behind the key material. A payload in another file than the header may start
    /// anywhere.
    pub payload_offset: Option<u64>,
    /// The cipher of the payload and of the key material.
    pub encryption: Encryption,
    /// Bytes of a sector of the payload: a power of two from 512 to 4096.
    pub sector_bytes: u32,
    /// How the key of the first slot is made of its passphrase.
    pub kdf: Kdf,
    /// The hash of the digest, and of the first slot's stripes.
    pub hash: LuksHash,
    /// Iterations of the digest by which the key is recognised. A key has too many bits to be guessed, so there are
    /// few.
    pub digest_iterations: u32,
    /// The label, up to 47 bytes.
    pub label: String,
    /// The subsystem, up to 47 bytes.
    pub subsystem: String,
}

impl Default for NewLuks2 {
    fn default() -> Self {
        NewLuks2 {
            header_bytes: 16 << 10,
            slot_area_bytes: (16 << 20) - (32 << 10),
            payload_offset: None,
            encryption: Encryption {
                algorithm: LuksAlgorithm::Aes,
                mode: LuksMode::Xts,
                iv: LuksIvGenerator::Plain64,
            },
            sector_bytes: 512,
            kdf: Kdf::Argon2 {
                variant: Argon2Variant::Id,
                time: 4,
                memory: 1 << 20,
                cpus: 4,
            },
            hash: LuksHash::Sha256,
            digest_iterations: 1000,
            label: String::new(),
            subsystem: String::new(),
        }
    }
}

impl NewLuks2 {
    /// How many random bytes a container takes, whose key has so many bytes.
    #[must_use]
    pub fn random_bytes(&self, key_bytes: usize) -> usize {
        Slot::area_bytes(key_bytes) as usize + 2 * SLOT_SALT_BYTES + UUID_BYTES + 2 * SALT_BYTES
    }

    /// A container whose payload has this key, and its first passphrase. `random` are
    /// [`random_bytes`](Self::random_bytes) random bytes. What the file has had in place of the header and of the
    /// key material need not be erased.
    ///
    /// # Errors
    /// If the encryption does not take the key, or a number or text is not possible.
    pub fn create(
        &self,
        key: &MasterKey,
        passphrase: &[u8],
        random: Zeroizing<Vec<u8>>,
    ) -> Result<Change, Luks2Error> {
        let mut random = Random::new(random);
        self.encryption.check(key.bytes().len())?;
        let uuid = uuid(&random.take(UUID_BYTES)?);
        let salt = random.take(SLOT_SALT_BYTES)?;
        let (label, subsystem) = (self.label.clone(), self.subsystem.clone());
        let binary = Binary::new(
            self.header_bytes,
            uuid.into_bytes(),
            label.into_bytes(),
            subsystem.into_bytes(),
        );
        let binary = binary.ok_or(Luks2Error::Full)?;
        let slots_end = (2 * self.header_bytes).checked_add(self.slot_area_bytes);
        let slots_end = slots_end.ok_or(Luks2Error::Full)?;
        let digest = Kdf::Pbkdf2 {
            hash: self.hash,
            iterations: self.digest_iterations,
        };
        digest.check()?;
        let length = self.hash.digest_bytes() as usize;
        let digest = digest.key(key.bytes(), &salt, length)?;
        let copy = Copy {
            // So the first copy is written last: there is no container before.
            which: Which::First,
            binary,
            metadata: self.metadata(slots_end, &salt, &digest).to_string().into(),
        };
        let empty = Luks2::decode(copy, false, slots_end)?;
        let slot = NewSlot {
            number: None,
            kdf: self.kdf,
            hash: self.hash,
        };
        empty.add_from(&slot, key, passphrase, &mut random)
    }

    fn metadata(&self, slots_end: u64, salt: &[u8], digest: &[u8]) -> Value {
        json!({
            "keyslots": {},
            "tokens": {},
            "segments": { "0": {
                "type": "crypt",
                "offset": self.payload_offset.unwrap_or(slots_end).to_string(),
                "size": "dynamic",
                "iv_tweak": "0",
                "encryption": self.encryption.to_string(),
                "sector_size": self.sector_bytes,
            } },
            "digests": { "0": {
                "type": "pbkdf2",
                "keyslots": [],
                "segments": ["0"],
                "hash": self.hash.name(),
                "iterations": self.digest_iterations,
                "salt": base64(salt),
                "digest": base64(digest),
            } },
            "config": {
                "json_size": self.header_bytes.saturating_sub(BINARY_BYTES as u64).to_string(),
                "keyslots_size": self.slot_area_bytes.to_string(),
            },
        })
    }
}

/// Version 4 of RFC 9562.
fn uuid(random: &[u8]) -> String {
    let mut text = String::new();
    for (nth, byte) in random.iter().enumerate() {
        let byte = match nth {
            6 => byte & 0x0f | 0x40,
            8 => byte & 0x3f | 0x80,
            _ => *byte,
        };
        if matches!(nth, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}
