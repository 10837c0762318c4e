//! Regular files and block devices, through the page cache or past it.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs;
use std::io::{self, Read};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use super::engine::{Op, OpKind};
use super::extent;
use super::lock::{self, LockBytes, LockRequest};
use super::named::{NamedFile, parent};
use super::{Alignment, Blocks, FileStamp, Io, Iov, Properties, Queue, Started, Storage};

/// The largest block of a file system, in bytes.
const MAX_PAGE: u64 = 64 << 10;

/// How the host's page cache is used, with QEMU's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CacheMode {
    /// `O_DIRECT`; durable after a flush.
    None,
    /// Through the page cache; durable after a flush.
    #[default]
    WriteBack,
    /// Through the page cache; durable when the write completes.
    WriteThrough,
    /// `O_DIRECT`; durable when the write completes.
    DirectSync,
    /// Through the page cache; flushes are ignored.
    Unsafe,
}

impl CacheMode {
    /// All of them.
    pub const ALL: [CacheMode; 5] = [
        Self::None,
        Self::WriteBack,
        Self::WriteThrough,
        Self::DirectSync,
        Self::Unsafe,
    ];

    /// QEMU's name.
    pub fn name(self) -> &'static str {
        match self {
            CacheMode::None => "none",
            CacheMode::WriteBack => "writeback",
            CacheMode::WriteThrough => "writethrough",
            CacheMode::DirectSync => "directsync",
            CacheMode::Unsafe => "unsafe",
        }
    }

    /// Whether it means `O_DIRECT`.
    pub fn is_direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::DirectSync)
    }

    /// Whether a flush does nothing.
    pub fn ignores_flushes(self) -> bool {
        self == CacheMode::Unsafe
    }

    /// Whether a write is durable when it completes.
    pub fn is_write_through(self) -> bool {
        matches!(self, CacheMode::WriteThrough | CacheMode::DirectSync)
    }
}

impl FromStr for CacheMode {
    type Err = crate::Error;
    /// QEMU's names, `off` for `none` among them; else the error is [`Error::Refused`].
    ///
    /// [`Error::Refused`]: crate::Error::Refused
    fn from_str(name: &str) -> crate::Result<Self> {
        let known = if name == "off" { "none" } else { name };
        let mode = Self::ALL.into_iter().find(|mode| mode.name() == known);
        mode.ok_or_else(|| {
            let name = crate::printable(name.as_bytes());
            let all = Self::ALL.map(Self::name).join(", ");
            crate::Error::Refused(format!(
                "There is no cache mode '{name}': it is one of {all}"
            ))
        })
    }
}

options! {
    /// How to open a file ([`open_file`](crate::storage::open_file)).
    #[derive(Clone, Copy, Debug, Default)]
    pub struct OpenFile {
        /// For writing too.
        pub write: bool,
        /// Create it if it does not exist. An existing file is not changed.
        pub create: bool,
        /// The cache mode.
        pub cache: CacheMode,
    }
}

/// Opens a file of this machine: [`open_file`](super::open_file).
pub fn open_host_file(path: &Path, how: OpenFile) -> io::Result<Arc<dyn Storage>> {
    let file = open(path, how)?;
    storage_of(file, path.to_owned(), how.cache)
}

/// The storage of a file that the caller has opened for reading, and for writing if that is needed.
/// `path` is for messages.
///
/// # Errors
/// `EINVAL` if the descriptor's `O_DIRECT` is not as `cache` needs it, or if it is neither a
/// regular file nor a block device.
pub fn file_from_fd(
    fd: OwnedFd,
    path: impl Into<PathBuf>,
    cache: CacheMode,
) -> io::Result<Arc<dyn Storage>> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    if flags.contains(rustix::fs::OFlags::DIRECT) != cache.is_direct() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "O_DIRECT of the descriptor does not fit the cache mode '{}'",
                cache.name()
            ),
        ));
    }
    storage_of(fd.into(), path.into(), cache)
}

