//! The key of the payload, from a slot and its passphrase, and the other way.

use std::ops::Range;

use zeroize::Zeroizing;

use super::error::Luks2Error;
use super::kdf::Limits;
use super::slot::{SECTOR, Slot};
use super::{Digest, Luks2};
use crate::keys::is_equal;
use crate::split::{merge, split};
use crate::{Cipher, MasterKey};

impl Luks2 {
    /// Which bytes of the file are the key material of a slot.
    ///
    /// # Errors
    /// If the slot is not in use, or has another key.
    pub fn material(&self, number: u32) -> Result<Range<u64>, Luks2Error> {
        let slot = self.slot(number)?;
        Ok(slot.area.start..slot.area.start + slot.material_bytes() as u64)
    }

    /// The key of the payload, from the [`material`](Self::material) of a slot; None if the passphrase is not that of
    /// the slot. No more time and memory than `limits` is spent.
    ///
    /// # Errors
    /// If the slot is not in use, or is beyond the limits, or if there is no memory for it.
    pub fn unlock(
        &self,
        number: u32,
        mut material: Zeroizing<Vec<u8>>,
        passphrase: &[u8],
        limits: &Limits,
    ) -> Result<Option<MasterKey>, Luks2Error> {
        let slot = self.slot(number)?;
        limits.check(&slot.kdf, || format!("Keyslot {number}"))?;
        limits.check(&self.digest.kdf, || "The LUKS2 digest".into())?;
        if material.len() != slot.material_bytes() {
            return Err(Luks2Error::Short);
        }
        let key = slot.kdf.key(passphrase, &slot.salt, slot.area_key_bytes)?;
        let sectors = slot.encryption.sectors(&key, SECTOR, 0)?;
        sectors.decrypt(0, &mut material);
        let stripes = &material[..slot.stripes_bytes()];
        let mut key = merge(slot.hash, stripes, slot.key_bytes)?;
        let key = MasterKey::new(std::mem::take(&mut *key));
        Ok(self.digest.is_of(&key)?.then_some(key))
    }
}

impl Digest {
    /// The digest of a key, as long as this one.
    pub(super) fn of(&self, key: &MasterKey) -> Result<Zeroizing<Vec<u8>>, Luks2Error> {
        self.kdf.key(key.bytes(), &self.salt, self.digest.len())
    }

    pub(super) fn is_of(&self, key: &MasterKey) -> Result<bool, Luks2Error> {
        Ok(is_equal(&self.of(key)?, &self.digest))
    }
}

impl Slot {
    /// Replaces the random bytes of the slot's area by the key material, which `passphrase` unlocks then.
    pub(super) fn protect(
        &self,
        key: &MasterKey,
        passphrase: &[u8],
        area: &mut [u8],
    ) -> Result<(), Luks2Error> {
        let material = area
            .get_mut(..self.material_bytes())
            .ok_or(Luks2Error::Short)?;
        split(
            self.hash,
            key.bytes(),
            &mut material[..self.stripes_bytes()],
        )?;
        let key = self.kdf.key(passphrase, &self.salt, self.area_key_bytes)?;
        let sectors = self.encryption.sectors(&key, SECTOR, 0)?;
        sectors.encrypt(0, material);
        Ok(())
    }
}
