//! An image that tasks of queues hold, too.
//!
//! What several requests may need (a table that is loaded, a commit, a change of
//! the header) is done by a task of the queue on which it was asked for first. The
//! task goes on when the request that waits for it is dropped or no longer polled,
//! so it has a share of the image.
//!
//! Who has the device for itself (`&mut`) waits until no task is left, and has no
//! tasks: its own commits are part of its future. See [`Whole`](super::Whole) for what happens
//! when that is dropped.
#![allow(unsafe_code)]

use std::future::poll_fn;
use std::ops::Deref;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use super::Image;
use crate::storage::Queue;

/// An image on the heap, which its tasks share.
#[derive(Debug)]
pub struct SharedImage(Arc<Image>);

/// What an image knows of its tasks.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    /// Where the image is, as its [`Arc`] has it, while it may be shared; null
    /// while somebody has it for himself.
    place: AtomicPtr<Image>,
    count: Arc<Count>,
}

/// How many tasks there are.
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
    pub(crate) async fn alone(&mut self) {
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

    /// The image, for whoever has it for itself; `None` while there are tasks.
    pub(crate) fn get_mut(&mut self) -> Option<&mut Image> {
        let image = Arc::get_mut(&mut self.0)?;
        *image.tasks.place.get_mut() = std::ptr::null_mut();
        Some(image)
    }
}

impl Deref for SharedImage {
    type Target = Image;

    #[inline]
    fn deref(&self) -> &Image {
        let place = &self.0.tasks.place;
        if place.load(Ordering::Relaxed).is_null() {
            place.store(Arc::as_ptr(&self.0).cast_mut(), Ordering::Relaxed);
        }
        &self.0
    }
}

impl Tasks {
    /// A share of the image that this is of, if it may be shared.
    fn share(&self) -> Option<Share> {
        let place = self.place.load(Ordering::Relaxed);
        if place.is_null() {
            return None;
        }
        // SAFETY: `place` is what `Arc::as_ptr` said, and that `Arc` is there: it
        // has the image that `self` is a part of. `&mut` of the image is given out
        // by `get_mut` alone, which makes `place` null before; and not while there
        // are other shares.
        let image = unsafe {
            Arc::increment_strong_count(place);
            Arc::from_raw(place)
        };
        crate::lock(&self.count.0).0 += 1;
        Some(Share {
            image: Some(image),
            count: self.count.clone(),
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // Before it is counted: who finds no share left is the only owner.
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
    /// Does `work` as a task of the queue, and waits for it. It goes on if this is
    /// dropped or not polled, and ends with the queue.
    ///
    /// If the image is not shared now, `work` is part of this future.
    pub(super) async fn as_task<T: 'static>(
        &self,
        queue: &Queue,
        work: impl AsyncFnOnce(&Image, &Queue) -> T + 'static,
    ) -> T {
        let Some(share) = self.tasks.share() else {
            return work(self, queue).await;
        };
        let task = async move |queue: Queue| {
            let image = share.image.as_ref().expect("there until it is dropped");
            work(image, &queue).await
        };
        queue.detach(task).await
    }
}
