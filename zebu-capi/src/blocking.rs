//! Blocking calls: each thread has a queue of its own for them.

use std::cell::{Cell, RefCell};
use std::os::fd::AsRawFd;
use std::rc::{Rc, Weak};

use zebu::{EngineKind, Queue, QueueOptions};

use crate::error::{Failure, Result};
use crate::queue::Inner;

thread_local! {
    /// The queues of this thread's blocking calls, by engine.
    static OWN: RefCell<Vec<(EngineKind, Queue)>> = const { RefCell::new(Vec::new()) };
    /// The queues that this thread has made for asynchronous requests.
    static MADE: RefCell<Vec<Weak<Inner>>> = const { RefCell::new(Vec::new()) };
}

/// The queue of this thread.
pub fn own_queue(engine: EngineKind) -> Result<Queue> {
    OWN.with_borrow_mut(|queues| {
        if let Some((_, queue)) = queues.iter().find(|(kind, _)| *kind == engine) {
            return Ok(queue.clone());
        }
        let queue = Queue::new(QueueOptions::default().engine(engine))?;
        queues.push((engine, queue.clone()));
        Ok(queue)
    })
}

/// Adds a queue that this thread has made.
pub fn register(queue: &Rc<Inner>) {
    MADE.with_borrow_mut(|made| {
        made.retain(|queue| queue.strong_count() > 0);
        made.push(Rc::downgrade(queue));
    });
}

/// The queues of this thread with requests in flight.
fn busy() -> Vec<Rc<Inner>> {
    MADE.with_borrow(|made| {
        let made = made.iter().filter_map(Weak::upgrade);
        made.filter(|queue| queue.has_requests()).collect()
    })
}

/// Executes the future of a request, and waits for it. It may have to wait for requests in the
/// thread's other queues, so these are driven too.
pub fn wait<T, F>(engine: EngineKind, request: impl FnOnce(Queue) -> F) -> Result<T>
where
    T: 'static,
    F: Future<Output = zebu::Result<T>> + 'static,
{
    let queue = own_queue(engine)?;
    let future = request(queue.clone());
    let busy = busy();
    if busy.is_empty() {
        return Ok(queue.block_on(future)?);
    }
    // What was submitted before begins before.
    for other in &busy {
        other.queue.turn();
    }
    let result = Rc::new(Cell::new(None));
    let place = result.clone();
    drop(queue.spawn(async move { place.set(Some(future.await)) }));
    let descriptors = [queue.as_raw_fd()].into_iter();
    let descriptors = descriptors.chain(busy.iter().map(|queue| queue.queue.as_raw_fd()));
    let descriptors: Vec<_> = descriptors.collect();
    let result = loop {
        let mut more = queue.turn();
        for other in &busy {
            more |= other.queue.turn();
        }
        if let Some(result) = result.take() {
            break result;
        }
        if !more {
            // After an error it goes round in circles: the request uses the caller's memory until
            // it has ended.
            let _ = poll(&descriptors, -1);
        }
    };
    // The caller's event loop waits for what comes, and for the completions that were found.
    for other in &busy {
        other.drive();
        other.signal_completions();
    }
    Ok(result?)
}

/// Waits until one of the descriptors is readable, or for so many milliseconds.
pub fn poll(descriptors: &[i32], timeout: i32) -> Result<()> {
    let events = libc::POLLIN;
    let list = descriptors.iter().map(|fd| libc::pollfd {
        fd: *fd,
        events,
        revents: 0,
    });
    let mut list: Vec<_> = list.collect();
    // SAFETY: the list has so many elements.
    let result = unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, timeout) };
    let error = std::io::Error::last_os_error();
    match result < 0 && error.kind() != std::io::ErrorKind::Interrupted {
        true => Err(Failure::from(error)),
        false => Ok(()),
    }
}
