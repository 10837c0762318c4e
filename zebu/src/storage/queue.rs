//! A queue: one thread's engine, and the requests that it drives.
//!
//! Requests are futures. The queue polls them; when all wait, it executes the
//! operation that it has alone, or enters the engine once, which hands over
//! everything started since and waits for the first end. There is no other
//! runtime: [`Queue::block_on`] is the loop, or [`Queue::turn`] in a loop of the
//! caller's, and any number of futures run beside it with [`Queue::spawn`].
//!
//! A queue belongs to the thread that made it. Wakers are what crosses
//! threads: a request may wait for something that a request on another queue
//! is doing (loading an L2 slice, say), and is woken by it.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::Storage;
use super::batch::Batch;
use super::buffer::{Buffer, BufferPool, Iov};
use super::engine::{Completion, Engine, EngineKind, Interest, Notify, Token, is_simulated};
use super::execution::{Execution, Turn};
use super::op::{Op, OpKind};

/// How requests of one queue are treated.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// The engine.
    pub engine: EngineKind,
    /// Parts of one request in flight at once, at least 1.
    pub parts: usize,
    /// Whether compressed clusters are inflated on this thread instead of on
    /// the library's workers. Right when there are as many queues as cores.
    pub inflate_here: bool,
    /// Whether this thread executes all writes to the page cache, and reads of what lies
    /// there, itself instead of the engine. Right for jobs that have a queue on each core:
    /// the bytes stay in the processor's cache.
    pub inline_buffered: bool,
    /// With io_uring, every so many large reads through the page cache are executed by a thread
    /// of the kernel, which copies beside this one; 0: none. As fio's option of that name. Right
    /// where this thread does nothing else with the bytes.
    pub force_async: u32,
    /// How many operations are handed to the kernel together at most, as QEMU's option
    /// `aio-max-batch`; at least 1. What is started in one turn of the queue's loop is handed
    /// over at its end at the latest. Operations that continue each other count as one.
    pub aio_max_batch: u32,
    /// How long a server's thread polls for more to do before it sleeps, at most
    /// (`Polling`); zero: not at all.
    pub poll: Duration,
}

impl QueueOptions {
    /// [`QueueOptions::poll`] as servers have it by default: longer than it
    /// takes to be woken, and shorter than a fast disk takes for a request.
    pub const SERVERS_POLL: Duration = Duration::from_micros(40);
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions {
            engine: EngineKind::best(),
            parts: 8,
            inflate_here: false,
            inline_buffered: false,
            force_async: 0,
            aio_max_batch: 2,
            poll: Duration::ZERO,
        }
    }
}

/// The least bytes of a large read ([`QueueOptions::force_async`]).
const LARGE_READ: u64 = 512 << 10;

/// A handle to one thread's queue. Clones mean the same queue.
///
/// # Futures that are dropped, kept or forgotten
/// A request's future may be dropped at any time. The drop waits for the operations
/// that the kernel has, and for the answer to a write that was sent to an NBD
/// server. The range of a dropped write reads as before or as after. Work that
/// other requests need too (loading a table, a commit, a flush of the device) is
/// done by a task of the queue: it goes on, and its errors are not lost.
///
/// A future that is kept without being polled blocks only requests that overlap it:
/// writes to the same clusters, or to the same blocks with direct I/O. (One to an
/// NBD server may block any request of its connection.) A future that was forgotten
/// (`std::mem::forget`) blocks them for ever, and the clusters that it allocated
/// leak; it is safe as long as the memory of its [`Iov`] stays valid.
///
/// Tasks run while the queue is driven ([`Queue::block_on`]), and end with its last
/// handle; requests of other queues that waited for them then do the work
/// themselves. A queue that is neither driven nor dropped blocks those. A device
/// that was dropped keeps its files, and their locks, until its tasks have ended.
pub struct Queue {
    inner: Rc<Inner>,
    /// Whether the queue's tasks run as long as this handle exists. Handles inside
    /// the queue's own tasks and operations do not count.
    keeps: bool,
}

