//! Credentials for TLS, as options describe them. The crate zebu-net has TLS itself.

use std::path::PathBuf;

/// A client's credentials, and how it authenticates the server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TlsCredentials {
    /// Certificates.
    Certificates(TlsFiles),
    /// A pre-shared key, which authenticates the server, too.
    Key(KeyFile),
}

/// What is verified of a server's certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verify {
    /// Nothing: any host may pretend to be the server.
    Nothing,
    /// That a trusted authority has signed it. It may be that of any host.
    Authority,
    /// That, and the name of the server.
    #[default]
    Name,
}

options! {
    /// Where certificates are.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
    pub struct TlsFiles {
        /// The directory; None: the system's authorities are trusted, and the client has no
        /// certificate.
        pub directory: Option<PathBuf>,
        /// What is verified.
        pub verify: Verify,
    }
}

options! {
    /// A client's key.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub struct KeyFile {
        /// The file, which may hold other keys.
        pub file: PathBuf,
        /// The user of the key; None: that of this login, as in libnbd.
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
