//! Places of new blocks in the file: behind all that it has.

use std::sync::{Arc, Mutex};

use crate::Tail;
use crate::lock;
use crate::storage::{self, Queue, Storage};
use crate::{Error, Result};

/// The places that blocks may get.
#[derive(Debug)]
pub(super) struct Places {
    tail: Arc<Tail>,
    /// Bytes of a block.
    size: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Where the last place ends.
    end: u64,
    /// Places before that end which were taken and given back. They may have been written.
    free: Vec<u64>,
}

/// A place of a block, which is free again unless it is kept.
pub(super) struct Place<'a> {
    places: &'a Places,
    pub offset: u64,
    /// Whether it reads as zeroes.
    is_zero: bool,
}

impl Places {
    /// Places for blocks of `size` bytes, from `end` on.
    pub(super) fn new(tail: Arc<Tail>, size: u64, end: u64) -> Self {
        let free = Vec::new();
        Places {
            tail,
            size,
            state: Mutex::new(State { end, free }),
        }
    }

    /// Where the last place ends.
    pub(super) fn end(&self) -> u64 {
        lock(&self.state).end
    }

    /// A place for a block, inside of the file.
    pub(super) async fn take(&self, queue: &Queue) -> Result<Place<'_>> {
        let place = self.next()?;
        self.tail.reach(queue, place.offset + self.size).await?;
        Ok(place)
    }

    fn next(&self) -> Result<Place<'_>> {
        let mut state = lock(&self.state);
        let (offset, is_zero) = match state.free.pop() {
            Some(offset) => (offset, false),
            None => {
                let offset = state.end;
                let end = offset.checked_add(self.size);
                let end = end.filter(|end| i64::try_from(*end).is_ok());
                state.end = end.ok_or_else(|| Error::os(libc::EFBIG))?;
                (offset, self.tail.is_fresh(offset))
            }
        };
        Ok(Place {
            places: self,
            offset,
            is_zero,
        })
    }

    /// Forgets the places at the end that are free, so that the file can be cut there. No request is in
    /// flight.
    pub(super) fn shrink(&self) -> u64 {
        let state = &mut *lock(&self.state);
        state.free.sort_unstable();
        while state
            .free
            .last()
            .is_some_and(|last| last + self.size == state.end)
        {
            state.end -= self.size;
            state.free.pop();
        }
        state.end
    }
}

impl Place<'_> {
    /// Makes all of it read as zeroes.
    pub(super) async fn zero(&self, queue: &Queue, file: &dyn Storage) -> Result<()> {
        if !self.is_zero {
            storage::punch_hole(file, queue, self.offset, self.places.size).await?;
        }
        Ok(())
    }

    /// A block has it now.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Place<'_> {
    /// Its writes have ended: the future of a request is dropped after its operations.
    fn drop(&mut self) {
        lock(&self.places.state).free.push(self.offset);
    }
}
