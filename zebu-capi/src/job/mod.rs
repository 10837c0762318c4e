//! Jobs: work on whole images, on a thread of its own, with progress and cancellation.

mod check;
mod compare;
mod convert;

pub use check::CCheckResult;
pub use compare::CCompareResult;
pub use convert::CConvertOptions;

use std::ffi::c_int;
use std::fs::File;
use std::io::Write;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use zebu::jobs::Progress;

use crate::error::{Failure, Out, Result, call, call_code};
use crate::fork::Process;

/// `zebu_job`.
#[derive(Debug)]
pub struct Job {
    process: Process,
    state: Arc<State>,
    /// None only in `drop`.
    thread: Option<JoinHandle<()>>,
}

/// What the job's thread shares with its user.
#[derive(Debug)]
struct State {
    done: AtomicU64,
    total: AtomicU64,
    canceled: AtomicBool,
    /// Set once, at the end.
    result: OnceLock<Result<Outcome>>,
    /// An eventfd that is readable at the end.
    ended: File,
}

/// What a job has found.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    Converted,
    Checked(CCheckResult),
    Compared(CCompareResult),
}

/// `zebu_progress`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CProgress {
    pub done: u64,
    pub total: u64,
    pub ended: c_int,
}

impl State {
    /// Takes the progress. Breaks if the job was cancelled.
    fn progress(&self, now: Progress) -> ControlFlow<()> {
        self.total.store(now.total, Ordering::Relaxed);
        self.done.store(now.done, Ordering::Relaxed);
        match self.canceled.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn end(&self, result: Result<Outcome>) {
        // It is set here only.
        let _ = self.result.set(result);
        // The counter of an eventfd has room for one.
        let _ = (&self.ended).write(&1u64.to_ne_bytes());
    }
}

/// Starts a job. `prepare` runs on the new thread too, since devices and queues belong to it, and
/// is waited for: its error is that of the start.
fn start<P>(
    prepare: impl FnOnce() -> Result<P> + Send + 'static,
    work: impl FnOnce(P, &State) -> Result<Outcome> + Send + 'static,
) -> Result<Job> {
    let state = Arc::new(State {
        done: AtomicU64::new(0),
        total: AtomicU64::new(0),
        canceled: AtomicBool::new(false),
        result: OnceLock::new(),
        ended: eventfd()?,
    });
    let (started, has_started) = std::sync::mpsc::channel();
    let of_thread = state.clone();
    let thread = std::thread::Builder::new()
        .name("zebu-job".into())
        .spawn(move || {
            let state = of_thread;
            let prepared = caught(prepare);
            let prepared = match prepared {
                Ok(prepared) => prepared,
                Err(failure) => {
                    // The caller waits for it.
                    let _ = started.send(Err(failure));
                    return;
                }
            };
            let _ = started.send(Ok(()));
            let result = caught(|| work(prepared, &state));
            state.end(result);
        })?;
    has_started
        .recv()
        .unwrap_or_else(|_| Err(Failure::misuse("The thread of the job has ended")))?;
    Ok(Job {
        process: Process::current(),
        state,
        thread: Some(thread),
    })
}

/// The result of `body`, a panic among its errors.
fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Failure::panicked(&*payload)))
}

fn eventfd() -> Result<File> {
    // SAFETY: a system call without memory.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: it was opened here.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// A job that must be given.
fn given(job: Option<&Job>) -> Result<&Job> {
    let job = job.ok_or_else(|| Failure::null("job"))?;
    job.process.check()?;
    Ok(job)
}

impl Job {
    /// Waits for the end.
    fn wait(&self) -> &Result<Outcome> {
        self.state.result.wait()
    }

    fn outcome(&self) -> Result<&Outcome> {
        match self.state.result.get() {
            Some(Ok(outcome)) => Ok(outcome),
            Some(Err(failure)) => Err(failure.clone()),
            None => Err(Failure::misuse("The job has not ended")),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The thread is not there to be waited for.
            std::mem::forget(self.thread.take());
            return;
        }
        self.state.canceled.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Panics of the job were caught.
            let _ = thread.join();
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn zebu_job_get_progress(
    job: Option<&Job>,
    progress: Option<&mut std::mem::MaybeUninit<CProgress>>,
    error: Out<'_>,
) -> c_int {
    call_code(error, || {
        let state = &given(job)?.state;
        let progress = progress.ok_or_else(|| Failure::null("progress"))?;
        // Before the numbers, which are final if it has ended.
        let ended = state.result.get().is_some();
        progress.write(CProgress {
            done: state.done.load(Ordering::Relaxed),
            total: state.total.load(Ordering::Relaxed),
            ended: ended.into(),
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_job_fd(job: Option<&Job>, error: Out<'_>) -> c_int {
    call(error, || Ok(given(job)?.state.ended.as_raw_fd())).unwrap_or_else(|f| f.code())
}

#[unsafe(no_mangle)]
extern "C" fn zebu_job_cancel(job: Option<&Job>, error: Out<'_>) -> c_int {
    call_code(error, || {
        given(job)?.state.canceled.store(true, Ordering::Relaxed);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_job_wait(job: Option<&Job>, error: Out<'_>) -> c_int {
    call_code(error, || given(job)?.wait().clone().map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn zebu_job_get_check_result(job: Option<&Job>, error: Out<'_>) -> *const CCheckResult {
    let result = call(error, || match given(job)?.outcome()? {
        Outcome::Checked(result) => Ok(&raw const *result),
        _ => Err(Failure::misuse("The job is not a check")),
    });
    result.unwrap_or(std::ptr::null())
}

#[unsafe(no_mangle)]
extern "C" fn zebu_job_get_compare_result(
    job: Option<&Job>,
    error: Out<'_>,
) -> *const CCompareResult {
    let result = call(error, || match given(job)?.outcome()? {
        Outcome::Compared(result) => Ok(&raw const *result),
        _ => Err(Failure::misuse("The job is not a comparison")),
    });
    result.unwrap_or(std::ptr::null())
}

#[unsafe(no_mangle)]
extern "C" fn zebu_job_free(job: Option<Box<Job>>) {
    drop(job);
}
