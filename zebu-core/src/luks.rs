//! The header of a LUKS partition, which an encrypted image keeps inside
//! itself. LUKS1 On-Disk Format Specification, "The partition header". What
//! is accepted is what QEMU accepts, checked in QEMU's order.

use std::fmt;

use thiserror::Error;

use crate::printable;

/// Size of the header in bytes.
pub const LUKS_HEADER_BYTES: usize = 592;
/// Key slots of a header.
pub const LUKS_SLOTS: usize = 8;

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const VERSION: u16 = 1;
const SLOT_ACTIVE: u32 = 0x00ac_71f3;
const SLOT_INACTIVE: u32 = 0x0000_dead;
const SECTOR: u64 = 512;
/// Key material starts at a multiple of it, the first behind the header.
const ALIGNMENT: u64 = 4096;
/// Sectors kept for the header.
const HEADER_SECTORS: u32 = (ALIGNMENT / SECTOR) as u32;
/// The only number of stripes that is used.
const STRIPES: u32 = 4000;

/// What is wrong with a LUKS header.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LuksError {
    /// The place that the image names for the header is too small.
    #[error("Request for data outside of extension header")]
    Short,
    /// The magic is not there.
    #[error("Volume is not in LUKS format")]
    NotLuks,
    /// Not version 1.
    #[error("LUKS version {0} is not supported")]
    Version(u16),
    /// A string that fills its field.
    #[error("LUKS header {0} is not NUL terminated")]
    Unterminated(&'static str),
    /// The payload starts before the end of the header.
    #[error("LUKS payload is overlapping with the header")]
    PayloadInHeader,
    /// The digest of the master key needs at least one iteration.
    #[error("LUKS key iteration count is zero")]
    NoIterations,
    /// An unusual number of stripes.
    #[error("Keyslot {slot} is corrupted (stripes {} != {STRIPES})", *.stripes as i32)]
    SlotStripes {
        /// Index of the slot.
        slot: usize,
        /// Its stripes.
        stripes: u32,
    },
    /// Neither active nor inactive.
    #[error("Keyslot {0} state (active/disable) is corrupted")]
    SlotState(usize),
    /// An active slot needs at least one iteration.
    #[error("Keyslot {0} iteration count is zero")]
    SlotNoIterations(usize),
    /// Key material within the header.
    #[error("Keyslot {0} is overlapping with the LUKS header")]
    SlotInHeader(usize),
    /// Key material that reaches into the payload.
    #[error("Keyslot {0} is overlapping with the encrypted payload")]
    SlotInPayload(usize),
    /// The key material of two slots in one place.
    #[error("Keyslots {0} and {1} are overlapping in the header")]
    SlotsOverlap(usize, usize),
    /// The cipher mode is not `mode-ivgen`.
    #[error("Unexpected cipher mode string format '{0}'")]
    ModeFormat(String),
    /// An unknown cipher mode.
    #[error("Cipher mode '{0}' not supported")]
    Mode(String),
    /// An unknown cipher, or not with this size of key.
    #[error("Algorithm '{name}' with key size {key_bytes} bytes not supported")]
    Cipher {
        /// Name of the cipher.
        name: String,
        /// Bytes of its key.
        key_bytes: u32,
    },
    /// An unknown hash.
    #[error("Hash algorithm '{0}' not supported")]
    Hash(String),
    /// An unknown way to make initialisation vectors.
    #[error("IV generator '{0}' not supported")]
    IvGenerator(String),
    /// ESSIV without its hash.
    #[error("Missing IV generator hash specification")]
    NoIvHash,
    /// No cipher takes the digest of the ESSIV hash as its key.
    #[error("{}", essiv_reason(.0, .1))]
    Essiv(LuksCipher, LuksHash),
}

