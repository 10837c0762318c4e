//! A cache on a local disk of blocks of images on other machines that are only read.
//!
//! A folder has a file for each block, which several processes read and write at once. What a block
//! belongs to is named by a hash of the object's name and of what tells that its bytes are the
//! same ([`CacheIdentity`](crate::storage::CacheIdentity)), so blocks of an object that has changed are not
//! found.
//!
//! | file | subject |
//! |---|---|
//! | `block.rs` | the bytes of a block's file |
//! | `directory.rs` | reading, writing and removing these files; the bound |
//! | `worker.rs` | threads for calls that block |
//! | `cached.rs` | the storage over the one on the other machine |

mod block;
mod cached;
mod directory;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::Result;
use crate::storage::{Check, RemoteCache, Storage};
use block::Key;
use cached::Cached;
use directory::Directory;
use worker::Workers;

/// Bytes of a block: what is fetched at least, and one file.
const BLOCK: u64 = 256 << 10;
/// Threads for the files of a cache.
const THREADS: usize = 4;
/// The smallest bound.
const LEAST: u64 = 1 << 20;

options! {
    /// How a [`BlockCache`] is used.
    #[derive(Clone, Debug)]
    pub struct BlockCacheOptions {
        /// Bytes of all files in the folder together, at least 1 MiB.
        pub size: u64,
        /// Gets a line of text when blocks are not cached, and why.
        pub warn: Option<fn(&str)>,
    }
}

impl BlockCacheOptions {
    /// The default of `size`: 10 GiB.
    pub const SIZE: u64 = 10 << 30;
}

impl Default for BlockCacheOptions {
    fn default() -> Self {
        BlockCacheOptions {
            size: Self::SIZE,
            warn: None,
        }
    }
}

/// A folder with blocks of objects on other machines. Clones are the same cache.
///
/// Any number of processes may use a folder at once, and may be killed at any moment. The files
/// have no more than [`BlockCacheOptions::size`] bytes together: those that were not used for
/// longest are removed first. A file that is damaged is noticed by its checksum, and the block is
/// fetched again.
#[derive(Clone)]
pub struct BlockCache(Arc<Inner>);

struct Inner {
    directory: Arc<Directory>,
    workers: Workers,
}

impl BlockCache {
    /// Opens a folder, which is created if it is not there.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if it cannot be written to, if it belongs to
    /// another user or others may write to it, or if the size is less than 1 MiB.
    pub fn open(path: impl AsRef<Path>, options: &BlockCacheOptions) -> Result<BlockCache> {
        Ok(BlockCache(Arc::new(Inner {
            directory: Arc::new(Directory::open(path.as_ref(), options)?),
            workers: Workers::new(THREADS),
        })))
    }

    /// `below` with this cache over it, to be read. Storages with an equal `version` have the same
    /// bytes, for ever.
    ///
    /// # Errors
    /// Those of [`Storage::len`].
    pub fn over(&self, below: Arc<dyn Storage>, version: &[&str]) -> io::Result<Arc<dyn Storage>> {
        self.over_checked(below, version, None)
    }

    /// Begins to read a block. None: it is not there.
    fn read(
        &self,
        key: &Key,
        nth: u64,
        length: usize,
    ) -> impl Future<Output = Option<Vec<u8>>> + use<> {
        let (directory, key) = (self.0.directory.clone(), key.clone());
        let read = move || directory.read(&key, nth, length);
        let read = self.0.workers.run(read);
        async move { read.await.flatten() }
    }

    /// Begins to store a block. The end says nothing of whether that could be done.
    fn store(&self, key: &Key, nth: u64, data: Arc<[u8]>) -> impl Future<Output = ()> + use<> {
        let (directory, key) = (self.0.directory.clone(), key.clone());
        let store = move || directory.store(&key, nth, &data);
        let store = self.0.workers.run(store);
        async move { store.await.unwrap_or_default() }
    }
}

impl RemoteCache for BlockCache {
    fn over_checked(
        &self,
        below: Arc<dyn Storage>,
        version: &[&str],
        check: Option<Arc<dyn Check>>,
    ) -> io::Result<Arc<dyn Storage>> {
        let key = Key::new(version);
        let cached = Cached::new(self.clone(), below, key, check)?;
        Ok(Arc::new(cached))
    }

    fn leave_out(&self, name: &str, why: &str) {
        self.0
            .directory
            .warn(&format!("'{name}' is not cached: {why}"));
    }
}

impl From<BlockCache> for Arc<dyn RemoteCache> {
    fn from(cache: BlockCache) -> Self {
        Arc::new(cache)
    }
}

impl fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let directory = &self.0.directory;
        f.debug_tuple("BlockCache").field(directory).finish()
    }
}
