//! The error of a request, which can be cloned.

use std::io;

use crate::error::{one_line, with_errno};
use crate::nbd::protocol::ErrorCode;

/// The error of an NBD server or of the connection: the source of an [`io::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NBD server {server}: {what}")]
#[non_exhaustive]
pub struct NbdError {
    /// The server.
    pub server: String,
    /// Its message, or what happened.
    pub what: String,
    /// The nearest `errno`.
    pub errno: i32,
}

impl From<NbdError> for io::Error {
    fn from(error: NbdError) -> Self {
        with_errno(error.errno, error)
    }
}

impl NbdError {
    /// The error of a reply, with its message.
    pub(super) fn answer(server: &str, number: u32, words: &str) -> Self {
        let code = ErrorCode::from_wire(number);
        let errno = code.errno();
        let text = io::Error::from_raw_os_error(errno);
        let text = crate::strerror(&text).to_string();
        let what = match words.is_empty() {
            true => text,
            false => format!("{text} ({words})"),
        };
        NbdError {
            server: server.into(),
            what: one_line(&what),
            errno,
        }
    }

    /// An error that ends the connection.
    pub(super) fn broken(server: &str, what: impl ToString) -> Self {
        NbdError {
            server: server.into(),
            what: one_line(&what.to_string()),
            errno: libc::EIO,
        }
    }
}
