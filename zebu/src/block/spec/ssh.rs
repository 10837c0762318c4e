//! A file on an SSH server, as it is described.
#![cfg(feature = "ssh")]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use super::{FileDriver, FileSpec};
use crate::storage::ssh::HostKeyCheck;
use crate::{Error, Result};

/// A file on an SSH server (`ssh`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SshSpec {
    /// `server.host`: a name, an address, or a `Host` of the user's configuration of `ssh`.
    pub host: String,
    /// `server.port`; None: that of the configuration.
    pub port: Option<u16>,
    /// `user`; None: that of the configuration.
    pub user: Option<String>,
    /// `path`: relative ones are of the user's home on the server.
    pub path: String,
    /// `host-key-check`
    pub host_key: HostKeyCheck,
    /// `timeout`, an option of zebu's own: how long the server may send nothing while requests wait;
    /// None: for ever.
    pub timeout: Option<Duration>,
    /// The server was given by the older options `host` and `port`.
    pub(crate) is_old: bool,
}

impl SshSpec {
    /// Its name, as QEMU shows it.
    pub fn name(&self) -> PathBuf {
        let host = match self.host.contains(':') {
            true => format!("[{}]", self.host),
            false => self.host.clone(),
        };
        let user = self.user.as_ref().map(|user| format!("{user}@"));
        let port = self.port.map(|port| format!(":{port}"));
        let check = self.host_key.name();
        let check = check.map(|check| format!("?host_key_check={check}"));
        let [user, port, check] = [user, port, check].map(Option::unwrap_or_default);
        format!("ssh://{user}{host}{port}{}{check}", self.path).into()
    }

    /// Whether both are one file, as far as their names tell.
    pub fn is_same(&self, other: &SshSpec) -> bool {
        (&self.host, self.port, &self.path) == (&other.host, other.port, &other.path)
    }

    /// The file of this path, relative to the folder of this one.
    pub(super) fn beside(&self, path: &OsStr) -> Result<FileSpec> {
        let wrong = |_| Error::Refused("The name of an extent is not UTF-8".into());
        let path = str::from_utf8(path.as_bytes()).map_err(wrong)?;
        let folder = match path.starts_with('/') {
            true => 0,
            false => self.path.rfind('/').map_or(0, |slash| slash + 1),
        };
        let spec = SshSpec {
            path: format!("{}{path}", &self.path[..folder]),
            ..self.clone()
        };
        let mut file = FileSpec::new(spec.name());
        file.driver = FileDriver::Ssh(Box::new(spec));
        Ok(file)
    }
}
