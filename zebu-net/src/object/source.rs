//! What objects are read from: a web server or an object store.

use std::fmt;
use std::ops::Range;
use std::pin::Pin;

use bytes::Bytes;

use super::failure::Trouble;
use crate::storage::CacheIdentity;

/// A future of the runtime's thread.
pub(super) type Task<'a, T> = Pin<Box<dyn Future<Output = Result<T, Trouble>> + Send + 'a>>;

/// An object of known length that does not change. An implementation checks that with each answer.
pub(super) trait Source: fmt::Debug + Send + Sync {
    /// Asks for bytes `range`, which is not empty and inside the object. The body has these bytes,
    /// or fewer.
    fn get(&self, range: Range<u64>) -> Task<'_, Box<dyn Body>>;

    /// Asks for all bytes from the first on, also if the server has no ranges.
    fn get_all(&self) -> Task<'_, Box<dyn Body>>;
}

/// Bytes that arrive.
pub(super) trait Body: Send {
    /// The next ones; `None` at the end.
    fn chunk(&mut self) -> Task<'_, Option<Bytes>>;
}

/// An object that was opened.
pub(super) struct Opened {
    pub source: Box<dyn Source>,
    /// In bytes.
    pub length: u64,
    /// Whether ranges can be read.
    pub has_ranges: bool,
    pub cache_identity: CacheIdentity,
    /// When it was changed, in seconds since 1970, if the server tells.
    pub modified: Option<u32>,
    /// The bytes from the first on: all, or some.
    pub first: Box<dyn Body>,
}

/// A body of bytes that are here.
pub(super) struct InMemory(pub Option<Bytes>);

impl Body for InMemory {
    fn chunk(&mut self) -> Task<'_, Option<Bytes>> {
        let bytes = self.0.take();
        Box::pin(async move { Ok(bytes) })
    }
}