fn essiv_reason(cipher: &LuksCipher, hash: &LuksHash) -> String {
    let family = match cipher.algorithm {
        LuksAlgorithm::Aes => "AES",
        LuksAlgorithm::Serpent => "Serpent",
        LuksAlgorithm::Twofish => "Twofish",
        LuksAlgorithm::Cast5 => return format!("Cipher {cipher} not supported with essiv"),
    };
    let bytes = hash.digest_bytes();
    format!("No {family} cipher with key size {bytes} available")
}

/// An enum whose values have names: on the disk, and in what is shown.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident { $($(#[$value_doc:meta])* $value:ident = $name:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $type { $($(#[$value_doc])* $value),* }

        impl $type {
            /// Its name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$value => $name),* }
            }

            /// The one of this name.
            #[must_use]
            pub fn find(name: &[u8]) -> Option<Self> {
                [$(Self::$value),*].into_iter().find(|v| v.name().as_bytes() == name)
            }
        }
    };
}

named! {
    /// A family of ciphers.
    LuksAlgorithm {
        /// AES.
        Aes = "aes",
        /// CAST-128.
        Cast5 = "cast5",
        /// Serpent.
        Serpent = "serpent",
        /// Twofish.
        Twofish = "twofish",
    }
}

named! {
    /// How the blocks of a sector are chained.
    LuksMode {
        /// Each block by itself.
        Ecb = "ecb",
        /// Cipher block chaining.
        Cbc = "cbc",
        /// XTS, which takes two keys.
        Xts = "xts",
        /// Counter.
        Ctr = "ctr",
    }
}

named! {
    /// A hash.
    LuksHash {
        /// MD5.
        Md5 = "md5",
        /// SHA-1.
        Sha1 = "sha1",
        /// SHA-224.
        Sha224 = "sha224",
        /// SHA-256.
        Sha256 = "sha256",
        /// SHA-384.
        Sha384 = "sha384",
        /// SHA-512.
        Sha512 = "sha512",
        /// RIPEMD-160.
        Ripemd160 = "ripemd160",
        /// SM3.
        Sm3 = "sm3",
    }
}

impl LuksAlgorithm {
    /// Whether there is such a cipher with a key of so many bytes.
    #[must_use]
    pub const fn takes_key(self, bytes: u32) -> bool {
        match self {
            Self::Cast5 => bytes == 16,
            Self::Aes | Self::Serpent | Self::Twofish => matches!(bytes, 16 | 24 | 32),
        }
    }
}

impl LuksHash {
    /// Bytes of a digest.
    #[must_use]
    pub const fn digest_bytes(self) -> u32 {
        match self {
            Self::Md5 => 16,
            Self::Sha1 | Self::Ripemd160 => 20,
            Self::Sha224 => 28,
            Self::Sha256 | Self::Sm3 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    fn named(name: &[u8]) -> Result<Self, LuksError> {
        Self::find(name).ok_or_else(|| LuksError::Hash(printable(name)))
    }
}

/// A cipher with the size of its key. Shown as `aes-256`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LuksCipher {
    /// The family.
    pub algorithm: LuksAlgorithm,
    /// Bytes of one key; XTS has two.
    pub key_bytes: u32,
}

impl fmt::Display for LuksCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.algorithm.name(), 8 * self.key_bytes)
    }
}

/// How initialisation vectors are made of sector numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LuksIvGenerator {
    /// The lower 32 bits of the number.
    Plain,
    /// The number.
    Plain64,
    /// The number, encrypted with a hash of the key.
    Essiv(LuksHash),
}

impl LuksIvGenerator {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Plain64 => "plain64",
            Self::Essiv(_) => "essiv",
        }
    }

    /// The hash, if it uses one.
    #[must_use]
    pub const fn hash(self) -> Option<LuksHash> {
        match self {
            Self::Essiv(hash) => Some(hash),
            Self::Plain | Self::Plain64 => None,
        }
    }
}

