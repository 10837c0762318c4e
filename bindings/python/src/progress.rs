//! What a job tells Python while it runs on its caller's thread.

use std::ops::ControlFlow;

use pyo3::prelude::*;
use zebu::jobs::Progress;

/// Calls Python at intervals. An exception cancels the job.
pub struct Reporter {
    callback: Option<Py<PyAny>>,
    exception: Option<PyErr>,
}

impl Reporter {
    /// With the callback that takes the bytes or entries done and their total, if there is one.
    pub fn new(callback: Option<Py<PyAny>>) -> Reporter {
        Reporter {
            callback,
            exception: None,
        }
    }

    /// Handles signals, and reports. Breaks after an exception.
    pub fn report(&mut self, now: Progress) -> ControlFlow<()> {
        if self.exception.is_some() {
            return ControlFlow::Break(());
        }
        let reported = Python::attach(|py| {
            py.check_signals()?;
            if let Some(callback) = &self.callback {
                callback.call1(py, (now.done, now.total))?;
            }
            Ok(())
        });
        match reported {
            Ok(()) => ControlFlow::Continue(()),
            Err(exception) => {
                self.exception = Some(exception);
                ControlFlow::Break(())
            }
        }
    }

    /// The result of the job, where an exception of Python comes first.
    pub fn end<T>(self, py: Python<'_>, result: crate::error::Result<T>) -> PyResult<T> {
        match self.exception {
            Some(exception) => Err(exception),
            None => result.map_err(|failure| failure.raise(py)),
        }
    }
}
