//! Opening and making files by name. [`Names`] is the kernel's part, which a simulation replaces.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::file::{identity, open_host_file};
use super::named::parent;
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
