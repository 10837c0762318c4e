//! Handles to the results of tasks.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

use super::{Inner, Queue};

struct JoinState<T> {
    value: Cell<Option<T>>,
    waker: Cell<Option<Waker>>,
    /// Whether the task has ended or was dropped.
    ended: Cell<bool>,
}

impl<T> JoinState<T> {
    /// Waits for the result; None: there is none any more.
    fn poll(&self, context: &mut Context<'_>) -> Poll<Option<T>> {
        match self.value.take() {
            Some(value) => Poll::Ready(Some(value)),
            None if self.ended.get() => Poll::Ready(None),
            None => {
                self.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

/// Is dropped with the task, and wakes what waits for its result, also if there is none.
struct Joined<T>(Rc<JoinState<T>>);

impl<T> Drop for Joined<T> {
    fn drop(&mut self) {
        self.0.ended.set(true);
        self.0.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// The result of a spawned future.
///
/// ```
/// use zebu::{Queue, QueueOptions};
///
/// let queue = Queue::new(QueueOptions::default())?;
/// let handle = queue.spawn(async { 2 + 2 });
/// assert_eq!(queue.block_on(handle), 4);
/// queue.spawn(std::future::pending::<()>()).abort();
/// # std::io::Result::Ok(())
/// ```
///
/// # Panics
/// If it is polled after the future was dropped without a result: that has panicked, or its queue
/// has ended.
pub struct Handle<T> {
    state: Rc<JoinState<T>>,
    /// The task, if it may be aborted: its queue, index and serial number.
    pub(super) task: Option<(Weak<Inner>, u32, u64)>,
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

impl<T> Future for Handle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let value = std::task::ready!(self.state.poll(context));
        Poll::Ready(value.expect("a spawned future that has panicked or ended with its queue"))
    }
}

/// Counts a spawned future until it is dropped.
pub struct Spawned(Weak<Inner>);

impl Spawned {
    pub fn new(inner: &Rc<Inner>) -> Self {
        inner.spawned.set(inner.spawned.get() + 1);
        Spawned(Rc::downgrade(inner))
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        let Some(inner) = self.0.upgrade() else {
            return;
        };
        inner.spawned.set(inner.spawned.get() - 1);
        inner.wake_draining();
    }
}

impl Inner {
    /// [`Queue::is_idle`].
    pub(super) fn is_idle(&self) -> bool {
        self.spawned.get() == 0 && self.unbroken.get() == 0 && self.owed.get() == 0
    }

    /// Wakes [`Queue::drain`] if it may be ready.
    pub(super) fn wake_draining(&self) {
        if self.is_idle() {
            let waiting = self.draining.take();
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

/// Makes a task of a future, and a handle to its result.
pub fn joined<T: 'static>(
    future: impl Future<Output = T> + 'static,
) -> (Pin<Box<dyn Future<Output = ()>>>, Handle<T>) {
    let state = Rc::new(JoinState {
        value: Cell::new(None),
        waker: Cell::new(None),
        ended: Cell::new(false),
    });
    let handle = Handle {
        state: state.clone(),
        task: None,
    };
    let joined = Joined(state);
    let task = Box::pin(async move {
        let value = future.await;
        joined.0.value.set(Some(value));
        drop(joined);
    });
    (task, handle)
}

/// The result of a task, which is cancelled when this is dropped ([`Queue::begin`]).
#[must_use = "dropped, it cancels the task"]
pub struct Begun<T> {
    pub(super) queue: Queue,
    pub(super) id: u32,
    pub(super) serial: u64,
    pub(super) handle: Handle<T>,
}

/// The result of a task that was dropped with its queue: an error if it can be one.
pub trait Cancelled {
    /// The result of a future that was cancelled.
    fn cancelled() -> Self;
}

impl Cancelled for () {
    fn cancelled() {}
}

impl<T, E: From<io::Error>> Cancelled for Result<T, E> {
    fn cancelled() -> Self {
        Err(io::Error::from_raw_os_error(libc::ECANCELED).into())
    }
}

impl<T: Cancelled> Future for Begun<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        match std::task::ready!(self.handle.state.poll(context)) {
            Some(value) => Poll::Ready(value),
            // It is a task that is dropped next.
            None if self.queue.inner.ending.get() => Poll::Pending,
            None => Poll::Ready(T::cancelled()),
        }
    }
}

impl<T> Drop for Begun<T> {
    fn drop(&mut self) {
        self.queue.inner.cancel_task_unbroken(self.id, self.serial);
    }
}
