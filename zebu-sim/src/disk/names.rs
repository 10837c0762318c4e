//! What the library, and programs without locks, do with names.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use zebu::internal::names::{LockBytes, NamedFile, Names};
use zebu::storage::{LockRequest, OpenFile, Storage};

use super::folder::{Entry, Folder, plain};
use super::{Disk, File};

/// The byte that a program locks to write.
const HELD_WRITE: i64 = 101;

/// The names of a disk, for the library.
pub struct DiskNames(pub Arc<Disk>);

impl Names for DiskNames {
    fn open(&self, path: &Path, how: OpenFile) -> io::Result<Arc<dyn Storage>> {
        self.0.pause();
        let found = self.0.folder(|folder| folder.find(path))?;
        let number = match found {
            Err(e) if how.create && e.raw_os_error() == Some(libc::ENOENT) => {
                let path = self.0.folder(|folder| folder.follow(path))??;
                self.0.add_named(path)
            }
            found => found?,
        };
        Ok(self.0.open_named(number, path, how.cache))
    }

    fn make(&self, path: &Path) -> io::Result<(u64, u64)> {
        self.0.pause();
        let path = plain(path);
        match self.0.folder(|folder| folder.entries.contains_key(&path))? {
            true => Err(io::Error::from_raw_os_error(libc::EEXIST)),
            false => Ok((1, self.0.add_named(path) as u64)),
        }
    }

    fn identity(&self, path: &Path) -> io::Result<(u64, u64)> {
        self.0.pause();
        Ok((1, self.0.folder(|folder| folder.find(path))?? as u64))
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        self.0.pause();
        let entry = self
            .0
            .folder(|folder| folder.entries.get(&plain(path)).cloned())?;
        match entry {
            Some(Entry::Link(to)) => Ok(to),
            Some(Entry::File(_)) => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            None => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }
}

/// What programs do with names that know no locks.
impl Disk {
    /// Adds an empty file of a new name. Returns its number.
    pub fn add_named(&self, name: impl Into<PathBuf>) -> usize {
        let (name, number) = (name.into(), self.add(Vec::new()));
        self.any_folder(|folder| folder.change(vec![(name, Some(Entry::File(number)))]));
        number
    }

    /// Makes a symbolic link.
    pub fn link(&self, name: &str, to: &str) {
        let entry = Some(Entry::Link(to.into()));
        self.any_folder(|folder| folder.change(vec![(name.into(), entry)]));
    }

    /// Removes a name.
    ///
    /// # Errors
    /// Those of unlink(2).
    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.pause();
        self.folder(
            |folder| match folder.entries.contains_key(Path::new(name)) {
                true => {
                    folder.change(vec![(name.into(), None)]);
                    Ok(())
                }
                false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
            },
        )?
    }

    /// Gives a file another name, in the place of what may have it.
    ///
    /// # Errors
    /// Those of rename(2).
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.pause();
        self.folder(|folder| {
            let entry = folder.entries.get(Path::new(from)).cloned();
            let entry = entry.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
            folder.change(vec![(from.into(), None), (to.into(), Some(entry))]);
            Ok(())
        })?
    }

    /// Makes all names durable.
    pub fn sync_names(&self) {
        self.any_folder(Folder::sync);
    }

    /// The file that a name leads to.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.any_folder(|folder| folder.find(Path::new(name)).ok())
    }
}

impl LockBytes for File {
    fn set(&self, byte: i64, locked: bool) -> io::Result<()> {
        self.disk().pause();
        let (file, open) = (self.number(), self.open_number());
        let done = self.disk().folder(|folder| match locked {
            true => _ = folder.locks.insert((file, byte, open)),
            false => _ = folder.locks.remove(&(file, byte, open)),
        });
        match locked {
            true => done,
            false => Ok(()),
        }
    }

    fn is_locked_by_others(&self, byte: i64) -> io::Result<bool> {
        self.disk().pause();
        let (file, own) = (self.number(), self.open_number());
        let (locks, is_locked) = self.disk().folder(|folder| {
            let all = folder.locks.range((file, byte, 0)..=(file, byte, u64::MAX));
            let is_locked = all.into_iter().any(|(.., open)| *open != own);
            (folder.locks.contains(&(file, HELD_WRITE, own)), is_locked)
        })?;
        // The bytes are set first, and what others hold is looked at then.
        if locks {
            self.disk().note_lock();
        }
        Ok(is_locked)
    }
}

impl NamedFile for File {
    fn lock_bytes(&self) -> &dyn LockBytes {
        self
    }

    fn locked(&self) -> &Mutex<LockRequest> {
        self.locks()
    }

    fn path(&self) -> &Path {
        Storage::path(self)
    }

    fn is_device(&self) -> bool {
        false
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        Ok((1, self.number() as u64))
    }

    fn identity_at_path(&self) -> io::Result<(u64, u64)> {
        DiskNames(self.disk().clone()).identity(Storage::path(self))
    }

    /// At once after the look at what has the name: no program can do both in one call.
    fn unlink(&self) -> io::Result<()> {
        let removed = self.disk().folder(|folder| {
            let name = folder.follow(Storage::path(self))?;
            let file = folder.find(&name)?;
            let checked = folder.check_removal(self.open_number(), file);
            folder.change(vec![(name, None)]);
            Ok::<_, io::Error>(checked)
        })?;
        self.disk().note_violation(removed?);
        Ok(())
    }

    fn sync_path(&self) -> io::Result<()> {
        self.disk().pause();
        self.disk().folder(Folder::sync)
    }
}