impl Clone for Queue {
    fn clone(&self) -> Self {
        if self.keeps {
            self.inner.keepers.set(self.inner.keepers.get() + 1);
        }
        Queue {
            inner: self.inner.clone(),
            keeps: self.keeps,
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.keeps {
            let left = self.inner.keepers.get() - 1;
            self.inner.keepers.set(left);
            if left == 0 {
                self.inner.end_tasks();
            }
        }
    }
}

struct Inner {
    options: QueueOptions,
    engine: RefCell<Box<dyn Engine>>,
    /// The descriptor of the engine.
    descriptor: Option<RawFd>,
    slots: RefCell<Slots>,
    /// Operations that were started in this turn of the loop.
    started: RefCell<Vec<(Token, Op)>>,
    /// Operations that this thread will execute, one a turn.
    inline: RefCell<VecDeque<(Token, Op)>>,
    /// Of those in `started`.
    batch: Cell<Batch>,
    /// Operations that have not ended.
    in_flight: Cell<usize>,
    /// Waits for descriptors that have not ended.
    watches: Cell<usize>,
    /// Large reads through the page cache since the last one with `force_async`.
    large_reads: Cell<u32>,
    /// Reused by `drive`.
    done: RefCell<Vec<Completion>>,
    wakers: RefCell<Vec<Waker>>,
    tasks: RefCell<Tasks>,
    shared: Arc<Shared>,
    /// Whether `block_on` or `turn` is running.
    running: Cell<bool>,
    /// Whether `turn` was ever called: another event loop waits for the descriptor.
    armed: Cell<bool>,
    /// Number of handles with `keeps`.
    keepers: Cell<usize>,
    /// Number of sections that tasks are in and that are not cancelled.
    unbroken: Cell<usize>,
    /// Number of spawned futures, and the wakers of `drain`.
    spawned: Cell<usize>,
    draining: RefCell<Vec<Waker>>,
    buffers: BufferPool,
    thread: std::thread::ThreadId,
    number: u64,
}

/// Operations in flight.
#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<Token>,
}

enum Slot {
    Free,
    /// Started: the waker for its end, and its file, which is not closed before; a wait for a
    /// descriptor has none.
    Busy(Option<Waker>, Option<Arc<OwnedFd>>),
    /// Ended with this result, not yet looked at.
    Ended(i32),
}

#[derive(Default)]
struct Tasks {
    tasks: Vec<Task>,
    free: Vec<u32>,
    /// Number of tasks that were ever added.
    serial: u64,
}

struct Task {
    /// None while it is being polled, and when the place is free.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    serial: u64,
    waker: Arc<TaskWaker>,
}

/// What wakers on any thread touch.
struct Shared {
    ready: Mutex<Vec<u32>>,
    /// Whether the queue's thread blocks in the engine or in another event loop, or is about to,
    /// and was not notified yet.
    sleeps: AtomicBool,
    notify: Arc<dyn Notify>,
}

struct TaskWaker {
    shared: Arc<Shared>,
    task: u32,
    /// Whether it is in `ready` already.
    queued: AtomicBool,
}

/// The place in `ready` of the future that `block_on` was given.
const ROOT: u32 = u32::MAX;

impl TaskWaker {
    /// From now on a wake queues the task again.
    ///
    /// A swap and no store: whoever woke the task meanwhile and found it queued
    /// relies on the poll that follows to see what it did before.
    fn begin(&self) {
        self.queued.swap(false, Ordering::AcqRel);
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        self.shared.ready().push(self.task);
        // SeqCst pairs with `drive` and `arm`: either the sleep is seen here, or the task there.
        let sleeps = &self.shared.sleeps;
        if sleeps.load(Ordering::SeqCst) && sleeps.swap(false, Ordering::SeqCst) {
            // One notification ends the sleep, and then all of `ready` is looked at.
            self.shared.notify.notify();
        }
    }
}

impl Shared {
    fn ready(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        crate::lock(&self.ready)
    }
}

impl Queue {
    /// A queue on this thread.
    pub fn new(options: QueueOptions) -> io::Result<Queue> {
        let engine = options.engine.start()?;
        Ok(Self::with_engine(options, engine))
    }

    /// A queue with this engine, whatever the options say.
    fn with_engine(options: QueueOptions, engine: Box<dyn Engine>) -> Queue {
        static QUEUES: AtomicU64 = AtomicU64::new(0);
        let shared = Arc::new(Shared {
            ready: Mutex::default(),
            sleeps: AtomicBool::new(false),
            notify: engine.notifier(),
        });
        let inner = Rc::new(Inner {
            options,
            descriptor: engine.descriptor(),
            engine: RefCell::new(engine),
            slots: RefCell::default(),
            started: RefCell::default(),
            inline: RefCell::default(),
            batch: Cell::default(),
            in_flight: Cell::new(0),
            watches: Cell::new(0),
            large_reads: Cell::new(0),
            done: RefCell::default(),
            wakers: RefCell::default(),
            tasks: RefCell::default(),
            shared,
            running: Cell::new(false),
            armed: Cell::new(false),
            keepers: Cell::new(1),
            unbroken: Cell::new(0),
            spawned: Cell::new(0),
            draining: RefCell::default(),
            buffers: BufferPool::new(),
            thread: std::thread::current().id(),
            number: QUEUES.fetch_add(1, Ordering::Relaxed),
        });
        Queue { inner, keeps: true }
    }

    /// A handle for the queue's own tasks and operations.
    pub(crate) fn for_itself(&self) -> Queue {
        Queue {
            inner: self.inner.clone(),
            keeps: false,
        }
    }

    /// A number that no other queue of the process has; the next queue has the
    /// next one.
    #[cfg_attr(not(feature = "nbd"), allow(dead_code))]
    pub(crate) fn number(&self) -> u64 {
        self.inner.number
    }

    /// What it was made with.
    pub fn options(&self) -> &QueueOptions {
        &self.inner.options
    }

