//! An object in an object store, as it is described.
#![cfg(feature = "object-store")]

use std::path::{Path, PathBuf};

use super::RemoteOptions;

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

/// Which protocol an object store speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreKind {
    /// Amazon S3 (`s3`).
    S3,
    /// Google Cloud Storage (`gs`).
    Google,
    /// Azure Blob Storage (`az`).
    Azure,
}

impl StoreKind {
    /// The name of the driver, and the scheme of URLs.
    pub fn name(self) -> &'static str {
        match self {
            StoreKind::S3 => "s3",
            StoreKind::Google => "gs",
            StoreKind::Azure => "az",
        }
    }
}

impl StoreSpec {
    /// Its URL as a name.
    pub fn name(&self) -> &Path {
        &self.url
    }
}
