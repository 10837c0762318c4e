//! One file of an image, or the export that it is instead.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::source::{FileDriver, FileSpec, NbdSpec, NbdTls};
use crate::storage::nbd::{Nbd, NbdOptions, NbdServer};
use crate::storage::{CacheMode, File, LockRequest, OpenFile, Storage};
use crate::tls::{ClientTls, TlsCredentials};
use crate::{Error, Result};

/// Credentials for TLS, by the ids that images are named with
/// (`tls-creds`).
pub type TlsObjects = BTreeMap<String, TlsCredentials>;

/// A file that was opened.
#[derive(Debug)]
pub enum OpenedFile {
    /// Of this machine.
    Local(Arc<File>),
    /// An export of a server.
    Nbd(Arc<Nbd>),
}

/// What tells one file from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Device and inode.
    Local(u64, u64),
    /// Server and export.
    Nbd(NbdServer, String),
}

impl FileSpec {
    /// Opens it: a file, or a connection to a server, which is never made if it
    /// is not there. Blocks.
    pub fn open(&self, how: OpenFile, tls: &TlsObjects) -> Result<OpenedFile> {
        if let Some(nbd) = &self.nbd {
            let options = nbd.options(how.write, how.cache, tls)?;
            return Nbd::open(options).map(Arc::new).map(OpenedFile::Nbd);
        }
        let file = File::open(&self.path, how).map_err(|e| could_not_open(e, self))?;
        if self.driver == FileDriver::HostDevice && !file.is_device() {
            return Err(Error::Refused(format!(
                "'host_device' driver requires '{}' to be either a character or block device",
                self.name()
            )));
        }
        Ok(OpenedFile::Local(Arc::new(file)))
    }
}

impl OpenedFile {
    /// What reads and writes it.
    pub fn storage(&self) -> Arc<dyn Storage> {
        match self {
            OpenedFile::Local(file) => file.clone(),
            OpenedFile::Nbd(nbd) => nbd.clone(),
        }
    }

    /// Takes the locks by which QEMU and zebu keep out of each other's way; of
    /// an export that is the server's affair.
    pub fn lock(&self, request: LockRequest) -> Result<()> {
        match self {
            OpenedFile::Local(file) => file.lock(request),
            OpenedFile::Nbd(_) => Ok(()),
        }
    }

    /// The same for two names of one file.
    pub(super) fn identity(&self, spec: &FileSpec) -> Result<Identity> {
        match (self, &spec.nbd) {
            (OpenedFile::Local(file), _) => {
                let (device, inode) = file.identity()?;
                Ok(Identity::Local(device, inode))
            }
            (OpenedFile::Nbd(_), Some(nbd)) => {
                Ok(Identity::Nbd(nbd.server.clone(), nbd.export.clone()))
            }
            (OpenedFile::Nbd(_), None) => unreachable!("opened by its description"),
        }
    }
}

impl NbdSpec {
    /// How to connect.
    fn options(&self, write: bool, cache: CacheMode, tls: &TlsObjects) -> Result<NbdOptions> {
        let credentials = match &self.tls {
            NbdTls::Off => None,
            NbdTls::Named(credentials) => Some(credentials),
            NbdTls::Object(id) => Some(
                tls.get(id)
                    .ok_or_else(|| Error::Refused(format!("No TLS credentials with id '{id}'")))?,
            ),
        };
        let tls = credentials.map(|c| ClientTls::load(c, self.certificate_name()));
        let tls = tls.transpose().map_err(|e| Error::Refused(e.to_string()))?;
        let default = NbdOptions::new(self.server.clone(), self.export.clone());
        Ok(NbdOptions {
            name: self.name().into(),
            tls,
            write,
            cache,
            reconnect_delay: self.reconnect_delay,
            open_timeout: self.open_timeout,
            request_timeout: self.request_timeout.unwrap_or(default.request_timeout),
            connections: self.connections.unwrap_or(default.connections),
            ..default
        })
    }
}

/// What the operating system said, with the file that it said it of.
fn could_not_open(error: std::io::Error, spec: &FileSpec) -> Error {
    match error.raw_os_error() {
        Some(_) => Error::Io(error).during(format!("Could not open '{}'", spec.name())),
        None => Error::Io(error),
    }
}
