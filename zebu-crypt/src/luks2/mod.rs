//! LUKS containers of version 2, as pure functions: the caller reads and writes. LUKS2 On-Disk Format Specification.
//!
//! - `search`, `binary`: the two copies of the header, and which one counts
//! - `json`, `metadata`, `slot`, `encryption`: what the metadata say
//! - `kdf`, `unlock`: keys of passphrases, the key of the payload
//! - `change`, `create`: other passphrases, new containers
//!
//! The payload is one encrypted segment. What else there is, a payload that is being encrypted, integrity, is refused
//! by its name. Tokens and flags are kept and not used.

mod binary;
mod change;
mod create;
mod encryption;
mod error;
mod json;
mod kdf;
mod metadata;
mod search;
mod slot;
mod unlock;

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value;

use crate::{MasterKey, Sectors};
use binary::{Binary, Which};
use json::Object;
use metadata::{Digest, check_requirements, slot_area};
use search::Copy;
use slot::decode_slots;

pub use change::{Change, NewSlot, Write};
pub use create::NewLuks2;
pub use encryption::Encryption;
pub use error::Luks2Error;
pub use kdf::{Argon2Variant, Kdf, Limits};
pub use metadata::Segment;
pub use search::Search;
pub use slot::{Priority, Slot};

/// The header of a LUKS2 container, found by [`Search`] or made by [`NewLuks2`].
#[derive(Clone, Debug)]
pub struct Luks2 {
    binary: Binary,
    /// The copy that it was read from.
    from: Which,
    needs_repair: bool,
    file_bytes: u64,
    /// All metadata, also what is not understood.
    metadata: Value,
    slot_area: Range<u64>,
    slots: BTreeMap<u32, Slot>,
    segment: Segment,
    segment_number: u32,
    digest: Digest,
}

impl Luks2 {
    fn decode(copy: Copy, needs_repair: bool, file_bytes: u64) -> Result<Self, Luks2Error> {
        let metadata: Value =
            serde_json::from_slice(&copy.metadata).map_err(|_| Luks2Error::Json)?;
        let root = Object::root(&metadata)?;
        check_requirements(&root)?;
        let slot_area = slot_area(&root, copy.binary.bytes)?;
        let (segment_number, segment) = Segment::decode(&root)?;
        let within = slot_area.start..slot_area.end.min(file_bytes);
        let slots = decode_slots(&root, &within)?;
        let digest = Digest::decode(&root, segment_number)?;
        for number in &digest.slots {
            let slot = slots.get(number).ok_or(Luks2Error::NoSlot(*number))?;
            segment.encryption.check(slot.key_bytes)?;
        }
        Ok(Luks2 {
            binary: copy.binary,
            from: copy.which,
            needs_repair,
            file_bytes,
            slot_area,
            slots,
            segment,
            segment_number,
            digest,
            metadata,
        })
    }

    /// The UUID, as text.
    #[must_use]
    pub fn uuid(&self) -> &[u8] {
        &self.binary.uuid
    }

    /// The label; empty if there is none.
    #[must_use]
    pub fn label(&self) -> &[u8] {
        &self.binary.label
    }

    /// The subsystem; empty if there is none.
    #[must_use]
    pub fn subsystem(&self) -> &[u8] {
        &self.binary.subsystem
    }

    /// The number of the last change of the header.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.binary.sequence
    }

    /// Whether one copy of the header is damaged or older than the other one. Any change repairs it.
    #[must_use]
    pub fn needs_repair(&self) -> bool {
        self.needs_repair
    }

    /// Where the payload is, and how it is encrypted.
    #[must_use]
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// A slot with the key of the payload.
    ///
    /// # Errors
    /// If it is not in use, or has another key.
    pub fn slot(&self, number: u32) -> Result<&Slot, Luks2Error> {
        let is_ours = self.digest.slots.contains(&number);
        let slot = self.slots.get(&number).filter(|_| is_ours);
        slot.ok_or(Luks2Error::NoSlot(number))
    }

    /// The slots that are tried with a passphrase, in this order. One of the priority [`Priority::Ignored`] is only
    /// tried if the user names it.
    #[must_use]
    pub fn slots(&self) -> Vec<u32> {
        let ours = |(number, _): &(&u32, &Slot)| self.digest.slots.contains(number);
        let mut slots: Vec<_> = self.slots.iter().filter(ours).collect();
        slots.retain(|(_, slot)| slot.priority != Priority::Ignored);
        // Those of one priority stay in order.
        slots.sort_by_key(|(_, slot)| std::cmp::Reverse(slot.priority));
        slots.into_iter().map(|(number, _)| *number).collect()
    }

    /// Where the payload is in the file of the header, if this has so many bytes: whole sectors.
    ///
    /// # Errors
    /// If it is not in this file, or not behind the header.
    pub fn payload(&self, file_bytes: u64) -> Result<Range<u64>, Luks2Error> {
        if self.segment.offset < self.slot_area.end {
            return Err(Luks2Error::PayloadInHeader);
        }
        self.detached_payload(file_bytes)
    }

    /// The same, if the header is in a file of its own, and that of the payload has so many bytes.
    ///
    /// # Errors
    /// If it is not in this file.
    pub fn detached_payload(&self, file_bytes: u64) -> Result<Range<u64>, Luks2Error> {
        let (start, sector) = (self.segment.offset, u64::from(self.segment.sector_bytes));
        let space = file_bytes.checked_sub(start);
        let space = space.ok_or(Luks2Error::PayloadOutside)?;
        let bytes = self.segment.bytes.unwrap_or(space - space % sector);
        if bytes > space {
            return Err(Luks2Error::PayloadOutside);
        }
        Ok(start..start + bytes)
    }

    /// The cipher of the payload, whose first sector has the number 0.
    ///
    /// # Errors
    /// If it does not take this key.
    pub fn cipher(&self, key: &MasterKey) -> Result<Sectors, Luks2Error> {
        let (bytes, start) = (self.segment.sector_bytes as usize, self.segment.iv_tweak);
        Ok(self.segment.encryption.sectors(key.bytes(), bytes, start)?)
    }
}
