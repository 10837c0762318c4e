//! Queues: asynchronous requests, and their completions.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use zebu::{Queue, QueueOptions};

use crate::blocking;
use crate::device::{Handle, given};
use crate::error::{Failure, Out, Result, call, call_code, call_count, call_object};
use crate::fork::Process;
use crate::open::engine;
use crate::request::{Request, vector};
use crate::text::{Options, OptionsPointer, Text, check_flags, check_reserved};

const INFLATE_INLINE: u32 = 1 << 0;

/// `zebu_queue_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CQueueOptions {
    pub struct_size: usize,
    pub flags: u32,
    pub reserved: u32,
    pub engine: Text,
}

// SAFETY: numbers, and a pointer that may be NULL.
unsafe impl Options for CQueueOptions {
    const NAME: &'static str = "zebu_queue_options";
}

/// `zebu_completion`.
#[derive(Debug)]
#[repr(C)]
pub struct CCompletion {
    pub cookie: *mut c_void,
    pub error: *const Failure,
    pub result: c_int,
}

/// `zebu_queue`.
pub struct QueueHandle {
    thread: ThreadId,
    inner: Rc<Inner>,
}

/// The part that only the queue's thread touches.
pub struct Inner {
    pub queue: Queue,
    pub process: Process,
    completed: Rc<RefCell<VecDeque<Completed>>>,
    /// Requests whose completion was not returned yet, by number.
    in_flight: RefCell<HashMap<u64, zebu::Handle<()>>>,
    next: Cell<u64>,
    /// The errors of the completions that were returned last.
    errors: RefCell<Vec<Failure>>,
}

/// A request that has ended.
struct Completed {
    number: u64,
    cookie: *mut c_void,
    result: Result<()>,
}

/// Makes the completion of a request when it is dropped: also after a panic, and (for nobody) when
/// the queue is freed.
struct Place {
    number: u64,
    cookie: *mut c_void,
    result: Option<Result<()>>,
    completed: Rc<RefCell<VecDeque<Completed>>>,
}

impl Place {
    fn end(mut self, result: Result<()>) {
        self.result = Some(result);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let panicked = || Err(Failure::panicked(&"a request has panicked"));
        self.completed.borrow_mut().push_back(Completed {
            number: self.number,
            cookie: self.cookie,
            result: self.result.take().unwrap_or_else(panicked),
        });
    }
}

impl Inner {
    /// Whether requests have not completed.
    pub fn has_requests(&self) -> bool {
        self.in_flight.borrow().len() > self.completed.borrow().len()
    }

    /// Makes the descriptor readable if there are completions.
    pub fn signal_completions(&self) {
        if !self.completed.borrow().is_empty() {
            // A turn must have ended for a new task to make the descriptor readable.
            drop(self.queue.spawn(async {}));
        }
    }

    /// Starts a request.
    fn submit(&self, device: &Handle, cookie: *mut c_void, request: Request) {
        let request = request.execute(self.queue.clone(), device.device.clone());
        let number = self.next.replace(self.next.get() + 1);
        let place = Place {
            number,
            cookie,
            result: None,
            completed: self.completed.clone(),
        };
        let handle = self.queue.spawn(async move {
            place.end(request.await.map_err(Failure::from));
        });
        self.in_flight.borrow_mut().insert(number, handle);
    }

    /// Does what can be done without waiting. From then on the descriptor reports what comes.
    pub fn drive(&self) {
        while self.queue.turn() {}
    }

    /// Gives the caller up to `max` completions.
    fn take(&self, completions: *mut CCompletion, max: usize) -> usize {
        let mut completed = self.completed.borrow_mut();
        let count = completed.len().min(max);
        // They do not move: there is room for all.
        let mut errors = Vec::with_capacity(count);
        for (place, request) in completed.drain(..count).enumerate() {
            self.in_flight.borrow_mut().remove(&request.number);
            let (error, code) = match request.result {
                Ok(()) => (std::ptr::null(), 0),
                Err(failure) => {
                    let code = failure.code();
                    errors.push(failure);
                    (
                        errors.last().map_or(std::ptr::null(), std::ptr::from_ref),
                        code,
                    )
                }
            };
            let completion = CCompletion {
                cookie: request.cookie,
                error,
                result: code,
            };
            // SAFETY: the header requires room for `max` completions.
            unsafe { completions.add(place).write(completion) };
        }
        drop(completed);
        self.errors.replace(errors);
        self.signal_completions();
        count
    }
}

