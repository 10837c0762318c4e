//! Places of new blocks in the file of an image that is written, of one size: behind all that it has,
//! or where a request has given one back.
//!
//! A request takes places, writes its blocks there, leads the table to them in memory, and keeps them.
//! Nothing leads to a place before, so a request that fails or is dropped gives its places back, and
//! what it has written there is never read. From [`Places::take`] until then a place has one owner:
//! writes to it need no lock, and the list of places stands for an instant only, without an await.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::Tail;
use crate::lock;
use crate::storage::{self, Iov, Queue, Storage};
use crate::{Error, Result};

/// The places that blocks may get, by number.
#[derive(Debug)]
pub(crate) struct Places {
    tail: Arc<Tail>,
    /// Where place 0 starts in the file, and bytes of each.
    start: u64,
    size: u64,
    /// How many there may be.
    limit: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// All places from here on are free.
    end: u64,
    /// All places from here on were never taken. (It is behind `end` after that was lowered: the file
    /// may not have been cut there.)
    new: u64,
    /// Free places before it, by the first of a run: how many. They may have been written.
    free: BTreeMap<u64, u64>,
}

/// Places that follow each other, which are free again unless they are kept.
pub(crate) struct Place<'a> {
    places: &'a Places,
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Whether they read as zeroes.
    is_zero: bool,
}

impl Places {
    /// Places of `size` bytes from `start` on, at most `limit`. Those in `used` are in use: ascending,
    /// each once.
    pub(crate) fn new(
        tail: Arc<Tail>,
        start: u64,
        size: u64,
        limit: u64,
        used: impl IntoIterator<Item = u64>,
    ) -> Self {
        let mut state = State {
            end: 0,
            new: 0,
            free: BTreeMap::new(),
        };
        for place in used {
            if place > state.end {
                state.free.insert(state.end, place - state.end);
            }
            state.end = place + 1;
        }
        Places {
            tail,
            start,
            size,
            // Each ends where a file can have bytes.
            limit: limit.min((i64::MAX as u64).saturating_sub(start) / size),
            state: Mutex::new(state),
        }
    }

    /// Where in the file the last place that was ever taken ends.
    pub(crate) fn end(&self) -> u64 {
        self.start + lock(&self.state).end * self.size
    }

    /// At least one place and at most `most`, inside of the file. The lowest free ones come first.
    ///
    /// # Errors
    /// `EFBIG` if there is none; those of making the file longer.
    pub(crate) async fn take(&self, queue: &Queue, most: u64) -> Result<Place<'_>> {
        let place = match self.take_free(most) {
            Some(place) => place,
            None => self.take_new(most)?,
        };
        let end = place.offset() + place.bytes();
        self.tail.reach(queue, end).await?;
        Ok(place)
    }

    /// The lowest places that were given back, or that the image did not use, at most `most`.
    pub(crate) fn take_free(&self, most: u64) -> Option<Place<'_>> {
        let free = &mut lock(&self.state).free;
        let (first, length) = free.pop_first()?;
        let count = length.min(most);
        if count < length {
            free.insert(first + count, length - count);
        }
        Some(Place {
            places: self,
            first,
            count,
            is_zero: false,
        })
    }

    fn take_new(&self, most: u64) -> Result<Place<'_>> {
        let mut state = lock(&self.state);
        let first = state.end;
        let count = most.min(self.limit.saturating_sub(first));
        if count == 0 {
            return Err(Error::os(libc::EFBIG));
        }
        state.end += count;
        let is_new = first >= state.new;
        state.new = state.new.max(state.end);
        Ok(Place {
            places: self,
            first,
            count,
            is_zero: is_new && self.tail.is_fresh(self.start + first * self.size),
        })
    }

    /// Forgets the free places at the end, so that the file can be cut where it says. No request is in
    /// flight.
    pub(crate) fn shrink(&self) -> u64 {
        {
            let state = &mut *lock(&self.state);
            while let Some((&first, &count)) = state.free.last_key_value() {
                if first + count < state.end {
                    break;
                }
                state.end = first;
                state.free.pop_last();
            }
        }
        self.end()
    }
}

impl Place<'_> {
    /// Where they start in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.places.start + self.first * self.places.size
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> u64 {
        self.count * self.places.size
    }

    /// Writes at `within` bytes from their start. The rest of them reads as zeroes.
    pub(crate) async fn write(
        &self,
        queue: &Queue,
        file: &dyn Storage,
        within: u64,
        iov: &Iov,
    ) -> Result<()> {
        if (iov.len() as u64) < self.bytes() {
            self.zero(queue, file).await?;
        }
        Ok(storage::write(file, queue, self.offset() + within, iov).await?)
    }

    /// Makes all of them read as zeroes.
    pub(crate) async fn zero(&self, queue: &Queue, file: &dyn Storage) -> Result<()> {
        if !self.is_zero {
            storage::punch_hole(file, queue, self.offset(), self.bytes()).await?;
        }
        Ok(())
    }

    /// Blocks have them now.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Place<'_> {
    /// Its writes have ended: the future of a request is dropped after its operations.
    fn drop(&mut self) {
        lock(&self.places.state).free.insert(self.first, self.count);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a place for two blocks, and one that counts as new though it was written.
    use super::*;
    use crate::storage::Memory;

    /// Takes new or free places and says which: the first, how many, whether they read as zeroes.
    fn take(places: &Places, most: u64) -> Option<(Place<'_>, (u64, u64, bool))> {
        let place = places
            .take_free(most)
            .or_else(|| places.take_new(most).ok())?;
        let what = (place.first, place.count, place.is_zero);
        Some((place, what))
    }

    fn keep(places: &Places, most: u64) -> Option<(u64, u64, bool)> {
        take(places, most).map(|(place, what)| {
            place.keep();
            what
        })
    }

    #[test]
    fn a_place_that_comes_back_is_taken_first_and_is_not_new() {
        let file = Arc::new(Memory::new(vec![0; 1000]));
        let places = Places::new(Tail::new(file).unwrap(), 600, 100, 130, [1, 2]);
        assert_eq!(keep(&places, 3), Some((0, 1, false)));
        // This one has bytes of the file that was there before.
        assert_eq!(keep(&places, 1), Some((3, 1, false)));
        let (back, what) = take(&places, 3).unwrap();
        assert_eq!(what, (4, 3, true));
        assert_eq!(keep(&places, 1), Some((7, 1, true)));
        drop(back);
        assert_eq!(keep(&places, 2), Some((4, 2, false)));
        assert_eq!(keep(&places, 2), Some((6, 1, false)));
        let (back, what) = take(&places, 200).unwrap();
        assert_eq!(what, (8, 122, true));
        assert!(take(&places, 1).is_none());
        drop(back);
        assert_eq!(keep(&places, 2), Some((8, 2, false)));
        assert_eq!(places.shrink(), 600 + 10 * 100);
        // What was written there is gone only if the file was cut.
        assert_eq!(keep(&places, 1), Some((10, 1, false)));
    }
}
