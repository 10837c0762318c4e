//! New LUKS1 headers, with the passphrase of their first slot.

use zebu_core::Result;
use zebu_core::parts::drivers::structures::LuksHeader;
use zebu_core::parts::drivers::{NewEncryption, random_uuid, refused};
use zebu_core::parts::storage::Secret;
use zeroize::Zeroizing;

use super::cost::iterations;
use super::failed;
use super::options::{Kind, Named, SECTOR};
use crate::keys::{MasterKey, material_bytes, protect};

/// The digest of the key takes this part of the time of a passphrase.
const DIGEST_PART: u32 = 8;

/// Random bytes of the kernel.
fn random(length: usize) -> Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(vec![0; length]);
    getrandom::fill(&mut bytes).map_err(|e| refused(format!("Unable to get random bytes: {e}")))?;
    Ok(bytes)
}

fn random_salt() -> Result<Zeroizing<[u8; 32]>> {
    let mut salt = Zeroizing::new([0; 32]);
    salt.copy_from_slice(&random(32)?);
    Ok(salt)
}

fn uuid() -> Result<String> {
    let hex: String = random_uuid()?
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]);
    Ok(parts.join("-"))
}

/// A new header, with the passphrase of its first slot.
#[derive(Debug)]
pub(super) struct NewHeader {
    kind: Kind,
    secret: Secret,
}

impl NewHeader {
    pub(super) fn of(options: Named<'_>) -> Result<Self> {
        let secret = options.values.secret(&options.name("key-secret"))?;
        Ok(NewHeader {
            secret: secret.ok_or_else(|| super::no_key(options.prefix))?,
            kind: Kind::of(options)?,
        })
    }

    /// Where the payload starts, in bytes from the header.
    pub(super) fn payload_offset(&self) -> u64 {
        let (_, payload) = LuksHeader::new_slots(self.kind.key_bytes());
        u64::from(payload) * SECTOR
    }

    /// A header with this key, whose slots are not active.
    fn empty(&self, key: &MasterKey) -> Result<LuksHeader> {
        let (slots, payload_sector) = LuksHeader::new_slots(self.kind.key_bytes());
        let time = self.kind.time / DIGEST_PART;
        let mut header = LuksHeader {
            cipher: self.kind.cipher,
            mode: self.kind.mode,
            iv_generator: self.kind.iv,
            hash: self.kind.hash,
            payload_sector,
            key_bytes: self.kind.key_bytes(),
            digest: [0; 20],
            digest_salt: *random_salt()?,
            digest_iterations: iterations(self.kind.hash, 20, time).map_err(failed)?,
            uuid: uuid()?.into_bytes(),
            slots,
        };
        header.digest = key.digest(&header).map_err(failed)?;
        Ok(header)
    }

    /// The header with one slot, and its key material.
    pub(super) fn seal(&self, key: &MasterKey) -> Result<(LuksHeader, Vec<u8>)> {
        let mut header = self.empty(key)?;
        let length = header.key_bytes as usize;
        let slot = &mut header.slots[0];
        slot.active = true;
        slot.salt = *random_salt()?;
        slot.iterations = iterations(self.kind.hash, length, self.kind.time).map_err(failed)?;
        let random = random(material_bytes(&header))?;
        let passphrase = self.secret.passphrase();
        let material = protect(&header, &header.slots[0], key, &passphrase, random);
        Ok((header, material.map_err(failed)?))
    }

    /// A new key.
    pub(super) fn key(&self) -> Result<MasterKey> {
        let mut bytes = random(self.kind.key_bytes() as usize)?;
        Ok(MasterKey::new(std::mem::take(&mut *bytes)))
    }
}

impl NewEncryption for NewHeader {
    fn length(&self) -> u64 {
        self.payload_offset()
    }

    fn header(&self) -> Result<Vec<u8>> {
        let (header, material) = self.seal(&self.key()?)?;
        let mut bytes = header.encode().to_vec();
        bytes.resize(header.slots[0].key_offset() as usize, 0);
        bytes.extend(material);
        Ok(bytes)
    }

    fn secret(&self) -> &Secret {
        &self.secret
    }
}
