//! Whether two names of this machine lead to the same bytes.

use std::ffi::OsStr;
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Whether two names are those of one file or block device, or bytes of one are in the other: a
/// partition and its disk, a loop device and its file, two loop devices over the same bytes of a file.
pub fn is_same(one: &Path, other: &Path) -> bool {
    let (one, other) = (places(one), places(other));
    let mut pairs = one
        .iter()
        .flat_map(|place| other.iter().map(move |other| (place, other)));
    pairs.any(|(one, other)| one.overlaps(other))
}

/// Device and inode, or [`u64::MAX`] and the number of a block device.
type Identity = (u64, u64);

fn identity(metadata: &fs::Metadata) -> Option<Identity> {
    let kind = metadata.file_type();
    (kind.is_file() || kind.is_block_device()).then(|| super::file::identity(metadata))
}

/// Where bytes of a file or block device are.
struct Place {
    identity: Identity,
    /// Bytes of it; None: some, of which it is not known where.
    range: Option<Range<u64>>,
    /// It is what was named.
    is_whole: bool,
}

impl Place {
    fn overlaps(&self, other: &Place) -> bool {
        // A loop device over less than a sector has no bytes, and its file none the less.
        let end = |range: &Range<u64>| range.end.max(range.start.saturating_add(1));
        self.identity == other.identity
            && match (&self.range, &other.range) {
                (Some(one), Some(other)) => one.start < end(other) && other.start < end(one),
                _ => self.is_whole || other.is_whole,
            }
    }
}

/// The file or block device of a name, and those that its bytes are in. Loop devices may be over
/// each other, so there is a limit.
fn places(path: &Path) -> Vec<Place> {
    const DEEPEST: usize = 16;
    let mut found = Vec::new();
    let mut next = vec![(path.to_owned(), Some(0..u64::MAX))];
    while let Some((path, range)) = next.pop()
        && found.len() < DEEPEST
    {
        let Some(identity) = fs::metadata(path).ok().as_ref().and_then(identity) else {
            continue;
        };
        if let (u64::MAX, device) = identity {
            let inside = |within: Option<Range<u64>>| {
                let (own, within) = (range.clone()?, within?);
                let end = within.start.saturating_add(own.end).min(within.end);
                Some(within.start.saturating_add(own.start)..end)
            };
            next.extend(
                behind(device)
                    .into_iter()
                    .map(|(path, within)| (path, inside(within))),
            );
        }
        found.push(Place {
            identity,
            range,
            is_whole: found.is_empty(),
        });
    }
    found
}

/// The names of what the bytes of a block device are in, and which bytes these are there, as the kernel
/// tells them in sysfs.
fn behind(device: u64) -> Vec<(PathBuf, Option<Range<u64>>)> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let Ok(folder) = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) else {
        return Vec::new();
    };
    let node = |folder: &Path| {
        let name = folder.file_name()?;
        // The kernel has `!` for the slashes of names.
        let name = name.to_str()?.replace('!', "/");
        Some(Path::new("/dev").join(name))
    };
    let number = |file: &str| {
        let text = fs::read_to_string(folder.join(file)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    // In sectors of 512 bytes, whatever the device has.
    let size = number("size").map(|sectors| sectors.saturating_mul(512));
    let from = |start: Option<u64>| Some(start?..start?.saturating_add(size?));
    let mut names = Vec::new();
    if folder.join("partition").exists() {
        let start = number("start").map(|sectors| sectors.saturating_mul(512));
        names.extend(
            folder
                .parent()
                .and_then(node)
                .map(|name| (name, from(start))),
        );
    }
    if let Ok(file) = fs::read(folder.join("loop/backing_file")) {
        let file = file.strip_suffix(b"\n").unwrap_or(&file);
        let file = PathBuf::from(OsStr::from_bytes(file));
        names.push((file, from(number("loop/offset"))));
    }
    // Device mapper and md.
    let slaves = fs::read_dir(folder.join("slaves"));
    let slaves = slaves.into_iter().flatten().filter_map(Result::ok);
    names.extend(slaves.filter_map(|slave| Some((node(&slave.path())?, None))));
    names
}
