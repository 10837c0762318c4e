//! Files of a test's folder: their bytes and numbers.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::Lab;

impl Lab {
    /// Syncs all files, so that the file system has allocated them and `disk size` no longer
    /// changes.
    pub fn sync_files(&self) {
        for entry in fs::read_dir(self.path("")).expect("list") {
            let entry = entry.expect("entry");
            if entry.file_type().expect("type").is_file() {
                File::open(entry.path())
                    .and_then(|file| file.sync_all())
                    .expect("sync");
            }
        }
    }

    /// Overwrites bytes of a file.
    pub fn patch(&self, name: &str, offset: u64, bytes: &[u8]) {
        File::options()
            .write(true)
            .open(self.path(name))
            .and_then(|file| file.write_all_at(bytes, offset))
            .unwrap_or_else(|error| panic!("patch {name}: {error}"));
    }

    /// A big-endian number in a file.
    pub fn u32_at(&self, name: &str, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        File::open(self.path(name))
            .and_then(|file| file.read_exact_at(&mut bytes, offset))
            .unwrap_or_else(|error| panic!("read {name}: {error}"));
        u32::from_be_bytes(bytes)
    }

    /// A big-endian number in a file.
    pub fn u64_at(&self, name: &str, offset: u64) -> u64 {
        (u64::from(self.u32_at(name, offset)) << 32) | u64::from(self.u32_at(name, offset + 4))
    }

    /// Fails the test unless both files have the same length and bytes. What is a hole in both
    /// is not read.
    #[track_caller]
    pub fn assert_same_bytes(&self, ours: &str, theirs: &str, what: &str) {
        if let Some(difference) = difference(&self.path(ours), &self.path(theirs)) {
            panic!("{what}: {ours} and {theirs}: {difference}");
        }
    }
}

/// Where two files differ, if they do.
fn difference(a: &Path, b: &Path) -> Option<String> {
    const STEP: u64 = 1 << 20;
    let open = |path: &Path| {
        File::open(path).unwrap_or_else(|error| panic!("open {}: {error}", path.display()))
    };
    let (a, b) = (open(a), open(b));
    let (len, other) = (
        a.metadata().expect("stat").len(),
        b.metadata().expect("stat").len(),
    );
    if len != other {
        return Some(format!("lengths {len} and {other}"));
    }
    let (mut from_a, mut from_b) = (vec![0; STEP as usize], vec![0; STEP as usize]);
    let mut at = 0;
    while at < len {
        let Some(data) = next_data(&a, at).into_iter().chain(next_data(&b, at)).min() else {
            break;
        };
        at = data - data % STEP;
        let n = STEP.min(len - at) as usize;
        a.read_exact_at(&mut from_a[..n], at).expect("read");
        b.read_exact_at(&mut from_b[..n], at).expect("read");
        if from_a[..n] != from_b[..n] {
            let i = (0..n).find(|&i| from_a[i] != from_b[i]).expect("differ");
            return Some(format!(
                "differ at {} ({:#x}): {:#04x} and {:#04x}",
                at + i as u64,
                at + i as u64,
                from_a[i],
                from_b[i]
            ));
        }
        at += STEP;
    }
    None
}

/// The next byte at or after `at` that is not in a hole.
fn next_data(file: &File, at: u64) -> Option<u64> {
    // SAFETY: lseek takes no pointer; the descriptor is open while `file` lives.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, libc::SEEK_DATA) };
    u64::try_from(found).ok()
}
