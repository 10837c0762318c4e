//! Handles to the results of tasks.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

use super::{Inner, Queue};

struct JoinState<T> {
    value: Cell<Option<T>>,
    waker: Cell<Option<Waker>>,
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
        match self.state.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                self.state.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

/// Counts a spawned future until it is dropped.
pub(super) struct Spawned(Weak<Inner>);

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
    /// Wakes [`Queue::drain`] if it may be ready.
    pub(super) fn wake_draining(&self) {
        if self.spawned.get() == 0 && self.unbroken.get() == 0 {
            let waiting = self.draining.take();
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

/// Makes a task of a future, and a handle to its result.
pub(super) fn joined<T: 'static>(
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
#[must_use = "dropped, it cancels the task"]
pub(crate) struct Begun<T> {
    pub(super) queue: Queue,
    pub(super) id: u32,
    pub(super) serial: u64,
    pub(super) handle: Handle<T>,
}

impl<T> Future for Begun<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.handle).poll(context)
    }
}

impl<T> Drop for Begun<T> {
    fn drop(&mut self) {
        self.queue.inner.cancel_task_unbroken(self.id, self.serial);
    }
}
