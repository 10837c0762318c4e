//! Bytes at offsets: files, memory, what is on other machines; queues and engines.
//!
//! A [`Storage`] holds bytes. A [`Queue`] drives the operations of a thread, any number in flight.
//! Everything above this module moves bytes by [`read()`], [`write()`] and the other functions
//! here.
//!
//! - `file`, `named`, `names`, `lock`, `same`, `stamp`: files of this machine;
//! - `host`, `connect`, `secret`, `version`: what storages on other machines share;
//! - `memory`, `null`, `window`, `patched`, `counted`, `blkdebug`: other storages, and those over one;
//! - `access`, `buffer`, `slab`, `blocks`, `writings`: any range from aligned operations, and its memory;
//! - `zero`, `extent`, `ahead`: zeroes found in data, holes, tables read ahead;
//! - `queue/`, `engine/`, `ready`, `budget`, `polling`, `request_pool`: operations, and what drives them.

mod access;
mod ahead;
pub(crate) mod blkdebug;
mod blocks;
mod budget;
mod buffer;
#[doc(hidden)]
pub mod connect;
mod counted;
pub(crate) mod engine;
pub(crate) mod event;
mod extent;
pub(crate) mod file;
pub(crate) mod host;
mod join;
pub(crate) mod lock;
mod memory;
pub(crate) mod named;
pub(crate) mod names;
mod null;
mod patched;
pub(crate) mod polling;
pub(crate) mod queue;
mod ready;
pub(crate) mod request_pool;
pub(crate) mod same;
pub(crate) mod secret;
mod slab;
mod stamp;
pub(crate) mod version;
mod window;
mod writings;
mod zero;

use std::fmt;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::Pin;

#[doc(hidden)]
pub use access::{
    Reading, ZEROES, begin_read, deallocate, read_pooled, reserved, zero_quickly, zeroed, zeroes,
};
pub use access::{
    allocate, discard, extent, flush, punch_hole, read, read_vec, set_len, write, write_slice,
    write_zeroes, zero_range,
};
#[doc(hidden)]
pub use ahead::Ahead;
#[doc(hidden)]
pub use blkdebug::{Action, Blkdebug, BlkdebugLimits, Injection, IoKinds, Rule};
pub use blocks::Blocks;
#[doc(hidden)]
pub use blocks::Written;
#[doc(hidden)]
pub use budget::Step;
pub use budget::{Budget, Reserved};
pub use buffer::{BUFFER_ALIGN, Buffer, Iov, OwnedBuffer};
#[doc(hidden)]
pub use counted::{Counted, Work};
#[doc(hidden)]
pub use engine::is_simulated;
pub use engine::{EngineKind, OpKind};
#[doc(hidden)]
pub use event::Event;
pub use extent::StorageExtent;
pub use file::{CacheMode, HostFile, OpenFile, file_from_fd};
#[doc(hidden)]
pub use join::join;
pub use lock::{LockRequest, Permissions};
pub use memory::Memory;
use named::NamedFile;
#[doc(hidden)]
pub use names::make_file;
pub use names::open_file;
#[doc(hidden)]
pub use null::Null;
#[doc(hidden)]
pub use patched::{Patched, Patches};
#[doc(hidden)]
pub use queue::{Begun, Cancelled, Io, yield_once};
pub use queue::{Handle, PoolBuffer, Queue, QueueOptions};
pub use ready::Ready;
#[doc(hidden)]
pub use secret::{Secret, Secrets, find_secret};
#[doc(hidden)]
pub use stamp::{FileStamp, InodeStamp};
pub use version::RemoteCache;
#[doc(hidden)]
pub use version::{CacheIdentity, Check};
pub use window::Window;
#[doc(hidden)]
pub use writings::Writings;
#[doc(hidden)]
pub use zero::is_zero;

/// The alignment that operations need, in bytes (powers of two).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of the addresses of memory segments.
    pub memory: usize,
    /// Of offsets and lengths.
    pub offset: usize,
}

impl Alignment {
    /// No constraint.
    pub const NONE: Alignment = Alignment {
        memory: 1,
        offset: 1,
    };
}

