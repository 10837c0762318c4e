//! Waiting on a thread of Python, without its lock.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// After so long a wait, signals are handled.
const SIGNALS: Duration = Duration::from_millis(100);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a future that a thread of the library executes. The exception of a signal's handler
/// (`KeyboardInterrupt`) ends the wait and not the request.
///
/// # Errors
/// That exception, or that of the request.
pub fn wait<T: Send>(
    py: Python<'_>,
    future: impl Future<Output = zebu::Result<T>> + Send,
) -> PyResult<T> {
    let mut future = pin!(future);
    loop {
        let until = Instant::now() + SIGNALS;
        let future = future.as_mut();
        match py.detach(|| poll_until(future, until)) {
            Poll::Ready(result) => {
                return result.map_err(|error| crate::error::Failure::from(error).raise(py));
            }
            Poll::Pending => py.check_signals()?,
        }
    }
}

/// Polls until the future is ready or the time has come.
fn poll_until<F: Future>(mut future: std::pin::Pin<&mut F>, until: Instant) -> Poll<F::Output> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        let poll = future.as_mut().poll(&mut context);
        let left = until.saturating_duration_since(Instant::now());
        if poll.is_ready() || left.is_zero() {
            return poll;
        }
        thread::park_timeout(left);
    }
}

/// Waits, whatever signals arrive.
pub fn wait_through<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        let until = Instant::now() + Duration::from_secs(3600);
        if let Poll::Ready(output) = poll_until(future.as_mut(), until) {
            return output;
        }
    }
}
