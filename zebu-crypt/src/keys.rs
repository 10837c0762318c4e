//! The key slots of a LUKS1 header: the key of the payload, which each passphrase gives.

use std::fmt;

use zebu_core::parts::drivers::structures::{LuksHeader, LuksSlot};
use zeroize::Zeroizing;

use crate::sectors::Sectors;
use crate::split::{merge, split};
use crate::{Cipher, CryptError, hash};

/// Bytes of a sector of key material, and of the payload.
const SECTOR: usize = 512;

/// The key that encrypts the payload. It is wiped when it is dropped.
#[derive(Clone)]
pub struct MasterKey(Zeroizing<Vec<u8>>);

impl fmt::Debug for MasterKey {
    /// Without its bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey")
    }
}

impl MasterKey {
    /// A key of these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        MasterKey(Zeroizing::new(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its digest, as the header keeps it to recognise the key.
    ///
    /// # Errors
    /// If the hash is not supported.
    pub fn digest(&self, header: &LuksHeader) -> Result<[u8; 20], CryptError> {
        let (salt, iterations) = (&header.digest_salt, header.digest_iterations);
        let digest = hash::pbkdf2(header.hash, &self.0, salt, iterations, 20)?;
        let mut bytes = [0; 20];
        bytes.copy_from_slice(&digest);
        Ok(bytes)
    }

    /// The cipher of the payload, whose first sector has the number 0.
    ///
    /// # Errors
    /// If it is not supported.
    pub fn cipher(&self, header: &LuksHeader) -> Result<Sectors, CryptError> {
        cipher(header, &self.0)
    }
}

fn cipher(header: &LuksHeader, key: &[u8]) -> Result<Sectors, CryptError> {
    Sectors::new(header.cipher, header.mode, header.iv_generator, key, SECTOR)
}

/// The bytes of the key material of a slot, which are whole sectors.
pub fn material_bytes(header: &LuksHeader) -> usize {
    stripes_bytes(header).next_multiple_of(SECTOR)
}

fn stripes_bytes(header: &LuksHeader) -> usize {
    header.key_bytes as usize * header.slots[0].stripes as usize
}

/// The master key, from the key material of a slot ([`material_bytes`] of them); None if the passphrase is
/// not that of the slot.
///
/// # Errors
/// If the cipher or the hash is not supported.
pub fn unlock(
    header: &LuksHeader,
    slot: &LuksSlot,
    mut material: Zeroizing<Vec<u8>>,
    passphrase: &[u8],
) -> Result<Option<MasterKey>, CryptError> {
    let length = header.key_bytes as usize;
    let key = hash::pbkdf2(header.hash, passphrase, &slot.salt, slot.iterations, length)?;
    cipher(header, &key)?.decrypt(0, &mut material);
    let key = MasterKey(merge(
        header.hash,
        &material[..stripes_bytes(header)],
        length,
    )?);
    let is_it = is_equal(&key.digest(header)?, &header.digest);
    Ok(is_it.then_some(key))
}

/// The key material of a slot, which `passphrase` unlocks then. `random` are [`material_bytes`] random bytes.
///
/// # Errors
/// If the cipher or the hash is not supported.
pub fn protect(
    header: &LuksHeader,
    slot: &LuksSlot,
    key: &MasterKey,
    passphrase: &[u8],
    mut random: Zeroizing<Vec<u8>>,
) -> Result<Vec<u8>, CryptError> {
    let length = header.key_bytes as usize;
    split(header.hash, &key.0, &mut random[..stripes_bytes(header)])?;
    let key = hash::pbkdf2(header.hash, passphrase, &slot.salt, slot.iterations, length)?;
    cipher(header, &key)?.encrypt(0, &mut random);
    Ok(std::mem::take(&mut *random))
}

/// In a time that does not depend on where they differ.
pub(crate) fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}
