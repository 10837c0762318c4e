//! Bytes at offsets: files through three engines, and memory.
//!
//! A [`Storage`] is what bytes are stored in; a [`Queue`] is how a thread
//! reads and writes them with many operations in flight. Everything above
//! this room moves bytes through [`read()`], [`write()`] and their like.

mod access;
mod ahead;
mod batch;
mod blkdebug;
mod blocks;
mod buffer;
mod counted;
mod engine;
mod event;
mod file;
mod join;
mod lock;
mod memory;
mod native;
pub mod nbd;
mod null;
mod op;
mod polling;
mod queue;
mod ready;
mod regions;
mod threads;
mod uring;
mod watch;
mod window;
mod writings;
mod zero;

use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::pin::Pin;

pub(crate) use access::{Reading, begin_read, give_back, read_pooled, zero_quickly};
pub use access::{
    allocate, discard, flush, punch_hole, read, read_vec, write, write_slice, write_zeroes,
    zero_range,
};
pub(crate) use ahead::Ahead;
pub use blkdebug::{Action, Blkdebug, BlkdebugLimits, Injection, IoKinds, Rule};
pub use blocks::Blocks;
pub(crate) use blocks::Written;
pub use buffer::{BUFFER_ALIGN, Buffer, Iov, OwnedBuffer};
pub(crate) use counted::{Counted, Work};
pub(crate) use engine::is_simulated;
pub use engine::{
    Completion, Engine, EngineKind, Interest, MakeEngine, Notify, Token, simulate_engines,
};
pub use event::Event;
pub use file::{CacheMode, File, OpenFile};
pub(crate) use join::join;
pub use lock::{LockRequest, Permissions};
pub use memory::Memory;
pub use null::Null;
pub use op::{Op, OpKind};
pub use polling::Polling;
pub(crate) use queue::{Begun, Io, yield_once};
pub use queue::{Handle, PoolBuffer, Queue, QueueOptions};
pub use ready::Ready;
pub use window::Window;
pub(crate) use writings::Writings;
pub use zero::is_zero;

/// What the offsets, lengths and memory of direct I/O must be multiples of,
/// in bytes (powers of two). Both are 1 where anything goes.
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

/// What a file says of the bytes from an offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageExtent {
    /// False: a hole, which reads as zeroes.
    pub data: bool,
    /// How many bytes are alike.
    pub length: u64,
}

/// What someone else, who was asked, says of the bytes from an offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteExtent {
    /// They read as zeroes.
    pub zero: bool,
    /// They take up space.
    pub allocated: bool,
    /// How many bytes are alike.
    pub length: u64,
}

/// An answer that is waited for.
pub type Asking = Pin<Box<dyn Future<Output = io::Result<RemoteExtent>>>>;

/// Something that stores bytes. Driven from any number of threads.
///
/// # Safety
/// Who reads and writes relies on it that the memory of an operation is used
/// only until the operation has ended: until its [`Started`] was awaited or
/// dropped. An implementation keeps no copy of the [`Iov`] beyond that.
#[allow(unsafe_code)]
pub unsafe trait Storage: Send + Sync + fmt::Debug {
    /// Starts an operation: on `memory` for reads and writes, on `length`
    /// bytes for range operations. Offsets, lengths and memory fit
    /// [`Storage::alignment`].
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

    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether there are no bytes at all.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Makes it `length` bytes long; new bytes read as zeroes. May block.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Bytes that the storage takes up on its device; an error if nobody here
    /// knows.
    fn allocated(&self) -> io::Result<u64>;

    /// What operations must be multiples of.
    fn alignment(&self) -> Alignment;

    /// Whether there is data at `offset`, and how far. At or past the end the
    /// length is 0. May block.
    fn extent(&self, offset: u64) -> io::Result<StorageExtent>;

    /// Asks the same of someone else, where the bytes are not of this machine;
    /// [`Storage::extent`] says less then.
    fn ask_extent(&self, _queue: &Queue, _offset: u64) -> Option<Asking> {
        None
    }

    /// Whether the bytes are someone else's, who is told what is wanted
    /// ([`OpKind::Discard`], [`OpKind::ZeroQuickly`]) and not how it is done.
    fn is_remote(&self) -> bool {
        false
    }

    /// The path that it was opened by, for messages; empty for memory.
    fn path(&self) -> &Path;

    /// The descriptor of the file, if the storage is a local file, for system calls that
    /// take descriptors.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// How writes become durable.
    fn cache_mode(&self) -> CacheMode;

    /// Whether it is a block device: of fixed size, its old content not zero.
    fn is_device(&self) -> bool;

    /// The writes in flight, of a storage that has an alignment: see
    /// [`Blocks`].
    fn blocks(&self) -> Option<&Blocks> {
        None
    }

    /// The storage that this one is made of, if it is of one.
    fn below(&self) -> Option<&dyn Storage> {
        None
    }

    /// Whether it is made of the disk of another image. An operation may wait there for
    /// what other queues do; and a flush that failed is remembered there.
    fn is_stacked(&self) -> bool {
        self.below().is_some_and(Storage::is_stacked)
    }

    /// What fails on purpose here, if anything does: it is told of the [`Event`]s.
    fn blkdebug(&self) -> Option<&Blkdebug> {
        None
    }
}

/// Reports an event to `storage`, if that is a blkdebug filter.
#[inline]
pub fn event(storage: &dyn Storage, event: Event) {
    if let Some(debug) = storage.blkdebug() {
        debug.event(event);
    }
}

/// An operation that was started.
pub struct Started(StartedKind);

enum StartedKind {
    /// In the engine; with the `iovec` array that it uses. The order matters:
    /// the Io is dropped first, which waits for the end.
    InFlight(
        Io,
        #[allow(dead_code, reason = "kept for the kernel, not read")] Option<Box<[libc::iovec]>>,
    ),
    Done(io::Result<usize>),
    Later(Pin<Box<dyn Future<Output = io::Result<usize>>>>),
}

impl Started {
    /// An operation that ended as it was started.
    pub fn done(result: io::Result<usize>) -> Self {
        Started(StartedKind::Done(result))
    }

    /// An operation that ends when `future` does, where it is not one of the
    /// engine alone. The future wakes whoever polls it, from any thread. If it is
    /// dropped before its end, it waits for the end of the operation or calls
    /// it off: the memory is not used afterwards.
    pub fn later(future: impl Future<Output = io::Result<usize>> + 'static) -> Self {
        Started(StartedKind::Later(Box::pin(future)))
    }

    pub(crate) fn in_flight(io: Io, segments: Option<Box<[libc::iovec]>>) -> Self {
        Started(StartedKind::InFlight(io, segments))
    }

    /// The bytes moved: fewer than asked at the end of a file.
    pub async fn wait(self) -> io::Result<usize> {
        match self.0 {
            StartedKind::InFlight(io, _segments) => io.await,
            StartedKind::Done(result) => result,
            StartedKind::Later(future) => future.await,
        }
    }
}
