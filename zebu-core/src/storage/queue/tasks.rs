//! The tasks of a queue: futures that it polls when they are woken, from any thread.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use super::super::Storage;
use super::super::engine::Notify;
use super::handle::{Spawned, joined};
use super::{Begun, Cancelled, Handle, Inner, Queue, Role};

impl Queue {
    /// Runs `future` beside the others whenever the queue is driven. The handle is a future of its
    /// result; if it is dropped, `future` goes on.
    ///
    /// It is dropped with the queue, so it may own a clone of the handle, but not the handle that
    /// [`Queue::new`] returned, nor a share of that (`Rc<Queue>`): then neither is ever dropped.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Handle<T> {
        let spawned = Spawned::new(&self.inner);
        let (task, mut handle) = joined(async move {
            let _spawned = spawned;
            future.await
        });
        let (id, serial) = self.inner.add_task(task, true);
        handle.task = Some((Rc::downgrade(&self.inner), id, serial));
        self.inner.wake_task(id);
        handle
    }

    /// Waits until [`Queue::is_idle`]: every spawned future has ended or was dropped, also those
    /// that are spawned meanwhile, and what dropped requests have left. Never ready within one of
    /// them.
    pub async fn drain(&self) {
        std::future::poll_fn(|context| {
            if self.is_idle() {
                return Poll::Ready(());
            }
            let waker = context.waker().clone();
            self.inner.draining.borrow_mut().push(waker);
            Poll::Pending
        })
        .await;
    }

    /// Whether the queue has nothing to do for others: no spawned future, and nothing that goes on
    /// after its request was dropped. Then its thread may wait elsewhere without driving it: no
    /// request of another queue waits for it. (Requests whose futures are kept do not count.)
    pub fn is_idle(&self) -> bool {
        self.inner.is_idle()
    }

    /// Runs the future of `work` as a task of this queue. It is polled at once, and goes on whether
    /// or not the result is awaited: no request may have to wait for it. It is dropped with the
    /// queue, but not in an unbroken section ([`Queue::unbroken`]).
    #[doc(hidden)]
    pub fn detach<T: 'static, F>(&self, work: impl FnOnce(Queue) -> F) -> Handle<T>
    where
        F: Future<Output = T> + 'static,
    {
        let (task, handle) = joined(work(self.for_itself()));
        let (id, _) = self.inner.add_task(task, false);
        self.inner.run_task(id);
        handle
    }

    /// As [`Queue::detach`], but the task is cancelled when the result is dropped, which waits for
    /// the end of an unbroken section. For what requests of other queues may wait for: the queue is
    /// perhaps not driven any more. (In an unbroken section of an image in another one the task is
    /// not cancelled, and goes on as one that the queue owes to others, see [`Queue::is_idle`].) If
    /// the task ends with its queue, the result is `ECANCELED`.
    #[doc(hidden)]
    pub fn begin<T: Cancelled + 'static, F>(&self, work: impl FnOnce(Queue) -> F) -> Begun<T>
    where
        F: Future<Output = T> + 'static,
    {
        let (task, handle) = joined(work(self.for_itself()));
        let (id, serial) = self.inner.add_task(task, false);
        self.inner.run_task(id);
        Begun {
            queue: self.for_itself(),
            id,
            serial,
            handle,
        }
    }

    /// As [`Queue::detach`]; all of the future is an unbroken section, for which the end of the
    /// queue waits; after that, this call. It must wait for nothing but the end of an operation.
    #[doc(hidden)]
    pub fn detach_unbroken<F>(&self, work: impl FnOnce(Queue) -> F)
    where
        F: Future<Output = ()> + 'static,
    {
        let unbroken = self.inner.begin_unbroken(None);
        let work = self.detach(|queue| {
            let work = work(queue);
            async move {
                work.await;
                drop(unbroken);
            }
        });
        drop(work);
        if self.inner.keepers.get() == 0 {
            self.inner.end_tasks();
        } else if !self.inner.owned.get() && !self.inner.ending.get() {
            // Perhaps nobody drives the clones that are left. Their other tasks go on.
            self.inner.drive_sections(|| self.inner.unbroken.get() > 0);
            self.inner.arm_again();
        }
    }

    /// Begins an unbroken section of a task, which is not cancelled with the queue: the task is
    /// polled until the result of this is dropped. The section must wait only for operations of
    /// `storage`. Without effect outside of tasks. For a storage in another image the section ends
    /// with its queue, and only outlives its request: an operation may wait there for a queue that
    /// is not driven while this one ends. (That image has unbroken sections and records failures
    /// itself.)
    pub(crate) fn unbroken(&self, storage: &dyn Storage) -> Option<Unbroken> {
        let task = match self.role != Role::Own {
            true => None,
            false => self.inner.polled.get(),
        };
        // A caller's future is not polled while the queue ends.
        let is_spawned = |id: u32| self.inner.tasks.borrow().tasks[id as usize].is_spawned;
        let task = task.filter(|id| !is_spawned(*id))?;
        Some(match storage.is_stacked() {
            true => self.inner.begin_outliving(task),
            false => self.inner.begin_unbroken(Some(task)),
        })
    }

    /// Whether the task that is being polled is in an unbroken section. Then it must wait for no
    /// other request.
    pub(in super::super) fn is_unbroken(&self) -> bool {
        let is_in = |id: u32| self.inner.tasks.borrow().tasks[id as usize].unbroken > 0;
        self.inner.polled.get().is_some_and(is_in)
    }
}