    /// Runs `future`, and all spawned ones beside it, until it is ready.
    ///
    /// # Panics
    /// If called from within a future that this queue drives.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        // The inner loop would take the wake-ups of what the outer one polls.
        assert!(
            !self.inner.running.replace(true),
            "block_on within a future of the same queue"
        );
        let running = Running(&self.inner.running);
        let waker = Arc::new(TaskWaker {
            shared: self.inner.shared.clone(),
            task: ROOT,
            queued: AtomicBool::new(true),
        });
        self.inner.shared.ready().push(ROOT);
        let mut future = pin!(future);
        let std_waker = Waker::from(waker.clone());
        let mut batch = Vec::new();
        let output = loop {
            std::mem::swap(&mut *self.inner.shared.ready(), &mut batch);
            let mut root_is_ready = false;
            for task in batch.drain(..) {
                match task {
                    ROOT => root_is_ready = true,
                    task => self.inner.run_task(task),
                }
            }
            if root_is_ready {
                waker.begin();
                let mut context = Context::from_waker(&std_waker);
                if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                    break output;
                }
            }
            self.inner.drive(false);
        };
        drop(running);
        self.inner.arm_again();
        output
    }

    /// Polls the futures that were woken, starts what they submitted and takes what has ended,
    /// without blocking. True: there is more to do already, call it again; false: from now on
    /// [`Queue::as_fd`] becomes readable when something ends, when a future is woken (by
    /// [`Queue::spawn`] too), and when a request begins outside of this call.
    ///
    /// An event loop of the caller's own drives the queue so:
    ///
    /// ```no_run
    /// # use std::os::fd::AsFd;
    /// # fn wait_for_readable(fd: impl AsFd) {}
    /// # let queue = zebu::storage::Queue::new(Default::default())?;
    /// loop {
    ///     while queue.turn() {}
    ///     wait_for_readable(&queue); // epoll, poll, tokio's AsyncFd, ...
    /// }
    /// # std::io::Result::Ok(())
    /// ```
    ///
    /// # Panics
    /// If called from within a future that this queue drives.
    pub fn turn(&self) -> bool {
        assert!(
            !self.inner.running.replace(true),
            "turn within a future of the same queue"
        );
        let _running = Running(&self.inner.running);
        let shared = &self.inner.shared;
        shared.sleeps.store(false, Ordering::SeqCst);
        let ready = std::mem::take(&mut *shared.ready());
        for id in ready {
            if id != ROOT {
                self.inner.run_task(id);
            }
        }
        self.inner.armed.set(true);
        self.inner.arm()
    }

    /// Runs `future` beside the others whenever the queue is driven. The
    /// result is awaited through the handle; dropping the handle leaves the
    /// future running.
    ///
    /// A future that holds a handle to the queue, or does I/O through it, keeps
    /// the queue alive: let it end before the last other handle goes, or
    /// neither ever does.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Handle<T> {
        let spawned = Spawned::new(&self.inner);
        let (task, mut handle) = joined(async move {
            let _spawned = spawned;
            future.await
        });
        let (id, serial) = self.inner.add_task(task);
        handle.task = Some((Rc::downgrade(&self.inner), id, serial));
        self.inner.wake_task(id);
        handle
    }

    /// Waits until every spawned future has ended or was dropped, also those that are spawned
    /// meanwhile. Never ready within one of them.
    pub async fn drain(&self) {
        std::future::poll_fn(|context| {
            if self.inner.spawned.get() == 0 {
                return Poll::Ready(());
            }
            let waker = context.waker().clone();
            self.inner.draining.borrow_mut().push(waker);
            Poll::Pending
        })
        .await;
    }

    /// Runs the future of `work` as a task of this queue. It is polled at once, and
    /// goes on whether or not the result is awaited. It is dropped with the last
    /// handle of the queue, but not within a section of [`Queue::unbroken`].
    pub(crate) fn detach<T: 'static, F>(&self, work: impl FnOnce(Queue) -> F) -> Handle<T>
    where
        F: Future<Output = T> + 'static,
    {
        let (task, handle) = joined(work(self.for_itself()));
        let (id, _) = self.inner.add_task(task);
        self.inner.run_task(id);
        handle
    }

    /// As [`Queue::detach`], but the task is cancelled when the result is dropped.
    pub(crate) fn begin<T: 'static, F>(&self, work: impl FnOnce(Queue) -> F) -> Begun<T>
    where
        F: Future<Output = T> + 'static,
    {
        let (task, handle) = joined(work(self.for_itself()));
        let (id, serial) = self.inner.add_task(task);
        self.inner.run_task(id);
        Begun {
            queue: self.for_itself(),
            id,
            serial,
            handle,
        }
    }

    /// Begins a section of a task, for operations of `storage`, that is not cancelled with the
    /// queue: it is polled until the result of this is dropped. The section must wait
    /// for nothing else. Without effect outside of tasks, and for a storage in another image:
    /// there an operation may wait for a queue that is not driven while this one ends.
    /// (That image has such sections of its own, and remembers what failed.)
    pub(crate) fn unbroken(&self, storage: &dyn Storage) -> Unbroken {
        let counts = !self.keeps && !storage.is_stacked();
        let count = &self.inner.unbroken;
        count.set(count.get() + usize::from(counts));
        Unbroken {
            inner: self.inner.clone(),
            counts,
        }
    }

    /// A buffer of at least `len` bytes from the queue's pool, content
    /// unspecified; it returns there when dropped.
    pub fn buffer(&self, len: usize) -> PoolBuffer {
        PoolBuffer {
            buffer: Some(self.inner.buffers.take(len)),
            queue: self.for_itself(),
        }
    }

    /// Starts one operation.
    ///
    /// # Safety
    /// The memory (and `iovec` array) that `op` names stays valid and otherwise
    /// untouched until the [`Io`] has ended or was dropped, and for ever if it is
    /// forgotten. `fd` is the descriptor that `op` names.
    pub(crate) unsafe fn submit(&self, op: Op, fd: &Arc<OwnedFd>) -> Io {
        debug_assert_eq!(self.inner.thread, std::thread::current().id());
        debug_assert_eq!(op.fd, fd.as_raw_fd());
        let token = self.inner.slots.borrow_mut().take(Some(fd.clone()));
        // It is executed before the `Io` has ended, which waits for that when it is dropped.
        self.inner.start(token, op);
        self.inner.submitted();
        Io {
            queue: self.for_itself(),
            token,
            ended: false,
            _not_send: PhantomData,
        }
    }

    /// Begins to wait for a descriptor, which stays open until the [`Io`] has
    /// ended or was dropped; see [`Io::cancel_watch`].
    pub(super) fn watch(&self, fd: RawFd, interest: Interest) -> Io {
        debug_assert_eq!(self.inner.thread, std::thread::current().id());
        let token = self.inner.slots.borrow_mut().take(None);
        self.inner.watches.set(self.inner.watches.get() + 1);
        self.inner.engine.borrow_mut().watch(token, fd, interest);
        self.inner.submitted();
        Io {
            queue: self.for_itself(),
            token,
            ended: false,
            _not_send: PhantomData,
        }
    }

    /// Starts one operation on the memory of `iov`; as [`Queue::submit`], on
    /// the promise that made the `Iov`. `buffered`: through the page cache.
    ///
    /// # Safety
    /// The promise of the `Iov` holds, and the returned array is kept as long as the
    /// [`Io`].
    pub(crate) unsafe fn submit_iov(
        &self,
        kind: OpKind,
        fd: &Arc<OwnedFd>,
        offset: u64,
        iov: &Iov,
        buffered: bool,
    ) -> (Io, Option<Box<[libc::iovec]>>) {
        let mut op = Op {
            segments: 1,
            buffered,
            ..Op::without_memory(kind, fd.as_raw_fd(), offset, iov.len() as u64)
        };
        if let Some((ptr, _)) = iov.single() {
            op.memory = ptr.cast();
            // SAFETY: on the promise of the Iov.
            return (unsafe { self.submit(op, fd) }, None);
        }
        let mut array = Vec::new();
        iov.for_each(|ptr, len| {
            // The kernel takes no more in one call. The caller goes on from
            // there, as from any short result.
            if array.len() < libc::UIO_MAXIOV as usize {
                array.push(libc::iovec {
                    iov_base: ptr.cast(),
                    iov_len: len,
                })
            }
        });
        op.length = array.iter().map(|s| s.iov_len as u64).sum();
        // A slice of many segments may lie in one, or in none. One segment is
        // given to engines as such, never as an array.
        if array.len() <= 1 {
            op.memory = array.first().map_or(std::ptr::null_mut(), |s| s.iov_base);
            // SAFETY: as above.
            return (unsafe { self.submit(op, fd) }, None);
        }
        let mut array = array.into_boxed_slice();
        op.segments = array.len() as u32;
        op.memory = array.as_mut_ptr().cast();
        // SAFETY: as above; the array lives as long as the Io (the caller
        // keeps both in one place, the Io first).
        (unsafe { self.submit(op, fd) }, Some(array))
    }
}

