//! Which file on which server, and how the server is known.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::storage::CacheMode;

/// A server, as the program `ssh` is told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SshServer {
    /// A name, an address, or a `Host` of the user's configuration.
    pub host: String,
    /// None: that of the configuration.
    pub port: Option<u16>,
    /// None: that of the configuration.
    pub user: Option<String>,
}

impl fmt::Display for SshServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.host),
            None => write!(f, "{}", self.host),
        }
    }
}

/// How the key of a server is checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostKeyCheck {
    /// By the user's configuration of `ssh`. A key that would have to be confirmed is refused.
    #[default]
    Configured,
    /// It must be a known one.
    KnownHosts,
    /// It must have this hash, in lower-case hexadecimal digits.
    Hash(HashKind, String),
    /// Not at all.
    Nothing,
}

impl HostKeyCheck {
    /// QEMU's `host_key_check`, if one is given.
    pub(crate) fn name(&self) -> Option<String> {
        match self {
            HostKeyCheck::Configured => None,
            HostKeyCheck::KnownHosts => Some("yes".into()),
            HostKeyCheck::Nothing => Some("no".into()),
            HostKeyCheck::Hash(kind, digits) => Some(format!("{}:{digits}", kind.name())),
        }
    }
}

/// The hash of a server's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HashKind {
    /// MD5
    Md5,
    /// SHA-1
    Sha1,
    /// SHA-256
    Sha256,
}

impl HashKind {
    /// The kind that QEMU calls so.
    pub(crate) fn from_name(name: &str) -> Option<HashKind> {
        let kinds = [HashKind::Md5, HashKind::Sha1, HashKind::Sha256];
        kinds.into_iter().find(|kind| kind.name() == name)
    }

    /// QEMU's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            HashKind::Md5 => "md5",
            HashKind::Sha1 => "sha1",
            HashKind::Sha256 => "sha256",
        }
    }

    /// Hexadecimal digits of such a hash.
    pub(crate) fn digits(self) -> usize {
        match self {
            HashKind::Md5 => 32,
            HashKind::Sha1 => 40,
            HashKind::Sha256 => 64,
        }
    }
}

/// How to open a file.
#[derive(Clone, Debug)]
pub(crate) struct SshOptions {
    pub server: SshServer,
    /// The file's path on the server; relative ones are of the user's home.
    pub path: String,
    pub host_key: HostKeyCheck,
    /// The name that is shown.
    pub name: PathBuf,
    pub write: bool,
    /// Create it if it does not exist.
    pub create: bool,
    pub cache: CacheMode,
    /// How long the server may send nothing while requests wait; None: for ever.
    pub timeout: Option<Duration>,
}
