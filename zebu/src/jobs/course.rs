//! The course of a job over a range of bytes: how far its lanes have come, and
//! the first of what went wrong.

use std::ops::Range;
use std::sync::Mutex;

use super::lanes::Cursor;

/// A failure, and the byte where it happened.
pub(super) type At<E> = (u64, E);

/// How a job goes.
#[derive(Debug)]
pub(super) struct Course<E> {
    cursor: Cursor,
    /// The one with the lowest offset so far.
    failure: Mutex<Option<At<E>>>,
}

impl<E> Course<E> {
    /// At the start of `total` bytes.
    pub(super) fn new(total: u64) -> Self {
        Course {
            cursor: Cursor::new(total),
            failure: Mutex::new(None),
        }
    }

    /// How far it has come.
    pub(super) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Calls `work` with chunks that nobody else has, cut at multiples of
    /// `size`, until there are none or somebody has failed.
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

    /// The next chunk that nobody else has, cut at a multiple of `size`.
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

    /// Chunks are taken in order, so those before a failure are tried by
    /// somebody before the job ends: the lowest one wins.
    fn fail(&self, new: At<E>) {
        self.cursor.stop();
        let mut failure = crate::lock(&self.failure);
        if failure.as_ref().is_none_or(|old| new.0 < old.0) {
            *failure = Some(new);
        }
    }

    /// How it ended, after all lanes have.
    pub(super) fn result(&self) -> Result<(), E> {
        let mut failure = crate::lock(&self.failure);
        failure.take().map_or(Ok(()), |(_, error)| Err(error))
    }
}
