//! LUKS2 containers of cryptsetup are unlocked and their payload decrypted, and cryptsetup takes those that zebu
//! makes and changes. Damage, and ends between two writes, leave a container that opens. No metadata cause a panic.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zebu_core::parts::drivers::structures::LuksHash;
use zebu_crypt::luks2::{
    Argon2Variant, Change, Encryption, Kdf, Limits, Luks2, Luks2Error, NewLuks2, NewSlot, Search,
};
use zebu_crypt::{Cipher, MasterKey};
use zeroize::Zeroizing;

zebu_core::register!(formats: [zebu_crypt::FORMATS], protocols: &[], encryption: zebu_crypt::ENCRYPTION);

/// Bytes of each copy of a header.
const HEADER: usize = 16 << 10;
const BINARY: usize = 4096;
const CHECKSUM: Range<usize> = 448..512;
const FAST: Kdf = Kdf::Pbkdf2 {
    hash: LuksHash::Sha256,
    iterations: 1000,
};
const ARGON2: Kdf = Kdf::Argon2 {
    variant: Argon2Variant::Id,
    time: 4,
    memory: 64,
    cpus: 2,
};

fn random(bytes: usize) -> Zeroizing<Vec<u8>> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).unwrap();
    random.into()
}

/// The header of a file, and which ranges were read.
fn find(file: &[u8]) -> (Result<Luks2, Luks2Error>, Vec<Range<u64>>) {
    let mut search = Search::new(file.len() as u64);
    let mut read = Vec::new();
    while let Some(range) = search.wants() {
        search.give(&file[range.start as usize..range.end as usize]);
        read.push(range);
        assert!(read.len() < 20);
    }
    (search.finish(), read)
}

fn header(file: &[u8]) -> Luks2 {
    find(file).0.unwrap()
}

fn unlock(file: &[u8], slot: u32, passphrase: &str) -> Option<MasterKey> {
    let header = header(file);
    let range = header.material(slot).unwrap();
    let material = file[range.start as usize..range.end as usize].to_vec();
    let (passphrase, limits) = (passphrase.as_bytes(), Limits::default());
    header
        .unlock(slot, material.into(), passphrase, &limits)
        .unwrap()
}

fn apply(change: &Change, file: &mut Vec<u8>) {
    for write in &change.writes {
        put(file, write.offset as usize, &write.bytes);
    }
}

fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    file.resize(file.len().max(at + bytes.len()), 0);
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

fn add(file: &mut Vec<u8>, key: &MasterKey, number: u32, kdf: Kdf, passphrase: &str) {
    let header = header(file);
    let slot = NewSlot {
        number: Some(number),
        kdf,
        hash: LuksHash::Sha256,
    };
    let random = random(header.random_bytes());
    let change = header.add(&slot, key, passphrase.as_bytes(), random);
    apply(&change.unwrap(), file);
}

fn remove(file: &mut Vec<u8>, number: u32) {
    let header = header(file);
    let change = header.remove(number, random(header.random_bytes()));
    apply(&change.unwrap(), file);
}

/// A container with the passphrase `first`, and its key.
fn create(new: &NewLuks2, key_bytes: usize) -> (Vec<u8>, MasterKey) {
    let key = MasterKey::new(random(key_bytes).to_vec());
    let change = new.create(&key, b"first", random(new.random_bytes(key_bytes)));
    let mut file = Vec::new();
    apply(&change.unwrap(), &mut file);
    file.resize(16 << 20, 0);
    (file, key)
}

/// A small container, whose key material is quickly unlocked.
fn small() -> (Vec<u8>, MasterKey) {
    let new = NewLuks2 {
        slot_area_bytes: 1 << 20,
        kdf: FAST,
        ..NewLuks2::default()
    };
    let (mut file, key) = create(&new, 32);
    file.truncate(2 << 20);
    (file, key)
}

/// The metadata of the first copy.
fn metadata(file: &[u8]) -> Value {
    let text = &file[BINARY..HEADER];
    let end = text.iter().position(|byte| *byte == 0).unwrap();
    serde_json::from_slice(&text[..end]).unwrap()
}

