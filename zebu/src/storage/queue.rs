//! A queue: one thread's engine, and the requests that it drives.
//!
//! Requests are futures. The queue polls them; when all wait, it enters the
//! engine once, which hands over everything submitted since and waits for the
//! first end. There is no other runtime: [`Queue::block_on`] is the loop, and
//! any number of futures run beside it with [`Queue::spawn`].
//!
//! A queue belongs to the thread that made it. Wakers are what crosses
//! threads: a request may wait for something that a request on another queue
//! is doing (loading an L2 slice, say), and is woken by it.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::buffer::{Buffer, BufferPool, Iov};
use super::engine::{Completion, Engine, EngineKind, Interest, Notify, Token};
use super::op::{Op, OpKind};

/// How requests of one queue are treated.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// The engine.
    pub engine: EngineKind,
    /// Parts of one request in flight at once, at least 1. (A file may make two operations of a
    /// large one.)
    pub parts: usize,
    /// Whether compressed clusters are inflated on this thread instead of on
    /// the library's workers. Right when there are as many queues as cores.
    pub inflate_here: bool,
    /// Whether this thread copies to the page cache, and from it what lies
    /// there, instead of the engine. File systems that cannot write to it
    /// without blocking (ext4) make io_uring pass that to a kernel thread, which
    /// costs more than the copy; and what was read a moment ago is still in the
    /// cache of the processor when it is looked at. Right for jobs that have a
    /// queue on each core. [`Queue::set_write_here`] changes that for writes.
    pub copy_here: bool,
    /// Whether io_uring has every other large read through the page cache done by a thread of the
    /// kernel, which copies beside this one: with several of 1 MiB in flight a quarter faster or more.
    /// Right for who does nothing with the bytes himself.
    pub share_copies: bool,
    /// How long who serves clients on this queue looks for more to do before
    /// the thread sleeps, at most ([`Polling`](super::Polling)); zero: not at
    /// all.
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
            copy_here: false,
            share_copies: false,
            poll: Duration::ZERO,
        }
    }
}

/// Reads from this many bytes on may be copied by a thread of the kernel
/// ([`QueueOptions::share_copies`]).
const COPIED_ASIDE: usize = 512 << 10;

/// A handle to one thread's queue. Clones mean the same queue.
///
/// A request's future that was polled is polled until it is ready, or dropped.
/// One that is kept and not polled holds others up, also of other queues: it may
/// be the one that loads a table for them, commits what they flush, or receives
/// from an NBD server what is theirs. [`Queue::spawn`] polls by itself. To drop
/// one is always right, and another request goes on with what it led; the drop
/// waits for the operations that the kernel has, and for the answer to a write
/// that an NBD server has.
#[derive(Clone)]
pub struct Queue(Rc<Inner>);

struct Inner {
    options: QueueOptions,
    engine: RefCell<Box<dyn Engine>>,
    slots: RefCell<Slots>,
    /// Reused by `drive`.
    done: RefCell<Vec<Completion>>,
    wakers: RefCell<Vec<Waker>>,
    tasks: RefCell<Tasks>,
    shared: Arc<Shared>,
    /// Whether `block_on` is running.
    running: Cell<bool>,
    write_here: Cell<bool>,
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
    /// In the engine; who to wake when it ends.
    Busy(Option<Waker>),
    /// Ended with this result, not yet looked at.
    Ended(i32),
}

#[derive(Default)]
struct Tasks {
    tasks: Vec<Task>,
    free: Vec<u32>,
    live: usize,
}

struct Task {
    /// None while it is being polled, and when the place is free.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    waker: Arc<TaskWaker>,
}

/// What wakers on any thread touch.
struct Shared {
    ready: Mutex<Vec<u32>>,
    /// Whether the queue's thread blocks in the engine, or is about to.
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
        // SeqCst pairs with `enter_engine`: either we see that it sleeps, or
        // it sees what we pushed.
        if self.shared.sleeps.load(Ordering::SeqCst) {
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
        static QUEUES: AtomicU64 = AtomicU64::new(0);
        let engine = options.engine.start()?;
        let shared = Arc::new(Shared {
            ready: Mutex::default(),
            sleeps: AtomicBool::new(false),
            notify: engine.notifier(),
        });
        Ok(Queue(Rc::new(Inner {
            write_here: Cell::new(options.copy_here),
            options,
            engine: RefCell::new(engine),
            slots: RefCell::default(),
            done: RefCell::default(),
            wakers: RefCell::default(),
            tasks: RefCell::default(),
            shared,
            running: Cell::new(false),
            buffers: BufferPool::new(),
            thread: std::thread::current().id(),
            number: QUEUES.fetch_add(1, Ordering::Relaxed),
        })))
    }

