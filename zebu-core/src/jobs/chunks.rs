//! The chunks of a job over a range of bytes.

use std::ops::Range;
use std::sync::Mutex;

use super::workers::Cursor;

/// A failure, and the byte where it happened.
pub(super) type At<E> = (u64, E);

/// How much of a range the workers of a job have done, and the first failure.
#[derive(Debug)]
pub(super) struct Chunks<E> {
    cursor: Cursor,
    /// The failure with the lowest offset so far.
    failure: Mutex<Option<At<E>>>,
}

impl<E> Chunks<E> {
    /// At the start of `total` bytes.
    pub(super) fn new(total: u64) -> Self {
        Chunks {
            cursor: Cursor::new(total),
            failure: Mutex::new(None),
        }
    }

    /// The range of which workers take chunks.
    pub(super) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Calls `work` with chunks that no other worker has, cut at multiples of `size`, until there
    /// are none or a worker has failed.
    pub(super) async fn each_chunk(
        &self,
        size: u64,
        mut work: impl AsyncFnMut(&Range<u64>) -> Result<(), At<E>>,
    ) {
        while let Some(chunk) = self.take(size) {
            let ended = work(&chunk).await;
            self.end(&chunk, ended).await;
        }
    }

    /// The next chunk that no other worker has, cut at a multiple of `size`.
    pub(super) fn take(&self, size: u64) -> Option<Range<u64>> {
        let end_of = |at: u64| ((at / size + 1) * size).min(self.cursor.total());
        self.cursor.take(end_of)
    }

    /// A taken chunk is done, or has failed, which ends the job.
    pub(super) async fn end(&self, chunk: &Range<u64>, ended: Result<(), At<E>>) {
        match ended {
            Ok(()) => self.cursor.finish(chunk).await,
            Err(failure) => self.fail(failure),
        }
    }

    /// Chunks are taken in order, so those before a failure are processed before the job ends. The
    /// failure with the lowest offset is kept.
    fn fail(&self, new: At<E>) {
        self.cursor.stop();
        let mut failure = crate::lock(&self.failure);
        if failure.as_ref().is_none_or(|old| new.0 < old.0) {
            *failure = Some(new);
        }
    }

    /// The result of the job, after all workers have ended.
    pub(super) fn result(&self) -> Result<(), E> {
        let mut failure = crate::lock(&self.failure);
        failure.take().map_or(Ok(()), |(_, error)| Err(error))
    }
}