/// Replaces the metadata of both copies, with right checksums.
fn set_metadata(file: &mut [u8], metadata: &Value) {
    let text = metadata.to_string();
    for copy in file[..2 * HEADER].chunks_exact_mut(HEADER) {
        copy[BINARY..].fill(0);
        copy[BINARY..BINARY + text.len()].copy_from_slice(text.as_bytes());
        copy[CHECKSUM].fill(0);
        let sum = Sha256::digest(&*copy);
        copy[CHECKSUM][..32].copy_from_slice(&sum);
    }
}

/// A folder with files of passphrases, in which cryptsetup runs.
struct Cryptsetup(TempDir);

impl Cryptsetup {
    fn new() -> Option<Self> {
        let this = Cryptsetup(TempDir::new().unwrap());
        for name in ["first", "second", "third"] {
            fs::write(this.path().join(name), name).unwrap();
        }
        if this.run("--version").is_none() {
            println!("skipped: no cryptsetup");
            return None;
        }
        Some(this)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// What it printed; None: it failed.
    fn run(&self, args: &str) -> Option<String> {
        let output = Command::new("cryptsetup")
            .args(args.split(' '))
            .current_dir(self.path())
            .output()
            .ok()?;
        if !output.status.success() {
            println!("{args}: {}", String::from_utf8_lossy(&output.stderr));
        }
        let success = output.status.success();
        success.then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A new container; None if this cryptsetup has no such cipher without the kernel.
    fn format(&self, options: &str) -> Option<Vec<u8>> {
        fs::write(self.path().join("x"), vec![0; 17 << 20]).unwrap();
        let args = format!("luksFormat --type luks2 --batch-mode {options} x first");
        self.run(&args).map(|_| self.read("x"))
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path().join(name)).unwrap()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path().join(name), bytes).unwrap();
    }

    /// Whether it takes the passphrase for `x`.
    fn opens(&self, passphrase: &str) -> bool {
        let args = format!("open --test-passphrase --type luks2 --key-file {passphrase} x");
        self.run(&args).is_some()
    }
}

const QUICK: &str = "--pbkdf pbkdf2 --pbkdf-force-iterations 1000";

#[test]
fn containers_of_cryptsetup() {
    let Some(cryptsetup) = Cryptsetup::new() else {
        return;
    };
    let mut cases = 0;
    let argon2 = "--pbkdf-memory 64 --pbkdf-force-iterations 4 --pbkdf-parallel";
    for options in [
        format!("--pbkdf argon2id {argon2} 1 --sector-size 4096"),
        format!("--pbkdf argon2id {argon2} 4 --label some --subsystem other"),
        format!("--pbkdf argon2i {argon2} 2 --sector-size 2048"),
        format!("{QUICK} --hash sha512 --sector-size 1024"),
        format!("{QUICK} -c aes-cbc-essiv:sha256 -s 256 --hash sha1 --luks2-metadata-size 64k"),
        format!("{QUICK} -c serpent-xts-plain64 -s 256 --hash ripemd160"),
        format!("{QUICK} -c twofish-cbc-plain -s 128"),
    ] {
        let Some(mut file) = cryptsetup.format(&options) else {
            println!("skipped: {options}");
            continue;
        };
        assert!(unlock(&file, 0, "First").is_none(), "{options}");
        let key = unlock(&file, 0, "first").expect("the passphrase is right");
        assert_eq!(header(&file).slots(), [0]);
        assert!(!header(&file).needs_repair());
        add(&mut file, &key, 3, ARGON2, "third");
        cryptsetup.write("x", &file);
        assert!(
            cryptsetup.opens("first") && cryptsetup.opens("third"),
            "{options}"
        );
        assert!(!cryptsetup.opens("second"), "{options}");
        remove(&mut file, 0);
        cryptsetup.write("x", &file);
        assert!(
            !cryptsetup.opens("first") && cryptsetup.opens("third"),
            "{options}"
        );
        // Now the other way.
        let args = format!("luksAddKey {QUICK} --key-file third x second");
        cryptsetup.run(&args).expect(&options);
        let file = cryptsetup.read("x");
        assert_eq!(header(&file).slots(), [0, 3]);
        assert!(unlock(&file, 0, "second").is_some(), "{options}");
        cryptsetup.run("luksKillSlot --batch-mode x 3").unwrap();
        assert_eq!(header(&cryptsetup.read("x")).slots(), [0], "{options}");
        cases += 1;
    }
    assert!(cases > 4);
    println!("cases: {cases} containers of cryptsetup");
}