fn storage_of(file: fs::File, path: PathBuf, cache: CacheMode) -> io::Result<Arc<dyn Storage>> {
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(not_regular(&path));
    }
    let device = kind.is_block_device();
    let fd = OwnedFd::from(file);
    clear_nonblock(fd.as_raw_fd())?;
    let is_direct = cache.is_direct();
    let alignment = match is_direct {
        true => direct_alignment(fd.as_raw_fd(), device),
        false => Alignment::NONE,
    };
    let page = page_size().max(metadata.blksize().next_power_of_two().min(MAX_PAGE));
    Ok(Arc::new(HostFile {
        fd: Arc::new(fd),
        locks: OnceLock::new(),
        locked: Mutex::new(LockRequest::NOTHING),
        blocks: (alignment.offset > 1).then(|| Blocks::new(page)),
        failed_flush: Arc::default(),
        properties: Properties {
            path,
            cache,
            alignment,
            is_device: device,
            ..Properties::PLAIN
        },
    }))
}

/// Opens a file only after a look at what it is: to open a FIFO lets its writer go on, a tape
/// rewinds, and a watchdog starts. The look pins it, so it is the same that is opened.
fn open(path: &Path, how: OpenFile) -> io::Result<fs::File> {
    let look = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let pinned = match rustix::fs::open(path, look, rustix::fs::Mode::empty()) {
        Ok(pinned) => fs::File::from(pinned),
        Err(rustix::io::Errno::NOENT) if how.create => return open_by(path, path, how),
        Err(error) => return Err(error.into()),
    };
    let kind = pinned.metadata()?.file_type();
    if kind.is_fifo() || kind.is_char_device() {
        return Err(not_regular(path));
    }
    let again = PathBuf::from(format!("/proc/self/fd/{}", pinned.as_raw_fd()));
    let existing = OpenFile {
        create: false,
        ..how
    };
    match open_by(&again, path, existing) {
        // There is no /proc. A FIFO that has replaced it since does not block.
        Err(e) if e.kind() == io::ErrorKind::NotFound => open_by(path, path, how),
        opened => opened,
    }
}

/// Opens a file by one name; `path` is the one for messages.
fn open_by(name: &Path, path: &Path, how: OpenFile) -> io::Result<fs::File> {
    // A FIFO would block in open(2).
    let mut flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    if how.cache.is_direct() {
        flags |= libc::O_DIRECT;
    }
    let opened = fs::OpenOptions::new()
        .read(true)
        .write(how.write)
        .create(how.create)
        .truncate(false)
        .mode(0o644)
        .custom_flags(flags)
        .open(name);
    match opened {
        // open(2): the file system has no O_DIRECT. The message is QEMU's.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) && how.cache.is_direct() => {
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "Could not open '{}': filesystem does not support O_DIRECT",
                    path.display()
                ),
            ))
        }
        other => other,
    }
}

fn not_regular(path: &Path) -> io::Error {
    let path = crate::printable(path.as_os_str().as_bytes());
    let text = format!("'file' driver requires '{path}' to be a regular file");
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// The content of a regular file that an image may have named. Blocks.
///
/// # Errors
/// Those of open(2) and read(2), and `InvalidInput` for other kinds of files.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open(path, OpenFile::default())?;
    if !file.metadata()?.is_file() {
        return Err(not_regular(path));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Makes the name of a file durable, in the folder that has the file. A folder that may not be read is
/// left to the file system, as is one of a file system that has nothing to write.
///
/// # Errors
/// Those of fsync(2).
pub fn sync_name(path: &Path) -> io::Result<()> {
    let path = fs::canonicalize(path);
    let Ok(folder) = path.and_then(|path| fs::File::open(parent(&path))) else {
        return Ok(());
    };
    match folder.sync_all() {
        Err(e) if !matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EROFS)) => Err(e),
        _ => Ok(()),
    }
}