/// One of the places for the master key, each encrypted with another
/// passphrase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LuksSlot {
    /// Whether there is a key.
    pub active: bool,
    /// Iterations that make a key of the passphrase.
    pub iterations: u32,
    /// Salt for the same.
    pub salt: [u8; 32],
    /// Where the key material starts, in sectors of 512 bytes from the header.
    pub key_sector: u32,
    /// Stripes of the key material.
    pub stripes: u32,
}

impl LuksSlot {
    /// Where the key material starts, in bytes from the header.
    #[must_use]
    pub const fn key_offset(&self) -> u64 {
        self.key_sector as u64 * SECTOR
    }
}

/// The header of a LUKS partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksHeader {
    /// The cipher of the payload.
    pub cipher: LuksCipher,
    /// Its mode.
    pub mode: LuksMode,
    /// Its initialisation vectors.
    pub iv_generator: LuksIvGenerator,
    /// The hash that makes keys of passphrases.
    pub hash: LuksHash,
    /// Where the payload starts, in sectors of 512 bytes from the header. In a
    /// qcow2 image there is none, and this is where the key material ends.
    pub payload_sector: u32,
    /// Bytes of the master key.
    pub key_bytes: u32,
    /// Digest of the master key.
    pub digest: [u8; 20],
    /// Salt for the digest.
    pub digest_salt: [u8; 32],
    /// Iterations for the digest.
    pub digest_iterations: u32,
    /// The UUID, as text.
    pub uuid: Vec<u8>,
    /// The key slots.
    pub slots: [LuksSlot; LUKS_SLOTS],
}

impl LuksHeader {
    /// Reads the header at the start of `bytes`, which are
    /// [`LUKS_HEADER_BYTES`] at least.
    pub fn decode(bytes: &[u8]) -> Result<Self, LuksError> {
        let mut fields = Fields(bytes);
        if fields.take()? != MAGIC {
            return Err(LuksError::NotLuks);
        }
        let version = u16::from_be_bytes(fields.take()?);
        if version != VERSION {
            return Err(LuksError::Version(version));
        }
        let cipher: [u8; 32] = fields.take()?;
        let mode: [u8; 32] = fields.take()?;
        let hash: [u8; 32] = fields.take()?;
        let cipher = terminated(&cipher, "cipher name")?;
        let mode = terminated(&mode, "cipher mode")?;
        let hash = terminated(&hash, "hash spec")?;
        let payload_sector = fields.number()?;
        let key_bytes = fields.number()?;
        let digest = fields.take()?;
        let digest_salt = fields.take()?;
        let digest_iterations = fields.number()?;
        let uuid: [u8; 40] = fields.take()?;
        if payload_sector < HEADER_SECTORS {
            return Err(LuksError::PayloadInHeader);
        }
        if digest_iterations == 0 {
            return Err(LuksError::NoIterations);
        }
        let slots = decode_slots(fields, payload_sector, key_bytes)?;
        // `mode-ivgen` or `mode-ivgen:hash`.
        let Some((mode, iv_generator)) = split_once(mode, b'-') else {
            return Err(LuksError::ModeFormat(printable(mode)));
        };
        let (iv_generator, iv_hash) = match split_once(iv_generator, b':') {
            Some((generator, hash)) => (generator, Some(LuksHash::named(hash)?)),
            None => (iv_generator, None),
        };
        let mode = LuksMode::find(mode).ok_or_else(|| LuksError::Mode(printable(mode)))?;
        let cipher = find_cipher(cipher, mode, key_bytes)?;
        let hash = LuksHash::named(hash)?;
        let iv_generator = match (iv_generator, iv_hash) {
            (b"plain", _) => LuksIvGenerator::Plain,
            (b"plain64", _) => LuksIvGenerator::Plain64,
            (b"essiv", None) => return Err(LuksError::NoIvHash),
            (b"essiv", Some(hash)) if cipher.algorithm.takes_key(hash.digest_bytes()) => {
                LuksIvGenerator::Essiv(hash)
            }
            (b"essiv", Some(hash)) => return Err(LuksError::Essiv(cipher, hash)),
            (other, _) => return Err(LuksError::IvGenerator(printable(other))),
        };
        Ok(Self {
            cipher,
            mode,
            iv_generator,
            hash,
            payload_sector,
            key_bytes,
            digest,
            digest_salt,
            digest_iterations,
            uuid: up_to_nul(&uuid).unwrap_or(&uuid).to_vec(),
            slots,
        })
    }