#[test]
fn priorities_are_those_of_cryptsetup() {
    let Some(cryptsetup) = Cryptsetup::new() else {
        return;
    };
    cryptsetup.format(QUICK).unwrap();
    for passphrase in ["second", "third"] {
        let args = format!("luksAddKey {QUICK} --key-file first x {passphrase}");
        cryptsetup.run(&args).unwrap();
    }
    cryptsetup.run("config --key-slot 0 --priority ignore x");
    cryptsetup.run("config --key-slot 2 --priority prefer x");
    let file = cryptsetup.read("x");
    assert_eq!(header(&file).slots(), [2, 1]);
    assert!(unlock(&file, 0, "first").is_some());
}

#[test]
fn new_containers() {
    let Some(cryptsetup) = Cryptsetup::new() else {
        return;
    };
    let named = |name| Encryption::named(name).unwrap();
    let new = NewLuks2 {
        kdf: ARGON2,
        ..NewLuks2::default()
    };
    for (new, key_bytes) in [
        (new.clone(), 64),
        (
            NewLuks2 {
                sector_bytes: 4096,
                label: "some".into(),
                ..new.clone()
            },
            64,
        ),
        (
            NewLuks2 {
                header_bytes: 64 << 10,
                slot_area_bytes: 2 << 20,
                encryption: named("aes-cbc-essiv:sha256"),
                hash: LuksHash::Sha512,
                kdf: FAST,
                ..new.clone()
            },
            32,
        ),
        (
            NewLuks2 {
                encryption: named("aes-xts-plain64"),
                payload_offset: Some(17 << 20),
                ..new.clone()
            },
            32,
        ),
    ] {
        let (mut file, key) = create(&new, key_bytes);
        file.resize(18 << 20, 0);
        cryptsetup.write("x", &file);
        assert!(cryptsetup.opens("first"), "{new:?}");
        assert!(!cryptsetup.opens("second"), "{new:?}");
        let dump = cryptsetup.run("luksDump x").unwrap();
        let header = header(&file);
        let uuid = String::from_utf8(header.uuid().to_vec()).unwrap();
        for text in [
            uuid,
            format!("sector: {} [bytes]", new.sector_bytes),
            format!("offset: {} [bytes]", header.segment().offset),
            format!("cipher: {}", new.encryption),
            new.label.clone(),
        ] {
            assert!(dump.contains(&text), "{text}: {dump}");
        }
        let payload = header.payload(file.len() as u64).unwrap();
        assert_eq!(payload, header.segment().offset..18 << 20);
        for number in 1..4 {
            add(&mut file, &key, number, FAST, "second");
        }
        cryptsetup.write("x", &file);
        assert!(cryptsetup.opens("second"), "{new:?}");
    }
}

/// Sectors that differ.
fn plain() -> Vec<u8> {
    (0..1 << 18)
        .map(|n: u32| (n / 512 + n % 512) as u8)
        .collect()
}

/// Encrypts `plain` as `data`, with the header in `x`; None if this cryptsetup does not without the kernel.
fn encrypt(cryptsetup: &Cryptsetup, options: &str) -> Option<Vec<u8>> {
    cryptsetup.write("data", &plain());
    let _ = fs::remove_file(cryptsetup.path().join("x"));
    let args = format!(
        "reencrypt --encrypt --type luks2 --header x {QUICK} {options} --batch-mode --key-file first data"
    );
    if cryptsetup.run(&args).is_none() {
        println!("skipped: this cryptsetup does not encrypt without the kernel");
        return None;
    }
    Some(cryptsetup.read("data"))
}

