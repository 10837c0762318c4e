//! What can be wrong with a LUKS2 container, or with what is asked of one.

use thiserror::Error;
use zebu_core::parts::printable;

use crate::CryptError;

/// Why a LUKS2 container is not used or not changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Luks2Error {
    /// The magic is in no place where a copy of the header may be.
    #[error("Volume is not in LUKS format")]
    NotLuks,
    /// The first copy has another version, and there is no second one.
    #[error("LUKS version {0} is not supported")]
    Version(u16),
    /// No copy of the header is whole.
    #[error("Each copy of the LUKS2 header is damaged")]
    Damaged,
    /// The text behind the binary header is not JSON.
    #[error("The LUKS2 metadata are not valid JSON")]
    Json,
    /// A field of the metadata is not there, or its value is not one that it may have.
    #[error("Field '{0}' of the LUKS2 metadata is missing or not valid")]
    Field(String),
    /// A feature that is not implemented here, by its name in the metadata.
    #[error("LUKS2 {what} '{name}' is not supported by zebu")]
    Unsupported {
        /// What has the name.
        what: &'static str,
        /// The name, on one line.
        name: String,
    },
    /// Not one segment: the payload is being encrypted, or it is in pieces.
    #[error("A LUKS2 container with {0} segments is not supported by zebu")]
    Segments(usize),
    /// No digest, or several ones, to recognise the key of the payload.
    #[error("The LUKS2 segment has {0} digests, not one")]
    Digests(usize),
    /// Key material outside the area for it, or beyond the end of the file.
    #[error("Keyslot {0} is not within the LUKS2 keyslot area")]
    SlotOutside(u32),
    /// The area of a slot does not have its key material.
    #[error("Keyslot {0} has less space than its key takes")]
    SlotShort(u32),
    /// The key material of two slots in one place.
    #[error("Keyslots {0} and {1} are overlapping in the header")]
    SlotsOverlap(u32, u32),
    /// The payload starts before the end of the key material.
    #[error("LUKS payload is overlapping with the header")]
    PayloadInHeader,
    /// The payload is not within the file.
    #[error("LUKS payload is beyond the end of the file")]
    PayloadOutside,
    /// A passphrase that costs more than allowed.
    #[error("{what} asks for {asked} {of} for its passphrase, more than the {allowed} allowed")]
    Expensive {
        /// What asks: a slot.
        what: String,
        /// How much it asks for.
        asked: String,
        /// Of what.
        of: &'static str,
        /// The limit.
        allowed: String,
    },
    /// There is not as much memory as the passphrase takes.
    #[error("No memory for the passphrase, which takes {0}")]
    Memory(String),
    /// Numbers with which no key is made of a passphrase.
    #[error("The costs of the passphrase are not valid")]
    Costs,
    /// There is no such slot for the key of the payload.
    #[error("Keyslot {0} is not in use")]
    NoSlot(u32),
    /// The slot has a passphrase already.
    #[error("Keyslot {0} is in use")]
    SlotInUse(u32),
    /// No slot is left, or no space for its key material.
    #[error("No free keyslot")]
    NoFreeSlot,
    /// Without the last passphrase, nothing could be read any more.
    #[error("Keyslot {0} has the last passphrase")]
    LastSlot(u32),
    /// The key is not that of the payload.
    #[error("The key is not that of the LUKS payload")]
    WrongKey,
    /// The metadata do not fit into the header.
    #[error("No space left in the LUKS2 header")]
    Full,
    /// Fewer bytes than the function takes.
    #[error("Too few bytes of key material or of random bytes")]
    Short,
    /// A cipher or a hash that is not there.
    #[error(transparent)]
    Crypt(#[from] CryptError),
}

/// A name of unknown origin, for a message.
pub fn shown(name: &str) -> String {
    const LONGEST: usize = 64;
    let end = name
        .char_indices()
        .nth(LONGEST)
        .map_or(name.len(), |(at, _)| at);
    printable(&name.as_bytes()[..end])
}
