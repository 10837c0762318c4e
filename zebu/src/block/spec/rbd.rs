//! An image in a Ceph cluster, as it is described.
#![cfg(feature = "rbd")]

use std::path::{Path, PathBuf};

/// An image in a Ceph cluster (`rbd`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RbdSpec {
    /// `pool`
    pub pool: String,
    /// `namespace`: that of the pool; empty: the default one.
    pub namespace: String,
    /// `image`
    pub image: String,
    /// `snapshot`, which is only read.
    pub snapshot: Option<String>,
    /// `conf`: the file of the cluster's configuration; None: Ceph's default ones, if they exist.
    pub conf: Option<PathBuf>,
    /// `user`, without `client.`; None: `admin`.
    pub user: Option<String>,
    /// `key-secret`: the id of a secret with the user's key, in base64.
    pub key: Option<String>,
    /// Options of the cluster's configuration: those of a name, `server` and
    /// `auth-client-required`.
    pub set: Vec<(String, String)>,
    /// The name, for messages.
    pub(crate) name: PathBuf,
    /// What QEMU shows of it, as members of a JSON object.
    pub(crate) shown: Vec<(String, String)>,
}

impl RbdSpec {
    /// Its name, for messages.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Whether both are one image, as far as their names tell.
    pub fn is_same(&self, other: &RbdSpec) -> bool {
        (&self.pool, &self.namespace, &self.image) == (&other.pool, &other.namespace, &other.image)
    }
}
