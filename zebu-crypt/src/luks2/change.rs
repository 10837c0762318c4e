//! Passphrases are added and removed: what is written, in which order.

use std::ops::Range;

use serde_json::{Value, json};
use zebu_core::parts::drivers::structures::LuksHash;
use zeroize::Zeroizing;

use super::Luks2;
use super::binary::SALT_BYTES;
use super::error::Luks2Error;
use super::kdf::Kdf;
use super::search::Copy;
use super::slot::{MOST_SLOTS, Priority, Slot};
use crate::MasterKey;

/// Bytes of the salt of a slot.
pub(super) const SLOT_SALT_BYTES: usize = 32;

/// Bytes of the longest key that a cipher takes: of AES-256 in XTS mode.
const LONGEST_CIPHER_KEY: usize = 64;

/// Bytes for one place of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Where they are written.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// A change of a container. If each write is flushed before the next one, the file has a whole copy of the header
/// at any time, and each passphrase of it works that is neither added nor removed.
#[derive(Clone, Debug)]
#[must_use]
pub struct Change {
    /// What is written, in this order.
    pub writes: Vec<Write>,
    /// The header afterwards.
    pub header: Luks2,
}

/// A passphrase to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewSlot {
    /// The slot; None: the first that is free.
    pub number: Option<u32>,
    /// How its key is made of the passphrase.
    pub kdf: Kdf,
    /// The hash that spreads the key over its stripes.
    pub hash: LuksHash,
}

/// Random bytes, of which none is used twice.
pub(super) struct Random {
    bytes: Zeroizing<Vec<u8>>,
    used: usize,
}

impl Random {
    pub fn new(bytes: Zeroizing<Vec<u8>>) -> Self {
        Random { bytes, used: 0 }
    }

    pub fn take(&mut self, length: usize) -> Result<Vec<u8>, Luks2Error> {
        let bytes = self.bytes.get(self.used..).and_then(|b| b.get(..length));
        let bytes = bytes.ok_or(Luks2Error::Short)?.to_vec();
        self.used += length;
        Ok(bytes)
    }
}

impl Luks2 {
    /// How many random bytes any change takes.
    #[must_use]
    pub fn random_bytes(&self) -> usize {
        let areas = self
            .slots
            .values()
            .map(|slot| slot.area.end - slot.area.start);
        let area = areas.fold(Slot::area_bytes(LONGEST_CIPHER_KEY), u64::max);
        area as usize + SLOT_SALT_BYTES + 2 * SALT_BYTES
    }

    /// Adds a passphrase. `random` are [`random_bytes`](Self::random_bytes) random bytes.
    ///
    /// # Errors
    /// If the slot is in use, no slot or no space is free, or the key is not that of the payload.
    pub fn add(
        &self,
        new: &NewSlot,
        key: &MasterKey,
        passphrase: &[u8],
        random: Zeroizing<Vec<u8>>,
    ) -> Result<Change, Luks2Error> {
        self.add_from(new, key, passphrase, &mut Random::new(random))
    }

    pub(super) fn add_from(
        &self,
        new: &NewSlot,
        key: &MasterKey,
        passphrase: &[u8],
        random: &mut Random,
    ) -> Result<Change, Luks2Error> {
        new.kdf.check()?;
        if !self.digest.is_of(key)? {
            return Err(Luks2Error::WrongKey);
        }
        let number = self.free_slot(new.number)?;
        let key_bytes = key.bytes().len();
        let slot = Slot {
            key_bytes,
            kdf: new.kdf,
            salt: random.take(SLOT_SALT_BYTES)?,
            encryption: self.segment.encryption,
            area_key_bytes: key_bytes,
            area: self.free_area(Slot::area_bytes(key_bytes))?,
            hash: new.hash,
            priority: Priority::Normal,
        };
        let mut material = random.take((slot.area.end - slot.area.start) as usize)?;
        slot.protect(key, passphrase, &mut material)?;
        let mut metadata = self.metadata.clone();
        metadata["keyslots"][number.to_string()] = slot.encode();
        for digest in self.digests_of_segment(&mut metadata) {
            if let Some(slots) = digest["keyslots"].as_array_mut() {
                slots.push(json!(number.to_string()));
            }
        }
        let material = Write {
            offset: slot.area.start,
            bytes: material,
        };
        self.changed(metadata, Some(material), random)
    }

