//! Containers of QEMU and of cryptsetup: their keys are found, their payload is decrypted, and they take the
//! passphrases that zebu adds. Each cipher, mode, generator of initialisation vectors and hash that QEMU has.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use zebu_core::parts::drivers::structures::{LUKS_HEADER_BYTES, LuksHeader, LuksSlot};
use zebu_crypt::{Cipher, MasterKey, material_bytes, protect, unlock};

zebu_core::register!(formats: [zebu_crypt::FORMATS], protocols: &[], encryption: zebu_crypt::ENCRYPTION);

/// Of a slot in a header: where it is, and its bytes.
const SLOTS: usize = 208;
const SLOT_BYTES: usize = 48;
const ACTIVE: u32 = 0x00ac_71f3;

/// Cipher, mode, generator of initialisation vectors, its hash, hash.
type Kind = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);

const KINDS: &[Kind] = &[
    ("aes-256", "xts", "plain64", "", "sha256"),
    ("aes-128", "xts", "plain64", "", "sha1"),
    ("aes-256", "xts", "plain", "", "sha512"),
    ("aes-256", "xts", "essiv", "sha256", "sha384"),
    ("aes-256", "cbc", "plain64", "", "sha224"),
    ("aes-256", "cbc", "essiv", "sha256", "ripemd160"),
    ("aes-192", "cbc", "plain", "", "sha256"),
    ("aes-128", "ecb", "plain64", "", "sha256"),
    ("aes-256", "ctr", "plain64", "", "sha256"),
    ("serpent-256", "xts", "plain64", "", "sha256"),
    ("serpent-128", "cbc", "plain64", "", "sha256"),
    ("twofish-256", "xts", "plain64", "", "sha512"),
    ("twofish-128", "cbc", "plain64", "", "sha256"),
    ("cast5-128", "cbc", "plain64", "", "sha256"),
];

/// What a program printed; None: it failed.
fn run(name: &str, args: &[&str], dir: &Path) -> Option<String> {
    let output = Command::new(name)
        .args(args)
        .current_dir(dir)
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        println!("{name} {args:?}: {text}");
    }
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn qemu(variable: &str, name: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| name.into())
}

/// Writes over the payload by qemu-io, and compares it.
fn qemu_io(dir: &Path, secret: &str, command: &str) -> bool {
    let object = format!("secret,id=s,data={secret}");
    let image = "driver=luks,key-secret=s,file.filename=x.luks";
    let args = ["--object", &object, "-c", command, "--image-opts", image];
    let text = run(&qemu("ZEBU_QEMU_IO", "qemu-io"), &args, dir);
    text.is_some_and(|text| !text.contains("failed") && !text.contains("rror"))
}

/// A container: its file, in memory.
struct Container(Vec<u8>);

impl Container {
    fn header(&self) -> LuksHeader {
        LuksHeader::decode(&self.0[..LUKS_HEADER_BYTES]).unwrap()
    }

    fn material(&mut self, slot: &LuksSlot) -> &mut [u8] {
        let (start, length) = (slot.key_offset() as usize, material_bytes(&self.header()));
        &mut self.0[start..start + length]
    }

    fn unlock(&mut self, number: usize, passphrase: &[u8]) -> Option<MasterKey> {
        let header = self.header();
        let slot = header.slots[number];
        let material = self.material(&slot).to_vec().into();
        unlock(&header, &slot, material, passphrase).unwrap()
    }

    /// Adds a passphrase.
    fn add(&mut self, number: usize, key: &MasterKey, passphrase: &[u8]) {
        let mut salt = [0; 32];
        getrandom::fill(&mut salt).unwrap();
        let iterations = 1000u32;
        let at = SLOTS + SLOT_BYTES * number;
        self.0[at..at + 4].copy_from_slice(&ACTIVE.to_be_bytes());
        self.0[at + 4..at + 8].copy_from_slice(&iterations.to_be_bytes());
        self.0[at + 8..at + 40].copy_from_slice(&salt);
        let header = self.header();
        let slot = header.slots[number];
        let mut random = vec![0; material_bytes(&header)];
        getrandom::fill(&mut random).unwrap();
        let material = protect(&header, &slot, key, passphrase, random.into()).unwrap();
        self.material(&slot).copy_from_slice(&material);
    }

