//! Threads for calls that block.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use futures_channel::oneshot;

use crate::lock;

type Job = Box<dyn FnOnce() + Send>;

/// The threads. They are started by the first job, and end with this.
#[derive(Debug)]
pub(super) struct Workers {
    /// None: there was no job.
    sender: Mutex<Option<Sender<Job>>>,
    threads: usize,
}

impl Workers {
    pub fn new(threads: usize) -> Workers {
        Workers {
            sender: Mutex::default(),
            threads,
        }
    }

    /// Runs `job` on one of the threads, also if the result is not awaited. None: there are no
    /// threads.
    pub fn run<T, J>(&self, job: J) -> impl Future<Output = Option<T>> + use<T, J>
    where
        T: Send + 'static,
        J: FnOnce() -> T + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let job = Box::new(move || {
            // An error: the future was dropped.
            let _ = sender.send(job());
        });
        let mut jobs = lock(&self.sender);
        let jobs = jobs.get_or_insert_with(|| self.start());
        // If there are no threads, the receiver notices.
        let _ = jobs.send(job);
        async move { receiver.await.ok() }
    }

    fn start(&self) -> Sender<Job> {
        let (sender, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..self.threads {
            let receiver = receiver.clone();
            let thread = thread::Builder::new().name("zebu-cache".into());
            // Without it the others do its work.
            let _ = thread.spawn(move || {
                while let Some(job) = next(&receiver) {
                    job()
                }
            });
        }
        sender
    }
}

/// The next job; None: there will be none.
fn next(receiver: &Mutex<Receiver<Job>>) -> Option<Job> {
    lock(receiver).recv().ok()
}
