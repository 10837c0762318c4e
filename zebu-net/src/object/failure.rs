//! Errors of objects: what one attempt ended with, and what a read reports.

use std::io;
use std::time::Duration;

use crate::error::{one_line, with_errno};

/// Why nothing can be asked over https.
pub(super) const NO_AUTHORITIES: &str = "no CA certificates were found in the places where systems \
    have them (such as /etc/ssl/certs), which SSL_CERT_FILE and SSL_CERT_DIR replace";

/// How one attempt ended.
#[derive(Clone, Debug)]
pub(super) enum Trouble {
    /// It may succeed later.
    Transient {
        what: String,
        /// The server asks for a pause: all requests to it wait.
        pause: Option<Pause>,
    },
    /// It may succeed at once, in another way than before.
    RetryNow(String),
    /// It will not succeed.
    Permanent { what: String, errno: i32 },
    /// The object is not the one that was opened: no later read succeeds.
    Changed(String),
}

/// A pause that a server asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    /// As it says itself (`Retry-After`).
    pub length: Option<Duration>,
}

impl Trouble {
    pub fn transient(what: impl Into<String>) -> Trouble {
        Trouble::Transient {
            what: what.into(),
            pause: None,
        }
    }

    pub fn permanent(what: impl Into<String>) -> Trouble {
        Trouble::Permanent {
            what: what.into(),
            errno: libc::EIO,
        }
    }

    /// As an error of the object with this name.
    pub fn error(self, name: &str) -> ObjectError {
        let (what, errno) = match self {
            Trouble::Transient { what, .. } | Trouble::RetryNow(what) => (what, libc::EIO),
            Trouble::Permanent { what, errno } => (what, errno),
            Trouble::Changed(what) => (what, libc::ESTALE),
        };
        ObjectError {
            name: name.into(),
            what: one_line(&what),
            errno,
        }
    }
}

/// The error of an object on a web server or in an object store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {what}")]
pub(crate) struct ObjectError {
    name: String,
    what: String,
    errno: i32,
}

impl ObjectError {
    /// The text without the object's name.
    pub fn what(&self) -> &str {
        &self.what
    }
}

impl From<ObjectError> for io::Error {
    fn from(error: ObjectError) -> Self {
        with_errno(error.errno, error)
    }
}