    fn payload(&mut self) -> &mut [u8] {
        let start = self.header().payload_offset() as usize;
        &mut self.0[start..]
    }
}

#[test]
fn containers_of_qemu() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("x.luks");
    let mut cases = 0;
    for kind in KINDS {
        let (cipher, mode, iv, iv_hash, hash) = kind;
        let mut options = format!(
            "key-secret=s,iter-time=10,cipher-alg={cipher},cipher-mode={mode},ivgen-alg={iv},hash-alg={hash}"
        );
        if !iv_hash.is_empty() {
            options += &format!(",ivgen-hash-alg={iv_hash}");
        }
        let img = qemu("ZEBU_QEMU_IMG", "qemu-img");
        let args = [
            "create",
            "-q",
            "--object",
            "secret,id=s,data=first",
            "-f",
            "luks",
            "-o",
            &options,
        ];
        let args = [&args[..], &["x.luks", "64k"]].concat();
        if run(&img, &args, dir.path()).is_none() {
            println!("skipped: this QEMU has no {kind:?}");
            continue;
        }
        assert!(qemu_io(dir.path(), "first", "write -P 7 0 64k"), "{kind:?}");
        let mut container = Container(fs::read(&path).unwrap());
        assert!(container.unlock(0, b"First").is_none(), "{kind:?}");
        let key = container
            .unlock(0, b"first")
            .expect("the passphrase is right");
        let cipher = key.cipher(&container.header()).unwrap();
        let payload = container.payload();
        cipher.decrypt(0, payload);
        assert!(payload.iter().all(|byte| *byte == 7), "{kind:?}");
        // Now the other way.
        payload.fill(9);
        cipher.encrypt(0, payload);
        container.add(3, &key, b"third");
        fs::write(&path, &container.0).unwrap();
        for passphrase in ["first", "third"] {
            assert!(
                qemu_io(dir.path(), passphrase, "read -P 9 0 64k"),
                "{kind:?} {passphrase}"
            );
        }
        assert!(!qemu_io(dir.path(), "second", "read 0 64k"), "{kind:?}");
        cases += 1;
    }
    assert!(cases > 4);
    println!("cases: {cases} kinds of containers");
}

#[test]
fn containers_of_cryptsetup() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("x.luks");
    if run("cryptsetup", &["--version"], dir.path()).is_none() {
        println!("skipped: no cryptsetup");
        return;
    }
    fs::write(dir.path().join("first"), "first").unwrap();
    fs::write(dir.path().join("third"), "third").unwrap();
    for (cipher, bits, hash) in [
        ("aes-xts-plain64", "512", "sha256"),
        ("aes-cbc-essiv:sha256", "256", "sha1"),
        ("serpent-xts-plain64", "256", "ripemd160"),
        ("twofish-cbc-plain", "128", "sha512"),
    ] {
        fs::write(&path, vec![0; 4 << 20]).unwrap();
        let args = [
            "-q",
            "luksFormat",
            "--type",
            "luks1",
            "--pbkdf-force-iterations",
            "1000",
        ];
        let kind = [
            "-c",
            cipher,
            "-s",
            bits,
            "-h",
            hash,
            "--key-file",
            "first",
            "x.luks",
        ];
        if run("cryptsetup", &[&args[..], &kind].concat(), dir.path()).is_none() {
            println!("skipped: {cipher} {hash}");
            continue;
        }
        let mut container = Container(fs::read(&path).unwrap());
        let key = container
            .unlock(0, b"first")
            .expect("the passphrase is right");
        container.add(3, &key, b"third");
        fs::write(&path, &container.0).unwrap();
        for passphrase in ["first", "third"] {
            let args = [
                "open",
                "--test-passphrase",
                "--type",
                "luks1",
                "--key-file",
                passphrase,
                "x.luks",
            ];
            assert!(
                run("cryptsetup", &args, dir.path()).is_some(),
                "{cipher} {passphrase}"
            );
        }
    }
}
