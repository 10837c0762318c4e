//! Opening, making, locking and removing files by name. [`Names`] is the kernel's part, which a simulation
//! replaces.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use super::file::{identity, open_host_file};
use super::lock::{LockBytes, LockRequest, relock};
use super::{OpenFile, Storage};

/// The names of a machine.
pub trait Names {
    /// Opens a file.
    ///
    /// # Errors
    /// Those of open(2).
    fn open(&self, path: &Path, how: OpenFile) -> io::Result<Arc<dyn Storage>>;

    /// Makes an empty file of a new name (`O_EXCL`). Returns its [`identity`].
    ///
    /// # Errors
    /// Those of open(2).
    fn make(&self, path: &Path) -> io::Result<(u64, u64)>;

    /// The identity of the file that a name leads to.
    ///
    /// # Errors
    /// Those of stat(2).
    fn identity(&self, path: &Path) -> io::Result<(u64, u64)>;

    /// What a symbolic link names.
    ///
    /// # Errors
    /// Those of readlink(2).
    fn read_link(&self, path: &Path) -> io::Result<PathBuf>;
}

/// Those of this machine.
struct Host;

impl Names for Host {
    fn open(&self, path: &Path, how: OpenFile) -> io::Result<Arc<dyn Storage>> {
        open_host_file(path, how)
    }

    fn make(&self, path: &Path) -> io::Result<(u64, u64)> {
        let made = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(path)?;
        Ok(identity(&made.metadata()?))
    }

    fn identity(&self, path: &Path) -> io::Result<(u64, u64)> {
        Ok(identity(&fs::metadata(path)?))
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        fs::read_link(path)
    }
}

thread_local! {
    static SIMULATED: RefCell<Option<Rc<dyn Names>>> = const { RefCell::new(None) };
}

/// From now on this thread opens and makes files of these names instead of those of the machine.
/// `None` ends that.
pub fn simulate_names(names: Option<Rc<dyn Names>>) {
    SIMULATED.set(names);
}

fn with_names<T>(ask: impl FnOnce(&dyn Names) -> T) -> T {
    match SIMULATED.with_borrow(Clone::clone) {
        Some(names) => ask(&*names),
        None => ask(&Host),
    }
}

/// Opens a regular file or block device.
///
/// # Errors
/// Those of open(2), and `InvalidInput` for other kinds of files, or if the file system does not
/// support the cache mode.
pub fn open_file(path: impl Into<PathBuf>, how: OpenFile) -> io::Result<Arc<dyn Storage>> {
    with_names(|names| names.open(&path.into(), how))
}

/// Makes an empty file, if there is none of this name; one that a symbolic link names, if that is what
/// is missing. Returns its [`identity`]: without one, another program has made it.
///
/// # Errors
/// Those of open(2).
pub fn make_file(path: &Path) -> io::Result<Option<(u64, u64)>> {
    /// Links that the kernel follows, too.
    const LINKS: usize = 40;
    with_names(|names| {
        let mut path = path.to_owned();
        for _ in 0..LINKS {
            match names.make(&path) {
                Ok(identity) => return Ok(Some(identity)),
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                Err(_) => {}
            }
            // The kernel does not follow a link here. Whether it may be followed, it says in stat(2).
            match names.identity(&path) {
                Ok(_) => return Ok(None),
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                Err(_) => {}
            }
            path = match names.read_link(&path) {
                Ok(target) => parent(&path).join(target),
                // It was removed meanwhile, or is no link any more.
                Err(_) => return Ok(None),
            };
        }
        Err(io::Error::from_raw_os_error(libc::ELOOP))
    })
}

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

    /// [`identity`].
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
