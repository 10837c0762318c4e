//! A queue: one thread's engine, and the requests that it drives.
//!
//! Requests are futures. The queue polls them; when all wait, it enters the engine once, which
//! submits the operations that were started and waits for the first end. There is no other runtime:
//! [`Queue::block_on`] is the loop, or [`Queue::turn`] in a loop of the caller's, and any number of
//! futures run beside it with [`Queue::spawn`].
//!
//! A queue belongs to the thread that made it. Wakers cross threads: a request may wait for a task
//! of another queue, which wakes it.
//!
//! `drive` is the loop, `handle` what it gives to callers, `tasks` and `pool` the futures, `io`, `batch` and `execution`
//! operations and the thread that executes them, `memory` what requests reserve.

mod batch;
mod drive;
mod execution;
mod handle;
mod io;
mod memory;
mod options;
mod pool;
pub(crate) mod tasks;
#[cfg(test)]
pub(super) mod tests;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use super::buffer::Buffer;
use super::engine::Op;
use super::engine::{Completion, Engine, Token};
use batch::Batch;
pub use handle::Handle;
pub use handle::{Begun, Cancelled};
pub use io::Io;
use io::Slots;
pub use options::QueueOptions;
use pool::BufferPool;
pub use pool::PoolBuffer;
pub use tasks::yield_once;
use tasks::{Shared, Tasks};

/// A handle to one thread's queue. Clones mean the same queue, for requests and their futures; it
/// ends when the handle that [`Queue::new`] returned, its owner, is dropped. So keep that, and give
/// away clones. Requests of clones that waited for a task of the queue then fail with `ECANCELED`.
///
/// # Futures that are dropped, kept or forgotten
/// A request's future may be dropped at any time. The drop waits for the operations that the kernel
/// has, also for a flush of a file that the request has begun for others, so that its error is not
/// lost. The range of a dropped write reads as before or as after. (A change that was sent to an NBD
/// server goes on as a task, for which requests of the same range wait.)
///
/// A future that is kept without being polled blocks only requests that overlap it:
/// writes to the same clusters, or to the same blocks with direct I/O. (One to an
/// NBD server may block any request of its connection.) Work that other requests need too (loading
/// a table, a commit) is done by a task of the queue, which goes on. A future that was forgotten
/// (`std::mem::forget`) blocks them for ever, and the clusters that it allocated
/// leak; it is safe as long as the memory of its [`Iov`](super::Iov) stays valid.
///
/// Tasks and spawned futures run while the queue is driven ([`Queue::block_on`], [`Queue::turn`]),
/// and end with it; requests of other queues that waited for them then do the work
/// themselves. A queue that has futures of requests, or is not idle ([`Queue::is_idle`]), and is
/// neither driven nor dropped blocks those. A device
/// that was dropped keeps its files, and their locks, until its tasks have ended.
pub struct Queue {
    inner: Rc<Inner>,
    /// In how many images the one is stored whose requests use this handle.
    depth: u8,
    role: Role,
}

/// What the drop of a handle means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// It is the one that `Queue::new` returned: the queue's tasks end.
    Owner,
    /// The tasks that were begun after the owner's drop end if it is the last one.
    Clone,
    /// It is inside the queue's own tasks and operations: nothing.
    Own,
}

impl Clone for Queue {
    fn clone(&self) -> Self {
        let role = match self.role {
            Role::Own => Role::Own,
            Role::Owner | Role::Clone => {
                self.inner.keepers.set(self.inner.keepers.get() + 1);
                Role::Clone
            }
        };
        Queue {
            inner: self.inner.clone(),
            role,
            depth: self.depth,
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.role == Role::Own {
            return;
        }
        let left = self.inner.keepers.get() - 1;
        self.inner.keepers.set(left);
        if self.role == Role::Owner {
            self.inner.owned.set(false);
        }
        if left == 0 || self.role == Role::Owner {
            self.inner.end_tasks();
        }
    }
}

struct Inner {
    options: QueueOptions,
    engine: RefCell<Box<dyn Engine>>,
    slots: RefCell<Slots>,
    /// Operations that were started in this turn of the loop.
    started: RefCell<Vec<(Token, Op)>>,
    /// Operations that this thread will execute, one a turn.
    inline: RefCell<VecDeque<(Token, Op)>>,
    /// The batch that those in `started` make.
    batch: Cell<Batch>,
    /// Operations that have not ended.
    in_flight: Cell<usize>,
    /// Waits for descriptors that have not ended.
    watches: Cell<usize>,
    /// How many more reads that were executed at once futures go on with in this turn.
    at_once: Cell<u32>,
    /// Large reads through the page cache since the last one with `force_async`.
    large_reads: Cell<u32>,
    /// Reused by `drive`.
    done: RefCell<Vec<Completion>>,
    wakers: RefCell<Vec<Waker>>,
    tasks: RefCell<Tasks>,
    /// Tasks that were woken and are polled one after the other.
    taken: RefCell<VecDeque<u32>>,
    /// The task that is being polled.
    polled: Cell<Option<u32>>,
    shared: Arc<Shared>,
    /// Whether `block_on` or `turn` is running.
    running: Cell<bool>,
    /// Whether `turn` was ever called: another event loop waits for the descriptor.
    armed: Cell<bool>,
    /// Number of handles that are not `Role::Own`.
    keepers: Cell<usize>,
    /// Whether the handle that `Queue::new` returned was not dropped.
    owned: Cell<bool>,
    /// Number of sections that tasks are in and that are not cancelled.
    unbroken: Cell<usize>,
    /// Number of tasks that go on although their requests were dropped.
    owed: Cell<usize>,
    /// Whether `end_tasks` is running.
    ending: Cell<bool>,
    /// Number of spawned futures, and the wakers of `drain`.
    spawned: Cell<usize>,
    draining: RefCell<Vec<Waker>>,
    buffers: BufferPool,
    thread: std::thread::ThreadId,
    number: u64,
}

impl Queue {
    /// A queue of this thread.
    ///
    /// # Errors
    /// If this system does not have the engine.
    pub fn new(options: QueueOptions) -> std::io::Result<Queue> {
        let engine = options.engine.start()?;
        Ok(Self::with_engine(options, engine))
    }

