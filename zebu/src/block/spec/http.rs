//! An object on a web server, as it is described.
#![cfg(feature = "http")]

use std::path::{Path, PathBuf};

use super::{FileDriver, FileSpec, RemoteOptions};
use crate::{Error, Result};

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
    pub(crate) shown: Vec<(String, String)>,
}

/// A cookie.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HttpCookie {
    /// Its text.
    Text(crate::storage::Secret),
    /// The id of a secret.
    Secret(String),
}

impl HttpSpec {
    /// Its URL as a name.
    pub fn name(&self) -> &Path {
        Path::new(&self.url)
    }

    /// The object with this URL, read in the same way.
    pub(super) fn beside(&self, url: Vec<u8>) -> Result<FileSpec> {
        let wrong = |_| Error::Refused("The URL of an extent is not UTF-8".into());
        let url = String::from_utf8(url).map_err(wrong)?;
        let mut file = FileSpec::new(&url);
        file.driver = FileDriver::Http(Box::new(HttpSpec {
            url,
            ..self.clone()
        }));
        Ok(file)
    }
}