/// What another event loop waits for, until it is readable; see [`Queue::turn`].
impl AsFd for Queue {
    /// # Panics
    /// If the engine is one of a simulation.
    fn as_fd(&self) -> BorrowedFd<'_> {
        let fd = self
            .inner
            .descriptor
            .expect("a simulation has no event loop");
        // SAFETY: the engine keeps it open, and lives as long as the queue.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Ends [`Queue::block_on`], also when a future panics.
struct Running<'a>(&'a Cell<bool>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Slots {
    fn take(&mut self, fd: Option<Arc<OwnedFd>>) -> Token {
        match self.free.pop() {
            Some(token) => {
                self.slots[token as usize] = Slot::Busy(None, fd);
                token
            }
            None => {
                self.slots.push(Slot::Busy(None, fd));
                (self.slots.len() - 1) as Token
            }
        }
    }
}

impl Inner {
    /// Its index, and a number that distinguishes it from earlier tasks with the
    /// same index.
    fn add_task(&self, future: Pin<Box<dyn Future<Output = ()>>>) -> (u32, u64) {
        let mut tasks = self.tasks.borrow_mut();
        let tasks = &mut *tasks;
        tasks.serial += 1;
        let id = match tasks.free.pop() {
            Some(id) => {
                let task = &mut tasks.tasks[id as usize];
                task.future = Some(future);
                task.serial = tasks.serial;
                id
            }
            None => {
                let id = tasks.tasks.len() as u32;
                let waker = Arc::new(TaskWaker {
                    shared: self.shared.clone(),
                    task: id,
                    queued: AtomicBool::new(false),
                });
                tasks.tasks.push(Task {
                    future: Some(future),
                    serial: tasks.serial,
                    waker,
                });
                id
            }
        };
        (id, tasks.serial)
    }

