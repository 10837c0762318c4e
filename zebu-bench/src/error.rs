//! The suite's one error type: a sentence for readers of the report.

use std::fmt;

/// What went wrong, as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(pub String);

/// A result whose error is a sentence.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error of a sentence.
    pub fn new(message: impl Into<String>) -> Self {
        Error(message.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

/// Puts what was being done in front of an error.
pub trait Context<T> {
    /// Turns the error into `what: error`.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error(format!("{}: {e}", what())))
    }
}