/// An open regular file or block device of this machine.
#[derive(Debug)]
pub struct HostFile {
    /// Shared with operations in flight.
    fd: Arc<OwnedFd>,
    /// The descriptor with the locks, once there are any.
    locks: OnceLock<Option<OwnedFd>>,
    /// The locks.
    locked: Mutex<LockRequest>,
    /// With direct I/O.
    blocks: Option<Blocks>,
    /// The error number of a flush of the page cache that failed; 0: none did.
    failed_flush: Arc<AtomicI32>,
    properties: Properties,
}

impl HostFile {
    /// Takes QEMU's image locks. They are held until the file is dropped or another request
    /// replaces them. After a failure the old ones are held.
    ///
    /// # Errors
    /// [`Error::Locked`](crate::Error::Locked) if another process has a lock that conflicts.
    pub fn lock(&self, request: LockRequest) -> crate::Result<()> {
        NamedFile::lock(self, request)
    }

    /// The descriptor of the locks, which has its own open file description: that of I/O may
    /// outlive the process, because operations of io_uring refer to it until the kernel has ended
    /// them.
    fn lock_fd(&self) -> RawFd {
        let own = self.locks.get_or_init(|| {
            let again = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
            let mut how = fs::OpenOptions::new();
            how.read(true)
                .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
            // Without permission (a file that another user opened), the locks are on the
            // description for I/O.
            how.open(again).ok().map(OwnedFd::from)
        });
        own.as_ref().unwrap_or(&self.fd).as_raw_fd()
    }

    /// Device and inode number, or the number of the block device: the same for two names of one
    /// file.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        Ok(identity(&self.std().metadata()?))
    }

    fn std(&self) -> ManuallyDrop<fs::File> {
        // SAFETY: the descriptor is open, and is not closed by this.
        ManuallyDrop::new(unsafe { fs::File::from_raw_fd(self.fd.as_raw_fd()) })
    }
}

impl LockBytes for HostFile {
    fn set(&self, byte: libc::off_t, locked: bool) -> io::Result<()> {
        self.lock_fd().set(byte, locked)
    }

    fn is_locked_by_others(&self, byte: libc::off_t) -> io::Result<bool> {
        self.lock_fd().is_locked_by_others(byte)
    }
}

impl NamedFile for HostFile {
    fn lock_bytes(&self) -> &dyn LockBytes {
        self
    }

    fn locked(&self) -> &Mutex<LockRequest> {
        &self.locked
    }

    fn path(&self) -> &Path {
        &self.properties.path
    }

    fn is_device(&self) -> bool {
        self.properties.is_device
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        HostFile::identity(self)
    }

    fn identity_at_path(&self) -> io::Result<(u64, u64)> {
        Ok(identity(&fs::metadata(&self.properties.path)?))
    }

    fn unlink(&self) -> io::Result<()> {
        fs::remove_file(fs::canonicalize(&self.properties.path)?)
    }

    fn sync_path(&self) -> io::Result<()> {
        sync_name(&self.properties.path)
    }
}

/// Device and inode number, or `u64::MAX` and the number of the block device: the same for two names
/// of one file.
pub fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    match metadata.file_type().is_block_device() {
        true => (u64::MAX, metadata.rdev()),
        false => (metadata.dev(), metadata.ino()),
    }
}

// SAFETY: the engine uses the memory until the operation has ended, which the `Io` in the `Started`
// waits for.
unsafe impl Storage for HostFile {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::Extent && self.properties.is_device {
            return Started::done(Ok(0));
        }
        // A search for holes is no direct I/O.
        let buffered = kind == OpKind::Extent || !self.properties.cache.is_direct();
        if let Some(iov) = memory {
            // SAFETY: passed on; the `Started` waits for the end.
            let (io, segments) = unsafe { queue.submit_iov(kind, &self.fd, offset, iov, buffered) };
            return Started::in_flight(io, segments);
        }
        if kind == OpKind::ZeroQuickly && self.properties.is_device {
            return Started::done(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
        }
        if kind == OpKind::SetLength && self.properties.is_device {
            return match self.len() {
                Ok(size) => Started::fixed_length(size, length, "Cannot grow device files"),
                Err(error) => Started::done(Err(error)),
            };
        }
        let op = Op::without_memory(kind, self.fd.as_raw_fd(), offset, length);
        // SAFETY: there is no memory.
        let io = unsafe { queue.submit(op, &self.fd) };
        match kind == OpKind::Flush && buffered {
            true => Started::later(flush_cache(io, self.failed_flush.clone())),
            false => Started::in_flight(io, None),
        }
    }

