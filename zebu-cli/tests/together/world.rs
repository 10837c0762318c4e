//! The folder of a run, and what it holds afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zebu::storage::{LockRequest, OpenFile, open_file};

use crate::commands::{BASES, FILES, STATES};
use crate::common::{Rng, program};

/// What files hold, by their names.
pub type Found = BTreeMap<&'static str, String>;

/// Names that commands write to.
const NAMES: [&str; 8] = ["t", "behind", "u", "u0", "u1", "base", "other", "set"];

/// Runs the program in a folder. Returns its exit status and its standard output.
pub fn run(folder: &Path, words: &[String], most: Option<u64>) -> (i32, Vec<u8>) {
    let mut command = Command::new("sh");
    // In units of 512 bytes.
    let limit = most.map_or(String::new(), |most| format!("ulimit -f {}; ", most / 512));
    let output = command
        .args(["-c", &format!("trap '' XFSZ; {limit}exec \"$0\" \"$@\"")])
        .arg(program())
        .args(words)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .expect("run the program");
    (output.status.code().unwrap_or(-1), output.stdout)
}

/// The words of a line, in which `_` is a blank within a word.
fn words(line: &str) -> Vec<String> {
    let words = line.split(' ').map(|word| word.replace('_', " "));
    words.collect()
}

/// Folders in which each state was made once.
pub struct Templates(Vec<TempDir>);

impl Templates {
    pub fn new() -> Templates {
        let make = |state: &crate::commands::State| {
            let folder = folder();
            let mut rng = Rng::new(7);
            for (name, length) in FILES {
                let bytes: Vec<u8> = (0..*length / 8)
                    .flat_map(|_| rng.next().to_le_bytes())
                    .collect();
                fs::write(folder.path().join(name), bytes).expect("write");
            }
            for line in BASES.iter().chain(state.make) {
                let (status, _) = run(folder.path(), &words(line), None);
                assert_eq!(status, 0, "{}: {line}", state.name);
            }
            if state.is_link {
                std::os::unix::fs::symlink("behind", folder.path().join("t")).expect("link");
            }
            folder
        };
        Templates(STATES.iter().map(make).collect())
    }

    /// A folder in this state.
    pub fn copy(&self, state: usize) -> TempDir {
        let new = folder();
        for entry in fs::read_dir(self.0[state].path()).expect("list") {
            let entry = entry.expect("an entry");
            let target = new.path().join(entry.file_name());
            match entry.file_type().expect("a type").is_symlink() {
                true => {
                    let behind = fs::read_link(entry.path()).expect("a link");
                    std::os::unix::fs::symlink(behind, target).expect("link");
                }
                false => fs::copy(entry.path(), target).map(drop).expect("copy"),
            }
        }
        new
    }
}

pub fn folder() -> TempDir {
    let place = [
        Path::new("/dev/shm"),
        Path::new(env!("CARGO_TARGET_TMPDIR")),
    ];
    let place = place.into_iter().find(|place| place.is_dir());
    tempfile::tempdir_in(place.expect("a folder")).expect("a temporary folder")
}

/// What all files hold.
pub fn found(folder: &Path) -> Found {
    NAMES
        .iter()
        .map(|name| (*name, describe(folder, name)))
        .collect()
}

fn describe(folder: &Path, name: &str) -> String {
    let path = folder.join(name);
    let link = match fs::symlink_metadata(&path) {
        Err(_) => return "nothing".into(),
        Ok(metadata) if metadata.is_dir() => return set(folder, name),
        Ok(metadata) if metadata.is_symlink() => "link to ",
        Ok(_) => "",
    };
    let Ok(bytes) = fs::read(&path) else {
        return format!("{link}nothing");
    };
    if bytes.is_empty() {
        return format!("{link}an empty file");
    }
    // No program has it open any more.
    let file = open_file(&path, OpenFile::default().write(true)).expect("open");
    let locked = file
        .host_file()
        .expect("a file")
        .lock(LockRequest::QCOW2_WRITE);
    assert!(locked.is_ok(), "'{name}' is locked: {locked:?}");
    drop(file);
    if bytes.get(257..262) == Some(b"ustar") {
        return format!(
            "{link}an appliance with {}",
            content(folder, &["--disk", "1", name])
        );
    }
    let info = run(
        folder,
        &["info", "--output=json", name].map(String::from),
        None,
    );
    let Ok(info) = serde_json::from_slice::<Value>(&info.1) else {
        return format!("{link}no image");
    };
    let names = |list: &Value| {
        let names = list.as_array().into_iter().flatten();
        let names = names.filter_map(|one| one["name"].as_str());
        // Those of backups have random names.
        let names = names.filter(|name| !name.contains('-'));
        let mut names: Vec<_> = names.collect();
        names.sort();
        names.join(" ")
    };
    let own = &info["format-specific"]["data"];
    let damage = match info["format"].as_str() {
        Some("qcow2") => {
            let check = run(folder, &["check", name].map(String::from), None);
            String::from_utf8_lossy(&check.1)
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned()
        }
        _ => String::new(),
    };
    format!(
        "{link}{} of {} over {}, snapshots [{}], bitmaps [{}], lazy {}: {} {damage}",
        info["format"],
        info["virtual-size"],
        info["backing-filename"],
        names(&info["snapshots"]),
        names(&own["bitmaps"]),
        own["lazy-refcounts"],
        content(folder, &[name]),
    )
}

/// A hash of a disk.
fn content(folder: &Path, source: &[&str]) -> String {
    let target = folder.join("content");
    let all = ["convert", "-O", "raw"]
        .iter()
        .chain(source)
        .chain(&["content"]);
    let all: Vec<_> = all.map(|word| (*word).to_owned()).collect();
    let (status, _) = run(folder, &all, None);
    let bytes = fs::read(&target).unwrap_or_default();
    let _ = fs::remove_file(&target);
    match status {
        0 => format!("{} bytes {}", bytes.len(), digest(&bytes)),
        _ => "it cannot be read".into(),
    }
}

/// What a set of backups holds.
fn set(folder: &Path, name: &str) -> String {
    let words = |words: &[&str]| {
        words
            .iter()
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>()
    };
    let verified = run(folder, &words(&["backup", "verify", name]), None).0;
    let list = run(
        folder,
        &words(&["backup", "list", "--output=json", name]),
        None,
    );
    let list: Value = serde_json::from_slice(&list.1).unwrap_or_default();
    if list.as_array().is_none_or(Vec::is_empty) {
        return "nothing".into();
    }
    let mut text = format!("a set, verified {verified}");
    for point in list.as_array().into_iter().flatten() {
        let number = point["number"].to_string();
        let restore = ["backup", "restore", "--point", &number, name, "restored"];
        let status = run(folder, &words(&restore), None).0;
        let bytes = fs::read(folder.join("restored")).unwrap_or_default();
        let _ = fs::remove_file(folder.join("restored"));
        text += &format!(", point {number}: {status} {}", digest(&bytes));
    }
    text
}

/// The first digits of a hash.
fn digest(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    hash[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}
