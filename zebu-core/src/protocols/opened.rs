//! A file or an export that was opened.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::Result;
use crate::storage::named::NamedFile;
use crate::storage::{CacheIdentity, CacheMode, Check, LockRequest, RemoteCache, Storage};

/// How often a file is opened again that was removed or replaced before it was locked.
pub const ATTEMPTS: usize = 16;
/// The error after so many attempts.
pub const REPLACED: &str = "Other programs replace the file again and again: try it once more";

/// What `open` opens in the first of `caches` (at least one) that works. The
/// error is that of the last.
#[doc(hidden)]
pub fn in_first<T, E>(
    caches: &[CacheMode],
    open: impl Fn(CacheMode) -> Result<T, E>,
) -> Result<T, E> {
    let (last, others) = caches.split_last().expect("a cache mode");
    let opened = others.iter().find_map(|cache| open(*cache).ok());
    opened.map_or_else(|| open(*last), Ok)
}

/// The identity of a file, by which a loop is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Device and inode.
    Local(u64, u64),
    /// What names it on another machine, with the protocol.
    Elsewhere(String),
    /// A part of a file: offset and size.
    Part(Box<Identity>, Option<u64>, Option<u64>),
    /// The disk of the image in a file.
    Inside(Box<Identity>),
}

/// What a protocol does with a file that is open, besides moving its bytes.
pub trait Opened: fmt::Debug + Send + Sync {
    /// Whether the file was there before an opening that may create it; None: not known.
    fn existed(&self) -> Option<bool> {
        None
    }

    /// Whether its name still leads to it, as far as that can be told.
    fn is_at_its_path(&self) -> bool {
        true
    }

    /// Whether it can be made empty.
    fn is_emptied(&self) -> bool {
        false
    }

    /// [`OpenedFile::remove`]
    fn remove(&self) -> io::Result<()> {
        Ok(())
    }

    /// [`OpenedFile::lock`]
    fn lock(&self, _request: LockRequest) -> Result<()> {
        Ok(())
    }
}

/// There is nothing to be done with it.
impl Opened for () {}

/// A file that was opened.
#[derive(Debug)]
pub struct OpenedFile {
    #[doc(hidden)]
    pub storage: Arc<dyn Storage>,
    /// The file itself, also if the storage is a part of it or a filter over it.
    #[doc(hidden)]
    pub own: Arc<dyn Opened>,
    /// Equal for two names of one file. None: no other name can lead to it.
    #[doc(hidden)]
    pub identity: Option<Identity>,
    /// Which bytes it has, if it is on another machine, and how that is checked.
    #[doc(hidden)]
    pub version: Option<(CacheIdentity, Option<Arc<dyn Check>>)>,
}

impl OpenedFile {
    /// A file that is neither locked nor removed, and that no other name can lead to.
    #[doc(hidden)]
    pub fn new(storage: Arc<dyn Storage>) -> OpenedFile {
        OpenedFile {
            storage,
            own: Arc::new(()),
            identity: None,
            version: None,
        }
    }

    /// A part of this file, or a filter over it.
    pub(crate) fn over(self, storage: Arc<dyn Storage>) -> OpenedFile {
        OpenedFile {
            storage,
            version: None,
            ..self
        }
    }

    /// The storage of its bytes.
    pub fn storage(&self) -> Arc<dyn Storage> {
        self.storage.clone()
    }

    /// The same file with a cache over it, if it is on another machine and was opened to be read.
    /// If nothing tells whether its bytes change, it is left as it is, and the cache says so.
    ///
    /// # Errors
    /// Those of [`Storage::len`](crate::Storage::len).
    pub fn cached(mut self, cache: &dyn RemoteCache) -> Result<OpenedFile> {
        match self.version.take() {
            None => Ok(self),
            Some((Ok(words), check)) => {
                let words: Vec<&str> = words.0.iter().map(String::as_str).collect();
                let cached = cache.over_checked(self.storage(), &words, check)?;
                Ok(self.over(cached))
            }
            Some((Err(why), _)) => {
                cache.leave_out(&self.storage.path().display().to_string(), why);
                Ok(self)
            }
        }
    }

    /// The file or the device of this machine that it is.
    pub(crate) fn named_file(&self) -> Option<&dyn NamedFile> {
        self.storage.named_file()
    }

    /// Whether the file was there before an opening that may create it; None: not known.
    pub fn existed(&self) -> Option<bool> {
        self.own.existed()
    }

    /// Whether its name still leads to it, as far as that can be told: between the opening and the
    /// locking of a local file, another program may have removed or replaced it.
    pub(crate) fn is_at_its_path(&self) -> bool {
        self.own.is_at_its_path()
    }

    /// Removes the file, if it is one that can be created, and its name still leads to it. Blocks.
    ///
    /// # Errors
    /// Those of the file system, or of the server.
    pub fn remove(&self) -> io::Result<()> {
        self.own.remove()
    }

    /// Takes the locks that QEMU and zebu share. An export is locked by its server; files on SSH
    /// servers cannot be locked, and a writer of an image in Ceph has the exclusive lock there, if the
    /// image has that feature.
    ///
    /// # Errors
    ///
    /// If another process holds a lock that excludes this one.
    pub fn lock(&self, request: LockRequest) -> Result<()> {
        self.own.lock(request)
    }
}