#[derive(Default)]
pub struct Tasks {
    tasks: Vec<Task>,
    free: Vec<u32>,
    /// Number of tasks that were ever added.
    serial: u64,
}

struct Task {
    /// None while it is being polled, and if the place is free.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    serial: u64,
    waker: Arc<TaskWaker>,
    /// Whether it is a caller's ([`Queue::spawn`]).
    is_spawned: bool,
    /// Number of unbroken sections that it is in.
    unbroken: usize,
    /// The same of those that end with the queue.
    outliving: usize,
    /// Whether its request was dropped in one of these.
    is_owed: bool,
}

/// State that wakers use on any thread.
pub struct Shared {
    ready: Mutex<Vec<u32>>,
    /// Whether the queue's thread blocks in the engine or in another event loop, or is about to,
    /// and was not notified.
    pub sleeps: AtomicBool,
    pub notify: Arc<dyn Notify>,
}

pub struct TaskWaker {
    shared: Arc<Shared>,
    task: u32,
    /// Whether it is in `ready` already.
    queued: AtomicBool,
}

/// Names the future of `block_on` in `ready`.
pub const ROOT: u32 = u32::MAX;

impl TaskWaker {
    pub fn new(shared: &Arc<Shared>, task: u32) -> Self {
        TaskWaker {
            shared: shared.clone(),
            task,
            queued: AtomicBool::new(false),
        }
    }

    /// From now on a wake queues the task again.
    ///
    /// A swap, not a store: a waker that found the task queued relies on the next poll to see what
    /// it did before.
    pub fn begin(&self) {
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
        // SeqCst pairs with `drive` and `arm`: either the sleep is seen here or the task there.
        let sleeps = &self.shared.sleeps;
        if sleeps.load(Ordering::SeqCst) && sleeps.swap(false, Ordering::SeqCst) {
            // One notification is enough: then all tasks in `ready` are polled.
            self.shared.notify.notify();
        }
    }
}

impl Shared {
    pub fn new(notify: Arc<dyn Notify>) -> Self {
        Shared {
            ready: Mutex::default(),
            sleeps: AtomicBool::new(false),
            notify,
        }
    }

    pub fn ready(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        crate::lock(&self.ready)
    }
}

#[cfg(test)]
impl Tasks {
    pub fn free_places(&self) -> usize {
        self.free.len()
    }
}

