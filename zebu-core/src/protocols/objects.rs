//! What images are named with by id: credentials, secrets and limits.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;

use crate::Result;
use crate::filters::ThrottleGroups;
pub use crate::storage::Secrets;
use crate::storage::{Secret, find_secret};
use crate::tls::TlsCredentials;

/// Credentials for TLS by their ids (`tls-creds`).
pub type TlsObjects = BTreeMap<String, TlsCredentials>;

options! {
    /// What images are named with by id, QEMU's `--object`.
    #[derive(Clone, Debug, Default)]
    pub struct Objects {
        /// Credentials for TLS (`tls-creds`).
        pub tls: TlsObjects,
        /// Secrets (`password-secret`, …).
        pub secrets: Secrets,
        /// Limits that nodes keep to together (`throttle-group`).
        pub throttle_groups: ThrottleGroups,
        /// What is asked for the passphrase of an encrypted image whose options name no secret.
        pub passphrases: Option<Passphrases>,
    }
}

type Ask = dyn Fn(&OsStr) -> Option<Secret> + Send + Sync;

/// What is asked for a passphrase, with the name of the image's file: a person, a service for keys.
#[derive(Clone)]
pub struct Passphrases(Arc<Ask>);

impl Passphrases {
    /// Asks this function. None: there is no passphrase. It may be called by any thread, and blocks it.
    pub fn new(ask: impl Fn(&OsStr) -> Option<Secret> + Send + Sync + 'static) -> Self {
        Passphrases(Arc::new(ask))
    }
}

impl fmt::Debug for Passphrases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrases")
    }
}

impl Objects {
    /// The passphrase of an image in the file of this name, if there is something to ask.
    pub(crate) fn ask_passphrase(&self, name: &OsStr) -> Option<Secret> {
        let Passphrases(ask) = self.passphrases.as_ref()?;
        ask(name)
    }

    /// The secret with this id.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused) in QEMU's words if there is none.
    pub fn secret(&self, id: &str) -> Result<Secret> {
        find_secret(&self.secrets, id)
    }
}
