//! A raw image: the storage's bytes are the disk's.

use std::sync::Arc;

use crate::Result;
use crate::storage::Storage;

/// A raw image.
#[derive(Debug)]
pub struct Raw {
    storage: Arc<dyn Storage>,
    size: u64,
}

impl Raw {
    /// The whole of `storage` as a disk. A length that is no multiple of 512
    /// is rounded up, as QEMU does; the missing bytes read as zeroes.
    pub fn new(storage: Arc<dyn Storage>) -> Result<Self> {
        let size = storage.len()?.next_multiple_of(512);
        Ok(Raw { storage, size })
    }

    /// Where the bytes are.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}