    fn wake_task(&self, id: u32) {
        let waker = self.tasks.borrow().tasks[id as usize].waker.clone();
        waker.wake();
    }

    /// Drops a task, unless it has ended or is being polled.
    fn cancel_task(&self, id: u32, serial: u64) {
        let future = {
            let mut tasks = self.tasks.borrow_mut();
            let tasks = &mut *tasks;
            let task = &mut tasks.tasks[id as usize];
            let future = match task.serial == serial {
                true => task.future.take(),
                false => None,
            };
            if future.is_some() {
                tasks.free.push(id);
            }
            future
        };
        // With nothing borrowed: dropping it may drive the queue.
        drop(future);
    }

    /// Drops all tasks, after the last handle that keeps them. That releases their
    /// locks, and wakes the requests of other queues that wait for them.
    fn end_tasks(&self) {
        // A panic may have left a section that never ends.
        while self.unbroken.get() > 0 && !std::thread::panicking() {
            let ready = std::mem::take(&mut *self.shared.ready());
            for id in ready {
                if id != ROOT {
                    self.run_task(id);
                }
            }
            if self.unbroken.get() > 0 {
                self.drive(false);
            }
        }
        let mut id = 0;
        loop {
            let serial = match self.tasks.borrow().tasks.get(id as usize) {
                Some(task) => task.serial,
                None => return,
            };
            self.cancel_task(id, serial);
            id += 1;
        }
    }

    fn run_task(&self, id: u32) {
        let (future, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            let task = &mut tasks.tasks[id as usize];
            task.waker.begin();
            // A late wake of a task that has ended finds nothing.
            let Some(future) = task.future.take() else {
                return;
            };
            (future, task.waker.clone())
        };
        let mut future = future;
        let waker = Waker::from(waker);
        let pending = future
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_pending();
        let mut tasks = self.tasks.borrow_mut();
        if pending {
            tasks.tasks[id as usize].future = Some(future);
        } else {
            tasks.free.push(id);
            drop(tasks);
            drop(future);
        }
    }

    /// Takes up an operation.
    fn start(&self, token: Token, mut op: Op) {
        self.in_flight.set(self.in_flight.get() + 1);
        if self.options.inline_buffered && op.buffered {
            self.inline.borrow_mut().push_back((token, op));
            return;
        }
        op.force_async = self.forces_async(&op);
        let mut batch = self.batch.get();
        if !batch.takes(&op, self.options.aio_max_batch) {
            self.hand_over();
            self.engine.borrow_mut().hand_over();
            batch = Batch::default();
        }
        batch.add(&op);
        self.batch.set(batch);
        self.started.borrow_mut().push((token, op));
    }

    fn forces_async(&self, op: &Op) -> bool {
        let every = self.options.force_async;
        if every == 0 || !op.buffered || op.kind != OpKind::Read || op.length < LARGE_READ {
            return false;
        }
        let count = (self.large_reads.get() + 1) % every;
        self.large_reads.set(count);
        count == 0
    }

    /// Gives the engine what was started.
    fn hand_over(&self) {
        let mut engine = self.engine.borrow_mut();
        for (token, op) in self.started.borrow_mut().drain(..) {
            // SAFETY: `Queue::submit` was promised that the memory stays valid.
            unsafe { engine.submit(token, op) };
        }
        self.batch.set(Batch::default());
    }

    /// Ends a turn of the loop: this thread executes at most one operation, so that its bytes are
    /// used before the next one, and the engine is given all others that are for it.
    fn end_turn(&self, sleeps: bool, done: &mut Vec<Completion>) {
        let alone = self.in_flight.get() == 1;
        let first = self.inline.borrow_mut().pop_front();
        let turn = Turn {
            alone,
            sleeps: sleeps && self.watches.get() == 0,
            inline_buffered: first.is_some(),
        };
        let first = match alone {
            true => first.or_else(|| self.started.borrow_mut().pop()),
            false => first,
        };
        if let Some((token, op)) = first {
            // SAFETY: `Queue::submit` was promised that the memory stays valid.
            match unsafe { Execution::of(&op, turn).perform(&op) } {
                Some(result) => done.push((token, result)),
                None => self.started.borrow_mut().push((token, op)),
            }
        }
        self.hand_over();
    }

