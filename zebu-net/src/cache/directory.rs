//! The folder of a cache: its files, and the bound on their bytes.
//!
//! - The files are in a folder of their own below the one that the user names, which may have any
//!   other files: what is here may be overwritten and removed.
//! - A block's file is written under a name of its own and then renamed, so another process sees all
//!   of it or nothing. After a power cut it may have any bytes: its checksum tells.
//! - The file `usage` has the sum of all files. It is changed under a lock of it ([`Usage`]), before a
//!   file is made; files that are removed or replaced are not subtracted. So it is not too low.
//!   When it reaches the bound, files are counted, and the oldest ones removed. It counts for one
//!   start of the system, since a power cut may leave an older sum than files.
//! - A file that is being written is locked, so one that was left behind is known.

use std::ffi::CStr;
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use libdeflater::Crc;
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, flock, fstat, mkdirat, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;

use super::block::{HEADER, Key, file_name, header, is_folder, number};
use super::{BlockCacheOptions, LEAST};
use crate::{Error, Result, lock};

/// The folder of the files, in the one that the user names.
pub(super) const OWN: &str = "zebu-cache";
/// The name of the file with the sum of bytes.
const USAGE: &str = "usage";
/// What the names of files that are being written begin with.
const NEW: &str = "new-";
/// How long another process may hold the lock: then it is stopped, or its disk is slow.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long nothing is stored after that.
const PAUSE: Duration = Duration::from_secs(30);
/// The age of a file's last use is as precise as this.
const PRECISION: Duration = Duration::from_secs(10);

/// The folder of a cache.
pub(super) struct Directory {
    root: OwnedFd,
    path: PathBuf,
    limit: u64,
    /// The start of the system.
    boot: String,
    /// Until when nothing is stored. Taken before the lock.
    paused: Mutex<Option<Instant>>,
    /// The last store has failed, and a line has said so.
    failing: AtomicBool,
    /// Numbers the files that are written.
    written: AtomicU64,
    warn: Option<fn(&str)>,
}

impl Directory {
    pub fn open(path: &Path, options: &BlockCacheOptions) -> Result<Directory> {
        let refused = |why: String| Error::Refused(format!("'{}': {why}", path.display()));
        let failed = |error: io::Error| refused(crate::strerror(&error).to_string());
        if options.size < LEAST {
            return Err(refused(format!("a cache has at least {LEAST} bytes")));
        }
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(path).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let above = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        check_owner(&above).map_err(refused)?;
        match mkdirat(&above, OWN, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(failed(e.into())),
        }
        let root = openat(&above, OWN, flags | OFlags::NOFOLLOW, Mode::empty());
        let root = root.map_err(|e| refused(format!("{OWN}: {}", crate::strerror(&e.into()))))?;
        check_owner(&root).map_err(|why| refused(format!("{OWN}: {why}")))?;
        let directory = Directory {
            root,
            path: path.join(OWN),
            limit: options.size,
            boot: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
            paused: Mutex::default(),
            failing: AtomicBool::new(false),
            written: AtomicU64::new(0),
            warn: options.warn,
        };
        match directory.usage() {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(failed(e)),
        }
        Ok(directory)
    }

    pub fn warn(&self, text: &str) {
        tracing::debug!("{text}");
        if let Some(warn) = self.warn {
            warn(text);
        }
    }

    fn open_at(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.root, name, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(File::from(file))
    }

    /// The data of a block, if it is there and undamaged. Blocks.
    pub fn read(&self, key: &Key, nth: u64, length: usize) -> Option<Vec<u8>> {
        let name = key.file(nth);
        // A pipe in its place does not stop it.
        let file = self
            .open_at(&name, OFlags::RDONLY | OFlags::NONBLOCK)
            .ok()?;
        let data = read_block(&file, key, nth, length).unwrap_or_default();
        if data.is_none() {
            tracing::debug!("{}/{name} is damaged", self.path.display());
            // An error: it was removed meanwhile.
            let _ = unlinkat(&self.root, &*name, AtFlags::empty());
        }
        data
    }