options! {
    /// Properties of a storage that do not change.
    #[derive(Clone, Debug)]
    pub struct Properties {
        /// The path that it was opened by, for messages; empty for memory.
        pub path: PathBuf,
        /// The cache mode.
        pub cache: CacheMode,
        /// The alignment of operations.
        pub alignment: Alignment,
        /// Whether it is a block device or the like: of fixed size, its old content not zero.
        pub is_device: bool,
        /// Whether another program has the bytes: it gets the request itself ([`OpKind::Discard`],
        /// [`OpKind::ZeroQuickly`]) instead of the operations that a file needs for it.
        pub is_remote: bool,
        /// Whether it is the disk of an image, or a filter: its operations may wait for tasks of other
        /// queues.
        pub is_stacked: bool,
        /// Whether it is the disk of an image, or a filter over one: that image locks its file, and records
        /// itself that a dropped flush has failed.
        pub is_in_image: bool,
        /// Whether a filter changes its bytes, so that others stand in the file of this path.
        pub is_coded: bool,
    }
}

impl Properties {
    /// The properties of plain memory.
    pub const PLAIN: Properties = Properties {
        path: PathBuf::new(),
        cache: CacheMode::WriteBack,
        alignment: Alignment::NONE,
        is_device: false,
        is_remote: false,
        is_stacked: false,
        is_in_image: false,
        is_coded: false,
    };
}

/// A storage of bytes, used by any number of threads.
///
/// # Safety
/// An implementation uses the memory of an operation, and keeps a copy of its [`Iov`], only until
/// the [`Started`] was awaited or dropped.
#[allow(unsafe_code)]
pub unsafe trait Storage: Send + Sync + fmt::Debug {
    /// Starts an operation: on `memory` for reads, writes and [`OpKind::Extent`], else on `length`
    /// bytes. Reads and writes are aligned to [`Storage::alignment`].
    ///
    /// # Safety
    /// The memory stays valid and otherwise unused until the [`Started`] was awaited or
    /// dropped, and for ever if it is forgotten. (The storage may be dropped before:
    /// operations keep what they need of it.)
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started;

    /// The storage below a filter: the methods of the filter that are not implemented are those of
    /// that storage, except [`Storage::host_file`] and [`Storage::named_file`]. All others have their
    /// own `len`.
    fn inner(&self) -> Option<&dyn Storage> {
        None
    }

    /// Length in bytes.
    ///
    /// # Errors
    /// Those of the file system.
    fn len(&self) -> io::Result<u64> {
        inner_of(self.inner())?.len()
    }

    /// Whether there are no bytes.
    ///
    /// # Errors
    /// Those of [`Storage::len`].
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Its properties.
    fn properties(&self) -> &Properties {
        static PLAIN: Properties = Properties::PLAIN;
        self.inner().map_or(&PLAIN, |inner| inner.properties())
    }

    /// Bytes that the storage takes up on its device.
    ///
    /// # Errors
    /// `Unsupported` if that is not known.
    fn allocated(&self) -> io::Result<u64> {
        inner_of(self.inner())?.allocated()
    }

    /// The file of this machine, if it is one.
    fn host_file(&self) -> Option<&HostFile> {
        None
    }

    /// The file of this machine, or of a simulation, if it is one that a name may lead to.
    #[doc(hidden)]
    fn named_file(&self) -> Option<&dyn NamedFile> {
        None
    }

    /// [`Storage::stamp`], also of an object on another machine, for which it is a request of its own. Blocks.
    #[doc(hidden)]
    fn stamp_by_request(&self) -> Option<io::Result<FileStamp>> {
        self.stamp()
    }

    /// What tells whether the file changes, asked now; None: it has nothing of that kind. Blocks.
    #[doc(hidden)]
    fn stamp(&self) -> Option<io::Result<FileStamp>> {
        self.inner()?.stamp()
    }

    /// Sets the time of change of a file that has a [`Storage::stamp`], in seconds since 1970.
    /// Blocks.
    ///
    /// # Errors
    /// Those of the file system, or of the server.
    #[doc(hidden)]
    fn set_modified(&self, seconds: u32) -> io::Result<()> {
        inner_of(self.inner())?.set_modified(seconds)
    }

    /// The writes in flight of a storage with an alignment.
    fn blocks(&self) -> Option<&Blocks> {
        self.inner()?.blocks()
    }

    /// The storage below, if there is one.
    fn below(&self) -> Option<&dyn Storage> {
        self.inner()?.below()
    }

    /// The export of a server whose bytes these are, one for one, if it is one.
    #[doc(hidden)]
    fn export(&self) -> Option<&dyn Export> {
        self.inner()?.export()
    }