    /// Ends a turn of the loop and enters the engine once; waits there for an end if it must, or
    /// if no future is ready.
    fn drive(&self, must_wait: bool) {
        let sleeps = || must_wait || self.shared.ready().is_empty();
        self.collect(sleeps(), |engine, done| {
            // The engine may have nothing to tell.
            if done.len() == self.in_flight.get() && !done.is_empty() && self.watches.get() == 0 {
                return Ok(());
            }
            // SeqCst pairs with `wake_by_ref`.
            self.shared.sleeps.store(true, Ordering::SeqCst);
            std::sync::atomic::fence(Ordering::SeqCst);
            let wait = done.is_empty() && self.inline.borrow().is_empty() && sleeps();
            let result = engine.poll(wait, done);
            self.shared.sleeps.store(false, Ordering::SeqCst);
            result
        });
    }

    /// Enters the engine without waiting, so that the descriptor tells of what comes. True: there
    /// is something to do already.
    fn arm(&self) -> bool {
        let mut more = false;
        self.collect(false, |engine, done| {
            more = engine.arm(done)?;
            Ok(())
        });
        // SeqCst pairs with `wake_by_ref`.
        self.shared.sleeps.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        more || !self.inline.borrow().is_empty() || !self.shared.ready().is_empty()
    }

    /// After the engine was entered outside of [`Queue::turn`]: makes the descriptor tell again of
    /// what comes, if an event loop of the caller's waits for it.
    fn arm_again(&self) {
        if self.armed.get() && !self.running.get() && self.arm() {
            self.shared.notify.notify();
        }
    }

    /// After something was given to the engine: if that was outside of the queue's own loops, an
    /// event loop of the caller's is told to call [`Queue::turn`].
    fn submitted(&self) {
        let sleeps = &self.shared.sleeps;
        if self.armed.get() && !self.running.get() && sleeps.swap(false, Ordering::SeqCst) {
            self.shared.notify.notify();
        }
    }

    /// Ends a turn of the loop, enters the engine by `enter`, records what has ended and wakes
    /// the futures that wait for it. `sleeps`: the thread has nothing else to do.
    fn collect(
        &self,
        sleeps: bool,
        enter: impl FnOnce(&mut dyn Engine, &mut Vec<Completion>) -> io::Result<()>,
    ) {
        let mut done = self.done.take();
        let mut wakers = self.wakers.take();
        self.end_turn(sleeps, &mut done);
        let panicked = AbortOnPanic(self.options.engine);
        let result = enter(&mut **self.engine.borrow_mut(), &mut done);
        std::mem::forget(panicked);
        if let Err(e) = result {
            abort(self.options.engine, &e);
        }
        {
            let mut slots = self.slots.borrow_mut();
            for (token, result) in done.drain(..) {
                // The kernel could not start it now: it is retried as after a signal.
                let result = match result == -libc::EAGAIN {
                    true => -libc::EINTR,
                    false => result,
                };
                let slot = &mut slots.slots[token as usize];
                let Slot::Busy(waker, file) = std::mem::replace(slot, Slot::Ended(result)) else {
                    unreachable!("an operation ends once");
                };
                let count = match file {
                    Some(_) => &self.in_flight,
                    None => &self.watches,
                };
                count.set(count.get() - 1);
                wakers.extend(waker);
            }
        }
        self.done.replace(done);
        // Only now, with nothing borrowed and every end on record: a waker is
        // foreign code, which may drop an `Io` and so come back here.
        wakers.drain(..).for_each(Waker::wake);
        self.wakers.replace(wakers);
    }
}

/// Ends the process: after a failure of the engine it is unknown which operations
/// are in flight, and to unwind would free memory that the kernel still uses.
#[cold]
fn abort(engine: EngineKind, why: &dyn std::fmt::Display) -> ! {
    eprintln!("The {engine} I/O engine failed: {why}");
    std::process::abort()
}

/// Ends the process if it is dropped by a panic.
struct AbortOnPanic(EngineKind);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        // No kernel uses the memory of a simulation.
        if !is_simulated() {
            abort(self.0, &"it panicked");
        }
    }
}

/// Ends an unbroken section ([`Queue::unbroken`]).
pub(crate) struct Unbroken {
    inner: Rc<Inner>,
    counts: bool,
}

impl Drop for Unbroken {
    fn drop(&mut self) {
        let count = &self.inner.unbroken;
        count.set(count.get() - usize::from(self.counts));
    }
}

/// One operation in flight: a future of the bytes moved.
///
/// Dropping it waits for the end, since the memory may go away afterwards.
pub(crate) struct Io {
    queue: Queue,
    token: Token,
    ended: bool,
    _not_send: PhantomData<*const ()>,
}