#[test]
fn payloads_that_cryptsetup_encrypts() {
    let Some(cryptsetup) = Cryptsetup::new() else {
        return;
    };
    for options in [
        "--sector-size 512",
        "--sector-size 1024",
        "--sector-size 4096",
        "--sector-size 4096 -c aes-cbc-essiv:sha256 -s 256",
        "--sector-size 2048 -c aes-cbc-plain64 -s 256",
    ] {
        let Some(mut data) = encrypt(&cryptsetup, options) else {
            return;
        };
        assert!(data != plain(), "{options}");
        let file = cryptsetup.read("x");
        let key = unlock(&file, 0, "first").expect("the passphrase is right");
        let header = header(&file);
        assert_eq!(header.payload(1 << 18), Err(Luks2Error::PayloadInHeader));
        assert_eq!(header.detached_payload(1 << 18), Ok(0..1 << 18));
        header.cipher(&key).unwrap().decrypt(0, &mut data);
        assert!(data == plain(), "{options}");
    }
}

#[test]
fn payloads_that_cryptsetup_decrypts() {
    let Some(cryptsetup) = Cryptsetup::new() else {
        return;
    };
    if encrypt(&cryptsetup, "").is_none() {
        return;
    }
    for (sector_bytes, tweak) in [(512, 0), (4096, 0), (4096, 8), (1024, 1u64 << 33)] {
        let new = NewLuks2 {
            sector_bytes,
            kdf: FAST,
            payload_offset: Some(0),
            ..NewLuks2::default()
        };
        let (mut file, key) = create(&new, 64);
        let mut values = metadata(&file);
        values["segments"]["0"]["iv_tweak"] = json!(tweak.to_string());
        set_metadata(&mut file, &values);
        let mut data = plain();
        let cipher = header(&file).cipher(&key).unwrap();
        cipher.encrypt(0, &mut data);
        cryptsetup.write("x", &file);
        cryptsetup.write("data", &data);
        let args = "reencrypt --decrypt --force-offline-reencrypt --header x --batch-mode --key-file first data";
        cryptsetup.run(args).expect("it encrypts, too");
        assert!(cryptsetup.read("data") == plain(), "{sector_bytes} {tweak}");
    }
}

