//! A raw image: the storage's bytes, or a part of them, are the disk's.

use std::sync::Arc;

use super::guess::Guard;
use crate::storage::Storage;
use crate::{Error, Result};

/// A raw image.
#[derive(Debug)]
pub struct Raw {
    storage: Arc<dyn Storage>,
    offset: u64,
    size: u64,
    pub(super) guard: Option<Guard>,
}

impl Raw {
    /// The part of `storage` from `offset` (None: its start) on, of `size`
    /// bytes (None: to its end). A length that is no multiple of 512 is rounded
    /// up, as QEMU does; the missing bytes read as zeroes.
    pub fn part_of(
        storage: Arc<dyn Storage>,
        offset: Option<u64>,
        size: Option<u64>,
    ) -> Result<Self> {
        let offset = offset.unwrap_or(0);
        let Some(rest) = storage.len()?.checked_sub(offset) else {
            return Err(Error::Refused(format!(
                "Offset ({offset}) cannot be greater than size of the containing file ({})",
                storage.len()?
            )));
        };
        if let Some(size) = size.filter(|size| *size > rest) {
            return Err(Error::Refused(format!(
                "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to the \
                 actual size of the containing file ({})",
                storage.len()?
            )));
        }
        Ok(Raw {
            storage,
            offset,
            size: size.unwrap_or(rest).next_multiple_of(512),
            guard: None,
        })
    }

    /// Where the bytes are.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Where in the storage the disk starts, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether its format was guessed and it is open for writing: writes that
    /// would make it look like an image of another format fail with `EPERM`.
    pub fn is_guessed(&self) -> bool {
        self.guard.is_some()
    }

    /// Another size of the disk, which the storage has room for.
    pub(super) fn set_size(&mut self, size: u64) {
        self.size = size;
    }
}