impl Io {
    /// Makes this, which [`Queue::watch`] made, end soon if it has not ended.
    pub(super) fn cancel_watch(&mut self) {
        if !self.ended && self.take_result().is_none() {
            self.queue.inner.engine.borrow_mut().unwatch(self.token);
            self.queue.inner.submitted();
        }
    }

    fn take_result(&mut self) -> Option<i32> {
        let mut slots = self.queue.inner.slots.borrow_mut();
        let slot = &mut slots.slots[self.token as usize];
        let Slot::Ended(result) = *slot else {
            return None;
        };
        *slot = Slot::Free;
        slots.free.push(self.token);
        self.ended = true;
        Some(result)
    }
}

impl Future for Io {
    type Output = io::Result<usize>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        debug_assert!(!self.ended, "polled after it was ready");
        if let Some(result) = self.take_result() {
            return Poll::Ready(if result < 0 {
                Err(io::Error::from_raw_os_error(-result))
            } else {
                Ok(result as usize)
            });
        }
        let slots = &self.queue.inner.slots;
        let token = self.token as usize;
        let known = match &slots.borrow().slots[token] {
            Slot::Busy(Some(waker), _) => waker.will_wake(context.waker()),
            _ => false,
        };
        if !known {
            // Cloned, and the old one dropped, with nothing borrowed: both
            // are foreign code.
            let new = context.waker().clone();
            let old = match &mut slots.borrow_mut().slots[token] {
                Slot::Busy(waker, _) => waker.replace(new),
                _ => unreachable!("it has not ended"),
            };
            drop(old);
        }
        Poll::Pending
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if self.ended || self.take_result().is_some() {
            return;
        }
        while self.take_result().is_none() {
            // Even if futures are ready: they do not run now.
            self.queue.inner.drive(true);
        }
        self.queue.inner.arm_again();
    }
}

/// A buffer that returns to its queue's pool.
pub struct PoolBuffer {
    buffer: Option<Buffer>,
    queue: Queue,
}

impl PoolBuffer {
    /// Takes it away from the pool.
    pub(crate) fn into_buffer(mut self) -> Buffer {
        self.buffer.take().expect("present until dropped")
    }
}

impl std::ops::Deref for PoolBuffer {
    type Target = Buffer;
    fn deref(&self) -> &Buffer {
        self.buffer.as_ref().expect("present until dropped")
    }
}

impl AsRef<[u8]> for PoolBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::ops::DerefMut for PoolBuffer {
    fn deref_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("present until dropped")
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.queue.inner.buffers.give(buffer);
        }
    }
}

struct JoinState<T> {
    value: Cell<Option<T>>,
    waker: Cell<Option<Waker>>,
}

/// The result of a spawned future.
pub struct Handle<T> {
    state: Rc<JoinState<T>>,
    /// The task, if it may be aborted: its queue, index and serial number.
    task: Option<(std::rc::Weak<Inner>, u32, u64)>,
}

impl<T> Handle<T> {
    /// Drops the future, if it has not ended and is not the one that calls this. That waits for
    /// its operations in flight, as dropping any request does.
    pub fn abort(self) {
        if let Some((inner, id, serial)) = self.task
            && let Some(inner) = inner.upgrade()
        {
            inner.cancel_task(id, serial);
        }
    }
}

/// Counts a spawned future until it is dropped.
struct Spawned(std::rc::Weak<Inner>);

impl Spawned {
    fn new(inner: &Rc<Inner>) -> Self {
        inner.spawned.set(inner.spawned.get() + 1);
        Spawned(Rc::downgrade(inner))
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        let Some(inner) = self.0.upgrade() else {
            return;
        };
        let left = inner.spawned.get() - 1;
        inner.spawned.set(left);
        if left == 0 {
            let waiting = inner.draining.take();
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

/// Makes a task of a future, and a handle to its result.
fn joined<T: 'static>(
    future: impl Future<Output = T> + 'static,
) -> (Pin<Box<dyn Future<Output = ()>>>, Handle<T>) {
    let state = Rc::new(JoinState {
        value: Cell::new(None),
        waker: Cell::new(None),
    });
    let handle = Handle {
        state: state.clone(),
        task: None,
    };
    let task = Box::pin(async move {
        state.value.set(Some(future.await));
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    });
    (task, handle)
}

/// The result of a task, which is cancelled when this is dropped ([`Queue::begin`]).
pub(crate) struct Begun<T> {
    queue: Queue,
    id: u32,
    serial: u64,
    handle: Handle<T>,
}

impl<T> Future for Begun<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.handle).poll(context)
    }
}

impl<T> Drop for Begun<T> {
    fn drop(&mut self) {
        self.queue.inner.cancel_task(self.id, self.serial);
    }
}

impl<T> Future for Handle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        match self.state.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                self.state.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

