//! Errors, and the exceptions of `zebu._errors` that they become.

use std::ffi::OsString;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use zebu::{Error, ErrorKind};

/// A result with a [`Failure`].
pub type Result<T> = std::result::Result<T, Failure>;

/// What an exception is made of.
#[derive(Debug)]
pub struct Failure {
    exception: &'static str,
    errno: i32,
    message: String,
    /// The file that could not be opened.
    file: Option<OsString>,
}

impl Failure {
    /// The failure with a context, unless it says as much already.
    pub fn during(self, context: &str) -> Failure {
        if self.message.starts_with(context) {
            return self;
        }
        let message = format!("{context}: {}", self.message);
        Failure { message, ..self }
    }

    /// The exception.
    pub fn raise(self, py: Python<'_>) -> PyErr {
        let exception = py
            .import("zebu._errors")
            .and_then(|errors| errors.getattr(self.exception))
            .and_then(|class| class.call1((self.errno, &self.message, self.file)));
        match exception {
            Ok(exception) => PyErr::from_value(exception),
            // At the end of the interpreter no module can be imported.
            Err(_) => PyRuntimeError::new_err(self.message),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let exception = match error.kind() {
            ErrorKind::NotFound => "NotFoundError",
            ErrorKind::NotPermitted => "NotPermittedError",
            ErrorKind::Locked => "LockedError",
            ErrorKind::Corrupt => "CorruptError",
            ErrorKind::Dirty => "DirtyError",
            ErrorKind::OutOfRange => "OutOfRangeError",
            ErrorKind::NoSpace => "NoSpaceError",
            ErrorKind::Unsupported => "UnsupportedError",
            ErrorKind::Refused => "RefusedError",
            ErrorKind::Limit => "LimitError",
            _ => "Error",
        };
        Failure {
            exception,
            errno: error.errno(),
            message: error.to_string(),
            file: error.file().map(OsString::from),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Error::from(error).into()
    }
}

/// A request that cannot be done, and why.
pub fn refused(why: impl Into<String>) -> Failure {
    Error::Refused(why.into()).into()
}
