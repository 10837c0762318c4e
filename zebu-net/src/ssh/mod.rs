//! Files on SSH servers: `ssh`.

mod file;
mod names;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::protocols::shown::object;
use crate::protocols::{
    Driver, FileDriver, FileSpec, Identity, Objects, Opened, OpenedFile, Protocol,
};
use crate::spelling::quote::json_string;
pub use crate::ssh::file::{HashKind, HostKeyCheck};
use crate::ssh::file::{Ssh, SshOptions, SshServer};
use crate::storage::OpenFile;
use crate::{Error, Result};

pub(crate) static DRIVER: Driver = Driver {
    names: &["ssh"],
    is_remote: true,
    parse: |given| {
        let ssh = SshSpec::take(&mut given.options, given.name)?;
        Ok(FileSpec::of(ssh.name(), FileDriver::other(ssh)))
    },
    ..Driver::DEFAULT
};

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
    is_old: bool,
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

    fn options(&self, how: OpenFile) -> SshOptions {
        SshOptions {
            server: SshServer {
                host: self.host.clone(),
                port: self.port,
                user: self.user.clone(),
            },
            path: self.path.clone(),
            host_key: self.host_key.clone(),
            name: self.name(),
            write: how.write,
            create: how.create,
            cache: how.cache,
            timeout: self.timeout,
        }
    }
}

impl Protocol for SshSpec {
    fn name(&self) -> &'static str {
        "ssh"
    }

    fn plain_name(&self, file: &FileSpec) -> Option<OsString> {
        // Else the name would be that of another file.
        let is_plain = self.path.starts_with('/') && !self.path.contains(['%', '?', '#']);
        is_plain.then(|| file.name().to_owned())
    }

    fn json(&self, _file: &FileSpec) -> String {
        let [host, port] = match self.is_old {
            true => ["host", "port"],
            false => ["server.host", "server.port"],
        };
        let timeout = self.timeout.map(|time| time.as_secs().to_string());
        let members = [
            (host, Some(self.host.clone())),
            (port, self.port.map(|port| port.to_string())),
            ("host_key_check", self.host_key.name()),
            ("driver", Some("ssh".into())),
            ("path", Some(self.path.clone())),
            ("user", self.user.clone()),
            ("timeout", timeout),
        ];
        let given = members.into_iter();
        let given = given.filter_map(|(k, v)| Some((k.into(), json_string(v?.as_bytes()))));
        object(given.collect())
    }

    fn name_there<'a>(&'a self, _file: &'a FileSpec) -> &'a OsStr {
        OsStr::new(&self.path)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn is_same(&self, other: &FileDriver) -> bool {
        other
            .get::<SshSpec>()
            .is_some_and(|other| self.is_same(other))
    }

    fn beside(&self, _own: &FileSpec, path: &OsStr) -> Option<Result<FileSpec>> {
        let wrong = |_| Error::Refused("The name of an extent is not UTF-8".into());
        let found = str::from_utf8(path.as_bytes()).map(|path| {
            let folder = match path.starts_with('/') {
                true => 0,
                false => self.path.rfind('/').map_or(0, |slash| slash + 1),
            };
            let spec = SshSpec {
                path: format!("{}{path}", &self.path[..folder]),
                ..self.clone()
            };
            FileSpec::of(spec.name(), FileDriver::other(spec))
        });
        Some(found.map_err(wrong))
    }

    fn connects(&self) -> bool {
        true
    }

    fn open(&self, _file: &FileSpec, how: OpenFile, _objects: &Objects) -> Result<OpenedFile> {
        let ssh = Arc::new(Ssh::open(self.options(how))?);
        let name = format!("{:?}", ("ssh", &self.host, self.port, &self.path));
        Ok(OpenedFile {
            own: ssh.clone(),
            identity: Some(Identity::Elsewhere(name)),
            version: Some((ssh.cache_identity(), Some(ssh.clone()))),
            ..OpenedFile::new(ssh)
        })
    }
}

impl Opened for Ssh {
    fn existed(&self) -> Option<bool> {
        Some(!self.was_created())
    }

    fn is_emptied(&self) -> bool {
        true
    }

    fn remove(&self) -> io::Result<()> {
        self.remove()
    }
}
