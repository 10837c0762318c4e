//! Large operations on scattered memory: as one, or as two halves, whichever the disk is
//! quicker with.
//!
//! A disk takes longer for memory in several pieces than for one piece. On one host two
//! halves overlap that (5 to 10 % less time), on another the second wake-up costs more than
//! that (up to 14 % more). Nothing that can be asked says which it is, so both are tried.

use std::sync::Mutex;
use std::time::Duration;

use super::OpKind;
use crate::lock;

/// Operations of a kind that are tried both ways in turn, to begin with.
const FIRST: u32 = 64;

/// After them, one of 2^5, by chance so to say, goes the way that was slower: another load, and
/// it may not be so any more.
const AGAIN: u32 = 5;

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
        let mut course = lock(self.course(kind));
        course.next()
    }

    /// An operation on `length` bytes took `time`, in halves or not, until its task had
    /// heard of it. (What that task waited for before counts, too, either way.)
    pub fn ended(&self, kind: OpKind, halves: bool, length: usize, time: Duration) {
        let mut course = lock(self.course(kind));
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
        // Fibonacci's hash, which has no short period either.
        better != (turn.wrapping_mul(0x9e37_79b1) >> (u32::BITS - AGAIN) == 0)
    }
}

impl Mean {
    /// What is far above (the disk was busy with something else) counts as somewhat above; after
    /// what is far below the mean begins anew, since it began with such a one, or the load has
    /// gone.
    fn add(&mut self, value: f64) {
        self.count = match value < self.value / 2.0 {
            true => 1,
            false => (self.count + 1).min(WINDOW),
        };
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
        let most = |halved| (3000..3200).contains(&halved);
        assert_eq!(halved(&halves, 64, 500, 450), 32);
        assert!(most(halved(&halves, 3200, 500, 450)));
        // Another disk, so to say: soon the other way.
        halved(&halves, 3200, 500, 600);
        assert!(most(3200 - halved(&halves, 3200, 500, 600)));
        // As quick is not quicker.
        halved(&halves, 6400, 500, 499);
        assert!(most(3200 - halved(&halves, 3200, 500, 499)));
    }

    #[test]
    fn a_stall_does_not_decide() {
        for before in [0, 1, 2, 640] {
            let halves = Halves::default();
            halved(&halves, before, 500, 450);
            let two = halves.next(OpKind::Read);
            halves.ended(OpKind::Read, two, 1 << 20, Duration::from_secs(3));
            halved(&halves, 64, 500, 450);
            assert!(halved(&halves, 320, 500, 450) >= 290, "{before}");
        }
    }
}
