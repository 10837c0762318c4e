//! The progress of a job, and how a caller learns it and cancels the job.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::ControlFlow;

/// How much of a job is done, in a unit of the job: bytes of the disk, L1 entries, steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// What is done.
    pub done: u64,
    /// What there is to do. A repair that needs another pass over the tables adds it here.
    pub total: u64,
}

impl Progress {
    pub(crate) fn is_complete(self) -> bool {
        self.done >= self.total
    }
}

/// The result of a progress callback: whether the job continues. `()` continues.
pub trait IntoControlFlow {
    /// Breaks to stop the job.
    fn into_control_flow(self) -> ControlFlow<()>;
}

impl IntoControlFlow for () {
    fn into_control_flow(self) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

impl IntoControlFlow for ControlFlow<()> {
    fn into_control_flow(self) -> ControlFlow<()> {
        self
    }
}

/// The error of a job that its progress callback has stopped.
pub fn cancelled_error() -> io::Error {
    io::Error::from_raw_os_error(libc::ECANCELED)
}

/// The work of a job that runs on one queue.
pub trait Report {
    /// There is so much more to do.
    fn plan(&self, work: u64);

    /// So much more is done; 0 only looks whether to go on.
    ///
    /// # Errors
    /// `ECANCELED` if the callback breaks before all is done.
    fn add(&self, work: u64) -> io::Result<()>;

    /// All is done.
    fn finish(&self) {
        // Nothing is left to cancel.
        let _ = self.add(u64::MAX);
    }
}

/// Nobody looks at the progress.
impl Report for () {
    fn plan(&self, _work: u64) {}

    fn add(&self, _work: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Calls the progress callback of a job.
pub struct Reporter<F> {
    on_progress: RefCell<F>,
    done: Cell<u64>,
    total: Cell<u64>,
}

impl<G: IntoControlFlow, F: FnMut(Progress) -> G> Reporter<F> {
    /// Of a job without work so far.
    pub(crate) fn new(on_progress: F) -> Self {
        Reporter {
            on_progress: RefCell::new(on_progress),
            done: Cell::new(0),
            total: Cell::new(0),
        }
    }
}

impl<G: IntoControlFlow, F: FnMut(Progress) -> G> Report for Reporter<F> {
    fn plan(&self, work: u64) {
        self.total.set(self.total.get().saturating_add(work));
    }

    fn add(&self, work: u64) -> io::Result<()> {
        let total = self.total.get();
        let done = self.done.get().saturating_add(work).min(total);
        self.done.set(done);
        let progress = Progress { done, total };
        let flow = (self.on_progress.borrow_mut())(progress).into_control_flow();
        match flow.is_break() && !progress.is_complete() {
            true => Err(cancelled_error()),
            false => Ok(()),
        }
    }
}
