//! New LUKS1 containers, as QEMU makes them.

use std::sync::Arc;
use std::time::Duration;

use zebu_core::Result;
use zebu_core::parts::drivers::structures::{
    LUKS_HEADER_BYTES, LuksAlgorithm, LuksCipher, LuksHash, LuksHeader, LuksIvGenerator, LuksMode,
};
use zebu_core::parts::drivers::{
    BoxFuture, CreateOption, CreateValues, ImagePlan, Making, NewEncryption, NewImage, OptionKind,
    PlanRequest, Preallocation, check_inside, make_valid, random_uuid, refused, too_large,
};
use zebu_core::parts::filters::FilteredFile;
use zebu_core::parts::storage::{self, Iov, LockRequest, Secret};
use zebu_core::{Queue, Storage};
use zeroize::Zeroizing;

use super::cost::iterations;
use crate::keys::{MasterKey, material_bytes, protect};
use crate::sectors::Sectors;
use crate::{CryptError, Encrypted};

/// In the order in which they are shown.
pub(super) static CREATE_OPTIONS: [CreateOption; 11] = [
    text("cipher-alg", "Name of encryption cipher algorithm"),
    text("cipher-mode", "Name of encryption cipher mode"),
    text("hash-alg", "Name of encryption hash algorithm"),
    CreateOption::new(
        "iter-time",
        OptionKind::Number,
        "Time to spend in PBKDF in milliseconds",
    ),
    text("ivgen-alg", "Name of IV generator algorithm"),
    text("ivgen-hash-alg", "Name of IV generator hash algorithm"),
    text(
        "key-secret",
        "ID of the secret that provides the keyslot passphrase",
    ),
    CreateOption::SIZE,
    CreateOption::NOCOW,
    CreateOption::FILE_PREALLOCATION,
    CreateOption::EXTENT_SIZE_HINT,
];

const fn text(name: &'static str, help: &'static str) -> CreateOption {
    CreateOption::new(name, OptionKind::Text, help)
}

const SECTOR: u64 = 512;
/// The name of the cipher of a container that is not finished.
const UNFINISHED: &[u8] = b"zebu-unfinished";
/// Where the name of the cipher is in a header.
const CIPHER_NAME: usize = 8;
/// Milliseconds that a passphrase takes if nothing else is asked for, as in QEMU.
const TIME: u64 = 2000;
/// The digest of the key takes this part of the time of a passphrase.
const DIGEST_PART: u32 = 8;

/// Whether a container that begins with `bytes` is not finished.
pub(super) fn is_unfinished(bytes: &[u8]) -> bool {
    let name = bytes.get(CIPHER_NAME..CIPHER_NAME + UNFINISHED.len());
    name == Some(UNFINISHED)
}

/// How a new container is encrypted.
#[derive(Clone, Copy, Debug)]
struct Kind {
    cipher: LuksCipher,
    mode: LuksMode,
    iv: LuksIvGenerator,
    hash: LuksHash,
    time: Duration,
}

impl Kind {
    fn of(options: Named<'_>) -> Result<Kind> {
        let cipher = match options.word("cipher-alg") {
            None => cipher("aes-256"),
            Some(name) => cipher(name),
        };
        let cipher = cipher.ok_or_else(|| options.unknown("cipher-alg"))?;
        let mode = options
            .find("cipher-mode", LuksMode::find)?
            .unwrap_or(LuksMode::Xts);
        let hash = options
            .find("hash-alg", LuksHash::find)?
            .unwrap_or(LuksHash::Sha256);
        let iv_hash = options.find("ivgen-hash-alg", LuksHash::find)?;
        let iv = match options.word("ivgen-alg") {
            None | Some("plain64") => LuksIvGenerator::Plain64,
            Some("plain") => LuksIvGenerator::Plain,
            Some("essiv") => LuksIvGenerator::Essiv(iv_hash.unwrap_or(LuksHash::Sha256)),
            Some(_) => return Err(options.unknown("ivgen-alg")),
        };
        let time = match options.values.number(&options.name("iter-time")) {
            None => TIME,
            Some(time) => time,
        };
        let kind = Kind {
            cipher,
            mode,
            iv,
            hash,
            time: Duration::from_millis(time),
        };
        // Whether there are these ciphers and hashes.
        let key = vec![0; kind.key_bytes() as usize];
        let sectors = Sectors::new(cipher, mode, iv, &key, SECTOR as usize);
        sectors.map_err(failed)?;
        crate::hash::digest(hash, &[]).map_err(failed)?;
        Ok(kind)
    }

