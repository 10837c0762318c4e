//! TLS: authentication by certificates (rustls) or by pre-shared keys (s2n-tls),
//! and one `Session` for both, which a client and a server drive alike.
//!
//! rustls has no pre-shared keys. s2n-tls has them, but reads certificates, which come from
//! untrusted peers, in C. Both use AWS-LC.
//!
//! Without the feature `tls` only the types of credentials are here: whatever asks for TLS is
//! refused.
//!
//! | file | subject |
//! |---|---|
//! | `session.rs` | clients, servers, sessions |
//! | `absent.rs` | the same without the feature `tls` |
//! | `certificates.rs` | directories of certificates |
//! | `keys.rs` | files of pre-shared keys |
//! | `psk.rs` | a session with pre-shared keys |

#[cfg(feature = "tls")]
mod certificates;
#[cfg(feature = "tls")]
mod keys;
#[cfg(feature = "tls")]
mod psk;
#[cfg_attr(not(feature = "tls"), path = "absent.rs")]
pub(crate) mod session;

use std::path::PathBuf;

pub use session::{ClientTls, ServerTls};

/// Bytes of a key at least: s2n-tls takes no shorter one (RFC 9257, section 6).
pub const MIN_KEY: usize = 16;
/// Users of a server at most: each connection has all their keys, and compares
/// all with each that a client offers, before the client is authenticated.
pub const MAX_USERS: usize = 100;
/// Why TLS cannot be used as it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file that cannot be read, or holds something else.
    #[error("Unable to load {path}: {why}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// What was given does not fit together, or is not here.
    #[error("Unable to use TLS: {0}")]
    Unusable(String),
}

/// What a client shows, and how it knows the server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TlsCredentials {
    /// Certificates.
    Certificates(TlsFiles),
    /// A pre-shared key: the peer that has it is the server.
    Key(KeyFile),
}

/// What of a server's certificate is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verify {
    /// Nothing: a host between the two may pose as the server.
    Nothing,
    /// That a trusted authority signed it. It may be anybody's whom that
    /// authority signed.
    Authority,
    /// That, and that it is for the name of the server.
    #[default]
    Name,
}

options! {
    /// Where certificates are.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
    pub struct TlsFiles {
        /// The directory; None: the system's authorities are trusted, and we are
        /// nobody.
        pub directory: Option<PathBuf>,
        /// What is looked at.
        pub verify: Verify,
    }
}

options! {
    /// A client's key.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct KeyFile {
        /// Where it is, perhaps among others.
        pub file: PathBuf,
        /// Whose it is; None: of the user of this login, as in libnbd.
        pub user: Option<String>,
    }
}

impl KeyFile {
    /// The key of this login's user in `file`.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        KeyFile {
            file: file.into(),
            user: None,
        }
    }
}

/// An error of what a peer sent.
#[cfg(feature = "tls")]
fn broken(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, error)
}
