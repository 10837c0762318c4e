//! How a web server is asked.

use std::fmt;
use std::path::PathBuf;

use crate::storage::Secret;

/// An object on a web server, and how it is asked for.
#[derive(Clone, Debug)]
pub(crate) struct HttpOptions {
    /// Without a user and a fragment.
    pub url: reqwest::Url,
    /// What is sent to this server only, not to others that it redirects to.
    pub access: Access,
    /// The user of proxies.
    pub proxy: Option<Login>,
    /// Whether the server must have a certificate of its name by a trusted authority.
    pub verify: bool,
    /// The authorities that are trusted instead of those of the system, in PEM.
    pub authorities: Option<PathBuf>,
}

impl HttpOptions {
    /// What names the object, and by what it is known that its server is the one. A server may
    /// choose the object by the user, the token or the cookie. A password chooses none: the server
    /// refuses a wrong one when the object is opened.
    pub fn words(&self) -> Vec<String> {
        let access = &self.access;
        let user = access.login.as_ref().map(|login| login.user.clone());
        let secret = |secret: &Option<Secret>| match secret {
            Some(secret) => secret.reveal().to_string(),
            None => String::new(),
        };
        let authorities = self.authorities.as_ref();
        vec![
            self.url.to_string(),
            user.unwrap_or_default(),
            secret(&access.token),
            secret(&access.cookie),
            self.verify.to_string(),
            authorities.map_or(String::new(), |path| path.display().to_string()),
        ]
    }
}

/// Credentials.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    /// For basic authentication.
    pub login: Option<Login>,
    /// For bearer authentication.
    pub token: Option<Secret>,
    /// The value of the header `Cookie`.
    pub cookie: Option<Secret>,
}

/// A user, and perhaps a password.
#[derive(Clone)]
pub(crate) struct Login {
    pub user: String,
    pub password: Option<Secret>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}