impl Inner {
    /// Its index, and a number that distinguishes it from earlier tasks with the
    /// same index.
    pub(super) fn add_task(
        &self,
        future: Pin<Box<dyn Future<Output = ()>>>,
        is_spawned: bool,
    ) -> (u32, u64) {
        let mut tasks = self.tasks.borrow_mut();
        let tasks = &mut *tasks;
        tasks.serial += 1;
        let id = match tasks.free.pop() {
            Some(id) => {
                let task = &mut tasks.tasks[id as usize];
                task.future = Some(future);
                task.serial = tasks.serial;
                task.is_spawned = is_spawned;
                id
            }
            None => {
                let id = tasks.tasks.len() as u32;
                let waker = Arc::new(TaskWaker::new(&self.shared, id));
                tasks.tasks.push(Task {
                    future: Some(future),
                    serial: tasks.serial,
                    waker,
                    is_spawned,
                    unbroken: 0,
                    outliving: 0,
                    is_owed: false,
                });
                id
            }
        };
        (id, tasks.serial)
    }

    pub(super) fn wake_task(&self, id: u32) {
        let waker = self.tasks.borrow().tasks[id as usize].waker.clone();
        waker.wake();
    }

    /// Drops a task, unless it has ended or is being polled.
    pub(super) fn cancel_task(&self, id: u32, serial: u64) {
        let future = {
            let mut tasks = self.tasks.borrow_mut();
            let task = &mut tasks.tasks[id as usize];
            match task.serial == serial {
                true => task.future.take(),
                false => None,
            }
        };
        if future.is_some() {
            // With nothing borrowed: dropping it may drive the queue. Its place is free afterwards.
            let _ended = Ended(self, id);
            drop(future);
        }
    }

    /// As [`Inner::cancel_task`], at the end of its unbroken sections. In one that outlives the request
    /// the task goes on.
    pub(super) fn cancel_task_unbroken(&self, id: u32, serial: u64) {
        // After its owner, perhaps nobody drives the queue.
        if self.owned.get() && !self.ending.get() {
            let task = &mut self.tasks.borrow_mut().tasks[id as usize];
            if task.serial == serial && task.future.is_some() && task.outliving > 0 {
                task.is_owed = true;
                self.owed.set(self.owed.get() + 1);
                return;
            }
        }
        let is_unbroken = || {
            let task = &self.tasks.borrow().tasks[id as usize];
            task.serial == serial && task.future.is_some() && task.unbroken > 0
        };
        if is_unbroken() {
            self.drive_sections(is_unbroken);
            self.arm_again();
        }
        self.cancel_task(id, serial);
    }

    /// Drops all tasks, with the handle that [`Queue::new`] returned; those that requests of clones
    /// begin afterwards, with the last clone. That releases their locks and wakes the requests that
    /// wait for them.
    pub(super) fn end_tasks(&self) {
        if self.ending.replace(true) {
            return;
        }
        loop {
            self.drive_sections(|| self.unbroken.get() > 0);
            // The drop of a task may begin another section.
            let next = {
                let tasks = self.tasks.borrow();
                let place = tasks.tasks.iter().position(|task| task.future.is_some());
                place.map(|id| (id as u32, tasks.tasks[id].serial))
            };
            match next {
                Some((id, serial)) => self.cancel_task(id, serial),
                None => break,
            }
        }
        self.ending.set(false);
    }

    /// Drives the queue for unbroken sections while `last`. A caller's futures, of which one may be
    /// dropping a request just now, are not polled.
    fn drive_sections(&self, last: impl Fn() -> bool) {
        let mut later = Later {
            inner: self,
            tasks: Vec::new(),
        };
        // After a panic a section may never end.
        while last() && !std::thread::panicking() {
            self.take_ready();
            while let Some(id) = self.next_ready() {
                let is_for_later = id == ROOT || {
                    let task = &self.tasks.borrow().tasks[id as usize];
                    // Without a future, it may be the one that is being polled.
                    task.is_spawned || task.future.is_none()
                };
                match is_for_later {
                    true => later.tasks.push(id),
                    false => self.run_task(id),
                }
            }
            if last() {
                self.drive(false);
            }
        }
    }

    fn begin_unbroken(self: &Rc<Self>, task: Option<u32>) -> Unbroken {
        self.unbroken.set(self.unbroken.get() + 1);
        if let Some(id) = task {
            self.tasks.borrow_mut().tasks[id as usize].unbroken += 1;
        }
        Unbroken {
            inner: self.clone(),
            task,
            outlives: false,
        }
    }

