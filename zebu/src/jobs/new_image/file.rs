//! A file that is being made: which program has made it, which one fills it, and what becomes of it
//! after an error, also if several programs want the same name at once.

use std::sync::Arc;

use super::{could_not_create, must_exist};
use crate::block::{ATTEMPTS, FileDriver, FileSpec, Objects, OpenedFile, REPLACED, in_first};
use crate::storage::{self, CacheMode, LockRequest, OpenFile, Queue, Storage};
use crate::{Error, Result};

/// A file that is being made. What it held is there until the caller changes it. While this is there,
/// no other program gets the lock; so the file is emptied and removed only here.
#[derive(Debug)]
pub struct NewFile {
    file: OpenedFile,
    storage: Arc<dyn Storage>,
    /// It was made for this, and not by another program.
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
        use FileDriver::{Any, File, HostCdrom, HostDevice};
        // Only these tell two files of one name apart.
        let is_local = matches!(spec.driver, Any | File | HostCdrom | HostDevice);
        let mut made = None;
        for _ in 0..ATTEMPTS {
            let opened = in_first(caches, |cache| {
                let how = OpenFile::default().write(true).create(!is_local);
                spec.open(how.cache(cache), objects)
            });
            let file = match opened {
                Ok(file) => file,
                Err(e) if is_local && !must_exist(spec) && e.errno() == libc::ENOENT => {
                    let new = storage::make_file(&spec.path);
                    made = new.map_err(|e| could_not_create(spec, e.into()))?;
                    continue;
                }
                Err(e) => return Err(could_not_create(spec, e)),
            };
            // Without the lock it may be another program's by now, whichever made it.
            file.lock(lock)?;
            if !file.is_at_its_path() {
                continue;
            }
            let identity = file.host_file().map(|file| file.identity()).transpose()?;
            let new = NewFile {
                storage: file.storage(),
                is_new: match file.existed() {
                    Some(existed) => !existed,
                    None => identity.is_some() && identity == made,
                },
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

    /// Whether it was made for this, and not by another program.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Whether it keeps what it holds.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    fn sync_name(&self) -> std::io::Result<()> {
        match self.file.host_file() {
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
        match self.file {
            OpenedFile::Local(_) if self.storage.is_device() => Ok(()),
            OpenedFile::Local(_) => queue.block_on(storage::set_len(&*self.storage, queue, 0)),
            #[cfg(feature = "ssh")]
            OpenedFile::Ssh(_) => queue.block_on(storage::set_len(&*self.storage, queue, 0)),
            _ => Ok(()),
        }
    }
}