/// Lets the other tasks of the queue that are ready go on first.
pub(crate) async fn yield_once() {
    let mut has_waited = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut has_waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    //! Guards against a flush that fails because the kernel could not begin it, an
    //! engine's failure that frees memory which the kernel uses, a file that is
    //! closed under an operation that was forgotten, and tasks that outlive their
    //! queue.
    use super::super::{CacheMode, OpenFile, Storage, flush, open_file};
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    /// An engine that completes operations with given results, and then fails.
    struct Told {
        results: Vec<i32>,
        taken: Vec<(Token, Op)>,
        panics: bool,
    }

    struct NoNotify;
    impl Notify for NoNotify {
        fn notify(&self) {}
    }

    impl Engine for Told {
        unsafe fn submit(&mut self, token: Token, op: Op) {
            self.taken.push((token, op));
        }
        fn watch(&mut self, _: Token, _: RawFd, _: Interest) {}
        fn unwatch(&mut self, _: Token) {}
        fn poll(&mut self, _: bool, done: &mut Vec<Completion>) -> io::Result<()> {
            let Some((token, _)) = self.taken.pop() else {
                return Ok(());
            };
            match self.results.pop() {
                Some(result) => done.push((token, result)),
                None if self.panics => panic!("as it was told"),
                None => return Err(io::Error::from_raw_os_error(libc::EBADF)),
            }
            Ok(())
        }
        fn notifier(&self) -> Arc<dyn Notify> {
            Arc::new(NoNotify)
        }
    }

    fn told(results: &[i32], panics: bool) -> Queue {
        let engine = Told {
            results: results.to_vec(),
            taken: Vec::new(),
            panics,
        };
        Queue::with_engine(QueueOptions::default(), Box::new(engine))
    }

    fn file() -> Arc<dyn Storage> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1; 4096]).unwrap();
        let how = OpenFile {
            write: true,
            // The engine's, also alone.
            cache: CacheMode::WriteThrough,
            ..OpenFile::default()
        };
        open_file(file.path(), how).unwrap()
    }

    #[test]
    fn what_cannot_be_begun_now_is_begun_again() {
        let file = file();
        let queue = told(&[0, -libc::EAGAIN, -libc::EINTR, -libc::EAGAIN], false);
        queue.block_on(flush(&*file, &queue)).unwrap();
        let queue = told(&[4096, -libc::EAGAIN], false);
        let write = super::super::write_slice(&*file, &queue, 0, &[2; 4096]);
        queue.block_on(write).unwrap();
        let queue = told(&[-libc::EIO, -libc::EAGAIN], false);
        let error = queue.block_on(flush(&*file, &queue)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn a_failed_engine_ends_the_process() {
        const NAME: &str = "ZEBU_TEST_ENGINE_FAILS";
        if let Ok(how) = std::env::var(NAME) {
            let queue = told(&[], how == "panic");
            let _ = queue.block_on(flush(&*file(), &queue));
            return;
        }
        for how in ["panic", "error"] {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["a_failed_engine_ends_the_process", "--nocapture"])
                .env(NAME, how)
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{text}");
            assert!(text.contains("I/O engine failed"), "{text}");
        }
    }

    #[test]
    fn a_file_is_open_as_long_as_operations_are_in_flight() {
        for engine in EngineKind::ALL {
            let options = QueueOptions {
                engine,
                ..QueueOptions::default()
            };
            let Ok(queue) = Queue::new(options) else {
                continue;
            };
            let file = file();
            let fd = file.host_file().unwrap().as_fd().as_raw_fd();
            let link = format!("/proc/self/fd/{fd}");
            let name = std::fs::read_link(&link).unwrap();
            // SAFETY: there is no memory.
            let started = unsafe { file.start(&queue, OpKind::Flush, 0, 0, None) };
            std::mem::forget(started);
            drop(file);
            let is_open = || std::fs::read_link(&link).is_ok_and(|now| now == name);
            assert!(is_open());
            while is_open() {
                queue.inner.drive(true);
            }
        }
    }

    #[test]
    fn tasks_end_with_their_queue_and_unbroken_sections_before() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let (other, alive) = (Rc::new(()), Rc::new(Cell::new(0)));
        let (held, count) = (other.clone(), alive.clone());
        // Its answer is dropped at once.
        drop(queue.detach(|queue| async move {
            let _held = held;
            {
                let storage = super::super::Memory::new(Vec::new());
                let _unbroken = queue.unbroken(&storage);
                for _ in 0..3 {
                    yield_once().await;
                    count.set(count.get() + 1);
                }
            }
            std::future::pending::<()>().await;
        }));
        let begun = queue.begin({
            let held = other.clone();
            |_| async move {
                let _held = held;
                std::future::pending::<()>().await;
            }
        });
        assert_eq!(Rc::strong_count(&other), 3);
        drop(begun);
        assert_eq!(Rc::strong_count(&other), 2);
        assert_eq!(alive.get(), 0);
        drop(queue);
        assert_eq!(alive.get(), 3);
        assert_eq!(Rc::strong_count(&other), 1);
    }
}