    /// Where the payload starts, in bytes from the header.
    #[must_use]
    pub const fn payload_offset(&self) -> u64 {
        self.payload_sector as u64 * SECTOR
    }

    /// The slots of a new header, all inactive, for a key of so many bytes; and the sector behind their key
    /// material, where the payload starts.
    #[must_use]
    pub fn new_slots(key_bytes: u32) -> ([LuksSlot; LUKS_SLOTS], u32) {
        let sectors = slot_sectors(key_bytes);
        let mut next = HEADER_SECTORS;
        let slots = [(); LUKS_SLOTS].map(|()| {
            let key_sector = next;
            next += sectors;
            LuksSlot {
                key_sector,
                stripes: STRIPES,
                ..LuksSlot::default()
            }
        });
        (slots, next)
    }

    /// The bytes of the header, which [`LuksHeader::decode`] reads.
    #[must_use]
    pub fn encode(&self) -> [u8; LUKS_HEADER_BYTES] {
        let mut mode = format!("{}-{}", self.mode.name(), self.iv_generator.name());
        if let Some(hash) = self.iv_generator.hash() {
            mode = format!("{mode}:{}", hash.name());
        }
        let names = [self.cipher.algorithm.name(), &mode, self.hash.name()];
        let mut out = [&MAGIC[..], &VERSION.to_be_bytes()].concat();
        names
            .into_iter()
            .for_each(|name| put_text(&mut out, name.as_bytes(), 32));
        out.extend(self.payload_sector.to_be_bytes());
        out.extend(self.key_bytes.to_be_bytes());
        out.extend(self.digest);
        out.extend(self.digest_salt);
        out.extend(self.digest_iterations.to_be_bytes());
        put_text(&mut out, &self.uuid, 40);
        for slot in &self.slots {
            out.extend(match slot.active {
                true => SLOT_ACTIVE.to_be_bytes(),
                false => SLOT_INACTIVE.to_be_bytes(),
            });
            out.extend(slot.iterations.to_be_bytes());
            out.extend(slot.salt);
            out.extend(slot.key_sector.to_be_bytes());
            out.extend(slot.stripes.to_be_bytes());
        }
        let mut bytes = [0; LUKS_HEADER_BYTES];
        bytes.copy_from_slice(&out);
        bytes
    }
}

/// Appends a text and zeroes, `length` bytes together.
fn put_text(out: &mut Vec<u8>, text: &[u8], length: usize) {
    let text = text.iter().copied();
    out.extend(text.chain(std::iter::repeat(0)).take(length));
}

/// Sectors that the key material of a slot takes.
fn slot_sectors(key_bytes: u32) -> u32 {
    let material = u64::from(key_bytes) * u64::from(STRIPES);
    (material.next_multiple_of(ALIGNMENT) / SECTOR) as u32
}

/// What is left of the header to be read, front to back.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], LuksError> {
        let (field, rest) = self.0.split_first_chunk().ok_or(LuksError::Short)?;
        self.0 = rest;
        Ok(*field)
    }

    fn number(&mut self) -> Result<u32, LuksError> {
        Ok(u32::from_be_bytes(self.take()?))
    }
}

fn up_to_nul(field: &[u8]) -> Option<&[u8]> {
    let end = field.iter().position(|byte| *byte == 0)?;
    field.get(..end)
}

fn terminated<'a>(field: &'a [u8], what: &'static str) -> Result<&'a [u8], LuksError> {
    up_to_nul(field).ok_or(LuksError::Unterminated(what))
}