    /// A number that no other queue of the process has; the next queue has the
    /// next one.
    pub(crate) fn number(&self) -> u64 {
        self.0.number
    }

    /// Whether writes through the page cache are made by this thread from now
    /// on, see [`QueueOptions::copy_here`]. Who does one thing at a time on
    /// the queue holds up nothing else by that.
    pub fn set_write_here(&self, here: bool) {
        self.0.write_here.set(here);
    }

    /// Whether they are.
    pub(super) fn writes_here(&self) -> bool {
        self.0.write_here.get()
    }

    /// What it was made with.
    pub fn options(&self) -> &QueueOptions {
        &self.0.options
    }

    /// Runs `future`, and all spawned ones beside it, until it is ready.
    ///
    /// # Panics
    /// If called from within a future that this queue drives.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        // The inner loop would take the wake-ups of what the outer one polls.
        assert!(
            !self.0.running.replace(true),
            "block_on within a future of the same queue"
        );
        let _running = Running(&self.0.running);
        let waker = Arc::new(TaskWaker {
            shared: self.0.shared.clone(),
            task: ROOT,
            queued: AtomicBool::new(true),
        });
        self.0.shared.ready().push(ROOT);
        let mut future = pin!(future);
        let std_waker = Waker::from(waker.clone());
        let mut batch = Vec::new();
        loop {
            std::mem::swap(&mut *self.0.shared.ready(), &mut batch);
            let mut root_is_ready = false;
            for task in batch.drain(..) {
                match task {
                    ROOT => root_is_ready = true,
                    task => self.0.run_task(task),
                }
            }
            if root_is_ready {
                waker.begin();
                let mut context = Context::from_waker(&std_waker);
                if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                    return output;
                }
            }
            self.0.drive(false);
        }
    }

    /// Runs `future` beside the others whenever the queue is driven. The
    /// result is awaited through the handle; dropping the handle leaves the
    /// future running.
    ///
    /// A future that holds a handle to the queue, or does I/O through it, keeps
    /// the queue alive: let it end before the last other handle goes, or
    /// neither ever does.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Handle<T> {
        let result = Rc::new(JoinState {
            value: Cell::new(None),
            waker: Cell::new(None),
        });
        let state = result.clone();
        self.0.add_task(Box::pin(async move {
            state.value.set(Some(future.await));
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        }));
        Handle { state: result }
    }

    /// A buffer of at least `len` bytes from the queue's pool, content
    /// unspecified; it returns there when dropped.
    pub fn buffer(&self, len: usize) -> PoolBuffer {
        PoolBuffer {
            buffer: Some(self.0.buffers.take(len)),
            queue: self.clone(),
        }
    }

    /// Starts one operation.
    ///
    /// # Safety
    /// The descriptor stays open, and the memory (and `iovec` array) that `op`
    /// names valid and otherwise untouched, until the [`Io`] has ended or was
    /// dropped. The `Io` must not be forgotten while its memory goes away.
    pub(crate) unsafe fn submit(&self, op: Op) -> Io {
        debug_assert_eq!(self.0.thread, std::thread::current().id());
        let token = self.0.slots.borrow_mut().take();
        // SAFETY: passed on; `Io` waits for the end when it is dropped.
        unsafe { self.0.engine.borrow_mut().submit(token, op) };
        Io {
            queue: self.clone(),
            token,
            ended: false,
            _not_send: PhantomData,
        }
    }

    /// Begins to wait for a descriptor, which stays open until the [`Io`] has
    /// ended or was dropped; see [`Io::cancel_watch`].
    pub(super) fn watch(&self, fd: std::os::fd::RawFd, interest: Interest) -> Io {
        debug_assert_eq!(self.0.thread, std::thread::current().id());
        let token = self.0.slots.borrow_mut().take();
        self.0.engine.borrow_mut().watch(token, fd, interest);
        Io {
            queue: self.clone(),
            token,
            ended: false,
            _not_send: PhantomData,
        }
    }

    /// Starts one operation on the memory of `iov`; as [`Queue::submit`], on
    /// the promise that made the `Iov`. `cached`: through the page cache.
    ///
    /// # Safety
    /// The descriptor stays open until the result has ended or was dropped.
    pub(crate) unsafe fn submit_iov(
        &self,
        kind: OpKind,
        fd: std::os::fd::RawFd,
        offset: u64,
        iov: &Iov,
        cached: bool,
    ) -> (Io, Option<Box<[libc::iovec]>>) {
        let mut op = Op {
            kind,
            fd,
            offset,
            length: iov.len() as u64,
            memory: std::ptr::null_mut(),
            segments: 1,
            aside: cached
                && self.options().share_copies
                && kind == OpKind::Read
                && iov.len() >= COPIED_ASIDE,
        };
        if let Some((ptr, _)) = iov.single() {
            op.memory = ptr.cast();
            // SAFETY: on the promise of the Iov.
            return (unsafe { self.submit(op) }, None);
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
            return (unsafe { self.submit(op) }, None);
        }
        let mut array = array.into_boxed_slice();
        op.segments = array.len() as u32;
        op.memory = array.as_mut_ptr().cast();
        // SAFETY: as above; the array lives as long as the Io (the caller
        // keeps both in one place, the Io first).
        (unsafe { self.submit(op) }, Some(array))
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
    fn take(&mut self) -> Token {
        match self.free.pop() {
            Some(token) => {
                self.slots[token as usize] = Slot::Busy(None);
                token
            }
            None => {
                self.slots.push(Slot::Busy(None));
                (self.slots.len() - 1) as Token
            }
        }
    }
}

