//! Threads that inflate, one a core, shared by all queues of the process.

use std::any::Any;
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};

use crate::lock;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Work {
    jobs: Mutex<VecDeque<Job>>,
    arrived: Condvar,
}

/// The work of the threads; None if the system allows no threads.
fn workers() -> Option<&'static Work> {
    static WORKERS: OnceLock<Option<&'static Work>> = OnceLock::new();
    *WORKERS.get_or_init(|| {
        let work: &'static Work = Box::leak(Box::default());
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = (0..cores).map_while(|_| {
            std::thread::Builder::new()
                .name("zebu-codec".into())
                .spawn(|| run_jobs(work))
                .ok()
        });
        (threads.count() > 0).then_some(work)
    })
}

fn run_jobs(work: &Work) {
    loop {
        let mut jobs = lock(&work.jobs);
        let job = loop {
            match jobs.pop_front() {
                Some(job) => break job,
                None => jobs = work.arrived.wait(jobs).unwrap_or_else(|e| e.into_inner()),
            }
        };
        drop(jobs);
        job();
    }
}

struct Shared<T> {
    /// What the work returned, or what it panicked with.
    value: Option<Result<T, Box<dyn Any + Send>>>,
    waker: Option<Waker>,
}

/// The result of work on another thread. A panic there is propagated to the task that awaits
/// it.
pub struct Running<T>(Arc<Mutex<Shared<T>>>);

/// Runs `work` on one of the threads, now; the result is awaited on any.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Running<T> {
    let shared = Arc::new(Mutex::new(Shared {
        value: None,
        waker: None,
    }));
    let result = shared.clone();
    let job: Job = Box::new(move || {
        let value = catch_unwind(AssertUnwindSafe(work));
        let waker = {
            let mut shared = lock(&result);
            shared.value = Some(value);
            shared.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    });
    match workers() {
        Some(workers) => {
            lock(&workers.jobs).push_back(job);
            workers.arrived.notify_one();
        }
        None => job(),
    }
    Running(shared)
}

impl<T> Future for Running<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut shared = lock(&self.0);
        match shared.value.take() {
            Some(Ok(value)) => Poll::Ready(value),
            Some(Err(panic)) => {
                drop(shared);
                resume_unwind(panic)
            }
            None => {
                shared.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a reader that hangs after its work has panicked, and against the loss of a
    //! thread.
    use super::*;
    use crate::storage::{Queue, QueueOptions};

    #[test]
    fn a_panic_is_passed_to_the_waiter() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        for _ in 0..100 {
            let running = run(|| -> u32 { resume_unwind(Box::new("broken")) });
            let result = catch_unwind(AssertUnwindSafe(|| queue.block_on(running)));
            assert_eq!(result.unwrap_err().downcast_ref(), Some(&"broken"));
        }
        assert_eq!(queue.block_on(run(|| 7)), 7);
    }
}