    /// The filter that injects errors, if there is one.
    #[doc(hidden)]
    fn blkdebug(&self) -> Option<&Blkdebug> {
        self.inner()?.blkdebug()
    }

    /// Ends the use of a filter that was written through, before that of what is below.
    #[doc(hidden)]
    fn end<'a>(&'a self, _queue: &'a Queue) -> Pin<Box<dyn Future<Output = io::Result<()>> + 'a>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// [`Properties::alignment`].
    fn alignment(&self) -> Alignment {
        self.properties().alignment
    }

    /// [`Properties::cache`].
    fn cache_mode(&self) -> CacheMode {
        self.properties().cache
    }

    /// [`Properties::path`].
    fn path(&self) -> &Path {
        &self.properties().path
    }

    /// [`Properties::is_device`].
    fn is_device(&self) -> bool {
        self.properties().is_device
    }

    /// [`Properties::is_stacked`].
    fn is_stacked(&self) -> bool {
        self.properties().is_stacked
    }

    /// [`Properties::is_in_image`].
    fn is_in_image(&self) -> bool {
        self.properties().is_in_image
    }

    /// [`Properties::is_remote`].
    fn is_remote(&self) -> bool {
        self.properties().is_remote
    }
}

/// The export of a server, which keeps dirty bitmaps of it.
#[doc(hidden)]
pub trait Export {
    /// Passes the ranges that are dirty in a metadata context to `each`, in order. Neighbours may be alike.
    ///
    /// # Errors
    /// If the server has no such context, or fails.
    fn dirty<'a>(
        &'a self,
        queue: &'a Queue,
        context: &'a str,
        each: &'a mut dyn FnMut(Range<u64>),
    ) -> Pin<Box<dyn Future<Output = crate::Result<()>> + 'a>>;
}

/// The storage below a filter.
fn inner_of(inner: Option<&dyn Storage>) -> io::Result<&dyn Storage> {
    inner.ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// Ends the use of all filters of a storage that was written, the uppermost first. The first error is
/// the result.
#[doc(hidden)]
pub async fn end(storage: &dyn Storage, queue: &Queue) -> io::Result<()> {
    let (mut result, mut next) = (Ok(()), Some(storage));
    while let Some(storage) = next {
        result = result.and(storage.end(queue).await);
        next = storage.inner().or_else(|| storage.below());
    }
    result
}

/// Reports an event to `storage`, if that is a blkdebug filter.
#[inline]
#[doc(hidden)]
pub fn event(storage: &dyn Storage, event: Event) {
    if let Some(debug) = storage.blkdebug() {
        debug.event(event);
    }
}

/// An operation that was started.
pub struct Started(StartedKind);

enum StartedKind {
    /// In the engine, with its `iovec` array. The `Io` comes first: its drop waits for the end.
    InFlight(
        Io,
        #[allow(dead_code, reason = "kept for the kernel, not read")] Option<Box<[libc::iovec]>>,
    ),
    Done(io::Result<usize>),
    Later(Pin<Box<dyn Future<Output = io::Result<usize>>>>),
}

impl Started {
    /// An operation that ended when it was started.
    pub fn done(result: io::Result<usize>) -> Self {
        Started(StartedKind::Done(result))
    }

    /// An operation that ends with `future`, which may wake its task from any thread. The drop of
    /// the future cancels the operation or waits for its end: the memory is not used afterwards.
    pub fn later(future: impl Future<Output = io::Result<usize>> + 'static) -> Self {
        Started(StartedKind::Later(Box::pin(future)))
    }

    /// A change of the length of a storage of fixed size: nothing happens if it is to be no longer
    /// than `size`, else it fails with this message.
    #[doc(hidden)]
    pub fn fixed_length(size: u64, length: u64, error: &'static str) -> Self {
        Self::done(match length <= size {
            true => Ok(0),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, error)),
        })
    }

    pub(crate) fn in_flight(io: Io, segments: Option<Box<[libc::iovec]>>) -> Self {
        Started(StartedKind::InFlight(io, segments))
    }

    /// Waits for the end: the bytes moved, fewer than requested at the end of a file.
    ///
    /// # Errors
    /// The error of the operation.
    pub async fn wait(self) -> io::Result<usize> {
        match self.0 {
            StartedKind::InFlight(io, _segments) => io.await,
            StartedKind::Done(result) => result,
            StartedKind::Later(future) => future.await,
        }
    }
}
