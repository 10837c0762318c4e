//! Exports of NBD servers: `nbd`.

pub mod client;
mod names;
pub mod protocol;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::nbd::client::{Nbd, NbdOptions, NbdServer};
use crate::protocols::{Driver, FileDriver, FileSpec, Identity, Objects, OpenedFile, Protocol};
use crate::storage::OpenFile;
use crate::storage::file::identity;
use crate::tls::{ClientTls, TlsCredentials};
use crate::{Error, Result};

pub(crate) static DRIVER: Driver = Driver {
    names: &["nbd"],
    schemes: &["nbd+tcp", "nbd+unix", "nbds", "nbds+tcp", "nbds+unix"],
    is_remote: true,
    parse: |given| {
        let nbd = NbdSpec::take(&mut given.options, given.name)?;
        let path = nbd.name().to_owned();
        Ok(FileSpec::of(path, FileDriver::other(nbd)))
    },
    ..Driver::DEFAULT
};

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
    name: PathBuf,
    /// The members that name it in JSON, as they were given.
    json: String,
}

/// Whether and how TLS is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NbdTls {
    /// Not at all.
    #[default]
    Off,
    /// With the credentials of this id in [`TlsObjects`](zebu_core::block::TlsObjects).
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

    /// The options of the connection.
    fn options(&self, how: OpenFile, objects: &Objects) -> Result<NbdOptions> {
        let credentials = match &self.tls {
            NbdTls::Off => None,
            NbdTls::Named(credentials) => Some(credentials),
            NbdTls::Object(id) => Some(
                objects
                    .tls
                    .get(id)
                    .ok_or_else(|| Error::Refused(format!("No TLS credentials with id '{id}'")))?,
            ),
        };
        let tls = credentials.map(|c| ClientTls::load(c, self.certificate_name()));
        let tls = tls.transpose().map_err(|e| Error::Refused(e.to_string()))?;
        let default = NbdOptions::new(self.server.clone(), self.export.clone());
        Ok(NbdOptions {
            name: self.name().into(),
            context: self.context.clone(),
            tls,
            write: how.write,
            cache: how.cache,
            reconnect_delay: self.reconnect_delay,
            open_timeout: self.open_timeout,
            request_timeout: self.request_timeout.unwrap_or(default.request_timeout),
            connections: self.connections.unwrap_or(default.connections),
            ..default
        })
    }
}

impl Protocol for NbdSpec {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn json(&self, _file: &FileSpec) -> String {
        format!("{{{}}}", self.json)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn must_exist(&self) -> bool {
        true
    }

    fn is_same(&self, other: &FileDriver) -> bool {
        other
            .get::<NbdSpec>()
            .is_some_and(|other| self.is_same(other))
    }

    fn connects(&self) -> bool {
        true
    }

    fn open(&self, _file: &FileSpec, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        let nbd = Nbd::open(self.options(how, objects)?)?;
        let name = format!("{:?}", ("nbd", &self.server, &self.export));
        Ok(OpenedFile {
            identity: Some(Identity::Elsewhere(name)),
            ..OpenedFile::new(Arc::new(nbd))
        })
    }
}
