//! Files of a set: durable renames, hashes.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Bytes that are hashed at a time.
const PIECE: usize = 1 << 20;

/// Creates a directory, and those above it, where there is none. Durable on return. Those that were created
/// are added to `made`.
pub(crate) fn create_directory(path: &Path, made: &mut Vec<PathBuf>) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    create_directory(parent(path), made)?;
    match fs::create_dir(path) {
        Ok(()) => made.push(path.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(Error::file(path)(error)),
    }
    sync_directory(parent(path))
}

/// Whether a path leads to a file that is open.
pub(crate) fn is_at(path: &Path, file: &File) -> bool {
    let id = |found: fs::Metadata| (found.dev(), found.ino());
    let at_path = fs::symlink_metadata(path).map(id);
    matches!((at_path, file.metadata().map(id)), (Ok(one), Ok(other)) if one == other)
}

/// The directory that a path is in.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes what a directory lists durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|directory| directory.sync_all());
    synced.map_err(Error::file(path))
}

/// Makes the content of a file durable.
pub(crate) fn sync_file(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(Error::file(path))
}

/// Replaces a file, so that after a crash it has either the old or the new content. Durable on
/// return.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    let write = || {
        let mut file = File::create(&new)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(Error::file(&new))?;
    rename(&new, path)
}

/// Renames a file, which replaces another one. Durable on return.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(Error::file(to))?;
    sync_directory(parent(to))
}

/// Removes a file that may not exist.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::file(path)(error)),
        _ => Ok(()),
    }
}

/// Length and SHA-256 of a file. `go_on` is called with the bytes of each piece; false cancels.
pub(crate) fn hash(path: &Path, mut go_on: impl FnMut(u64) -> bool) -> Result<(u64, String)> {
    let mut file = File::open(path).map_err(Error::file(path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; PIECE];
    let mut length = 0;
    loop {
        let count = match file.read(&mut buffer) {
            Ok(0) => return Ok((length, hex(&hasher.finalize()))),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::file(path)(error)),
        };
        hasher.update(&buffer[..count]);
        length += count as u64;
        if !go_on(count as u64) {
            return Err(Error::Cancelled);
        }
    }
}

/// Hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A random id: 16 hexadecimal digits.
pub(crate) fn new_id() -> Result<String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|e| {
        let error = io::Error::from_raw_os_error(e.raw_os_error().unwrap_or(0));
        Error::file(Path::new("getrandom(2)"))(error)
    })?;
    Ok(hex(&bytes))
}

/// Whether a path leads to a file in a directory, by whatever name, or to a new one there.
pub(crate) fn is_inside(path: &Path, directory: &Path) -> Result<bool> {
    const LINKS: u32 = 40;
    is_inside_by(path, directory, LINKS)
}

fn is_inside_by(path: &Path, directory: &Path, links: u32) -> Result<bool> {
    let id = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let Ok(wanted) = id(path) else {
        // It does not exist, or cannot be opened either. A link may lead to a new file there.
        return match fs::read_link(path) {
            Ok(link) if links > 0 => is_inside_by(&parent(path).join(link), directory, links - 1),
            _ => Ok(id(parent(path)).ok() == id(directory).ok()),
        };
    };
    for entry in fs::read_dir(directory).map_err(Error::file(directory))? {
        let entry = entry.map_err(Error::file(directory))?;
        if id(&entry.path()).is_ok_and(|found| found == wanted) {
            return Ok(true);
        }
    }
    Ok(false)
}
