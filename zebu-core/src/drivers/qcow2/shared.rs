//! An image that is shared with tasks of queues.
//!
//! What several requests may need (loading a table, a commit, a change of the
//! header) is done by a task of the queue of the first such request. The task goes
//! on when the request that waits for it is no longer polled, so it shares ownership
//! of the image. It is cancelled when the request is dropped.
//!
//! A change of the whole image (`&mut`) waits until no task is left, and starts
//! none: its commits are part of its future. See [`SharedImage::whole`] for what
//! happens when that is dropped.

use std::future::poll_fn;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};

use super::Image;
use crate::storage::{Cancelled, Queue};
use crate::{Error, Result};

/// An image on the heap, which its tasks share.
#[derive(Debug)]
pub struct SharedImage(Arc<Image>);

/// The tasks of an image.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    /// The image that has this field, while it may be shared: not while there is a `&mut` to it.
    image: Mutex<Weak<Image>>,
    /// Whether it is there.
    is_shared: AtomicBool,
    count: Arc<Count>,
}

/// The number of tasks.
#[derive(Debug, Default)]
struct Count(Mutex<(usize, Vec<Waker>)>);

/// A task's share of an image.
struct Share {
    image: Option<Arc<Image>>,
    count: Arc<Count>,
}

impl SharedImage {
    /// An image that may have tasks from now on.
    pub(crate) fn new(image: Image) -> Self {
        SharedImage(Arc::new(image))
    }

    /// Waits until no task is left, so that [`SharedImage::get_mut`] succeeds.
    pub(crate) async fn wait_for_tasks(&mut self) {
        let count = &self.0.tasks.count;
        poll_fn(|context| {
            let mut state = crate::lock(&count.0);
            if state.0 == 0 {
                return Poll::Ready(());
            }
            if !state.1.iter().any(|w| w.will_wake(context.waker())) {
                state.1.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Exclusive access to the image, after its tasks have ended.
    pub(crate) async fn own(&mut self) -> Result<&mut Image> {
        self.wait_for_tasks().await;
        self.get_mut().ok_or_else(|| Error::os(libc::EBUSY))
    }

    /// Carries out a change of the whole image. If the future is dropped midway, every write fails
    /// until the image is opened again.
    pub(crate) async fn whole<T>(
        &mut self,
        change: impl AsyncFnOnce(&mut Image) -> Result<T>,
    ) -> Result<T> {
        let image = self.own().await?;
        let whole = image.writer()?.whole();
        let result = change(image).await;
        whole.end();
        result
    }

    /// Tasks may share the image from now on.
    #[cold]
    fn share(&self) {
        *crate::lock(&self.0.tasks.image) = Arc::downgrade(&self.0);
        self.0.tasks.is_shared.store(true, Ordering::Release);
    }

    /// Exclusive access to the image; `None` while there are tasks.
    fn get_mut(&mut self) -> Option<&mut Image> {
        self.0.tasks.is_shared.store(false, Ordering::Release);
        *crate::lock(&self.0.tasks.image) = Weak::new();
        Arc::get_mut(&mut self.0)
    }
}

impl Deref for SharedImage {
    type Target = Image;

    #[inline]
    fn deref(&self) -> &Image {
        if !self.0.tasks.is_shared.load(Ordering::Acquire) {
            self.share();
        }
        &self.0
    }
}

impl Tasks {
    /// A share of the image that has this field, if it may be shared.
    fn share(&self) -> Option<Share> {
        let image = crate::lock(&self.image).upgrade()?;
        crate::lock(&self.count.0).0 += 1;
        Some(Share {
            image: Some(image),
            count: self.count.clone(),
        })
    }
}

impl Share {
    async fn run<T>(self, queue: Queue, work: impl AsyncFnOnce(&Image, &Queue) -> T) -> T {
        let image = self.image.as_ref().expect("there until it is dropped");
        work(image, &queue).await
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // First, so that the `Arc` is unique when the count is 0.
        self.image = None;
        let wakers = {
            let mut state = crate::lock(&self.count.0);
            state.0 -= 1;
            match state.0 {
                0 => std::mem::take(&mut state.1),
                _ => Vec::new(),
            }
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Image {
    /// Runs `work` as a task of the queue, and waits for it. The task goes on if this future is not
    /// polled. It is cancelled with this future: the queue may not be driven afterwards, and
    /// requests of others that need the work then do it themselves.
    ///
    /// During exclusive access to the image `work` is part of this future.
    pub(super) async fn as_task<T: Cancelled + 'static>(
        &self,
        queue: &Queue,
        work: impl AsyncFnOnce(&Image, &Queue) -> T + 'static,
    ) -> T {
        match self.tasks.share() {
            Some(share) => queue.begin(|queue| share.run(queue, work)).await,
            // Rare, and would make the futures of all requests larger.
            None => Box::pin(work(self, queue)).await,
        }
    }
}
