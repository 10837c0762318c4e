//! Threads that inflate, one a core, shared by all queues of the process.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll, Waker};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Workers {
    jobs: Mutex<VecDeque<Job>>,
    work: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

fn workers() -> &'static Workers {
    static WORKERS: OnceLock<&'static Workers> = OnceLock::new();
    WORKERS.get_or_init(|| {
        let workers: &'static Workers = Box::leak(Box::default());
        let count = std::thread::available_parallelism().map_or(1, |n| n.get());
        for _ in 0..count {
            let spawned = std::thread::Builder::new()
                .name("zebu-codec".into())
                .spawn(move || work(workers));
            if spawned.is_err() {
                break;
            }
        }
        workers
    })
}

fn work(workers: &Workers) {
    loop {
        let mut jobs = lock(&workers.jobs);
        let job = loop {
            match jobs.pop_front() {
                Some(job) => break job,
                None => jobs = workers.work.wait(jobs).unwrap_or_else(|e| e.into_inner()),
            }
        };
        drop(jobs);
        job();
    }
}

struct Shared<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

/// The result of work on another thread.
pub struct Running<T>(Arc<Mutex<Shared<T>>>);

/// Runs `work` on one of the threads, now; the result is awaited on any.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Running<T> {
    let shared = Arc::new(Mutex::new(Shared {
        value: None,
        waker: None,
    }));
    let result = shared.clone();
    let workers = workers();
    lock(&workers.jobs).push_back(Box::new(move || {
        let value = work();
        let waker = {
            let mut shared = lock(&result);
            shared.value = Some(value);
            shared.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }));
    workers.work.notify_one();
    Running(shared)
}

impl<T> Future for Running<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut shared = lock(&self.0);
        match shared.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                shared.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
