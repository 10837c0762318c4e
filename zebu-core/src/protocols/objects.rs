//! What images are named with by id: credentials, secrets and limits.

use std::collections::BTreeMap;

use crate::filters::ThrottleGroups;
use crate::storage::Secret;
use crate::tls::TlsCredentials;
use crate::{Error, Result};

/// Credentials for TLS by their ids (`tls-creds`).
pub type TlsObjects = BTreeMap<String, TlsCredentials>;

options! {
    /// What images are named with by id, QEMU's `--object`.
    #[derive(Clone, Debug, Default)]
    pub struct Objects {
        /// Credentials for TLS (`tls-creds`).
        pub tls: TlsObjects,
        /// Secrets (`password-secret`, …).
        pub secrets: BTreeMap<String, Secret>,
        /// Limits that nodes keep to together (`throttle-group`).
        pub throttle_groups: ThrottleGroups,
    }
}

impl Objects {
    /// The secret with this id.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] in QEMU's words if there is none.
    pub fn secret(&self, id: &str) -> Result<Secret> {
        let secret = self.secrets.get(id).cloned();
        secret.ok_or_else(|| Error::Refused(format!("No secret with id '{id}'")))
    }
}