/// The slots, which end the header.
fn decode_slots(
    mut fields: Fields<'_>,
    payload_sector: u32,
    key_bytes: u32,
) -> Result<[LuksSlot; LUKS_SLOTS], LuksError> {
    let mut slots = [LuksSlot::default(); LUKS_SLOTS];
    let mut states = [0; LUKS_SLOTS];
    for (slot, state) in slots.iter_mut().zip(&mut states) {
        *state = fields.number()?;
        *slot = LuksSlot {
            active: *state == SLOT_ACTIVE,
            iterations: fields.number()?,
            salt: fields.take()?,
            key_sector: fields.number()?,
            stripes: fields.number()?,
        };
    }
    let sectors = slot_sectors(key_bytes);
    let end = |slot: &LuksSlot| u64::from(slot.key_sector) + u64::from(sectors);
    for (index, (slot, state)) in slots.iter().zip(states).enumerate() {
        if slot.stripes != STRIPES {
            return Err(LuksError::SlotStripes {
                slot: index,
                stripes: slot.stripes,
            });
        }
        if ![SLOT_ACTIVE, SLOT_INACTIVE].contains(&state) {
            return Err(LuksError::SlotState(index));
        }
        if slot.active && slot.iterations == 0 {
            return Err(LuksError::SlotNoIterations(index));
        }
        if slot.key_sector < HEADER_SECTORS {
            return Err(LuksError::SlotInHeader(index));
        }
        // QEMU lets this sum wrap at 2 TiB.
        if slot.key_sector.wrapping_add(sectors) > payload_sector {
            return Err(LuksError::SlotInPayload(index));
        }
        for (later, other) in slots.iter().enumerate().skip(index + 1) {
            if end(slot) > other.key_sector.into() && end(other) > slot.key_sector.into() {
                return Err(LuksError::SlotsOverlap(index, later));
            }
        }
    }
    Ok(slots)
}

fn split_once(text: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|byte| *byte == separator)?;
    Some((text.get(..at)?, text.get(at + 1..)?))
}

fn find_cipher(name: &[u8], mode: LuksMode, key_bytes: u32) -> Result<LuksCipher, LuksError> {
    let key_bytes = match mode {
        LuksMode::Xts => key_bytes / 2,
        LuksMode::Ecb | LuksMode::Cbc | LuksMode::Ctr => key_bytes,
    };
    LuksAlgorithm::find(name)
        .filter(|algorithm| algorithm.takes_key(key_bytes))
        .map(|algorithm| LuksCipher {
            algorithm,
            key_bytes,
        })
        .ok_or_else(|| LuksError::Cipher {
            name: printable(name),
            key_bytes,
        })
}

#[cfg(test)]
mod tests {
    //! Guards against a header that causes a panic, and wrong information about the encryption.
    use super::*;
    use proptest::prelude::*;

    /// A header like that of a new image.
    fn header() -> Vec<u8> {
        let mut out = [&MAGIC[..], &VERSION.to_be_bytes()].concat();
        for name in ["aes", "xts-plain64", "sha256"] {
            out.extend(name.bytes().chain(std::iter::repeat(0)).take(32));
        }
        out.extend([4040u32.to_be_bytes(), 64u32.to_be_bytes()].concat());
        out.extend([0x11; 20]);
        out.extend([0x22; 32]);
        out.extend(8015u32.to_be_bytes());
        out.extend(b"3651d535-4782-4bce-8ed6-de231444061f\0\0\0\0");
        for slot in 0..LUKS_SLOTS as u32 {
            let (state, iterations) = match slot {
                0 => (SLOT_ACTIVE, 33334u32),
                _ => (SLOT_INACTIVE, 0),
            };
            out.extend([state.to_be_bytes(), iterations.to_be_bytes()].concat());
            out.extend([slot as u8; 32]);
            out.extend([(8 + 504 * slot).to_be_bytes(), STRIPES.to_be_bytes()].concat());
        }
        assert_eq!(out.len(), LUKS_HEADER_BYTES);
        out
    }