    /// Removes a passphrase; its key material is overwritten first. `random` are
    /// [`random_bytes`](Self::random_bytes) random bytes.
    ///
    /// # Errors
    /// If the slot is not in use, or is the last one with the key of the payload.
    pub fn remove(&self, number: u32, random: Zeroizing<Vec<u8>>) -> Result<Change, Luks2Error> {
        let mut random = Random::new(random);
        let area = self.slot(number)?.area.clone();
        if self.digest.slots.iter().all(|other| *other == number) {
            return Err(Luks2Error::LastSlot(number));
        }
        let mut metadata = self.metadata.clone();
        if let Some(slots) = metadata["keyslots"].as_object_mut() {
            slots.shift_remove(&number.to_string());
        }
        // A token of this slot would name one that is not there.
        for list in ["digests", "tokens"] {
            let objects = metadata.get_mut(list).and_then(Value::as_object_mut);
            for object in objects.into_iter().flat_map(|o| o.values_mut()) {
                let slots = object.get_mut("keyslots").and_then(Value::as_array_mut);
                if let Some(slots) = slots {
                    slots.retain(|slot| *slot != json!(number.to_string()));
                }
            }
        }
        let wiped = Write {
            offset: area.start,
            bytes: random.take((area.end - area.start) as usize)?,
        };
        self.changed(metadata, Some(wiped), &mut random)
    }

    /// Writes both copies of the header anew. `random` are [`random_bytes`](Self::random_bytes) random bytes.
    ///
    /// # Errors
    /// If there are too few of them.
    pub fn repair(&self, random: Zeroizing<Vec<u8>>) -> Result<Change, Luks2Error> {
        self.changed(self.metadata.clone(), None, &mut Random::new(random))
    }

    fn free_slot(&self, asked: Option<u32>) -> Result<u32, Luks2Error> {
        let is_free = |number: &u32| !self.slots.contains_key(number);
        match asked {
            Some(number) if number >= MOST_SLOTS => Err(Luks2Error::NoFreeSlot),
            Some(number) if is_free(&number) => Ok(number),
            Some(number) => Err(Luks2Error::SlotInUse(number)),
            None => (0..MOST_SLOTS).find(is_free).ok_or(Luks2Error::NoFreeSlot),
        }
    }

    /// The first gap between the slots with so much space.
    fn free_area(&self, bytes: u64) -> Result<Range<u64>, Luks2Error> {
        let mut areas: Vec<_> = self.slots.values().map(|slot| slot.area.clone()).collect();
        areas.sort_by_key(|area| area.start);
        let mut start = self.slot_area.start;
        for area in areas {
            if area.start - start >= bytes {
                break;
            }
            start = area.end;
        }
        let area = start..start + bytes;
        let fits = area.end <= self.slot_area.end.min(self.file_bytes);
        fits.then_some(area).ok_or(Luks2Error::NoFreeSlot)
    }

    fn digests_of_segment<'a>(
        &self,
        metadata: &'a mut Value,
    ) -> impl Iterator<Item = &'a mut Value> + use<'a> {
        let segment = json!(self.segment_number.to_string());
        let digests = metadata["digests"].as_object_mut();
        let digests = digests.into_iter().flat_map(|digests| digests.values_mut());
        digests.filter(move |digest| {
            let segments = digest["segments"].as_array();
            segments.is_some_and(|segments| segments.contains(&segment))
        })
    }

    /// The header with these metadata. The copy that this one was read from is written last, since it is whole.
    fn changed(
        &self,
        metadata: Value,
        before: Option<Write>,
        random: &mut Random,
    ) -> Result<Change, Luks2Error> {
        let mut binary = self.binary.clone();
        binary.sequence = binary.sequence.checked_add(1).ok_or(Luks2Error::Full)?;
        let text = metadata.to_string().into_bytes();
        let mut writes = Vec::from_iter(before);
        for which in [self.from.other(), self.from] {
            let salt = random.take(SALT_BYTES)?;
            let copy = binary.encode(which, &text, &salt);
            writes.push(Write {
                offset: which.offset(binary.bytes),
                bytes: copy.ok_or(Luks2Error::Full)?,
            });
        }
        let copy = Copy {
            which: self.from,
            binary,
            metadata: text,
        };
        let header = Luks2::decode(copy, false, self.file_bytes)?;
        Ok(Change { writes, header })
    }
}