    fn key_bytes(&self) -> u32 {
        match self.mode {
            LuksMode::Xts => 2 * self.cipher.key_bytes,
            LuksMode::Ecb | LuksMode::Cbc | LuksMode::Ctr => self.cipher.key_bytes,
        }
    }

    /// The header of a container with this key, whose slots are not active.
    fn header(&self, key: &MasterKey) -> Result<LuksHeader> {
        let (slots, payload_sector) = LuksHeader::new_slots(self.key_bytes());
        let time = self.time / DIGEST_PART;
        let mut header = LuksHeader {
            cipher: self.cipher,
            mode: self.mode,
            iv_generator: self.iv,
            hash: self.hash,
            payload_sector,
            key_bytes: self.key_bytes(),
            digest: [0; 20],
            digest_salt: *random_salt()?,
            digest_iterations: iterations(self.hash, 20, time).map_err(failed)?,
            uuid: uuid()?.into_bytes(),
            slots,
        };
        header.digest = key.digest(&header).map_err(failed)?;
        Ok(header)
    }
}

/// The cipher of a name like `aes-256`.
fn cipher(name: &str) -> Option<LuksCipher> {
    let (algorithm, bits) = name.rsplit_once('-')?;
    let algorithm = LuksAlgorithm::find(algorithm.as_bytes())?;
    let bits: u32 = bits.parse().ok()?;
    let key_bytes = bits / 8;
    let cipher = LuksCipher {
        algorithm,
        key_bytes,
    };
    (algorithm.takes_key(key_bytes) && cipher.to_string() == name).then_some(cipher)
}

/// The values of options whose names begin alike.
#[derive(Clone, Copy)]
pub(super) struct Named<'a> {
    pub values: &'a CreateValues,
    pub prefix: &'static str,
}

impl<'a> Named<'a> {
    fn name(self, option: &str) -> String {
        format!("{}{option}", self.prefix)
    }

    fn word(self, option: &str) -> Option<&'a str> {
        self.values.word(&self.name(option))
    }

    /// The value of an option by its name.
    fn find<T>(self, option: &str, find: fn(&[u8]) -> Option<T>) -> Result<Option<T>> {
        let Some(name) = self.word(option) else {
            return Ok(None);
        };
        match find(name.as_bytes()) {
            None => Err(self.unknown(option)),
            found => Ok(found),
        }
    }

    /// The error of a name that an option does not have.
    fn unknown(self, option: &str) -> zebu_core::Error {
        let name = self.word(option).unwrap_or_default();
        refused(format!(
            "Parameter '{option}' does not accept value '{name}'"
        ))
    }
}