    /// Stores a block, if that can be done. Blocks.
    pub fn store(&self, key: &Key, nth: u64, data: &[u8]) {
        match self.write(key, nth, data) {
            Ok(()) => self.failing.store(false, Ordering::Relaxed),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                tracing::debug!("{}: a block is not stored", self.path.display());
            }
            Err(e) => {
                self.pause(&mut lock(&self.paused));
                if !self.failing.swap(true, Ordering::Relaxed) {
                    let path = self.path.display();
                    let why = crate::strerror(&e);
                    self.warn(&format!("'{path}': blocks are not cached for now: {why}"));
                }
            }
        }
    }

    /// Nothing is stored for some time.
    fn pause(&self, paused: &mut Option<Instant>) {
        *paused = Some(Instant::now() + PAUSE);
    }

    fn write(&self, key: &Key, nth: u64, data: &[u8]) -> io::Result<()> {
        let (file, name) = self.begin((HEADER + data.len()) as u64)?;
        let written = file
            .write_all_at(&header(key, nth, data), 0)
            .and_then(|()| file.write_all_at(data, HEADER as u64))
            .and_then(|()| self.name(&name, key, nth));
        if written.is_err() {
            // An error: it is gone already.
            let _ = unlinkat(&self.root, &*name, AtFlags::empty());
        }
        written
    }

    /// A file of this length that is to be written, and its name.
    fn begin(&self, length: u64) -> io::Result<(File, String)> {
        let usage = self.usage()?;
        let used = match usage.get() {
            Some(used) if used.saturating_add(length) <= self.limit => used,
            _ => self.make_space(length)?,
        };
        usage.set(used + length)?;
        loop {
            let nth = self.written.fetch_add(1, Ordering::Relaxed);
            let name = format!("{NEW}{}-{nth}", std::process::id());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
            match self.open_at(&name, flags) {
                // Of a process that has ended, or with the same number in another namespace.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
                Ok(file) => {
                    let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
                    // The sum of all files has all of its bytes from now on.
                    let begun = locked
                        .map_err(Into::into)
                        .and_then(|()| file.set_len(length));
                    if begun.is_err() {
                        let _ = unlinkat(&self.root, &*name, AtFlags::empty());
                    }
                    return begun.map(|()| (file, name));
                }
            }
        }
    }

    /// Gives a file that is complete its name.
    fn name(&self, new: &str, key: &Key, nth: u64) -> io::Result<()> {
        let name = key.file(nth);
        // A folder that is empty may be removed at any time.
        for _ in 0..3 {
            match renameat(&self.root, new, &self.root, &*name) {
                Ok(()) => return Ok(()),
                Err(Errno::NOENT) => match mkdirat(&self.root, key.folder(), Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                },
                Err(e) => return Err(e.into()),
            }
        }
        // The file was removed meanwhile.
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Locks the sum. `WouldBlock`: another process holds it for too long.
    fn usage(&self) -> io::Result<Usage<'_>> {
        let mut paused = lock(&self.paused);
        let begun = Instant::now();
        if paused.is_some_and(|until| begun < until) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        loop {
            let file = self.open_at(USAGE, OFlags::RDWR | OFlags::CREATE)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if self.is_at(&file, USAGE) => {
                    return Ok(Usage {
                        file,
                        boot: &self.boot,
                        _paused: paused,
                    });
                }
                // The file was removed meanwhile, or another process has the lock.
                Ok(()) | Err(Errno::INTR | Errno::WOULDBLOCK) => {}
                Err(e) => return Err(e.into()),
            }
            if begun.elapsed() > PATIENCE {
                self.pause(&mut paused);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// Whether the file of this name is `file`.
    fn is_at(&self, file: &File, name: &str) -> bool {
        let there = statat(&self.root, name, AtFlags::SYMLINK_NOFOLLOW);
        match (there, fstat(file)) {
            (Ok(there), Ok(own)) => (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino),
            _ => false,
        }
    }

    /// Removes files until there is space for `length` bytes, and for more. The bytes of those that
    /// are left.
    fn make_space(&self, length: u64) -> io::Result<u64> {
        let Contents {
            mut blocks,
            folders,
            new,
        } = self.contents()?;
        let mut used = new + blocks.iter().map(|block| block.size).sum::<u64>();
        if used + length > self.limit {
            // More than this block needs, so that the next ones need no count.
            let goal = self.limit - self.limit / 8;
            blocks.sort_unstable_by_key(|block| block.used);
            for block in blocks {
                if used + length <= goal {
                    break;
                }
                let name = format!("{}/{}", folders[block.folder], file_name(block.nth));
                match unlinkat(&self.root, &*name, AtFlags::empty()) {
                    Ok(()) | Err(Errno::NOENT) => used -= block.size,
                    Err(e) => return Err(e.into()),
                }
            }
            for folder in folders {
                // One with files in it stays.
                let _ = unlinkat(&self.root, &*folder, AtFlags::REMOVEDIR);
            }
        }
        match used + length <= self.limit {
            true => Ok(used),
            // Other processes write so much at this moment.
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Counts all files, and removes what was left behind.
    fn contents(&self) -> io::Result<Contents> {
        let mut contents = Contents::default();
        each(Dir::read_from(&self.root)?, |name| {
            if is_new(name) {
                contents.new += self.being_written(name);
            } else if is_folder(name) {
                contents.folders.push(name.into());
            }
        })?;
        for (nth, folder) in contents.folders.iter().enumerate() {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let Ok(fd) = openat(&self.root, &**folder, flags, Mode::empty()) else {
                continue;
            };
            each(Dir::read_from(&fd)?, |name| {
                let is = statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW);
                if let (Some(number), Ok(is)) = (number(name), is)
                    && FileType::from_raw_mode(is.st_mode) == FileType::RegularFile
                {
                    contents.blocks.push(Found {
                        used: (is.st_mtime, is.st_mtime_nsec as i64),
                        size: is.st_size as u64,
                        folder: nth,
                        nth: number,
                    });
                }
            })?;
        }
        Ok(contents)
    }

    /// The length of a file that a process writes; 0: it was left behind, and is removed.
    fn being_written(&self, name: &str) -> u64 {
        let Ok(file) = self.open_at(name, OFlags::RDWR | OFlags::NONBLOCK) else {
            return 0;
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if self.is_at(&file, name) => {
                // An error: it is counted again next time.
                let _ = unlinkat(&self.root, name, AtFlags::empty());
                0
            }
            // It is being written, or has just got its name.
            _ => file.metadata().map_or(0, |is| is.len()),
        }
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directory")
            .field("path", &self.path)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// Refuses a folder of another user, or one that others may write to.
fn check_owner(folder: &OwnedFd) -> std::result::Result<(), String> {
    let is = fstat(folder).map_err(|e| crate::strerror(&e.into()).to_string())?;
    if is.st_uid != own_user() {
        return Err("the folder of a cache must belong to the user who uses it".into());
    }
    if is.st_mode & 0o022 != 0 {
        return Err("others may write to it, so it cannot be a cache (chmod go-w)".into());
    }
    Ok(())
}

/// Whether this is the name of a file that is being written: `new-PID-N`.
fn is_new(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let numbers = name.strip_prefix(NEW).and_then(|rest| rest.split_once('-'));
    numbers.is_some_and(|(process, nth)| is_number(process) && is_number(nth))
}

/// The user of this process.
#[allow(unsafe_code)]
pub(super) fn own_user() -> u32 {
    // SAFETY: a system call without pointers, which does not fail.
    unsafe { libc::geteuid() }
}

/// The files of a cache.
#[derive(Default)]
struct Contents {
    blocks: Vec<Found>,
    folders: Vec<String>,
    /// Bytes of files that are being written.
    new: u64,
}

struct Found {
    /// When it was used last: seconds and nanoseconds.
    used: (i64, i64),
    size: u64,
    /// Its place in the list of folders.
    folder: usize,
    nth: u64,
}

/// Calls `found` with the names in a folder.
fn each(mut entries: Dir, mut found: impl FnMut(&str)) -> io::Result<()> {
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        // Names of a cache's files are ASCII.
        if let Ok(name) = name.to_str() {
            found(name);
        }
    }
    Ok(())
}

/// The data of a block; None: the file is damaged, or of another block.
fn read_block(file: &File, key: &Key, nth: u64, length: usize) -> io::Result<Option<Vec<u8>>> {
    let is = file.metadata()?;
    if is.len() != (HEADER + length) as u64 {
        return Ok(None);
    }
    let mut head = [0; HEADER];
    let mut data = vec![0; length];
    file.read_exact_at(&mut head, 0)?;
    file.read_exact_at(&mut data, HEADER as u64)?;
    if head != header(key, nth, &data) {
        return Ok(None);
    }
    let modified = Duration::new(is.mtime().max(0) as u64, is.mtime_nsec() as u32);
    let now = SystemTime::now();
    let age = now.duration_since(SystemTime::UNIX_EPOCH + modified);
    // A time in the future is set to now as well.
    if age.is_ok_and(|age| age < PRECISION) {
        return Ok(Some(data));
    }
    // An error makes it seem older.
    let _ = file.set_modified(now);
    Ok(Some(data))
}

/// The locked sum of bytes: the start of the system, the sum, and a checksum.
struct Usage<'a> {
    file: File,
    boot: &'a str,
    _paused: MutexGuard<'a, Option<Instant>>,
}

impl Usage<'_> {
    /// The sum, if it is known.
    fn get(&self) -> Option<u64> {
        let mut found = self.encoded(0);
        let at = self.boot.len();
        self.file.read_exact_at(&mut found, 0).ok()?;
        let sum = u64::from_le_bytes(*found.get(at..)?.first_chunk()?);
        (found == self.encoded(sum)).then_some(sum)
    }

    fn set(&self, sum: u64) -> io::Result<()> {
        self.file.write_all_at(&self.encoded(sum), 0)
    }

    fn encoded(&self, sum: u64) -> Vec<u8> {
        let mut bytes = self.boot.as_bytes().to_vec();
        bytes.extend(sum.to_le_bytes());
        let mut crc = Crc::new();
        crc.update(&bytes);
        bytes.extend(crc.sum().to_le_bytes());
        bytes
    }
}
