//! What the metadata say of the payload, besides its slots. LUKS2 On-Disk Format Specification, "Segments Object",
//! "Digests Object" and "Config Object".

use std::ops::Range;

use super::binary::BINARY_BYTES;
use super::encryption::{Encryption, hash_named};
use super::error::{Luks2Error, shown};
use super::json::Object;
use super::kdf::Kdf;
use super::slot::ALIGNMENT;

/// Bytes of the largest area for slots.
const MOST_SLOT_BYTES: u64 = 128 << 20;
/// The unit of the numbers that initialisation vectors are made of, in bytes.
const UNIT: u64 = 512;

/// Where the payload is, and how it is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it starts, in bytes of the file of the payload.
    pub offset: u64,
    /// Its bytes; None: up to the end of the file.
    pub bytes: Option<u64>,
    /// Its cipher.
    pub encryption: Encryption,
    /// Bytes of a sector.
    pub sector_bytes: u32,
    /// What is added to the numbers of its initialisation vectors, in units of 512 bytes.
    pub iv_tweak: u64,
}

/// How the key of the payload is recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Digest {
    /// The slots with this key.
    pub slots: Vec<u32>,
    /// PBKDF2.
    pub kdf: Kdf,
    pub salt: Vec<u8>,
    pub digest: Vec<u8>,
}

/// Refuses what must be understood before anything is read. Flags need not be.
pub(super) fn check_requirements(root: &Object<'_>) -> Result<(), Luks2Error> {
    let config = root.object("config")?;
    if config.get("requirements").is_none() {
        return Ok(());
    }
    let requirements = config.object("requirements")?;
    match requirements.optional_texts("mandatory")?.first() {
        None => Ok(()),
        Some(name) => Err(Luks2Error::Unsupported {
            what: "requirement",
            name: shown(name),
        }),
    }
}

/// Where the key material may be, if each copy of the header has so many bytes.
pub(super) fn slot_area(root: &Object<'_>, header_bytes: u64) -> Result<Range<u64>, Luks2Error> {
    let config = root.object("config")?;
    if config.decimal("json_size")? != header_bytes - BINARY_BYTES as u64 {
        return Err(config.wrong("json_size"));
    }
    let bytes = config.decimal("keyslots_size")?;
    if bytes > MOST_SLOT_BYTES || !bytes.is_multiple_of(ALIGNMENT) {
        return Err(config.wrong("keyslots_size"));
    }
    Ok(2 * header_bytes..2 * header_bytes + bytes)
}

impl Segment {
    /// The only segment, with its number.
    pub(super) fn decode(root: &Object<'_>) -> Result<(u32, Self), Luks2Error> {
        let segments = root.members("segments")?;
        let [(number, fields)] = &segments[..] else {
            return Err(Luks2Error::Segments(segments.len()));
        };
        let unsupported = |what, name| Luks2Error::Unsupported {
            what,
            name: shown(name),
        };
        match fields.text("type")? {
            "crypt" => (),
            other => return Err(unsupported("segment type", other)),
        }
        if fields.get("integrity").is_some() {
            let name = fields.object("integrity")?.text("type")?;
            return Err(unsupported("integrity", name));
        }
        if let Some(flag) = fields.optional_texts("flags")?.first() {
            return Err(unsupported("segment flag", flag));
        }
        Ok((*number, Self::fields(fields)?))
    }

    fn fields(fields: &Object<'_>) -> Result<Self, Luks2Error> {
        let sector_bytes = fields.positive("sector_size")?;
        if !matches!(sector_bytes, 512 | 1024 | 2048 | 4096) {
            return Err(fields.wrong("sector_size"));
        }
        let multiple = |name, unit| {
            let number = fields.decimal(name)?;
            let fits = number.is_multiple_of(unit);
            fits.then_some(number).ok_or_else(|| fields.wrong(name))
        };
        let bytes = match fields.text("size")? {
            "dynamic" => None,
            _ => Some(multiple("size", sector_bytes.into())?),
        };
        if bytes == Some(0) {
            return Err(fields.wrong("size"));
        }
        Ok(Segment {
            offset: multiple("offset", UNIT)?,
            bytes,
            encryption: Encryption::named(fields.text("encryption")?)?,
            sector_bytes,
            iv_tweak: multiple("iv_tweak", u64::from(sector_bytes) / UNIT)?,
        })
    }
}

impl Digest {
    /// The digest of the key of this segment.
    pub(super) fn decode(root: &Object<'_>, segment: u32) -> Result<Self, Luks2Error> {
        let mut found = Vec::new();
        for (_, fields) in root.members("digests")? {
            if fields.numbers("segments")?.contains(&segment) {
                found.push(fields);
            }
        }
        let [fields] = &found[..] else {
            return Err(Luks2Error::Digests(found.len()));
        };
        match fields.text("type")? {
            "pbkdf2" => (),
            other => {
                return Err(Luks2Error::Unsupported {
                    what: "digest",
                    name: shown(other),
                });
            }
        }
        let hash = hash_named(fields.text("hash")?)?;
        let digest = Digest {
            slots: fields.numbers("keyslots")?,
            kdf: Kdf::Pbkdf2 {
                hash,
                iterations: fields.positive("iterations")?,
            },
            salt: fields.bytes("salt")?,
            digest: fields.bytes("digest")?,
        };
        // A part of a digest would be the digest of other keys, too.
        let is_whole = |bytes| (16..=hash.digest_bytes() as usize).contains(&bytes);
        if !is_whole(digest.digest.len()) {
            return Err(fields.wrong("digest"));
        }
        Ok(digest)
    }
}
