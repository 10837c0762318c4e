//! What is known of a file's data.

use std::ops::Range;
use std::sync::Mutex;

use crate::drivers::StorageId;

/// A range of a file that was found to be data, which costs system calls to find out. It may
/// become a hole meanwhile, which does no harm: what reads as data can always be read.
#[derive(Debug, Default)]
pub(super) struct KnownData(Mutex<Option<(StorageId, Range<u64>)>>);

impl KnownData {
    /// How many bytes from `at` on are known to be data.
    pub(super) fn covers(&self, storage: StorageId, at: u64) -> Option<u64> {
        let known = crate::lock(&self.0);
        let (_, range) = known.as_ref().filter(|(of, _)| *of == storage)?;
        range.contains(&at).then(|| range.end - at)
    }

    pub(super) fn set(&self, storage: StorageId, at: u64, length: u64) {
        *crate::lock(&self.0) = Some((storage, at..at.saturating_add(length)));
    }
}