    fn len(&self) -> io::Result<u64> {
        match self.properties.is_device {
            true => Ok(extent::seek(self.fd.as_raw_fd(), 0, libc::SEEK_END)?.unwrap_or(0)),
            false => Ok(self.std().metadata()?.len()),
        }
    }

    fn allocated(&self) -> io::Result<u64> {
        Ok(self.std().metadata()?.blocks() * 512)
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn host_file(&self) -> Option<&HostFile> {
        Some(self)
    }

    fn named_file(&self) -> Option<&dyn NamedFile> {
        Some(self)
    }

    fn stamp(&self) -> Option<io::Result<FileStamp>> {
        // A write to a device does not change the times of its node.
        let is_device = self.properties.is_device;
        (!is_device).then(|| Ok(FileStamp::of(&self.std().metadata()?)))
    }

    fn set_modified(&self, seconds: u32) -> io::Result<()> {
        let since = Duration::from_secs(seconds.into());
        self.std().set_modified(SystemTime::UNIX_EPOCH + since)
    }

    fn blocks(&self) -> Option<&Blocks> {
        self.blocks.as_ref()
    }
}

/// The result of a flush of the page cache. After one has failed all fail: the kernel reports the
/// error once, and has dropped what it could not write.
async fn flush_cache(flush: Io, failed: Arc<AtomicI32>) -> io::Result<usize> {
    let result = flush.await;
    if let Err(error) = &result
        && error.kind() != io::ErrorKind::Interrupted
    {
        failed.store(error.raw_os_error().unwrap_or(libc::EIO), Ordering::SeqCst);
    }
    match failed.load(Ordering::SeqCst) {
        0 => result,
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

impl AsFd for HostFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        // Closing does it, too, but not while a child process that is being started has a
        // duplicate of the descriptor.
        if self.locks.get().is_some() {
            lock::unlock(self.lock_fd());
        }
    }
}

/// Clears `O_NONBLOCK`. System calls ignore it on files, but io_uring may end operations with
/// `EAGAIN` instead of blocking.
fn clear_nonblock(fd: RawFd) -> io::Result<()> {
    // SAFETY: system calls without pointers.
    let result = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK)
    };
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes of a page of memory.
fn page_size() -> u64 {
    // SAFETY: a call without pointers.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096).max(4096)
}

/// The alignment that `O_DIRECT` needs on this descriptor: of `statx(2)` (`STATX_DIOALIGN`, Linux
/// 6.1), else the logical block size of a device (`BLKSSZGET`), else a page.
fn direct_alignment(fd: RawFd, device: bool) -> Alignment {
    let empty = CString::default();
    let mut stat = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the pointers are valid for the call.
    let result = unsafe {
        libc::statx(
            fd,
            empty.as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            stat.as_mut_ptr(),
        )
    };
    // SAFETY: zeroed is a valid value, and the kernel filled it if it could.
    let stat = unsafe { stat.assume_init() };
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    if result == 0 && memory.is_power_of_two() && offset.is_power_of_two() {
        return Alignment {
            memory: memory as usize,
            // At least that of memory, so that the rest after a short result is aligned, too.
            offset: offset.max(memory) as usize,
        };
    }
    let mut sector: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes an int.
    if device && unsafe { libc::ioctl(fd, libc::BLKSSZGET as _, &mut sector) } == 0 && sector > 0 {
        return Alignment {
            memory: sector as usize,
            offset: sector as usize,
        };
    }
    Alignment {
        memory: 4096,
        offset: 4096,
    }
}
