//! An export of an NBD server, as it is described.
#![cfg(feature = "nbd")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::storage::file::identity;
use crate::storage::nbd::NbdServer;
use crate::tls::TlsCredentials;

/// An export of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdSpec {
    /// The server.
    pub server: NbdServer,
    /// The export; empty: the default one.
    pub export: String,
    /// `x-dirty-bitmap`: the metadata context that is asked for instead of `base:allocation`.
    pub context: Option<String>,
    /// Whether and how TLS is used.
    pub tls: NbdTls,
    /// `tls-hostname`: the name that the server's certificate must have, if it is not the host
    /// that is connected to.
    pub tls_hostname: Option<String>,
    /// `reconnect-delay`: how long requests wait when the connection is lost.
    pub reconnect_delay: Duration,
    /// `open-timeout`: how long connecting is tried.
    pub open_timeout: Duration,
    /// `request-timeout`, an option of zebu's own: how long a server may be silent while
    /// requests are in flight. Zero: for ever; None: the default.
    pub request_timeout: Option<Duration>,
    /// `connections`, an option of zebu's own: how many are made at most; None: the default.
    pub connections: Option<usize>,
    /// The name that QEMU shows.
    pub(crate) name: PathBuf,
    /// The members that name it in JSON, as they were given.
    pub(crate) json: String,
}

/// Whether and how TLS is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NbdTls {
    /// Not at all.
    #[default]
    Off,
    /// With the credentials of this id in [`TlsObjects`](crate::block::TlsObjects).
    Object(String),
    /// With the credentials that the name itself gives.
    Named(TlsCredentials),
}

impl NbdSpec {
    /// The name that the server's certificate must have; None: a Unix socket has none.
    pub fn certificate_name(&self) -> Option<&str> {
        match (&self.tls_hostname, &self.server) {
            (Some(name), _) => Some(name),
            (None, NbdServer::Tcp { host, .. }) => Some(host),
            (None, NbdServer::Unix(_)) => None,
        }
    }

    /// Whether both are one export, as far as their names tell: of one socket, also by its links, or of
    /// one address. Blocks, if a host's address must be found.
    pub fn is_same(&self, other: &NbdSpec) -> bool {
        self.export == other.export
            && match (&self.server, &other.server) {
                (one, two) if one == two => true,
                (NbdServer::Unix(one), NbdServer::Unix(two)) => {
                    let found = |path: &Path| Some(identity(&std::fs::metadata(path).ok()?));
                    found(one).is_some_and(|own| found(two) == Some(own))
                }
                (NbdServer::Tcp { .. }, NbdServer::Tcp { .. }) => {
                    let (one, two) = (self.server.addresses(), other.server.addresses());
                    one.is_ok_and(|one| two.is_ok_and(|two| one.iter().any(|at| two.contains(at))))
                }
                _ => false,
            }
    }

    /// Its name, as QEMU shows it.
    pub fn name(&self) -> &Path {
        &self.name
    }
}