#[test]
fn little_is_read() {
    let (file, _) = small();
    let (found, read) = find(&file);
    assert!(found.is_ok());
    assert_eq!(read, [0..16 << 10, 16 << 10..32 << 10]);
    assert_eq!(find(&[]).0.unwrap_err(), Luks2Error::NotLuks);
    assert_eq!(find(&vec![0; 1 << 20]).0.unwrap_err(), Luks2Error::NotLuks);
    let mut version_1 = vec![0; 1 << 20];
    version_1[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01");
    assert_eq!(find(&version_1).0.unwrap_err(), Luks2Error::Version(1));
}

#[test]
fn a_damaged_byte_is_recovered() {
    let (mut file, _) = small();
    let uuid = header(&file).uuid().to_vec();
    for at in 0..2 * HEADER {
        file[at] ^= 0x11;
        let found = header(&file);
        assert_eq!(found.uuid(), uuid);
        // SHA-256 does not fill the field.
        let is_used = !(CHECKSUM.start + 32..CHECKSUM.end).contains(&(at % HEADER));
        assert_eq!(found.needs_repair(), is_used, "{at}");
        file[at] ^= 0x11;
    }
    for (first, second) in [(0, 0), (7, 300), (5000, 5000), (1000, 449)] {
        let mut file = file.clone();
        file[first] ^= 1;
        let header = header(&file);
        let change = header.repair(random(header.random_bytes())).unwrap();
        file[HEADER + second] ^= 1;
        let error = find(&file).0.unwrap_err();
        let expected = [
            Luks2Error::Damaged,
            Luks2Error::Version(3),
            Luks2Error::NotLuks,
        ];
        assert!(expected.contains(&error), "{error:?}");
        apply(&change, &mut file);
        let (found, read) = find(&file);
        assert!(!found.unwrap().needs_repair());
        assert_eq!(read.len(), 2);
    }
}

/// Each state of the file while a change is written.
fn states(file: &[u8], change: &Change) -> Vec<Vec<u8>> {
    let mut states = Vec::new();
    let mut file = file.to_vec();
    for write in &change.writes {
        let (at, half) = (write.offset as usize, write.bytes.len() / 2);
        states.push(file.clone());
        let mut torn = file.clone();
        put(&mut torn, at, &write.bytes[..300]);
        states.push(torn.clone());
        put(&mut torn, at + half, &write.bytes[half..]);
        states.push(torn);
        put(&mut file, at, &write.bytes);
    }
    states.push(file);
    states
}

#[test]
fn a_change_may_end_between_any_writes() {
    let (whole, key) = small();
    for damaged in [None, Some(100), Some(HEADER + 100)] {
        let mut file = whole.clone();
        if let Some(at) = damaged {
            file[at] ^= 1;
        }
        let header = header(&file);
        let slot = NewSlot {
            number: None,
            kdf: FAST,
            hash: LuksHash::Sha256,
        };
        let random_bytes = header.random_bytes();
        let change = header
            .add(&slot, &key, b"second", random(random_bytes))
            .unwrap();
        let mut added = false;
        for state in states(&file, &change) {
            assert!(unlock(&state, 0, "first").is_some());
            match find(&state).0.unwrap().slots().len() {
                1 => assert!(!added),
                _ => {
                    added = true;
                    assert!(unlock(&state, 1, "second").is_some());
                }
            }
        }
        assert!(added);
        apply(&change, &mut file);
        let change = change.header.remove(0, random(random_bytes)).unwrap();
        let mut removed = false;
        for state in states(&file, &change) {
            assert!(unlock(&state, 1, "second").is_some());
            removed = !find(&state).0.unwrap().slots().contains(&0);
        }
        assert!(removed);
        let last = change.header.remove(1, random(random_bytes));
        assert_eq!(last.unwrap_err(), Luks2Error::LastSlot(1));
        // The material is gone.
        let mut file = whole.clone();
        apply(&change, &mut file);
        put(&mut file, 0, &whole[..2 * HEADER]);
        assert!(unlock(&file, 0, "first").is_none());
    }
}

#[test]
fn a_new_container_is_one_when_all_is_written() {
    let new = NewLuks2 {
        kdf: FAST,
        ..NewLuks2::default()
    };
    let key = MasterKey::new(random(64).to_vec());
    let change = new
        .create(&key, b"first", random(new.random_bytes(64)))
        .unwrap();
    let offsets: Vec<u64> = change.writes.iter().map(|write| write.offset).collect();
    assert_eq!(offsets, [32 << 10, 16 << 10, 0]);
    assert_eq!(change.header.segment().offset, 16 << 20);
    let few = new.create(&key, b"first", random(new.random_bytes(64) - 1));
    assert_eq!(few.unwrap_err(), Luks2Error::Short);
    for wrong in [
        NewLuks2 {
            header_bytes: 0,
            ..new.clone()
        },
        NewLuks2 {
            header_bytes: u64::MAX,
            ..new.clone()
        },
        NewLuks2 {
            slot_area_bytes: u64::MAX,
            ..new.clone()
        },
        NewLuks2 {
            slot_area_bytes: 4096,
            ..new.clone()
        },
        NewLuks2 {
            sector_bytes: 8192,
            ..new.clone()
        },
        NewLuks2 {
            payload_offset: Some(7),
            ..new.clone()
        },
        NewLuks2 {
            digest_iterations: 0,
            ..new.clone()
        },
        NewLuks2 {
            label: "x".repeat(48),
            ..new.clone()
        },
        NewLuks2 {
            hash: LuksHash::Md5,
            ..new.clone()
        },
    ] {
        assert!(
            wrong
                .create(&key, b"first", random(new.random_bytes(64)))
                .is_err(),
            "{wrong:?}"
        );
    }
}

#[test]
fn slots_are_used_up() {
    let (mut file, key) = small();
    let mut count = 1;
    let error = loop {
        let header = header(&file);
        let slot = NewSlot {
            number: None,
            kdf: FAST,
            hash: LuksHash::Sha1,
        };
        match header.add(&slot, &key, b"next", random(header.random_bytes())) {
            Ok(change) => apply(&change, &mut file),
            Err(error) => break error,
        }
        count += 1;
    };
    assert_eq!(error, Luks2Error::NoFreeSlot);
    assert_eq!(count, (1 << 20) / (128 << 10));
    // A gap is found again.
    remove(&mut file, 3);
    add(&mut file, &key, 30, FAST, "gap");
    assert!(unlock(&file, 30, "gap").is_some() && unlock(&file, 4, "next").is_some());
    let header = header(&file);
    let other = MasterKey::new(vec![1; 32]);
    let slot = |number| NewSlot {
        number,
        kdf: FAST,
        hash: LuksHash::Sha256,
    };
    for (slot, key, expected) in [
        (slot(Some(4)), &key, Luks2Error::SlotInUse(4)),
        (slot(Some(32)), &key, Luks2Error::NoFreeSlot),
        (slot(None), &other, Luks2Error::WrongKey),
    ] {
        let result = header.add(&slot, key, b"", random(header.random_bytes()));
        assert_eq!(result.unwrap_err(), expected);
    }
    assert_eq!(header.material(3), Err(Luks2Error::NoSlot(3)));
}

#[test]
fn what_is_kept() {
    let (mut file, key) = small();
    let mut values = metadata(&file);
    values["tokens"]["0"] = json!({"type": "some", "keyslots": ["0"], "x": [1, {}]});
    values["config"]["flags"] = json!(["allow-discards"]);
    set_metadata(&mut file, &values);
    add(&mut file, &key, 1, FAST, "second");
    remove(&mut file, 0);
    let values = metadata(&file);
    assert_eq!(
        values["tokens"]["0"],
        json!({"type": "some", "keyslots": [], "x": [1, {}]})
    );
    assert_eq!(values["config"]["flags"], json!(["allow-discards"]));
}

#[test]
fn what_is_refused() {
    let (file, _) = small();
    let slot = "/keyslots/0";
    let segment = "/segments/0";
    let field =
        |name: &str| format!("Field '{name}' of the LUKS2 metadata is missing or not valid");
    let unsupported = |text: &str| format!("LUKS2 {text} is not supported by zebu");
    for (path, value, message) in [
        (
            "/config/requirements".into(),
            json!({"mandatory": ["online-reencrypt-v2"]}),
            unsupported("requirement 'online-reencrypt-v2'"),
        ),
        (
            "/config/json_size".into(),
            json!("4096"),
            field("config.json_size"),
        ),
        (
            "/config/keyslots_size".into(),
            json!("1"),
            field("config.keyslots_size"),
        ),
        (
            "/segments".into(),
            json!({}),
            "A LUKS2 container with 0 segments is not supported by zebu".into(),
        ),
        (
            format!("{segment}/type"),
            json!("linear"),
            unsupported("segment type 'linear'"),
        ),
        (
            format!("{segment}/integrity"),
            json!({"type": "hmac(sha256)"}),
            unsupported("integrity 'hmac(sha256)'"),
        ),
        (
            format!("{segment}/flags"),
            json!(["backup-final\n"]),
            unsupported("segment flag 'backup-final\\n'"),
        ),
        (
            format!("{segment}/sector_size"),
            json!(8192),
            field("segments.0.sector_size"),
        ),
        (
            format!("{segment}/sector_size"),
            json!(0),
            field("segments.0.sector_size"),
        ),
        (
            format!("{segment}/size"),
            json!("0"),
            field("segments.0.size"),
        ),
        (
            format!("{segment}/size"),
            json!("+512"),
            field("segments.0.size"),
        ),
        (
            format!("{segment}/offset"),
            json!("100"),
            field("segments.0.offset"),
        ),
        (
            format!("{segment}/iv_tweak"),
            json!("99999999999999999999"),
            field("segments.0.iv_tweak"),
        ),
        (
            format!("{segment}/encryption"),
            json!("cipher_null-ecb"),
            unsupported("encryption 'cipher_null-ecb'"),
        ),
        (
            format!("{segment}/encryption"),
            json!("aes-cbc-essiv:sha512"),
            "Algorithm 'aes-256' with key size 64 bytes not supported".into(),
        ),
        (
            format!("{slot}/type"),
            json!("reencrypt"),
            unsupported("keyslot type 'reencrypt'"),
        ),
        (
            format!("{slot}/area/type"),
            json!("journal"),
            unsupported("keyslot area 'journal'"),
        ),
        (
            format!("{slot}/af/stripes"),
            json!(0),
            field("keyslots.0.af.stripes"),
        ),
        (
            format!("{slot}/af/hash"),
            json!("md5"),
            unsupported("hash 'md5'"),
        ),
        (
            format!("{slot}/kdf/type"),
            json!("scrypt"),
            unsupported("key derivation 'scrypt'"),
        ),
        (
            format!("{slot}/kdf/iterations"),
            json!(0),
            field("keyslots.0.kdf.iterations"),
        ),
        (
            format!("{slot}/kdf/salt"),
            json!("!"),
            field("keyslots.0.kdf.salt"),
        ),
        (
            format!("{slot}/kdf"),
            json!({"type": "argon2id", "time": 1, "memory": 8, "cpus": 2, "salt": "MTIzNDU2Nzg="}),
            field("keyslots.0.kdf.memory"),
        ),
        (
            format!("{slot}/key_size"),
            json!(513),
            field("keyslots.0.key_size"),
        ),
        (
            format!("{slot}/key_size"),
            json!(64),
            "Keyslot 0 has less space than its key takes".into(),
        ),
        (
            format!("{slot}/area/offset"),
            json!("32769"),
            field("keyslots.0.area.offset"),
        ),
        (
            format!("{slot}/area/offset"),
            json!("28672"),
            "Keyslot 0 is not within the LUKS2 keyslot area".into(),
        ),
        (
            format!("{slot}/area/size"),
            json!("18446744073709547520"),
            field("keyslots.0.area.size"),
        ),
        (
            format!("{slot}/area/size"),
            json!("134217728"),
            "Keyslot 0 is not within the LUKS2 keyslot area".into(),
        ),
        (
            format!("{slot}/priority"),
            json!(3),
            field("keyslots.0.priority"),
        ),
        (
            "/digests".into(),
            json!({}),
            "The LUKS2 segment has 0 digests, not one".into(),
        ),
        (
            "/digests/0/type".into(),
            json!("other"),
            unsupported("digest 'other'"),
        ),
        (
            "/digests/0/keyslots".into(),
            json!(["7"]),
            "Keyslot 7 is not in use".into(),
        ),
        (
            "/digests/0/digest".into(),
            json!(""),
            field("digests.0.digest"),
        ),
    ] {
        let mut values = metadata(&file);
        let (parent, name) = path.rsplit_once('/').unwrap();
        values.pointer_mut(parent).unwrap()[name] = value;
        let mut file = file.clone();
        set_metadata(&mut file, &values);
        assert_eq!(find(&file).0.unwrap_err().to_string(), message, "{path}");
    }
    let mut values = metadata(&file);
    values["keyslots"]["1"] = values["keyslots"]["0"].clone();
    values["segments"]["1"] = values["segments"]["0"].clone();
    let mut file = file.clone();
    set_metadata(&mut file, &values);
    let error = find(&file).0.unwrap_err();
    assert_eq!(error, Luks2Error::Segments(2));
    values["segments"]
        .as_object_mut()
        .unwrap()
        .shift_remove("1");
    set_metadata(&mut file, &values);
    assert_eq!(find(&file).0.unwrap_err(), Luks2Error::SlotsOverlap(0, 1));
}

#[test]
fn limits_hold() {
    let (mut file, _) = small();
    let unlocked = |file: &[u8], limits: &Limits| {
        let header = header(file);
        let material = vec![0; 128_000].into();
        header.unlock(0, material, b"first", limits).map(|_| ())
    };
    let limits = Limits {
        pbkdf2_iterations: 999,
        argon2_memory: 1024,
        ..Limits::default()
    };
    assert!(unlocked(&file, &Limits::default()).is_ok());
    assert_eq!(
        unlocked(&file, &limits).unwrap_err().to_string(),
        "Keyslot 0 asks for 1000 iterations for its passphrase, more than the 999 allowed"
    );
    let mut values = metadata(&file);
    values["keyslots"]["0"]["kdf"] = json!({"type": "argon2id", "time": 1, "memory": 67_108_864, "cpus": 2, "salt": "MTIzNDU2Nzg="});
    set_metadata(&mut file, &values);
    for (limits, allowed) in [(&limits, "1 MiB"), (&Limits::default(), "4 GiB")] {
        assert_eq!(
            unlocked(&file, limits).unwrap_err().to_string(),
            format!(
                "Keyslot 0 asks for 64 GiB of memory for its passphrase, more than the {allowed} allowed"
            )
        );
    }
}

/// Uses all of a container that opens.
fn use_all(file: &[u8]) {
    let Ok(header) = find(file).0 else {
        return;
    };
    let limits = Limits {
        pbkdf2_iterations: 1000,
        argon2_time: 4,
        argon2_memory: 64,
    };
    let _ = (header.payload(1 << 22), header.detached_payload(9));
    let _ = header.cipher(&MasterKey::new(vec![0; 32]));
    for number in header.slots() {
        let range = header.material(number).unwrap();
        let material = file[range.start as usize..range.end as usize].to_vec();
        let _ = header.unlock(number, material.into(), b"first", &limits);
        let _ = header.remove(number, random(header.random_bytes()));
    }
    let slot = NewSlot {
        number: None,
        kdf: FAST,
        hash: LuksHash::Sha256,
    };
    let key = unlock_within(&header, file, &limits).unwrap_or(MasterKey::new(vec![]));
    let _ = header.add(&slot, &key, b"", random(header.random_bytes()));
}

fn unlock_within(header: &Luks2, file: &[u8], limits: &Limits) -> Option<MasterKey> {
    let range = header.material(0).ok()?;
    let material = file[range.start as usize..range.end as usize].to_vec();
    header
        .unlock(0, material.into(), b"first", limits)
        .ok()
        .flatten()
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<u64>().prop_map(|n| json!(n)),
        any::<i16>().prop_map(|n| json!(n)),
        (0u64..64).prop_map(|n| json!(n)),
        any::<u64>().prop_map(|n| json!(n.to_string())),
        (0u64..600).prop_map(|n| json!((n * 4096).to_string())),
        any::<f64>().prop_map(|n| json!(n)),
        any::<String>().prop_map(|text| json!(text)),
        Just(json!("dynamic")),
        Just(json!([])),
        Just(json!({})),
        Just(json!(["0"])),
        Just(json!({"0": {}})),
    ]
}