impl Inner {
    fn add_task(&self, future: Pin<Box<dyn Future<Output = ()>>>) {
        let mut tasks = self.tasks.borrow_mut();
        let tasks = &mut *tasks;
        tasks.live += 1;
        let waker = match tasks.free.pop() {
            Some(id) => {
                let task = &mut tasks.tasks[id as usize];
                task.future = Some(future);
                task.waker.clone()
            }
            None => {
                let waker = Arc::new(TaskWaker {
                    shared: self.shared.clone(),
                    task: tasks.tasks.len() as u32,
                    queued: AtomicBool::new(false),
                });
                tasks.tasks.push(Task {
                    future: Some(future),
                    waker: waker.clone(),
                });
                waker
            }
        };
        waker.wake();
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
            tasks.live -= 1;
            drop(tasks);
            drop(future);
        }
    }

    /// Enters the engine once; waits there for an end if it must, or if no
    /// future is ready.
    fn drive(&self, must_wait: bool) {
        let mut done = self.done.take();
        let mut wakers = self.wakers.take();
        let result = self.enter_engine(must_wait, &mut done);
        {
            let mut slots = self.slots.borrow_mut();
            for (token, result) in done.drain(..) {
                let slot = &mut slots.slots[token as usize];
                match std::mem::replace(slot, Slot::Ended(result)) {
                    Slot::Busy(waker) => wakers.extend(waker),
                    _ => unreachable!("an operation ends once"),
                }
            }
        }
        self.done.replace(done);
        // Only now, with nothing borrowed and every end on record: a waker is
        // foreign code, which may drop an `Io` and so come back here.
        wakers.drain(..).for_each(Waker::wake);
        self.wakers.replace(wakers);
        if let Err(e) = result {
            // The ring itself is broken; what is in flight can never be
            // accounted for, and its memory not be given back.
            panic!("the {} I/O engine failed: {e}", self.options.engine);
        }
    }

    fn enter_engine(&self, must_wait: bool, done: &mut Vec<Completion>) -> io::Result<()> {
        // SeqCst pairs with `wake_by_ref`.
        self.shared.sleeps.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        let wait = must_wait || self.shared.ready().is_empty();
        let result = self.engine.borrow_mut().poll(wait, done);
        self.shared.sleeps.store(false, Ordering::SeqCst);
        result
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
            self.queue.0.engine.borrow_mut().unwatch(self.token);
        }
    }

    fn take_result(&mut self) -> Option<i32> {
        let mut slots = self.queue.0.slots.borrow_mut();
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
        let slots = &self.queue.0.slots;
        let token = self.token as usize;
        let known = match &slots.borrow().slots[token] {
            Slot::Busy(Some(waker)) => waker.will_wake(context.waker()),
            _ => false,
        };
        if !known {
            // Cloned, and the old one dropped, with nothing borrowed: both
            // are foreign code.
            let new = Slot::Busy(Some(context.waker().clone()));
            let old = std::mem::replace(&mut slots.borrow_mut().slots[token], new);
            drop(old);
        }
        Poll::Pending
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        while !self.ended && self.take_result().is_none() {
            // Even if futures are ready: they do not run now.
            self.queue.0.drive(true);
        }
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

impl std::ops::DerefMut for PoolBuffer {
    fn deref_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("present until dropped")
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.queue.0.buffers.give(buffer);
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
