//! The end of a file to which an image appends blocks.
//!
//! Space for new blocks is made before they are written, by a task: so that writes to several blocks
//! run side by side, none of which makes the file longer itself, and so that what is not written of a
//! new block reads as zeroes. The file has more space than is in use until [`Tail::cut`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Gate;
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// Least and most bytes that a file is made longer than is needed.
const LEAST_AHEAD: u64 = 1 << 20;
const MOST_AHEAD: u64 = 64 << 20;

/// The end of an image's file.
#[derive(Debug)]
pub(super) struct Tail {
    file: Arc<dyn Storage>,
    /// Bytes of the file, never more than it has: raised after it has grown, lowered before it is cut.
    length: AtomicU64,
    /// Held while the file is made longer.
    gate: Gate,
    /// How long the file was when it was opened, in bytes. What is behind reads as zeroes until it is
    /// written.
    opened: u64,
}

impl Tail {
    /// The end of `file` as it is now.
    pub(super) fn new(file: Arc<dyn Storage>) -> Result<Arc<Self>> {
        let length = file.len()?;
        Ok(Arc::new(Tail {
            file,
            length: AtomicU64::new(length),
            gate: Gate::default(),
            opened: length,
        }))
    }

    /// Bytes of the file that are there.
    pub(super) fn length(&self) -> u64 {
        self.length.load(Ordering::Acquire)
    }

    /// Whether the bytes from `offset` on were never written. (Those of a device have any content.)
    pub(super) fn is_fresh(&self, offset: u64) -> bool {
        offset >= self.opened && !self.file.is_device()
    }

    /// Makes the file reach to `end` at least. A device that does not is full.
    pub(super) async fn reach(self: &Arc<Self>, queue: &Queue, end: u64) -> Result<()> {
        if end <= self.length() {
            return Ok(());
        }
        // A task: requests for other blocks may need the space, too.
        let tail = self.clone();
        let growing = queue.begin(|queue| async move { tail.grow(&queue, end).await });
        growing.await
    }

    async fn grow(&self, queue: &Queue, end: u64) -> Result<()> {
        let _pass = self.gate.enter().await;
        if end <= self.length() {
            return Ok(());
        }
        if self.file.is_device() {
            return Err(Error::os(libc::ENOSPC));
        }
        // With direct I/O whole pages (see `storage/blocks.rs`).
        let unit = self.file.blocks().map_or(1, |blocks| blocks.page());
        let now = self.file.len()?;
        // No write to a page of which a part was behind the end is in flight meanwhile.
        let _written = match self.file.blocks() {
            Some(blocks) if !now.is_multiple_of(unit) => {
                Some(blocks.careful(now / unit * unit..u64::MAX).await)
            }
            _ => None,
        };
        let ahead = end.clamp(LEAST_AHEAD, MOST_AHEAD);
        let mut length = end.saturating_add(ahead).next_multiple_of(unit).max(now);
        if storage::set_len(&*self.file, queue, length).await.is_err() {
            // A limit may lie just behind the length that is needed.
            length = end.next_multiple_of(unit).max(now);
            storage::set_len(&*self.file, queue, length).await?;
        }
        self.length.store(length, Ordering::Release);
        Ok(())
    }

    /// Cuts off what is behind `end`, unless the file was that long when it was opened. Only when no
    /// request is in flight and none will come.
    pub(super) async fn cut(&self, queue: &Queue, end: u64) -> Result<()> {
        let _pass = self.gate.enter().await;
        let end = end.max(self.opened);
        if end < self.length() && !self.file.is_device() {
            // Before the file is shorter, so that this holds if the future is dropped meanwhile.
            self.length.store(end, Ordering::Release);
            storage::set_len(&*self.file, queue, end).await?;
        }
        Ok(())
    }
}
