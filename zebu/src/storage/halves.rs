//! Large operations on scattered memory: as one, or as two halves, whichever the disk is
//! quicker with.
//!
//! A disk takes longer for memory in several pieces than for one piece. On one host two
//! halves overlap that (5 to 10 % less time), on another the second wake-up costs more than
//! that (up to 14 % more). Nothing that can be asked says which it is, so both are tried.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::OpKind;

/// Operations of a kind that are tried both ways in turn, to begin with.
const FIRST: u32 = 64;

/// After them, one of so many goes the way that was slower: another image, another load, and it
/// may not be so any more.
const AGAIN: u32 = 32;

/// The mean counts so many of the last operations.
const WINDOW: u32 = 64;

/// By how much halves must be quicker: they are two operations, and cost more processor time.
const WORTH: f64 = 0.98;

/// How long operations took, as one and as two.
#[derive(Debug, Default)]
pub struct Halves {
    reads: Mutex<Course>,
    writes: Mutex<Course>,
}

#[derive(Debug, Default)]
struct Course {
    begun: u32,
    whole: Mean,
    halves: Mean,
}

#[derive(Debug, Default)]
struct Mean {
    count: u32,
    /// Nanoseconds a byte.
    value: f64,
}

impl Halves {
    /// Whether the next read or write goes as two halves. Its end is to be told to
    /// [`Halves::ended`], unless it failed or was short.
    pub fn next(&self, kind: OpKind) -> bool {
        let mut course = self
            .course(kind)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        course.next()
    }

    /// An operation on `length` bytes took `time`, in halves or not.
    pub fn ended(&self, kind: OpKind, halves: bool, length: usize, time: Duration) {
        let mut course = self
            .course(kind)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mean = match halves {
            true => &mut course.halves,
            false => &mut course.whole,
        };
        mean.add(time.as_nanos() as f64 / length as f64);
    }

    fn course(&self, kind: OpKind) -> &Mutex<Course> {
        match kind {
            OpKind::Read => &self.reads,
            _ => &self.writes,
        }
    }
}

impl Course {
    fn next(&mut self) -> bool {
        let turn = self.begun;
        self.begun = match turn + 1 {
            // Not to begin again at zero.
            u32::MAX => FIRST,
            next => next,
        };
        if turn < FIRST {
            // Thue and Morse's sequence: in step with no pattern of lengths or places.
            return turn.count_ones() % 2 == 1;
        }
        let better = self.halves.value < self.whole.value * WORTH;
        better != (turn.is_multiple_of(AGAIN))
    }
}

impl Mean {
    /// What is far off (the disk was busy with something else) counts as somewhat off.
    fn add(&mut self, value: f64) {
        self.count = (self.count + 1).min(WINDOW);
        let value = match self.count {
            1 => value,
            _ => value.min(self.value * 2.0),
        };
        self.value += (value - self.value) / f64::from(self.count);
    }
}

#[cfg(test)]
mod tests {
    //! If these fail, large operations of scattered memory go the slower way on some disks.

    use super::*;

    /// How many of `count` operations go in halves, if they take so long.
    fn halved(halves: &Halves, count: usize, whole: u64, split: u64) -> usize {
        (0..count)
            .filter(|_| {
                let two = halves.next(OpKind::Read);
                let time = Duration::from_micros(if two { split } else { whole });
                halves.ended(OpKind::Read, two, 1 << 20, time);
                two
            })
            .count()
    }

    #[test]
    fn the_quicker_way_is_found_and_found_again() {
        let halves = Halves::default();
        assert_eq!(halved(&halves, 64, 500, 450), 32);
        assert_eq!(halved(&halves, 3200, 500, 450), 3100);
        // Another disk, so to say: soon the other way.
        halved(&halves, 3200, 500, 600);
        assert_eq!(halved(&halves, 3200, 500, 600), 100);
        // As quick is not quicker.
        halved(&halves, 6400, 500, 499);
        assert_eq!(halved(&halves, 3200, 500, 499), 100);
    }

    #[test]
    fn a_stall_does_not_decide() {
        let halves = Halves::default();
        halved(&halves, 640, 500, 450);
        let two = halves.next(OpKind::Read);
        halves.ended(OpKind::Read, two, 1 << 20, Duration::from_secs(3));
        assert!(halved(&halves, 32, 500, 450) >= 30);
    }
}