    fn begin_outliving(self: &Rc<Self>, task: u32) -> Unbroken {
        self.tasks.borrow_mut().tasks[task as usize].outliving += 1;
        Unbroken {
            inner: self.clone(),
            task: Some(task),
            outlives: true,
        }
    }

    /// Adds the tasks that were woken to `taken`.
    fn take_ready(&self) {
        let mut taken = self.taken.borrow_mut();
        taken.extend(self.shared.ready().drain(..));
    }

    fn next_ready(&self) -> Option<u32> {
        self.taken.borrow_mut().pop_front()
    }

    /// Polls the tasks that were woken. True: the future of `block_on` was, too.
    ///
    /// If one panics, the others remain woken.
    pub(super) fn run_ready(&self) -> bool {
        self.take_ready();
        let _rest = Later {
            inner: self,
            tasks: Vec::new(),
        };
        let mut root_is_ready = false;
        // Not those that are woken meanwhile.
        let count = self.taken.borrow().len();
        for _ in 0..count {
            match self.next_ready() {
                Some(ROOT) => root_is_ready = true,
                Some(task) => self.run_task(task),
                // One of them drove the queue.
                None => break,
            }
        }
        root_is_ready
    }

    /// Polls a task; one that panics has ended.
    fn run_task(&self, id: u32) {
        let (mut future, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            let task = &mut tasks.tasks[id as usize];
            task.waker.begin();
            // A late wake of a task that has ended finds nothing.
            let Some(future) = task.future.take() else {
                return;
            };
            (future, Waker::from(task.waker.clone()))
        };
        let ended = Ended(self, id);
        let _polled = Polled(self, self.polled.replace(Some(id)));
        let mut context = Context::from_waker(&waker);
        if future.as_mut().poll(&mut context).is_pending() {
            std::mem::forget(ended);
            self.tasks.borrow_mut().tasks[id as usize].future = Some(future);
        } else {
            drop(ended);
        }
    }
}

/// Makes the place of a task free.
struct Ended<'a>(&'a Inner, u32);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let was_owed = {
            let mut tasks = self.0.tasks.borrow_mut();
            tasks.free.push(self.1);
            std::mem::take(&mut tasks.tasks[self.1 as usize].is_owed)
        };
        if was_owed {
            self.0.owed.set(self.0.owed.get() - 1);
            self.0.wake_draining();
        }
    }
}

/// The task that is being polled is this one again.
struct Polled<'a>(&'a Inner, Option<u32>);

impl Drop for Polled<'_> {
    fn drop(&mut self) {
        self.0.polled.set(self.1);
    }
}

/// Tasks that were woken and are polled later, with those that are left in `taken`.
struct Later<'a> {
    inner: &'a Inner,
    tasks: Vec<u32>,
}

impl Drop for Later<'_> {
    fn drop(&mut self) {
        let mut taken = self.inner.taken.borrow_mut();
        if !self.tasks.is_empty() || !taken.is_empty() {
            let mut ready = self.inner.shared.ready();
            ready.append(&mut self.tasks);
            ready.extend(taken.drain(..));
        }
    }
}

/// Ends an unbroken section ([`Queue::unbroken`]).
pub struct Unbroken {
    inner: Rc<Inner>,
    task: Option<u32>,
    /// Whether it is only of the request, and ends with the queue.
    outlives: bool,
}

impl Drop for Unbroken {
    fn drop(&mut self) {
        if let (true, Some(id)) = (self.outlives, self.task) {
            self.inner.tasks.borrow_mut().tasks[id as usize].outliving -= 1;
            return;
        }
        let left = self.inner.unbroken.get() - 1;
        self.inner.unbroken.set(left);
        if let Some(id) = self.task {
            self.inner.tasks.borrow_mut().tasks[id as usize].unbroken -= 1;
        }
        self.inner.wake_draining();
    }
}

/// Lets the other tasks of the queue that are ready go on first.
pub async fn yield_once() {
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
