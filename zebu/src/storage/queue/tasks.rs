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
use super::{Begun, Handle, Inner, Queue};

impl Queue {
    /// Runs `future` beside the others whenever the queue is driven. The handle is a future of its
    /// result; if it is dropped, `future` goes on.
    ///
    /// A future that owns a handle to the queue keeps the queue alive: it must end before the last
    /// other handle is dropped, or both leak.
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

    /// Runs the future of `work` as a task of this queue. It is polled at once, and goes on whether
    /// or not the result is awaited. It is dropped with the last handle of the queue, but not in an
    /// unbroken section ([`Queue::unbroken`]).
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

    /// As [`Queue::detach`]; all of the future is an unbroken section, for which the end of the
    /// queue waits. It must wait for nothing but the end of an operation.
    #[cfg_attr(not(feature = "nbd"), allow(dead_code))]
    pub(crate) fn detach_unbroken<F>(&self, work: impl FnOnce(Queue) -> F)
    where
        F: Future<Output = ()> + 'static,
    {
        let unbroken = self.begin_unbroken(true);
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
        }
    }

    /// Begins an unbroken section of a task, which is not cancelled with the queue: the task is
    /// polled until the result of this is dropped. The section must wait only for operations of
    /// `storage`. Without effect outside of tasks, and for a storage in another image: there an
    /// operation may wait for a queue that is not driven while this one ends. (That image has
    /// unbroken sections and records failures itself.)
    pub(crate) fn unbroken(&self, storage: &dyn Storage) -> Unbroken {
        self.begin_unbroken(!self.keeps && !storage.is_stacked())
    }

    fn begin_unbroken(&self, counts: bool) -> Unbroken {
        let count = &self.inner.unbroken;
        count.set(count.get() + usize::from(counts));
        Unbroken {
            inner: self.inner.clone(),
            counts,
        }
    }
}

#[derive(Default)]
pub(super) struct Tasks {
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
}

/// State that wakers use on any thread.
pub(super) struct Shared {
    ready: Mutex<Vec<u32>>,
    /// Whether the queue's thread blocks in the engine or in another event loop, or is about to,
    /// and was not notified.
    pub sleeps: AtomicBool,
    pub notify: Arc<dyn Notify>,
}

pub(super) struct TaskWaker {
    shared: Arc<Shared>,
    task: u32,
    /// Whether it is in `ready` already.
    queued: AtomicBool,
}

/// Names the future of `block_on` in `ready`.
pub(super) const ROOT: u32 = u32::MAX;

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
    pub(super) fn add_task(&self, future: Pin<Box<dyn Future<Output = ()>>>) -> (u32, u64) {
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
                let waker = Arc::new(TaskWaker::new(&self.shared, id));
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

    pub(super) fn wake_task(&self, id: u32) {
        let waker = self.tasks.borrow().tasks[id as usize].waker.clone();
        waker.wake();
    }

    /// Drops a task, unless it has ended or is being polled.
    pub(super) fn cancel_task(&self, id: u32, serial: u64) {
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

    /// Drops all tasks, after the last handle that keeps them. That releases their locks and wakes
    /// the requests of other queues that wait for them.
    pub(super) fn end_tasks(&self) {
        if self.ending.replace(true) {
            return;
        }
        loop {
            // After a panic a section may never end.
            while self.unbroken.get() > 0 && !std::thread::panicking() {
                self.run_ready();
                if self.unbroken.get() > 0 {
                    self.drive(false);
                }
            }
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

    /// Polls the tasks that were woken. True: the future of `block_on` was, too.
    ///
    /// If one panics, the others remain woken.
    pub(super) fn run_ready(&self) -> bool {
        let mut taken = Taken {
            inner: self,
            tasks: self.taken.take(),
            next: 0,
        };
        std::mem::swap(&mut *self.shared.ready(), &mut taken.tasks);
        let mut root_is_ready = false;
        while let Some(&task) = taken.tasks.get(taken.next) {
            taken.next += 1;
            match task {
                ROOT => root_is_ready = true,
                task => self.run_task(task),
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
        self.0.tasks.borrow_mut().free.push(self.1);
    }
}

/// Tasks that were woken and are polled one after the other.
struct Taken<'a> {
    inner: &'a Inner,
    tasks: Vec<u32>,
    next: usize,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut tasks = std::mem::take(&mut self.tasks);
        if self.next < tasks.len() {
            self.inner.shared.ready().extend(&tasks[self.next..]);
        }
        tasks.clear();
        self.inner.taken.replace(tasks);
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
