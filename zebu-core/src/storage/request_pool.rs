//! The requests of one connection or virtqueue of a server: what they take, and the tasks of the
//! queue that execute them.
//!
//! There are as many tasks as requests were ever in flight at once. A task stays for the next
//! request, since creating and placing its future costs more than many requests do.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::Queue;

/// Requests in flight, and the tasks that execute them.
pub struct RequestPool<T> {
    queue: Queue,
    /// Requests that no task has yet.
    waiting: RefCell<VecDeque<T>>,
    /// Tasks that have no request.
    idle: RefCell<Vec<Waker>>,
    tasks: Cell<usize>,
    closing: Cell<bool>,
    usage: Rc<Usage>,
}

#[derive(Default)]
struct Usage {
    requests: Cell<usize>,
    bytes: Cell<usize>,
    /// The task in [`RequestPool::wait_for`].
    waiter: Cell<Option<Waker>>,
}

impl Usage {
    fn wake(&self) {
        if let Some(waker) = self.waiter.take() {
            waker.wake();
        }
    }
}

/// Counts one request and its bytes until it is dropped.
pub struct Permit {
    usage: Rc<Usage>,
    bytes: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let usage = &self.usage;
        usage.requests.set(usage.requests.get() - 1);
        usage.bytes.set(usage.bytes.get() - self.bytes);
        usage.wake();
    }
}

impl<T> RequestPool<T> {
    /// A pool whose tasks are tasks of `queue`.
    pub fn new(queue: &Queue) -> Self {
        RequestPool {
            queue: queue.clone(),
            waiting: RefCell::default(),
            idle: RefCell::default(),
            tasks: Cell::new(0),
            closing: Cell::new(false),
            usage: Rc::default(),
        }
    }

    /// The queue of its tasks.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Permits that there are.
    pub fn requests(&self) -> usize {
        self.usage.requests.get()
    }

    /// Bytes of all permits.
    pub fn bytes(&self) -> usize {
        self.usage.bytes.get()
    }

    /// Counts a request of `bytes`. The caller checks whether there is capacity.
    pub fn permit(&self, bytes: usize) -> Permit {
        let usage = self.usage.clone();
        usage.requests.set(usage.requests.get() + 1);
        usage.bytes.set(usage.bytes.get() + bytes);
        Permit { usage, bytes }
    }

    /// Gives `request` to an idle task. If there is none, `task` makes one, which executes what
    /// [`RequestPool::next`] returns until that is `None`.
    pub fn start<F: Future<Output = ()> + 'static>(&self, request: T, task: impl FnOnce() -> F) {
        self.waiting.borrow_mut().push_back(request);
        let idle = self.idle.borrow_mut().pop();
        match idle {
            Some(waker) => waker.wake(),
            None => {
                self.tasks.set(self.tasks.get() + 1);
                drop(self.queue.spawn(task()));
            }
        }
    }

    /// The next request for a task. `None`: the task is to end.
    pub async fn next(&self) -> Option<T> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&self, context: &Context<'_>) -> Poll<Option<T>> {
        let mut idle = self.idle.borrow_mut();
        if let Some(request) = self.waiting.borrow_mut().pop_front() {
            // It may have been woken for another reason while it was idle.
            idle.retain(|waker| !waker.will_wake(context.waker()));
            return Poll::Ready(Some(request));
        }
        if self.closing.get() {
            self.tasks.set(self.tasks.get() - 1);
            self.usage.wake();
            return Poll::Ready(None);
        }
        if !idle.iter().any(|waker| waker.will_wake(context.waker())) {
            idle.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// Waits until `condition` holds. It is looked at again when a permit is dropped or a task
    /// ends. One task waits at a time.
    pub async fn wait_for(&self, condition: impl Fn(&Self) -> bool) {
        poll_fn(|context| {
            if condition(self) {
                return Poll::Ready(());
            }
            self.usage.waiter.set(Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }

    /// Ends the tasks, after the requests that they have. No request may follow.
    pub async fn close(&self) {
        self.closing.set(true);
        let idle = self.idle.take();
        idle.into_iter().for_each(Waker::wake);
        self.wait_for(|pool| pool.tasks.get() == 0).await;
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a request that is lost or executed twice, and tasks that are never reused
    //! or never end.
    use super::*;
    use crate::storage::{QueueOptions, yield_once};

    async fn work(pool: Rc<RequestPool<(usize, Permit)>>, done: Rc<RefCell<Vec<usize>>>) {
        while let Some((number, permit)) = pool.next().await {
            yield_once().await;
            done.borrow_mut().push(number);
            drop(permit);
        }
    }

    #[test]
    fn there_are_as_many_tasks_as_concurrent_requests() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let pool = Rc::new(RequestPool::new(&queue));
        let done = Rc::<RefCell<Vec<usize>>>::default();
        queue.block_on(async {
            for number in 0..100 {
                pool.wait_for(|pool| pool.requests() < 4 && pool.bytes() < 30)
                    .await;
                let permit = pool.permit(10);
                pool.start((number, permit), || work(pool.clone(), done.clone()));
            }
            assert!(pool.tasks.get() <= 3, "{} tasks", pool.tasks.get());
            pool.close().await;
        });
        let mut done = done.take();
        done.sort_unstable();
        assert_eq!(done, (0..100).collect::<Vec<_>>());
        assert_eq!((pool.requests(), pool.bytes()), (0, 0));
        assert_eq!(Rc::strong_count(&pool), 1);
    }
}
