//! A raw image: the storage's bytes are the disk's.

use std::sync::Arc;

use crate::storage::Storage;

/// A raw image.
#[derive(Debug)]
pub struct Raw {
    storage: Arc<dyn Storage>,
    size: u64,
}

impl Raw {
    /// Where the bytes are.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Size of the disk in bytes: that of the storage, rounded up to 512.
    pub fn size(&self) -> u64 {
        self.size
    }
}
