//! A thread for the calls of an image that block.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use futures_channel::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// The thread, which ends with this.
#[derive(Debug)]
pub(super) struct Worker(Sender<Job>);

impl Worker {
    pub fn start() -> io::Result<Worker> {
        let (sender, receiver) = channel::<Job>();
        let thread = thread::Builder::new().name("rbd-worker".into());
        thread.spawn(move || receiver.into_iter().for_each(|job| job()))?;
        Ok(Worker(sender))
    }

    /// Runs `job` there, after the ones before it.
    pub fn run<T, J>(&self, job: J) -> impl Future<Output = Result<T, i32>> + use<T, J>
    where
        T: Send + 'static,
        J: FnOnce() -> Result<T, i32> + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let job = Box::new(move || {
            // An error: the future was dropped.
            let _ = sender.send(job());
        });
        // If the thread has ended, the receiver notices.
        let _ = self.0.send(job);
        async move { receiver.await.unwrap_or(Err(libc::EIO)) }
    }
}