fn failed(error: CryptError) -> zebu_core::Error {
    refused(error.to_string())
}

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
    fn payload_offset(&self) -> u64 {
        let (_, payload) = LuksHeader::new_slots(self.kind.key_bytes());
        u64::from(payload) * SECTOR
    }

    /// The header with one slot, and its key material.
    fn seal(&self, key: &MasterKey) -> Result<(LuksHeader, Vec<u8>)> {
        let mut header = self.kind.header(key)?;
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
    fn key(&self) -> Result<MasterKey> {
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

#[derive(Debug)]
struct Plan {
    size: u64,
    new: NewHeader,
    preallocation: Preallocation,
}

pub(super) fn plan(request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
    let new = NewHeader::of(Named {
        values: request.options,
        prefix: "",
    })?;
    let is_possible = |size: &u64| {
        let end = size.checked_add(new.payload_offset());
        end.is_some_and(|end| end <= i64::MAX as u64)
    };
    let size = request.size.checked_next_multiple_of(SECTOR);
    let size = size.filter(is_possible);
    Ok(Box::new(Plan {
        size: size.ok_or_else(|| too_large("The requested file size is too large"))?,
        new,
        preallocation: request.options.file_preallocation()?,
    }))
}

impl ImagePlan for Plan {
    fn size(&self) -> u64 {
        self.size
    }

    fn alignment(&self) -> u64 {
        SECTOR
    }

    fn lock(&self) -> LockRequest {
        LockRequest::CREATE
    }

    fn key(&self) -> Option<&Secret> {
        Some(&self.new.secret)
    }

    fn overhead(&self) -> Option<u64> {
        Some(self.new.payload_offset())
    }

    fn compression(&self) -> Option<zebu_core::parts::codec::Compression> {
        None
    }

    fn mark(&self) -> Result<Option<Vec<u8>>> {
        let mut mark = vec![0; SECTOR as usize];
        mark[..CIPHER_NAME].copy_from_slice(b"LUKS\xba\xbe\0\x01");
        mark[CIPHER_NAME..CIPHER_NAME + UNFINISHED.len()].copy_from_slice(UNFINISHED);
        Ok(Some(mark))
    }

    fn begin<'a>(
        &'a self,
        queue: &'a Queue,
        files: Vec<Arc<dyn Storage>>,
    ) -> BoxFuture<'a, Result<Box<dyn NewImage>>> {
        Box::pin(async move {
            let [file] = <[_; 1]>::try_from(files).expect("the image's own file");
            let key = self.new.key()?;
            let (header, material) = self.new.seal(&key)?;
            let start = header.payload_offset();
            storage::set_len(&*file, queue, start + self.size).await?;
            let making = Making {
                queue,
                report: &(),
                preallocation: self.preallocation,
            };
            if self.preallocation != Preallocation::Off {
                making.allocate(&*file, start, self.size).await?;
            }
            let filter = Encrypted::new(key.cipher(&header).map_err(failed)?, start);
            let disk = FilteredFile::new(Arc::new(filter), file.clone());
            Ok(Box::new(NewLuks {
                file,
                disk,
                header,
                material,
                size: self.size,
            }) as Box<dyn NewImage>)
        })
    }
}

/// A container that is being filled.
#[derive(Debug)]
struct NewLuks {
    file: Arc<dyn Storage>,
    /// The file, whose payload is encrypted when it is written.
    disk: FilteredFile,
    header: LuksHeader,
    /// The key material of the first slot.
    material: Vec<u8>,
    size: u64,
}

impl NewImage for NewLuks {
    /// What is not written is what zeroes, or old content, decrypt to.
    fn is_filled_whole(&self) -> bool {
        true
    }

    fn has_order(&self) -> bool {
        false
    }

    fn write<'a>(&'a self, queue: &'a Queue, offset: u64, iov: Iov) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_inside(offset, &iov, self.size)?;
            let at = self.header.payload_offset() + offset;
            Ok(storage::write(&self.disk, queue, at, &iov).await?)
        })
    }

    fn finish<'a>(self: Box<Self>, queue: &'a Queue) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let file = &*self.file;
            let at = self.header.slots[0].key_offset();
            storage::write_slice(file, queue, at, &self.material).await?;
            let bytes = self.header.encode();
            let (first, rest) = bytes.split_at(SECTOR as usize);
            debug_assert_eq!(first.len() + rest.len(), LUKS_HEADER_BYTES);
            storage::write_slice(file, queue, SECTOR, rest).await?;
            make_valid(file, queue, 0, first).await
        })
    }
}