    /// A queue with this engine instead of that of the options.
    fn with_engine(options: QueueOptions, engine: Box<dyn Engine>) -> Queue {
        static QUEUES: AtomicU64 = AtomicU64::new(0);
        let buffers = BufferPool::new(options.keep);
        let inner = Rc::new(Inner {
            options,
            slots: RefCell::default(),
            started: RefCell::default(),
            inline: RefCell::default(),
            batch: Cell::default(),
            in_flight: Cell::new(0),
            watches: Cell::new(0),
            at_once: Cell::new(0),
            large_reads: Cell::new(0),
            done: RefCell::default(),
            wakers: RefCell::default(),
            tasks: RefCell::default(),
            taken: RefCell::default(),
            polled: Cell::new(None),
            shared: Arc::new(Shared::new(engine.notifier())),
            engine: RefCell::new(engine),
            running: Cell::new(false),
            armed: Cell::new(false),
            keepers: Cell::new(1),
            owned: Cell::new(true),
            unbroken: Cell::new(0),
            owed: Cell::new(0),
            ending: Cell::new(false),
            spawned: Cell::new(0),
            draining: RefCell::default(),
            buffers,
            thread: std::thread::current().id(),
            number: QUEUES.fetch_add(1, Ordering::Relaxed),
        });
        Queue {
            inner,
            role: Role::Owner,
            depth: 0,
        }
    }

    /// A handle for the queue's own tasks and operations.
    #[doc(hidden)]
    pub fn for_itself(&self) -> Queue {
        Queue {
            inner: self.inner.clone(),
            role: Role::Own,
            depth: self.depth,
        }
    }

    /// A handle for requests to an image in which the one is stored that this handle is for.
    #[doc(hidden)]
    pub fn for_image_below(&self) -> Queue {
        let mut queue = self.for_itself();
        queue.depth = queue.depth.saturating_add(1);
        queue
    }

    /// In how many images the one is stored whose requests use this handle.
    pub(super) fn depth(&self) -> u8 {
        self.depth
    }

    /// A number that no other queue of the process has, counted from 0.
    #[doc(hidden)]
    pub fn number(&self) -> u64 {
        self.inner.number
    }

    /// Its options.
    pub fn options(&self) -> &QueueOptions {
        &self.inner.options
    }

    /// Bytes that a buffer of `len` bytes takes.
    #[doc(hidden)]
    pub fn pooled(len: usize) -> usize {
        BufferPool::taken(len)
    }

    /// A buffer of at least `len` bytes from the queue's pool, to which it returns when it is
    /// dropped. Its content is unspecified. Aborts if there is no memory, as [`Buffer::new`] does.
    pub fn buffer(&self, len: usize) -> PoolBuffer {
        let buffer = self.inner.buffers.take(len);
        self.pool_buffer(buffer.unwrap_or_else(|_| Buffer::new(len)))
    }

    /// As [`Queue::buffer`].
    ///
    /// # Errors
    /// `ENOMEM` if there is no memory.
    pub fn try_buffer(&self, len: usize) -> std::io::Result<PoolBuffer> {
        Ok(self.pool_buffer(self.inner.buffers.take(len)?))
    }

    fn pool_buffer(&self, buffer: Buffer) -> PoolBuffer {
        PoolBuffer {
            buffer: Some(buffer),
            queue: self.for_itself(),
        }
    }
}
