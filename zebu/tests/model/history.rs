//! Which bytes a read may have found when others wrote meanwhile.
//!
//! Everything written carries a stamp in each 8 bytes: which write it was, and
//! for which sector. A stamp that is read must be that of a write that began
//! before the read ended, and that no other write wholly replaced: one that
//! began after it had ended, and ended before the read began.

use std::collections::HashMap;
use std::ops::Range;

pub const SECTOR: usize = 512;

/// What a write leaves in a sector: 0 for zeroes, else [`stamp`].
pub type Word = u64;

/// The word that write `id` (not 0) puts into `sector`.
pub fn stamp(id: u32, sector: usize) -> Word {
    u64::from(id) << 32 | sector as u64
}

/// The bytes of some sectors as write `id` leaves them.
pub fn stamped(id: u32, sectors: Range<usize>) -> Vec<u8> {
    sectors
        .flat_map(|sector| [stamp(id, sector).to_le_bytes(); SECTOR / 8])
        .flatten()
        .collect()
}

/// What one request did. Times are readings of a counter that all threads
/// count up.
pub struct Event {
    pub began: u64,
    /// None: it failed, or need not have done anything; it may have its effect
    /// at any time after it began.
    pub ended: Option<u64>,
    pub sectors: Range<usize>,
    pub what: What,
    /// For messages.
    pub thread: usize,
}

pub enum What {
    /// The id of the write; 0 for zeroes.
    Wrote(u32),
    /// The words found, one for each run of equal words in each sector.
    Read(Vec<Vec<Word>>),
}

/// The words of each sector, each run of equal ones once.
pub fn words(bytes: &[u8]) -> Vec<Vec<Word>> {
    let sectors = bytes.chunks(SECTOR).map(|sector| {
        let words = sector.chunks(8).map(|word| {
            let word = word.try_into().expect("sectors are whole words");
            Word::from_le_bytes(word)
        });
        let mut words: Vec<Word> = words.collect();
        words.dedup();
        words
    });
    sectors.collect()
}

/// Says which word was found where no write can have put it. `before` is what
/// was in each sector before the first event.
pub fn judge(before: &[Word], events: &[Event]) -> Result<(), String> {
    let mut writes: HashMap<usize, Vec<&Event>> = HashMap::new();
    for event in events {
        if let What::Wrote(_) = event.what {
            for sector in event.sectors.clone() {
                writes.entry(sector).or_default().push(event);
            }
        }
    }
    let none = Vec::new();
    for read in events {
        let What::Read(found) = &read.what else {
            continue;
        };
        for (sector, words) in read.sectors.clone().zip(found) {
            let writes = writes.get(&sector).unwrap_or(&none);
            for &word in words {
                if !is_possible(before[sector], writes, read, sector, word) {
                    return Err(impossible(before[sector], writes, read, sector, words));
                }
            }
        }
    }
    Ok(())
}

fn word_of(write: &Event, sector: usize) -> Word {
    match write.what {
        What::Wrote(0) | What::Read(_) => 0,
        What::Wrote(id) => stamp(id, sector),
    }
}

fn is_possible(before: Word, writes: &[&Event], read: &Event, sector: usize, word: Word) -> bool {
    let end = read.ended.expect("reads end");
    // Whether another write came wholly between a write that had ended at
    // `ended` and this read.
    let replaced = |ended: Option<u64>| {
        let Some(ended) = ended else {
            return false;
        };
        let mut others = writes.iter();
        others.any(|w| w.began > ended && w.ended.is_some_and(|e| e < read.began))
    };
    word == before && !replaced(Some(0))
        || writes
            .iter()
            .any(|w| word_of(w, sector) == word && w.began < end && !replaced(w.ended))
}

fn impossible(
    before: Word,
    writes: &[&Event],
    read: &Event,
    sector: usize,
    words: &[Word],
) -> String {
    let mut lines = format!(
        "sector {sector}: thread {} read {words:x?} from {} to {:?}; before all {before:x}",
        read.thread, read.began, read.ended
    );
    for w in writes {
        let word = word_of(w, sector);
        let (first, count) = (w.sectors.start, w.sectors.len());
        lines += &format!(
            "\n  thread {} wrote {word:x} from {} to {:?} (sectors {first}+{count})",
            w.thread, w.began, w.ended
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrote(id: u32, began: u64, ended: impl Into<Option<u64>>) -> Event {
        Event {
            began,
            ended: ended.into(),
            sectors: 0..2,
            what: What::Wrote(id),
            thread: 0,
        }
    }

    fn read(id: u32, began: u64, ended: u64) -> Event {
        let words = (0..2).map(|s| vec![if id == 0 { 0 } else { stamp(id, s) }]);
        Event {
            began,
            ended: Some(ended),
            sectors: 0..2,
            what: What::Read(words.collect()),
            thread: 1,
        }
    }

    fn judged(events: Vec<Event>) -> bool {
        judge(&[0, 0], &events).is_ok()
    }

    #[test]
    fn the_judge_knows_right_from_wrong() {
        assert!(judged(vec![wrote(1, 1, 2), read(1, 3, 4)]));
        assert!(!judged(vec![wrote(1, 1, 2), read(0, 3, 4)]), "lost");
        assert!(!judged(vec![wrote(1, 3, 4), read(1, 1, 2)]), "too early");
        assert!(!judged(vec![wrote(1, 1, 2), read(2, 3, 4)]), "made up");
        for id in [0, 1] {
            assert!(judged(vec![wrote(1, 1, 3), read(id, 2, 4)]), "concurrent");
            assert!(judged(vec![wrote(1, 1, None), read(id, 2, 4)]), "failed");
        }
        for id in [1, 2] {
            let both = vec![wrote(1, 1, 3), wrote(2, 2, 4), read(id, 5, 6)];
            assert!(judged(both), "either of two concurrent writes");
        }
        let old = vec![wrote(1, 1, 2), wrote(2, 3, 4), read(1, 5, 6)];
        assert!(!judged(old), "replaced");
        let misplaced = Event {
            what: What::Read(vec![vec![stamp(1, 1)], vec![stamp(1, 1)]]),
            ..read(1, 3, 4)
        };
        assert!(!judged(vec![wrote(1, 1, 2), misplaced]), "another's sector");
    }
}