/// Each value in the metadata.
fn paths(value: &Value, path: &str, all: &mut Vec<String>) {
    all.push(path.into());
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                paths(value, &format!("{path}/{name}"), all);
            }
        }
        Value::Array(values) => {
            for (nth, value) in values.iter().enumerate() {
                paths(value, &format!("{path}/{nth}"), all);
            }
        }
        _ => (),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(600) })]

    #[test]
    fn any_metadata(changes in proptest::collection::vec((any::<u16>(), any_value(), any::<bool>()), 1..3)) {
        let (mut file, _) = small();
        let mut values = metadata(&file);
        for (nth, value, delete) in changes {
            let mut all = Vec::new();
            paths(&values, "", &mut all);
            let path = &all[nth as usize % all.len()];
            if let Some(at) = path.rfind('/')
                && delete
                && let Some(parent) = values.pointer_mut(&path[..at]).and_then(Value::as_object_mut)
            {
                parent.shift_remove(&path[at + 1..]);
            } else {
                *values.pointer_mut(path).unwrap() = value;
            }
        }
        if values.to_string().len() < HEADER - BINARY {
            set_metadata(&mut file, &values);
            use_all(&file);
        }
    }

    #[test]
    fn any_header_bytes(
        damage in proptest::collection::vec((0..HEADER, any::<u8>()), 0..4),
        length in 0usize..100_000,
    ) {
        let (mut file, _) = small();
        for (at, byte) in damage {
            // The second copy is no help.
            file[HEADER + at] = byte;
            file[at % 5000] = byte;
        }
        for copy in file[..2 * HEADER].chunks_exact_mut(HEADER) {
            copy[CHECKSUM].fill(0);
            let sum = Sha256::digest(&*copy);
            copy[CHECKSUM][..32].copy_from_slice(&sum);
        }
        use_all(&file);
        let _ = find(&file[..length]);
    }
}
