//! The key slots in the metadata. LUKS2 On-Disk Format Specification, "Keyslots Object".

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Value, json};
use zebu_core::parts::drivers::structures::LuksHash;

use super::encryption::{Encryption, hash_named};
use super::error::{Luks2Error, shown};
use super::json::Object;
use super::kdf::Kdf;

/// Slots that a container may have.
pub const MOST_SLOTS: u32 = 32;
/// Key material starts at a multiple of it.
pub const ALIGNMENT: u64 = 4096;
/// Bytes of a sector of key material.
pub const SECTOR: usize = 512;

/// The only number of stripes that is used.
const STRIPES: usize = 4000;
/// Bytes of the longest key.
const LONGEST_KEY: usize = 512;

/// Whether a slot is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Only if it is named.
    Ignored,
    /// As others.
    Normal,
    /// Before others.
    Preferred,
}

/// One of the places for a key, encrypted with a passphrase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Bytes of the key in it.
    pub key_bytes: usize,
    /// How its key is made of the passphrase.
    pub kdf: Kdf,
    /// Salt for the same.
    pub salt: Vec<u8>,
    /// How the key material is encrypted.
    pub encryption: Encryption,
    /// Bytes of the key of that.
    pub area_key_bytes: usize,
    /// Where the key material is in the file, with what is unused behind it.
    pub area: Range<u64>,
    /// The hash that spreads the key over its stripes.
    pub hash: LuksHash,
    /// Whether it is tried.
    pub priority: Priority,
}

impl Slot {
    /// Bytes of the stripes of the key.
    pub(super) fn stripes_bytes(&self) -> usize {
        self.key_bytes * STRIPES
    }

    /// Bytes of the key material, which are whole sectors.
    pub(super) fn material_bytes(&self) -> usize {
        self.stripes_bytes().next_multiple_of(SECTOR)
    }

    /// Bytes of an area for a key of so many bytes.
    pub(super) fn area_bytes(key_bytes: usize) -> u64 {
        (key_bytes as u64 * STRIPES as u64).next_multiple_of(ALIGNMENT)
    }

    fn decode(number: u32, fields: &Object<'_>) -> Result<Self, Luks2Error> {
        let is = |object: &Object<'_>, what, expected| match object.text("type")? {
            name if name == expected => Ok(()),
            name => Err(Luks2Error::Unsupported {
                what,
                name: shown(name),
            }),
        };
        is(fields, "keyslot type", "luks2")?;
        let (af, area) = (fields.object("af")?, fields.object("area")?);
        is(&area, "keyslot area", "raw")?;
        is(&af, "key splitter", "luks1")?;
        if af.number("stripes")? != STRIPES as u64 {
            return Err(af.wrong("stripes"));
        }
        let (kdf, salt) = Kdf::decode(&fields.object("kdf")?)?;
        let slot = Slot {
            key_bytes: key_bytes(fields)?,
            kdf,
            salt,
            encryption: Encryption::named(area.text("encryption")?)?,
            area_key_bytes: key_bytes(&area)?,
            area: range(&area)?,
            hash: hash_named(af.text("hash")?)?,
            priority: priority(fields)?,
        };
        slot.encryption.check(slot.area_key_bytes)?;
        if slot.area.end - slot.area.start < slot.material_bytes() as u64 {
            return Err(Luks2Error::SlotShort(number));
        }
        Ok(slot)
    }

    pub(super) fn encode(&self) -> Value {
        json!({
            "type": "luks2",
            "key_size": self.key_bytes,
            "af": { "type": "luks1", "stripes": STRIPES, "hash": self.hash.name() },
            "area": {
                "type": "raw",
                "offset": self.area.start.to_string(),
                "size": (self.area.end - self.area.start).to_string(),
                "encryption": self.encryption.to_string(),
                "key_size": self.area_key_bytes,
            },
            "kdf": self.kdf.encode(&self.salt),
        })
    }
}

fn key_bytes(fields: &Object<'_>) -> Result<usize, Luks2Error> {
    let bytes = fields.positive("key_size")? as usize;
    let fits = bytes <= LONGEST_KEY;
    fits.then_some(bytes)
        .ok_or_else(|| fields.wrong("key_size"))
}

fn range(area: &Object<'_>) -> Result<Range<u64>, Luks2Error> {
    let aligned = |name| {
        let number = area.decimal(name)?;
        let is_aligned = number.is_multiple_of(ALIGNMENT);
        is_aligned.then_some(number).ok_or_else(|| area.wrong(name))
    };
    let (start, size) = (aligned("offset")?, aligned("size")?);
    let end = start.checked_add(size).ok_or_else(|| area.wrong("size"))?;
    Ok(start..end)
}

fn priority(fields: &Object<'_>) -> Result<Priority, Luks2Error> {
    if fields.get("priority").is_none() {
        return Ok(Priority::Normal);
    }
    match fields.number("priority")? {
        0 => Ok(Priority::Ignored),
        1 => Ok(Priority::Normal),
        2 => Ok(Priority::Preferred),
        _ => Err(fields.wrong("priority")),
    }
}

/// All slots, none of them outside `within` or over another one.
pub(super) fn decode_slots(
    root: &Object<'_>,
    within: &Range<u64>,
) -> Result<BTreeMap<u32, Slot>, Luks2Error> {
    let mut slots = BTreeMap::new();
    for (number, fields) in root.members("keyslots")? {
        if number >= MOST_SLOTS {
            return Err(root.wrong("keyslots"));
        }
        let slot = Slot::decode(number, &fields)?;
        if slot.area.start < within.start || slot.area.end > within.end {
            return Err(Luks2Error::SlotOutside(number));
        }
        slots.insert(number, slot);
    }
    let mut by_place: Vec<_> = slots.iter().collect();
    by_place.sort_by_key(|(_, slot)| slot.area.start);
    for pair in by_place.windows(2) {
        let [(a, first), (b, second)] = pair else {
            continue;
        };
        if first.area.end > second.area.start {
            return Err(Luks2Error::SlotsOverlap(**a, **b));
        }
    }
    Ok(slots)
}
