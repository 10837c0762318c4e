//! A file that is being made: which program has made it, which one fills it, and what becomes of it
//! after an error, also if several programs want the same name at once.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use super::could_not_create;
use crate::block::{ATTEMPTS, FileSpec, Objects, OpenedFile, REPLACED, in_first};
use crate::storage::{self, CacheMode, LockRequest, OpenFile, Queue, Storage};
use crate::{Error, ErrorKind, Result, printable};

/// Locks a file that was made for this. Two programs that lock it at the same time refuse each other;
/// then the one that made it goes on, so that no empty file stays.
fn lock_made(file: &OpenedFile, lock: LockRequest) -> Result<()> {
    for _ in 1..ATTEMPTS {
        match file.lock(lock) {
            Err(e) if e.kind() == ErrorKind::Locked => std::thread::sleep(Duration::from_millis(1)),
            locked => return locked,
        }
    }
    file.lock(lock)
}

/// Refuses files that were removed, or replaced by others of their names, since they were opened: what
/// was written to them is lost. Those on other machines are not looked at.
///
/// # Errors
/// [`Error::Refused`], with the name of the file.
pub fn check_names(files: &[Arc<dyn Storage>]) -> Result<()> {
    let is_lost = |file: &&Arc<dyn Storage>| {
        let named = file.named_file();
        named.is_some_and(|file| !file.is_at_its_path())
    };
    match files.iter().find(is_lost) {
        None => Ok(()),
        Some(file) => Err(Error::Refused(format!(
            "'{}' was removed or replaced while it was written, and what was written is lost",
            printable(file.path().as_os_str().as_bytes())
        ))),
    }
}

/// A file that is being made. What it held is there until the caller changes it. While this is there,
/// no other program gets the lock; so the file is emptied and removed only here.
#[derive(Debug)]
pub struct NewFile {
    file: OpenedFile,
    storage: Arc<dyn Storage>,
    /// It was made for this, and no other program has made or filled it.
    is_new: bool,
    /// It stays, with what it holds, whatever becomes of the image.
    is_kept: bool,
}

impl NewFile {
    /// Opens the file, in the first of `caches` that works, or makes it, and locks it. The name leads
    /// to it then, durably unless flushes are ignored.
    ///
    /// # Errors
    /// If it cannot be made, or another program uses it.
    pub fn open(
        spec: &FileSpec,
        lock: LockRequest,
        caches: &[CacheMode],
        objects: &Objects,
    ) -> Result<NewFile> {
        // Only files of this machine have an identity.
        let is_local = spec.is_local();
        let mut made = None;
        for _ in 0..ATTEMPTS {
            let opened = in_first(caches, |cache| {
                let how = OpenFile::default().write(true).create(!is_local);
                spec.open(how.cache(cache), objects)
            });
            let file = match opened {
                Ok(file) => file,
                Err(e)
                    if is_local && !spec.protocol().must_exist() && e.errno() == libc::ENOENT =>
                {
                    let new = storage::make_file(&spec.path);
                    made = new.map_err(|e| could_not_create(spec, e.into()))?;
                    continue;
                }
                Err(e) => return Err(could_not_create(spec, e)),
            };
            let identity = file.named_file().map(|file| file.identity()).transpose()?;
            let was_made = identity.is_some() && identity == made;
            // Without the lock it may be another program's by now, whichever made it.
            match was_made {
                true => lock_made(&file, lock)?,
                false => file.lock(lock)?,
            }
            if !file.is_at_its_path() {
                continue;
            }
            let storage = file.storage();
            let is_new = match file.existed() {
                Some(existed) => !existed,
                // Another program may have filled it until it was locked.
                None => was_made && storage.is_empty()?,
            };
            let new = NewFile {
                storage,
                is_new,
                file,
                is_kept: false,
            };
            new.sync_name()
                .map_err(|e| could_not_create(spec, e.into()))?;
            return Ok(new);
        }
        Err(Error::Refused(REPLACED.into()))
    }

    /// Opens a file that is there, and stays with what it holds, and locks it.
    ///
    /// # Errors
    /// If there is none, or another program uses it.
    pub fn open_kept(
        spec: &FileSpec,
        lock: LockRequest,
        caches: &[CacheMode],
        objects: &Objects,
    ) -> Result<NewFile> {
        let file = spec.open_locked(caches, lock, objects)?;
        Ok(NewFile {
            storage: file.storage(),
            file,
            is_new: false,
            is_kept: true,
        })
    }

    /// Whether it was made for this, and no other program has made or filled it.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Whether it keeps what it holds.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    fn sync_name(&self) -> std::io::Result<()> {
        match self.file.named_file() {
            Some(file) if !self.storage.cache_mode().ignores_flushes() => file.sync_name(),
            _ => Ok(()),
        }
    }

    /// Changes its locks.
    ///
    /// # Errors
    /// If another program has a lock that conflicts. It is locked as before then.
    pub fn lock(&self, lock: LockRequest) -> Result<()> {
        self.file.lock(lock)
    }

    /// Its bytes.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The file, open and locked.
    pub fn opened(&self) -> &OpenedFile {
        &self.file
    }

    /// Removes it, if it was made for this. What was there before is as it was.
    pub fn remove_if_new(&self) {
        if self.is_new {
            // Nothing better can be done with it.
            let _ = self.file.remove();
        }
    }

    /// Discards what was written to it: a file that was made for this is removed, one that was there
    /// is emptied. A device is left.
    ///
    /// # Errors
    /// Those of the file system, or of the server.
    pub fn discard(&self, queue: &Queue) -> std::io::Result<()> {
        if self.is_kept {
            return Ok(());
        }
        if self.is_new {
            return self.file.remove();
        }
        match self.file.own.is_emptied() {
            true => queue.block_on(storage::set_len(&*self.storage, queue, 0)),
            false => Ok(()),
        }
    }
}
