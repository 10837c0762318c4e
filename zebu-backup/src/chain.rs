//! Hashes of where the images of a disk are and what they were, by which a change behind the back of its bitmap is
//! seen.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};
use zebu::{Device, Format, Source};

use crate::files;

/// A hash of strings.
#[derive(Default)]
struct Words(Sha256);

impl Words {
    fn add(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }
}

/// `Entry::chain_sha256` of a raw disk.
pub(crate) fn raw_chain() -> String {
    let mut hash = Words::default();
    for word in [Format::RAW.name(), "", ""] {
        hash.add(word.as_bytes());
    }
    files::hex(&hash.0.finalize())
}

/// `Entry::chain_sha256` of a disk.
pub(crate) fn chain_sha256(device: &Device) -> String {
    let mut hash = Words::default();
    for (depth, layer) in device.layers().iter().enumerate() {
        let has_data_file = layer.data_file().is_some();
        // The file of the disk itself may be named in another way: the bitmap is in it.
        let own = (depth > 0).then(|| layer.file().path());
        let data = has_data_file.then(|| layer.data().path());
        hash.add(layer.format().name().as_bytes());
        for path in [own, data] {
            let path = path.unwrap_or(Path::new(""));
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            hash.add(real.as_os_str().as_bytes());
        }
    }
    files::hex(&hash.0.finalize())
}

/// `Entry::chain_files_sha256` of a disk.
pub(crate) fn chain_files_sha256(device: &Device) -> String {
    let mut hash = Words::default();
    // The bitmap is in the file of the disk.
    let own = device.top().file().path().to_owned();
    for layer in device.all_layers() {
        let is_top = std::ptr::eq(layer, device.top());
        for file in layer.storages().iter().filter(|file| !file.is_remote()) {
            let found = fs::metadata(file.path());
            let Some(found) = found.ok().filter(|found| found.is_file()) else {
                continue;
            };
            if file.path() == own {
                continue;
            }
            // A number is used again when its file is gone.
            let born = found.created().ok();
            let born = born.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let born = born.unwrap_or_default().as_nanos() as u64;
            for number in [found.dev(), found.ino(), born] {
                hash.add(&number.to_le_bytes());
            }
            // What is written to the disk is written to its data file, and the bitmap knows that.
            if !is_top {
                hash.add(&found.len().to_le_bytes());
                // Programs set the time of change back, but not that of the inode.
                for time in [
                    found.mtime(),
                    found.mtime_nsec(),
                    found.ctime(),
                    found.ctime_nsec(),
                ] {
                    hash.add(&time.to_le_bytes());
                }
            }
        }
    }
    files::hex(&hash.0.finalize())
}

/// `Entry::source_sha256`; none of a source without a place.
pub(crate) fn source_sha256(source: &Source) -> Option<String> {
    let file = source.resolve(None, None).ok()?.file;
    let path = &file.bottom().path;
    if path.as_os_str().is_empty() {
        return None;
    }
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let mut hash = Words::default();
    hash.add(real.as_os_str().as_bytes());
    Some(files::hex(&hash.0.finalize()))
}
