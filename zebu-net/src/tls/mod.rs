//! TLS: authentication by certificates (rustls) or by pre-shared keys (s2n-tls),
//! and one `Session` for both, which a client and a server drive alike.
//!
//! rustls has no pre-shared keys. s2n-tls has them, but parses certificates of untrusted peers in
//! C. rustls uses ring, s2n-tls uses AWS-LC.
//!
//! Without the feature `tls` there are only the types of credentials, and TLS is refused. Without
//! the feature `psk` pre-shared keys are.
//!
//! | file | subject |
//! |---|---|
//! | `session.rs` | clients, servers, sessions |
//! | `absent.rs` | the same without the feature `tls` |
//! | `certificates.rs` | directories of certificates |
//! | `keys.rs` | files of pre-shared keys |
//! | `psk.rs` | a session with pre-shared keys |
//! | `no_psk.rs` | the same without the feature `psk` |

#[cfg(feature = "tls")]
mod certificates;
#[cfg(feature = "tls")]
mod keys;
#[cfg(feature = "tls")]
#[cfg_attr(not(feature = "psk"), path = "no_psk.rs")]
mod psk;
#[cfg_attr(not(feature = "tls"), path = "absent.rs")]
pub(crate) mod session;

use std::path::PathBuf;

pub use session::{ClientTls, ServerTls};
pub use zebu_core::tls::{KeyFile, TlsCredentials, TlsFiles, Verify};

/// Bytes of a key at least, of s2n-tls (RFC 9257, section 6).
pub const MIN_KEY: usize = 16;
/// Users of a server at most: before a client is authenticated, each key that it offers is compared
/// with all.
pub const MAX_USERS: usize = 100;
/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file that cannot be read or parsed.
    #[error("Unable to load {path}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Options contradict each other, or something is missing.
    #[error("Unable to use TLS: {0}")]
    Unusable(String),
}

/// An error in what a peer sent.
#[cfg(feature = "tls")]
fn broken(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, error)
}
