//! Why a request failed, in a form that can be copied to many.

use std::io;

use crate::error::WithErrno;
use crate::nbd::ErrorCode;

/// What an NBD server, or the connection to it, made of a request: the source of
/// the error inside an [`io::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NBD server {server}: {what}")]
#[non_exhaustive]
pub struct NbdError {
    /// Which server.
    pub server: String,
    /// What it said, or what happened.
    pub what: String,
    /// The `errno` nearest to it.
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
    /// The server's answer, with its own words if it had some.
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

    /// Anything that ends the connection.
    pub(super) fn broken(server: &str, what: impl ToString) -> Self {
        NbdError {
            server: server.into(),
            what: clean(&what.to_string()),
            errno: libc::EIO,
        }
    }
}

/// One line of bounded length, whatever a server sent.
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
