//! The error of a request, which can be cloned.

use std::io;

use super::packet::Status;
use crate::error::{one_line, with_errno};

/// The error of an SSH server or of the connection: the source of an [`io::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("SSH server {server}: {what}")]
pub(super) struct SshError {
    server: String,
    /// What happened, on one line.
    pub what: String,
    errno: i32,
}

impl SshError {
    /// An error that ends the connection, or prevents it.
    pub fn broken(server: &str, what: &str) -> SshError {
        SshError {
            server: server.into(),
            what: one_line(what),
            errno: libc::EIO,
        }
    }

    /// The same with another number.
    pub fn with_errno(self, errno: i32) -> SshError {
        SshError { errno, ..self }
    }

    /// A status that is an error, which the server gave to what `doing` says.
    pub fn status(server: &str, doing: &str, status: &Status) -> SshError {
        let (errno, what) = match status.code {
            Status::NO_SUCH_FILE => (libc::ENOENT, "No such file or directory"),
            Status::PERMISSION_DENIED => (libc::EACCES, "Permission denied"),
            Status::UNSUPPORTED => (libc::EOPNOTSUPP, "Operation not supported"),
            // Also of a full disk.
            _ => (libc::EIO, &*status.message),
        };
        let what = match what.is_empty() {
            true => format!("{doing}: status {}", status.code),
            false => format!("{doing}: {what}"),
        };
        SshError {
            server: server.into(),
            what: one_line(&what),
            errno,
        }
    }
}

impl From<SshError> for io::Error {
    fn from(error: SshError) -> Self {
        with_errno(error.errno, error)
    }
}