    fn patched(patches: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = header();
        for (at, patch) in patches {
            bytes[*at..at + patch.len()].copy_from_slice(patch);
        }
        bytes
    }

    const CIPHER: usize = 8;
    const MODE: usize = 40;
    const HASH: usize = 72;
    const PAYLOAD: usize = 104;
    const KEY_BYTES: usize = 108;
    const ITERATIONS: usize = 164;
    const UUID: usize = 168;
    const SLOTS: usize = 208;

    #[test]
    fn known_header() {
        let bytes = header();
        let header = LuksHeader::decode(&bytes).unwrap();
        assert_eq!(header.encode()[..], bytes);
        let (slots, payload) = LuksHeader::new_slots(header.key_bytes);
        assert_eq!(payload, header.payload_sector);
        let sectors = |slots: [LuksSlot; LUKS_SLOTS]| slots.map(|slot| slot.key_sector);
        assert_eq!(sectors(slots), sectors(header.slots));
        assert_eq!(header.cipher.to_string(), "aes-256");
        assert_eq!(header.mode, LuksMode::Xts);
        assert_eq!(header.iv_generator, LuksIvGenerator::Plain64);
        assert_eq!(header.hash, LuksHash::Sha256);
        assert_eq!(header.payload_offset(), 2_068_480);
        assert_eq!(header.digest_iterations, 8015);
        assert_eq!(header.uuid, b"3651d535-4782-4bce-8ed6-de231444061f");
        let active: Vec<bool> = header.slots.iter().map(|slot| slot.active).collect();
        assert_eq!(
            active,
            [true, false, false, false, false, false, false, false]
        );
        assert_eq!(header.slots[0].iterations, 33334);
        assert_eq!(header.slots[0].key_offset(), 4096);
        assert_eq!(header.slots[7].key_offset(), 1_810_432);
        assert_eq!(header.slots[7].salt, [7; 32]);
    }

    #[test]
    fn names_are_decoded() {
        for (cipher, mode, key_bytes, expected) in [
            (
                &b"serpent\0"[..],
                &b"cbc-essiv:sha256\0"[..],
                32u32,
                "serpent-256 cbc essiv sha256",
            ),
            (b"twofish\0", b"ctr-plain\0", 24, "twofish-192 ctr plain"),
            (
                b"cast5\0",
                b"ecb-plain64:md5\0",
                16,
                "cast5-128 ecb plain64",
            ),
            (
                b"cast5\0",
                b"cbc-essiv:md5\0",
                16,
                "cast5-128 cbc essiv md5",
            ),
            (b"aes\0", b"xts-plain64\0", 33, "aes-128 xts plain64"),
        ] {
            let bytes = patched(&[
                (CIPHER, cipher),
                (MODE, mode),
                (KEY_BYTES, &key_bytes.to_be_bytes()),
            ]);
            let header = LuksHeader::decode(&bytes).unwrap();
            let mut text = format!(
                "{} {} {}",
                header.cipher,
                header.mode.name(),
                header.iv_generator.name()
            );
            if let Some(hash) = header.iv_generator.hash() {
                text += &format!(" {}", hash.name());
            }
            assert_eq!(text, expected);
        }
        let full = LuksHeader::decode(&patched(&[(UUID, &[b'z'; 40])])).unwrap();
        assert_eq!(full.uuid, [b'z'; 40]);
    }

