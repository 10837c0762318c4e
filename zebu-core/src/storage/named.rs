//! Locking and removing files that names lead to.

use std::io;
use std::path::Path;
use std::sync::Mutex;

use super::Storage;
use super::lock::{LockBytes, LockRequest, relock};

/// The folder that a path is in.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The file or device of this machine at the bottom of a storage, if there is one.
pub fn named_file(storage: &dyn Storage) -> Option<&dyn NamedFile> {
    storage
        .named_file()
        .or_else(|| storage.below().and_then(named_file))
}

/// An open file or device that a name may lead to.
pub trait NamedFile {
    /// The bytes by which it is locked.
    fn lock_bytes(&self) -> &dyn LockBytes;

    /// Its locks.
    fn locked(&self) -> &Mutex<LockRequest>;

    /// The path that it was opened by.
    fn path(&self) -> &Path;

    /// Whether it is a device, which has no name of its own.
    fn is_device(&self) -> bool;

    /// [`identity`](super::file::identity).
    ///
    /// # Errors
    /// Those of fstat(2).
    fn identity(&self) -> io::Result<(u64, u64)>;

    /// The identity of the file that its path leads to.
    ///
    /// # Errors
    /// Those of stat(2).
    fn identity_at_path(&self) -> io::Result<(u64, u64)>;

    /// Removes the name that its path leads to, whatever file has it.
    ///
    /// # Errors
    /// Those of unlink(2).
    fn unlink(&self) -> io::Result<()>;

    /// Makes that name durable.
    ///
    /// # Errors
    /// Those of fsync(2).
    fn sync_path(&self) -> io::Result<()>;

    /// Takes QEMU's image locks. They are held until the file is dropped or another request
    /// replaces them. After a failure the old ones are held.
    ///
    /// # Errors
    /// [`Error::Locked`](crate::Error::Locked) if another process has a lock that conflicts.
    fn lock(&self, request: LockRequest) -> crate::Result<()> {
        let mut locked = crate::lock(self.locked());
        relock(self.lock_bytes(), self.path(), *locked, request)?;
        *locked = request;
        Ok(())
    }

    /// Takes the lock for changes of the length, if the file is locked.
    ///
    /// # Errors
    /// Those of [`NamedFile::lock`].
    fn lock_length(&self) -> crate::Result<()> {
        let old = *crate::lock(self.locked());
        match old {
            LockRequest::NOTHING => Ok(()),
            old => self.lock(old.changing_length()),
        }
    }

    /// Whether its path still leads to it: it may have been removed, or replaced by another file.
    fn is_at_its_path(&self) -> bool {
        let there = self.identity_at_path();
        there.is_ok_and(|there| self.identity().is_ok_and(|own| own == there))
    }

    /// Removes the file that its path leads to, if that is still this one. A symbolic link stays. The
    /// caller has it locked, so that no other program fills it.
    ///
    /// # Errors
    /// Those of the file system.
    fn remove(&self) -> io::Result<()> {
        if self.is_device() || !self.is_at_its_path() {
            return Ok(());
        }
        self.unlink()
    }

    /// Makes the name of a regular file durable.
    ///
    /// # Errors
    /// Those of fsync(2).
    fn sync_name(&self) -> io::Result<()> {
        match self.is_device() {
            true => Ok(()),
            false => self.sync_path(),
        }
    }
}
