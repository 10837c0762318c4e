//! Blocking calls: each thread has a queue of its own for them.

use std::cell::{Cell, RefCell};
use std::os::fd::AsRawFd;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use zebu::{EngineKind, Queue, QueueOptions};

use crate::error::Result;
use crate::fork::Process;
use crate::queue::Inner;

thread_local! {
    /// The queues of this thread's blocking calls, by engine.
    static OWN: RefCell<Vec<(EngineKind, Process, Queue)>> = const { RefCell::new(Vec::new()) };
    /// The queues that this thread has made for asynchronous requests.
    static MADE: RefCell<Vec<Weak<Inner>>> = const { RefCell::new(Vec::new()) };
}

/// The queue of this thread.
pub fn own_queue(engine: EngineKind) -> Result<Queue> {
    OWN.with_borrow_mut(|queues| {
        let process = Process::current();
        // Those of a parent are neither used nor given up, since the parent uses their rings.
        let is_own =
            |(kind, made, _): &&(EngineKind, Process, Queue)| *kind == engine && *made == process;
        if let Some((_, _, queue)) = queues.iter().find(is_own) {
            return Ok(queue.clone());
        }
        let queue = Queue::new(QueueOptions::default().engine(engine))?;
        let clone = queue.clone();
        // The owner, since the queue ends with it.
        queues.push((engine, process, queue));
        Ok(clone)
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
pub fn busy() -> Vec<Rc<Inner>> {
    MADE.with_borrow(|made| {
        let made = made.iter().filter_map(Weak::upgrade);
        made.filter(|queue| queue.process.is_current() && queue.has_requests())
            .collect()
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
    let result = Rc::new(Cell::new(None));
    let place = result.clone();
    let task = queue.spawn(async move { place.set(Some(future.await)) });
    let task = AbortOnDrop(Some(task));
    let mut ended = None;
    // Last: what was submitted before begins before.
    drive(&busy, Some(&queue), None, || {
        ended = result.take();
        ended.is_some()
    });
    drop(task);
    busy.iter().for_each(|other| other.signal_completions());
    Ok(ended.expect("it has ended")?)
}

/// Drives these queues until `ended` returns true, or until then. Requests of one may wait for those
/// of another. Afterwards their descriptors report what comes.
pub fn drive(
    made: &[Rc<Inner>],
    own: Option<&Queue>,
    until: Option<Instant>,
    mut ended: impl FnMut() -> bool,
) {
    let queues: Vec<&Queue> = made.iter().map(|made| &made.queue).chain(own).collect();
    // All of them, whatever the first ones say.
    let turn = || queues.iter().filter(|queue| queue.turn()).count() > 0;
    loop {
        let more = turn();
        if ended() {
            break;
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            break;
        }
        if !more {
            poll(&queues, left);
        }
    }
    while turn() {}
}

/// Waits until one of the queues has something to do, or for so long. After an error it has not
/// waited: the caller looks again.
fn poll(queues: &[&Queue], left: Option<Duration>) {
    let list = queues.iter().map(|queue| libc::pollfd {
        fd: queue.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    let mut list: Vec<_> = list.collect();
    // Rounded up, so that it does not spin at the end.
    let left = left.map_or(-1, |left| {
        i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
    });
    // SAFETY: the list has so many elements.
    unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, left) };
}

/// A request that uses the caller's memory, which it must not do after the call, also if a panic
/// ends that.
struct AbortOnDrop(Option<zebu::Handle<()>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(zebu::Handle::abort);
    }
}