/// A queue that must be given, of this thread and this process.
fn own(queue: Option<&QueueHandle>) -> Result<&Rc<Inner>> {
    let queue = queue.ok_or_else(|| Failure::null("queue"))?;
    queue.inner.process.check()?;
    match queue.thread == std::thread::current().id() {
        true => Ok(&queue.inner),
        false => Err(Failure::misuse("The queue belongs to another thread")),
    }
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_new(
    options: OptionsPointer<CQueueOptions>,
    error: Out<'_>,
) -> Option<Box<QueueHandle>> {
    call_object(error, || {
        let options = options.get()?;
        check_flags(options.flags, INFLATE_INLINE)?;
        check_reserved(options.reserved)?;
        let options = QueueOptions::default()
            .engine(engine(options.engine)?)
            .inflate_inline(options.flags & INFLATE_INLINE != 0);
        let inner = Rc::new(Inner {
            queue: Queue::new(options)?,
            process: Process::current(),
            completed: Rc::default(),
            in_flight: RefCell::default(),
            next: Cell::new(0),
            errors: RefCell::default(),
        });
        // From the first turn on, the descriptor is readable when a request is submitted.
        inner.drive();
        blocking::register(&inner);
        Ok(QueueHandle {
            thread: std::thread::current().id(),
            inner,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_free(queue: Option<Box<QueueHandle>>, error: Out<'_>) -> c_int {
    call_code(error, || {
        if let Err(failure) = own(queue.as_deref()) {
            // It stays as it is. In a child that is all that can be done.
            let is_of_parent = queue
                .as_ref()
                .is_some_and(|q| !q.inner.process.is_current());
            std::mem::forget(queue);
            return if is_of_parent { Ok(()) } else { Err(failure) };
        }
        // The tasks of requests hold the queue, so they do not end with this handle to it.
        let queue = queue.expect("looked at");
        let requests = queue.inner.in_flight.take();
        requests.into_values().for_each(zebu::Handle::abort);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_fd(queue: Option<&QueueHandle>, error: Out<'_>) -> c_int {
    call(error, || Ok(own(queue)?.queue.as_raw_fd())).unwrap_or_else(|failure| failure.code())
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_in_flight(queue: Option<&QueueHandle>, error: Out<'_>) -> isize {
    call_count(error, || Ok(own(queue)?.in_flight.borrow().len()))
}

/// Submits a request.
fn submit(
    queue: Option<&QueueHandle>,
    device: Option<&Handle>,
    cookie: *mut c_void,
    error: Out<'_>,
    request: impl FnOnce() -> Result<Request>,
) -> c_int {
    call_code(error, || {
        let request = request()?;
        own(queue)?.submit(given(device)?, cookie, request);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_read(
    queue: Option<&QueueHandle>,
    device: Option<&Handle>,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    cookie: *mut c_void,
    error: Out<'_>,
) -> c_int {
    submit(queue, device, cookie, error, || {
        Ok(Request::Read(vector(iov, count)?, offset))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_write(
    queue: Option<&QueueHandle>,
    device: Option<&Handle>,
    iov: *const libc::iovec,
    count: c_int,
    offset: u64,
    cookie: *mut c_void,
    error: Out<'_>,
) -> c_int {
    submit(queue, device, cookie, error, || {
        Ok(Request::Write(vector(iov, count)?, offset))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_flush(
    queue: Option<&QueueHandle>,
    device: Option<&Handle>,
    cookie: *mut c_void,
    error: Out<'_>,
) -> c_int {
    submit(queue, device, cookie, error, || Ok(Request::Flush))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_discard(
    queue: Option<&QueueHandle>,
    device: Option<&Handle>,
    offset: u64,
    length: u64,
    cookie: *mut c_void,
    error: Out<'_>,
) -> c_int {
    submit(queue, device, cookie, error, || {
        Ok(Request::Discard(offset, length))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_write_zeroes(
    queue: Option<&QueueHandle>,
    device: Option<&Handle>,
    offset: u64,
    length: u64,
    flags: u32,
    cookie: *mut c_void,
    error: Out<'_>,
) -> c_int {
    submit(queue, device, cookie, error, || {
        Request::write_zeroes(offset, length, flags)
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_complete(
    queue: Option<&QueueHandle>,
    completions: *mut CCompletion,
    max: usize,
    error: Out<'_>,
) -> isize {
    call_count(error, || {
        let queue = own(queue)?;
        if completions.is_null() && max > 0 {
            return Err(Failure::null("completions"));
        }
        queue.drive();
        Ok(queue.take(completions, max))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_queue_wait(
    queue: Option<&QueueHandle>,
    completions: *mut CCompletion,
    min: usize,
    max: usize,
    timeout_ms: c_int,
    error: Out<'_>,
) -> isize {
    call_count(error, || {
        let queue = own(queue)?;
        if completions.is_null() && max > 0 {
            return Err(Failure::null("completions"));
        }
        let timeout = u64::try_from(timeout_ms).map(Duration::from_millis).ok();
        let until = timeout.map(|timeout| Instant::now() + timeout);
        queue.drive();
        let busy = blocking::busy();
        blocking::drive(&busy, None, until, || {
            queue.completed.borrow().len() >= min.min(max) || !queue.has_requests()
        });
        let count = queue.take(completions, max);
        busy.iter().for_each(|other| other.signal_completions());
        Ok(count)
    })
}
