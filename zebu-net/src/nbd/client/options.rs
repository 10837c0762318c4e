//! The options of an export: server, limits of time, connections.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::printable;
use crate::storage::CacheMode;
use crate::storage::host::addresses;
use crate::tls::ClientTls;

/// The context that distinguishes data from holes.
pub(super) const ALLOCATION: &str = "base:allocation";

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NbdServer {
    /// A unix socket.
    Unix(PathBuf),
    /// TCP.
    Tcp {
        /// Name or address, an IPv6 address without brackets.
        host: String,
        /// Its number, or a name of the system's list of services.
        port: String,
    },
}

impl NbdServer {
    /// The addresses of a server of TCP. Blocks.
    pub(crate) fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            NbdServer::Unix(_) => Ok(Vec::new()),
            NbdServer::Tcp { host, port } => resolve(host, port),
        }
    }
}

/// The addresses of a host. Blocks.
pub(super) fn resolve(host: &str, port: &str) -> io::Result<Vec<SocketAddr>> {
    let number = port.parse().or_else(|_| match port {
        "nbd" => Ok(crate::nbd::protocol::DEFAULT_PORT),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the port is no number",
        )),
    })?;
    addresses(host, number)
}

impl fmt::Display for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdServer::Unix(path) => f.write_str(&printable(path.as_os_str().as_bytes())),
            NbdServer::Tcp { host, port } => {
                let (host, port) = (printable(host.as_bytes()), printable(port.as_bytes()));
                match host.contains(':') {
                    true => write!(f, "[{host}]:{port}"),
                    false => write!(f, "{host}:{port}"),
                }
            }
        }
    }
}

options! {
    /// How to open an export.
    #[derive(Clone, Debug)]
    pub struct NbdOptions {
        /// The server.
        pub server: NbdServer,
        /// Its export; empty: the default one.
        pub export: String,
        /// The metadata context that is asked for instead of `base:allocation`. The export
        /// must have it (QEMU's `x-dirty-bitmap`). Bytes with its flag 1 count as not stored, and
        /// none as known zeroes.
        pub context: Option<String>,
        /// How the export is named in messages and reports.
        pub name: PathBuf,
        /// The credentials for TLS; None: no TLS.
        pub tls: Option<ClientTls>,
        /// Open for writing, too.
        pub write: bool,
        /// The cache mode.
        pub cache: CacheMode,
        /// How long requests wait for a new connection after one was lost. Zero: they fail, and so
        /// do all later ones. So they do if there are writes that no flush has made durable, unless
        /// the cache mode is [`CacheMode::Unsafe`].
        pub reconnect_delay: Duration,
        /// How long to try to connect when the export is opened. Zero: once.
        pub open_timeout: Duration,
        /// The connection is lost if a reply is due and nothing is received for so long. Zero: no
        /// limit.
        pub request_timeout: Duration,
        /// Connections at most, at least 1; one if the server does not announce `MULTI_CONN`, or if
        /// writes are to survive a reconnect. Further ones are made when queues use them.
        pub connections: usize,
    }
}

impl NbdOptions {
    /// The default of [`NbdOptions::connections`].
    pub const CONNECTIONS: usize = 4;
    /// The default of [`NbdOptions::request_timeout`]: a flush may take minutes on a slow disk.
    pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(600);

    /// An export with default options.
    pub fn new(server: NbdServer, export: impl Into<String>) -> Self {
        let export = export.into();
        let given = Some(&*export).filter(|export| !export.is_empty());
        NbdOptions {
            name: uri(&server, given).into(),
            server,
            export,
            context: None,
            tls: None,
            write: false,
            cache: CacheMode::WriteBack,
            reconnect_delay: Duration::ZERO,
            open_timeout: Duration::ZERO,
            request_timeout: Self::REQUEST_TIMEOUT,
            connections: Self::CONNECTIONS,
        }
    }

    /// The metadata context that is asked for.
    pub(super) fn status_context(&self) -> &str {
        self.context.as_deref().unwrap_or(ALLOCATION)
    }

    /// Whether a server after a reconnect must have all changes that the one before has confirmed.
    pub(super) fn keeps_changes(&self) -> bool {
        self.write && !self.reconnect_delay.is_zero() && !self.cache.ignores_flushes()
    }
}

/// The name of an export in QEMU's spelling.
pub(crate) fn uri(server: &NbdServer, export: Option<&str>) -> OsString {
    let (before, path) = match (server, export) {
        (NbdServer::Unix(path), None) => ("nbd+unix://?socket=".into(), Some(path)),
        (NbdServer::Unix(path), Some(export)) => {
            (format!("nbd+unix:///{export}?socket="), Some(path))
        }
        (server, None) => (format!("nbd://{server}"), None),
        (server, Some(export)) => (format!("nbd://{server}/{export}"), None),
    };
    let mut uri = OsString::from(before);
    uri.push(path.map_or(OsStr::new(""), |path| path.as_os_str()));
    uri
}