    #[test]
    fn errors_name_the_invalid_field() {
        let slot = |n: usize| SLOTS + 48 * n;
        let zero = 0u32.to_be_bytes();
        for (at, patch, message) in [
            (0, &b"X"[..], "Volume is not in LUKS format"),
            (6, &[0, 2], "LUKS version 2 is not supported"),
            (
                CIPHER,
                &[b'x'; 32],
                "LUKS header cipher name is not NUL terminated",
            ),
            (
                MODE,
                &[b'x'; 32],
                "LUKS header cipher mode is not NUL terminated",
            ),
            (
                HASH,
                &[b'x'; 32],
                "LUKS header hash spec is not NUL terminated",
            ),
            (
                PAYLOAD,
                &zero,
                "LUKS payload is overlapping with the header",
            ),
            (
                PAYLOAD,
                &[0, 0, 0, 9],
                "Keyslot 0 is overlapping with the encrypted payload",
            ),
            (ITERATIONS, &zero, "LUKS key iteration count is zero"),
            (
                slot(1) + 44,
                &[0xff; 4],
                "Keyslot 1 is corrupted (stripes -1 != 4000)",
            ),
            (
                slot(7),
                &zero,
                "Keyslot 7 state (active/disable) is corrupted",
            ),
            (slot(0) + 4, &zero, "Keyslot 0 iteration count is zero"),
            (
                slot(0) + 40,
                &zero,
                "Keyslot 0 is overlapping with the LUKS header",
            ),
            (
                slot(2) + 40,
                &[0, 0, 0, 8],
                "Keyslots 0 and 2 are overlapping in the header",
            ),
            (MODE, b"xts\0", "Unexpected cipher mode string format 'xts'"),
            (MODE, b"lrw-plain\0", "Cipher mode 'lrw' not supported"),
            (MODE, b"xts-be\n\0", "IV generator 'be\\n' not supported"),
            (MODE, b"xts-plain:x\0", "Hash algorithm 'x' not supported"),
            (
                MODE,
                b"xts-essiv\0",
                "Missing IV generator hash specification",
            ),
            (
                MODE,
                b"xts-essiv:sha1\0",
                "No AES cipher with key size 20 available",
            ),
            (
                MODE,
                b"cbc-plain\0",
                "Algorithm 'aes' with key size 64 bytes not supported",
            ),
            (
                CIPHER,
                b"des\0",
                "Algorithm 'des' with key size 32 bytes not supported",
            ),
            (HASH, b"SHA1\0", "Hash algorithm 'SHA1' not supported"),
        ] {
            let error = LuksHeader::decode(&patched(&[(at, patch)])).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
        for length in 0..LUKS_HEADER_BYTES {
            let result = LuksHeader::decode(&header()[..length]);
            assert_eq!(result, Err(LuksError::Short));
        }
    }

    proptest! {
        /// Any bytes decode or fail, and so does a header with any damage.
        #[test]
        fn any_bytes(
            bytes in proptest::collection::vec(any::<u8>(), 0..700),
            damage in proptest::collection::vec((0..LUKS_HEADER_BYTES, any::<u8>()), 0..4),
        ) {
            let _ = LuksHeader::decode(&bytes);
            let mut header = header();
            for (at, byte) in damage {
                header[at] = byte;
            }
            if let Err(error) = LuksHeader::decode(&header) {
                prop_assert!(!error.to_string().contains('\n'));
            }
            // What was read comes back, but for what follows the end of a text.
            if let Ok(read) = LuksHeader::decode(&header) {
                prop_assert_eq!(LuksHeader::decode(&read.encode()), Ok(read));
            }
        }

        /// The bytes behind the header do not matter.
        #[test]
        fn any_field_values(key_bytes: u32, payload: u32, sectors: [u32; LUKS_SLOTS]) {
            let mut bytes = header();
            bytes[PAYLOAD..PAYLOAD + 4].copy_from_slice(&payload.to_be_bytes());
            bytes[KEY_BYTES..KEY_BYTES + 4].copy_from_slice(&key_bytes.to_be_bytes());
            for (slot, sector) in bytes[SLOTS..].chunks_exact_mut(48).zip(sectors) {
                slot[40..44].copy_from_slice(&sector.to_be_bytes());
            }
            let once = LuksHeader::decode(&bytes);
            bytes.extend([0xff; 100]);
            prop_assert_eq!(once, LuksHeader::decode(&bytes));
        }
    }
}
