//! The error of a request, which can be cloned.

use std::io;

use crate::error::WithErrno;
use crate::nbd::ErrorCode;

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
        let errno = error.errno;
        let kind = io::Error::from_raw_os_error(errno).kind();
        let source = Box::new(error);
        io::Error::new(kind, WithErrno { errno, source })
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
            what: clean(&what),
            errno,
        }
    }

    /// An error that ends the connection.
    pub(super) fn broken(server: &str, what: impl ToString) -> Self {
        NbdError {
            server: server.into(),
            what: clean(&what.to_string()),
            errno: libc::EIO,
        }
    }
}

/// A text of the server as one line of limited length.
pub(super) fn clean(text: &str) -> String {
    const MOST: usize = 500;
    let shown = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    let mut clean: String = text.chars().take(MOST).map(shown).collect();
    if text.chars().nth(MOST).is_some() {
        clean.push('…');
    }
    clean
}
