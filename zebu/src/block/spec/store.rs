//! An object in an object store, as it is described.
#![cfg(feature = "object-store")]

use std::path::{Path, PathBuf};

use super::RemoteOptions;
use crate::storage::object::StoreKind;

/// An object in an object store (`s3`, `gs`, `az`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreSpec {
    /// The protocol of the store.
    pub kind: StoreKind,
    /// The bucket or container.
    pub bucket: String,
    /// The object's name in it.
    pub key: String,
    /// How it is read.
    pub reading: RemoteOptions,
    /// `s3://BUCKET/KEY`
    pub(crate) url: PathBuf,
}

impl StoreSpec {
    /// Its URL as a name.
    pub fn name(&self) -> &Path {
        &self.url
    }
}
