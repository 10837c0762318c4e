//! Objects on web servers: `http`, `https`.

mod names;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use crate::object::RemoteOptions;
use crate::object::{Access, HttpOptions, Login, Object, ObjectPlace};
use crate::protocols::shown::object;
use crate::protocols::{Driver, FileDriver, FileSpec, Identity, Objects, OpenedFile, Protocol};
use crate::spelling::path::in_folder_of;
use crate::storage::secret::without_queries;
use crate::storage::{OpenFile, Secret};
use crate::{Error, Result};

pub(crate) static DRIVER: Driver = Driver {
    names: &["http", "https"],
    is_remote: true,
    parse: |given| {
        let http = HttpSpec::take(&mut given.options, given.driver, given.name)?;
        let path = http.name().to_owned();
        Ok(FileSpec::of(path, FileDriver::other(http)))
    },
    ..Driver::DEFAULT
};

/// An object on a web server (`http`, `https`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpSpec {
    /// `http` or `https`.
    pub driver: &'static str,
    /// `url`, without a password.
    pub url: String,
    /// How it is read.
    pub reading: RemoteOptions,
    /// `sslverify`: whether the server must have a certificate of its name by a trusted authority.
    pub verify: bool,
    /// `cacert`, an option of zebu's own: the authorities that are trusted, in PEM; None: those of
    /// the system.
    pub authorities: Option<PathBuf>,
    /// `username`
    pub user: Option<String>,
    /// `password-secret`: the id of a secret.
    pub password: Option<String>,
    /// `token-secret`, an option of zebu's own: the id of a secret for bearer authentication.
    pub token: Option<String>,
    /// `cookie` itself, or the id of a secret (`cookie-secret`).
    pub cookie: Option<HttpCookie>,
    /// `proxy-username`
    pub proxy_user: Option<String>,
    /// `proxy-password-secret`: the id of a secret.
    pub proxy_password: Option<String>,
    /// What QEMU shows of it, as members of a JSON object.
    shown: Vec<(String, String)>,
}

/// A cookie.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HttpCookie {
    /// Its text.
    Text(Secret),
    /// The id of a secret.
    Secret(String),
}

impl HttpSpec {
    /// Its URL as a name.
    pub fn name(&self) -> &Path {
        Path::new(&self.url)
    }

    /// Where it is, with the secrets that are needed.
    fn place(&self, objects: &Objects) -> Result<ObjectPlace> {
        let wrong = |e: &dyn std::fmt::Display| Error::Refused(format!("'{}': {e}", self.url));
        let secret = |id: &Option<String>| id.as_ref().map(|id| objects.secret(id)).transpose();
        let mut url = reqwest::Url::parse(&self.url).map_err(|e| wrong(&e))?;
        let in_url = Some(url.username()).filter(|user| !user.is_empty());
        let user = self.user.clone().or(in_url.map(Into::into));
        url.set_fragment(None);
        url.set_username("").map_err(|()| wrong(&"no host"))?;
        let login = |user: &Option<String>, password: &Option<String>| -> Result<_> {
            let password = secret(password)?;
            Ok(user.clone().map(|user| Login { user, password }))
        };
        Ok(ObjectPlace::Http(Box::new(HttpOptions {
            url,
            access: Access {
                login: login(&user, &self.password)?,
                token: secret(&self.token)?,
                cookie: match &self.cookie {
                    None => None,
                    Some(HttpCookie::Text(text)) => Some(text.clone()),
                    Some(HttpCookie::Secret(id)) => Some(objects.secret(id)?),
                },
            },
            proxy: login(&self.proxy_user, &self.proxy_password)?,
            verify: self.verify,
            authorities: self.authorities.clone(),
        })))
    }
}

/// Opens the object at a place, to be read.
pub(crate) fn open(
    file: &FileSpec,
    place: ObjectPlace,
    reading: &RemoteOptions,
) -> Result<OpenedFile> {
    let name = file.path.to_string_lossy();
    let object = Object::open(place, without_queries(&name).into(), reading.clone())?;
    Ok(OpenedFile {
        identity: Some(Identity::Elsewhere(name.into())),
        version: Some((object.cache_identity().clone(), None)),
        ..OpenedFile::new(Arc::new(object))
    })
}

/// Refuses to open an object to be written.
pub(crate) fn refuse_writes(driver: &str, how: OpenFile) -> Result<()> {
    match how.write {
        true => Err(Error::Refused(format!(
            "{driver} driver does not support writes"
        ))),
        false => Ok(()),
    }
}

impl Protocol for HttpSpec {
    fn name(&self) -> &'static str {
        self.driver
    }

    fn plain_name(&self, file: &FileSpec) -> Option<OsString> {
        let others = [
            &self.user,
            &self.password,
            &self.token,
            &self.proxy_user,
            &self.proxy_password,
        ];
        let is_plain = self.verify
            && self.cookie.is_none()
            && self.authorities.is_none()
            && others.iter().all(|other| other.is_none());
        is_plain.then(|| file.name().to_owned())
    }

    fn json(&self, _file: &FileSpec) -> String {
        object(self.shown.clone())
    }

    fn is_object(&self) -> bool {
        true
    }

    fn beside(&self, own: &FileSpec, path: &OsStr) -> Option<Result<FileSpec>> {
        // As QEMU, which takes it for a file of this machine.
        if path.as_bytes().starts_with(b"/") {
            return None;
        }
        let wrong = |_| Error::Refused("The URL of an extent is not UTF-8".into());
        let url = in_folder_of(own.name(), path).into_string();
        Some(url.map_err(wrong).map(|url| {
            let spec = HttpSpec {
                url: url.clone(),
                ..self.clone()
            };
            FileSpec::of(url, FileDriver::other(spec))
        }))
    }

    fn connects(&self) -> bool {
        true
    }

    fn open(&self, file: &FileSpec, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        let place = self.place(objects)?;
        // As QEMU calls it.
        refuse_writes("curl", how)?;
        open(file, place, &self.reading)
    }
}
