//! Several writes of one request in flight.

use std::collections::VecDeque;
use std::io;

use super::access::{Writing, begin_write};
use super::{Iov, Queue, Storage};

/// The writes of one request to one storage, a limited number in flight.
pub struct Writings<'a> {
    storage: &'a dyn Storage,
    queue: &'a Queue,
    most: usize,
    /// The writes in flight, with their offsets.
    flight: VecDeque<(u64, Writing<'a>)>,
}

/// A write that failed: its offset and the error.
pub type Failed = (u64, io::Error);

impl<'a> Writings<'a> {
    /// At most `most` (and at least one) of them in flight.
    #[doc(hidden)]
    pub fn new(storage: &'a dyn Storage, queue: &'a Queue, most: usize) -> Self {
        Writings {
            storage,
            queue,
            most: most.max(1),
            flight: VecDeque::new(),
        }
    }

    /// Starts a write of `iov` as [`write()`](super::write()), when fewer than the limit are in
    /// flight.
    #[doc(hidden)]
    pub async fn write(&mut self, offset: u64, iov: Iov) -> Result<(), Failed> {
        while self.flight.len() >= self.most {
            self.finish_first().await?;
        }
        let writing = begin_write(self.storage, self.queue, offset, iov);
        if writing.has_started() {
            self.flight.push_back((offset, writing));
            return Ok(());
        }
        // It waits for blocks that other requests hold. Meanwhile this one must hold none, or two
        // requests could wait for each other.
        self.finish().await?;
        writing.finish().await.map_err(|e| (offset, e))
    }

    /// Waits for the end of all.
    #[doc(hidden)]
    pub async fn finish(&mut self) -> Result<(), Failed> {
        while !self.flight.is_empty() {
            self.finish_first().await?;
        }
        Ok(())
    }

    async fn finish_first(&mut self) -> Result<(), Failed> {
        match self.flight.pop_front() {
            Some((offset, writing)) => writing.finish().await.map_err(|e| (offset, e)),
            None => Ok(()),
        }
    }
}
