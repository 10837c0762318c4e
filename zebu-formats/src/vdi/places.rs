//! Which blocks of the file are in use.
//!
//! QEMU appends a block at the place that the header's count of blocks says, so places are taken from
//! the lowest on, and one that was not used after all (a write that failed or was dropped) is taken
//! again before any other. A block that the disk has keeps its place: nothing is ever freed.

use super::Vdi;
use crate::Result;
use crate::drivers::refused;
use crate::storage;

/// The places for blocks in the file: one bit for each, as many as the disk has blocks.
#[derive(Debug)]
pub(super) struct Places {
    used: Vec<u64>,
    count: u32,
    /// All places before this one are in use.
    lowest: u32,
    /// No place from here on was ever in use.
    highest: u32,
}

/// Places that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u32,
    pub(super) count: u32,
    /// Nothing was ever written there.
    pub(super) is_new: bool,
}

impl Places {
    /// The places that the map of an image has, in a file of so many bytes.
    ///
    /// # Errors
    /// If one is not in the file, leads to the same bytes as another one, or is beyond what a disk of
    /// this size can have: a write could destroy more than its range.
    pub(super) fn of(image: &Vdi, file_len: u64) -> Result<Self> {
        let count = image.map.len() as u32; // At most MAX_BLOCKS.
        let words = image.map.len().div_ceil(64);
        let mut used = storage::reserved(words)?;
        used.resize(words, 0);
        let mut places = Places {
            used,
            count,
            lowest: 0,
            highest: 0,
        };
        for index in 0..u64::from(count) {
            let Some(place) = image.place(index) else {
                continue;
            };
            let damaged = |what: &str| {
                refused(format!(
                    "The VDI block map is damaged: block {index} is at {place}, {what}; 'zebu \
                     convert' copies what can be read"
                ))
            };
            if place >= count {
                return Err(damaged("which is more than the disk has"));
            }
            if places.is_used(place) {
                return Err(damaged("as another one is"));
            }
            if image.needed_end(index, place) > file_len {
                return Err(damaged("past the end of the file"));
            }
            places.set(place, true);
            places.highest = places.highest.max(place + 1);
        }
        Ok(places)
    }

    fn is_used(&self, place: u32) -> bool {
        self.used[place as usize / 64] >> (place % 64) & 1 == 1
    }

    fn set(&mut self, place: u32, used: bool) {
        let bit = 1 << (place % 64);
        let word = &mut self.used[place as usize / 64];
        match used {
            true => *word |= bit,
            false => *word &= !bit,
        }
    }

    /// The lowest place that is not in use.
    fn first_free(&mut self) -> Option<u32> {
        while self.lowest < self.count && self.is_used(self.lowest) {
            // Words that are full at once.
            let is_start = self.lowest.is_multiple_of(64);
            match is_start && self.used[self.lowest as usize / 64] == u64::MAX {
                true => self.lowest = self.lowest.saturating_add(64),
                false => self.lowest += 1,
            }
        }
        (self.lowest < self.count).then_some(self.lowest)
    }

    /// Takes at least one and at most `most` places. None: every block of the disk has one, or is
    /// about to.
    pub(super) fn take(&mut self, most: u32) -> Option<Run> {
        let first = self.first_free()?;
        let is_new = first >= self.highest;
        let limit = match is_new {
            true => self.count,
            false => self.highest,
        };
        let limit = limit.min(first.saturating_add(most));
        let mut end = first;
        while end < limit && !self.is_used(end) {
            self.set(end, true);
            end += 1;
        }
        self.highest = self.highest.max(end);
        Some(Run {
            first,
            count: end - first,
            is_new,
        })
    }

    /// Gives places back.
    pub(super) fn give_back(&mut self, first: u32, count: u32) {
        for place in first..first + count {
            self.set(place, false);
            self.lowest = self.lowest.min(place);
        }
    }

    /// The lowest place before `end` that is not in use.
    pub(super) fn hole(&mut self, end: u32) -> Option<u32> {
        self.first_free().filter(|place| *place < end)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a place for two blocks, and one that counts as new though it was written.
    use super::*;

    fn run(first: u32, count: u32, is_new: bool) -> Option<Run> {
        Some(Run {
            first,
            count,
            is_new,
        })
    }

    #[test]
    fn a_place_that_comes_back_is_taken_first_and_is_not_new() {
        let mut places = Places {
            used: vec![0; 3],
            count: 130,
            lowest: 0,
            highest: 0,
        };
        assert_eq!(places.take(2), run(0, 2, true));
        assert_eq!(places.take(3), run(2, 3, true));
        places.give_back(1, 3);
        assert_eq!(places.hole(5), Some(1));
        assert_eq!(places.take(2), run(1, 2, false));
        assert_eq!(places.take(9), run(3, 1, false));
        assert_eq!(places.take(200), run(5, 125, true));
        assert_eq!(places.take(1), None);
        places.give_back(129, 1);
        assert_eq!(places.hole(129), None);
        assert_eq!(places.take(1), run(129, 1, false));
    }
}
