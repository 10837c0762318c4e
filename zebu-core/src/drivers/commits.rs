//! Commits of an image that is written in place: what has gathered in memory reaches the disk.
//!
//! One commit runs at a time, as a task of the queue whose flush comes first. It serves every flush
//! that was waiting when it began. A flush of the file that has failed is not tried again: data may be
//! lost already, and a second one would not report it. The image refuses changes from then on.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use super::{BoxFuture, Gate};
use crate::broken::{Rule, is_broken};
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// The commits of an image.
#[derive(Debug, Default)]
pub struct Commits {
    /// Held by a commit.
    pub(in crate::drivers) gate: Gate,
    /// Requested flushes, and the number of them that a commit has served.
    asked: AtomicU64,
    served: AtomicU64,
    /// The error number of a flush that failed; 0: none did.
    failed: AtomicI32,
}

/// What requests and tasks share of an image that is written.
pub trait Committed: Send + Sync + 'static {
    /// Its commits.
    fn commits(&self) -> &Commits;

    /// Makes durable what had changed before the call. No other commit runs. It may be dropped at any
    /// await: what it has not made durable, the next one does.
    fn commit<'a>(&'a self, queue: &'a Queue) -> BoxFuture<'a, Result<()>>;
}

/// A flush that was requested, by its number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked(u64);

impl Commits {
    /// Refuses changes after a failed flush.
    #[doc(hidden)]
    pub fn check(&self) -> Result<()> {
        match self.failed.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(Error::os(errno)),
        }
    }

    /// Refuses changes from now on.
    pub(super) fn fail(&self, errno: i32) {
        let failed = &self.failed;
        let _ = failed.compare_exchange(0, errno, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Makes durable what was completed before the call.
    #[doc(hidden)]
    pub async fn flush<T: Committed>(image: &Arc<T>, queue: &Queue) -> Result<()> {
        let mine = image.commits().ask();
        let image = image.clone();
        let commit = queue.begin(|queue| async move {
            let commits = image.commits();
            let commit = async || {
                commits.check()?;
                image.commit(&queue).await
            };
            commits.serve(mine, commit).await
        });
        commit.await
    }

    /// A flush is requested: of what was completed before the call.
    pub(super) fn ask(&self) -> Asked {
        Asked(self.asked.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// Serves a flush, and all that were requested until it starts, by a commit.
    pub(super) async fn serve(
        &self,
        mine: Asked,
        commit: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let _pass = self.gate.enter().await;
        // A commit that began after this request may have served it.
        if self.served.load(Ordering::SeqCst) >= mine.0 {
            return Ok(());
        }
        let until = self.asked.load(Ordering::SeqCst);
        commit().await?;
        self.served.store(until, Ordering::SeqCst);
        Ok(())
    }

    /// Flushes a file of the image, for a commit.
    #[doc(hidden)]
    pub async fn flush_file(&self, queue: &Queue, file: &dyn Storage) -> Result<()> {
        // The kernel reports an error only once, so the task is not dropped before the result is
        // known. (An image that this one is in reports it again.)
        let _unbroken = queue.unbroken(file);
        let fail_on_drop = (!file.is_in_image()).then(|| FailOnDrop(self));
        storage::event(file, storage::Event::FlushToDisk);
        let result = storage::flush(file, queue).await;
        fail_on_drop.into_iter().for_each(FailOnDrop::disarm);
        match &result {
            Ok(()) => {}
            Err(_) if is_broken(Rule::FailedFlushIsFinal) => {}
            Err(e) => self.fail(e.raw_os_error().unwrap_or(libc::EIO)),
        }
        result.map_err(Error::Io)
    }
}

/// Refuses changes if it is dropped before the end: after an error, or with its request.
pub(super) struct FailOnDrop<'a>(pub(super) &'a Commits);

impl FailOnDrop<'_> {
    /// Ends it.
    pub fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for FailOnDrop<'_> {
    fn drop(&mut self) {
        self.0.fail(libc::EIO);
    }
}
