//! The thread of a virtqueue, which has its own queue.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

use zebu::storage::{Queue, QueueOptions};

use crate::export::Export;
use crate::ring::{Ring, Start};

/// Commands to the thread.
enum Command {
    Start(Box<Start>),
    /// Finish requests in flight, and send the index of the next one.
    Stop(Sender<u16>),
    End,
}

/// Commands that were not executed yet, and the thread's waker.
#[derive(Default)]
struct Mailbox {
    commands: VecDeque<Command>,
    waker: Option<Waker>,
    /// The thread has ended.
    closed: bool,
}

type Shared = Arc<Mutex<Mailbox>>;

/// A thread that serves a virtqueue. When this is dropped, it finishes requests in flight and ends.
pub struct Worker {
    mailbox: Shared,
    thread: Option<JoinHandle<()>>,
}

/// The thread has panicked.
#[derive(Debug, thiserror::Error)]
#[error("the thread of a virtqueue has failed")]
pub struct Gone;

impl Worker {
    /// Starts a thread for the virtqueue `index` of an export.
    ///
    /// # Errors
    ///
    /// The thread or its queue cannot be created.
    pub fn new(export: &Arc<Export>, index: usize, options: &QueueOptions) -> io::Result<Self> {
        let mailbox = Shared::default();
        let (export, options) = (export.clone(), options.clone());
        let (ready, is_ready) = channel();
        let shared = mailbox.clone();
        let run = move || match Queue::new(options) {
            Ok(queue) => {
                let _ = ready.send(Ok(()));
                queue.block_on(run(&queue, &export, &shared));
            }
            Err(e) => drop(ready.send(Err(e))),
        };
        let thread = std::thread::Builder::new()
            .name(format!("virtqueue-{index}"))
            .spawn(run)?;
        let worker = Worker {
            mailbox,
            thread: Some(thread),
        };
        is_ready.recv().map_err(io::Error::other)??;
        Ok(worker)
    }

    /// Serves a ring, which must be stopped.
    pub fn start(&self, start: Start) {
        self.send(Command::Start(Box::new(start)));
    }

    /// Finishes requests in flight and stops. Returns the index of the next request.
    ///
    /// # Errors
    ///
    /// The thread has panicked.
    pub fn stop(&self) -> Result<u16, Gone> {
        let (sender, receiver) = channel();
        self.send(Command::Stop(sender));
        receiver.recv().map_err(|_| Gone)
    }

    fn send(&self, command: Command) {
        let waker = {
            let mut mailbox = lock(&self.mailbox);
            // A command that is dropped wakes the caller that waits for its reply.
            if !mailbox.closed {
                mailbox.commands.push_back(command);
            }
            mailbox.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.send(Command::End);
        if let Some(thread) = self.thread.take() {
            // A panic was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn lock(mailbox: &Shared) -> std::sync::MutexGuard<'_, Mailbox> {
    mailbox.lock().unwrap_or_else(|e| e.into_inner())
}

/// The next command. If there is none, the context's task is woken by one.
fn next(mailbox: &Shared, context: &Context<'_>) -> Poll<Command> {
    let mut mailbox = lock(mailbox);
    match mailbox.commands.pop_front() {
        Some(command) => Poll::Ready(command),
        None => {
            mailbox.waker = Some(context.waker().clone());
            Poll::Pending
        }
    }
}

/// Closes the mailbox when the thread ends, also in a panic.
struct Closed<'a>(&'a Shared);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut mailbox = lock(self.0);
        mailbox.closed = true;
        mailbox.commands.clear();
    }
}

async fn run(queue: &Queue, export: &Arc<Export>, mailbox: &Shared) {
    let _closed = Closed(mailbox);
    loop {
        let start = match poll_fn(|context| next(mailbox, context)).await {
            Command::Start(start) => *start,
            Command::Stop(_) => continue,
            Command::End => return,
        };
        let ring = Ring::new(queue, export, start);
        let command = ring.serve(|context| next(mailbox, context)).await;
        let at = ring.drain().await;
        match command {
            // After a disconnect no receiver is left.
            Command::Stop(sender) => drop(sender.send(at)),
            Command::End => return,
            Command::Start(_) => unreachable!("a ring is stopped before it is started"),
        }
    }
}
