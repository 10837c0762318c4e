//! The ends of asynchronous requests, for an event loop: a descriptor is readable while some
//! wait to be taken.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;

use crate::error::{Failure, Result, refused};
use crate::value::Value;

/// A request's number, its result and its exception.
type Taken = (u64, Py<PyAny>, Option<Py<PyAny>>);

/// Where requests of one event loop end.
#[pyclass(frozen, module = "zebu._zebu")]
pub struct Completions(Arc<Ended>);

struct Ended {
    list: Mutex<Vec<(u64, Result<Value>)>>,
    /// The pipe holds one byte while the list is not empty, else none.
    reader: PipeReader,
    writer: PipeWriter,
}

impl Ended {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Result<Value>)>> {
        self.list.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn add(&self, number: u64, result: Result<Value>) {
        let mut list = self.lock();
        list.push((number, result));
        if list.len() == 1 {
            // The pipe is empty and its reader is open, so this neither waits nor fails.
            let _ = (&self.writer).write(&[0]);
        }
    }
}

/// The place of one request's result. If it is dropped, the thread of the request has panicked.
pub struct Place {
    ended: Arc<Ended>,
    number: u64,
    result: Option<Result<Value>>,
}

impl Place {
    /// Puts the result there.
    pub fn end(mut self, result: Result<Value>) {
        self.result = Some(result);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let result = self.result.take();
        let result =
            result.unwrap_or_else(|| Err(refused("the thread of the request has panicked")));
        self.ended.add(self.number, result);
    }
}

impl Completions {
    /// The place of the request with this number.
    pub fn place(&self, number: u64) -> Place {
        Place {
            ended: self.0.clone(),
            number,
            result: None,
        }
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Completions> {
        let pipe = std::io::pipe().map_err(|error| Failure::from(error).raise(py))?;
        Ok(Completions(Arc::new(Ended {
            list: Mutex::default(),
            reader: pipe.0,
            writer: pipe.1,
        })))
    }

    fn fileno(&self) -> i32 {
        self.0.reader.as_raw_fd()
    }

    /// What has ended since the last call.
    fn take(&self, py: Python<'_>) -> PyResult<Vec<Taken>> {
        let ended = {
            let mut list = self.0.lock();
            if !list.is_empty() {
                let _ = (&self.0.reader).read(&mut [0]);
            }
            std::mem::take(&mut *list)
        };
        let object = |(number, result): (u64, Result<Value>)| {
            Ok(match result {
                Ok(value) => (number, value.into_object(py)?, None),
                Err(failure) => {
                    let exception = failure.raise(py).into_value(py).into_any();
                    (number, py.None(), Some(exception))
                }
            })
        };
        ended.into_iter().map(object).collect()
    }
}
