//! The data that each block may have while many threads write.
//!
//! A block is a sector. A write fills it with the block's address, the number of the write, and a
//! checksum of both, so that lost, misplaced and mixed data are detected.
//!
//! A read may return the data of any write that began before the read ended and was not replaced.
//! A write is replaced by one that began after it had ended, and that ended before the read began.
//! If a write to the block was in flight during the read, it may return words of several writes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

pub const BLOCK: usize = 512;
const WORDS: usize = BLOCK / 8;
/// Blocks behind one lock.
const GROUP: usize = 64;

/// A reading of the ledger's clock. Each begin and each end of a request has its own.
pub type Time = u64;
/// The number of a write; 0 for zeroes.
pub type Sequence = u64;

/// The words of a block.
fn words(block: usize, sequence: Sequence) -> impl Iterator<Item = u64> {
    let (address, is_zero) = ((block * BLOCK) as u64, sequence == 0);
    (0..WORDS as u64).map(move |nth| match nth {
        _ if is_zero => 0,
        0 => address,
        1 => sequence,
        // It compresses, for compressed writes.
        _ => checksum(address, sequence) ^ nth,
    })
}

/// A hash of both, by the finalizer of splitmix64.
fn checksum(address: u64, sequence: Sequence) -> u64 {
    let mut x = address ^ sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The bytes of blocks that one write has filled.
pub fn stamped(sequence: Sequence, blocks: Range<usize>) -> Vec<u8> {
    blocks
        .flat_map(|block| words(block, sequence))
        .flat_map(u64::to_le_bytes)
        .collect()
}

/// The bytes of a disk whose blocks are of these writes.
pub fn image_of(sequences: &[Sequence]) -> Vec<u8> {
    let blocks = sequences.iter().enumerate();
    blocks.flat_map(|(n, s)| stamped(*s, n..n + 1)).collect()
}

fn is_of(bytes: &[u8], block: usize, sequence: Sequence) -> bool {
    let pairs = bytes.chunks(8).zip(words(block, sequence));
    pairs.into_iter().all(|(b, word)| b == word.to_le_bytes())
}

/// The number of the write that the bytes of a block contain.
fn claims(bytes: &[u8]) -> Sequence {
    u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"))
}

/// A write to a block whose data may still be read.
#[derive(Clone, Copy, Debug)]
struct Write {
    sequence: Sequence,
    began: Time,
    /// `Time::MAX` while it is in flight.
    ended: Time,
    /// It was replaced at this time: reads that begin later do not return it.
    gone: Time,
}

/// The blocks of a disk.
pub struct Ledger {
    clock: AtomicU64,
    /// When the requests in flight began.
    active: Mutex<BTreeSet<Time>>,
    groups: Vec<Mutex<Vec<Vec<Write>>>>,
    blocks: usize,
}

impl Ledger {
    /// A disk whose blocks are of these writes. No request is in flight.
    pub fn new(before: &[Sequence]) -> Self {
        let write = |sequence: &Sequence| {
            vec![Write {
                sequence: *sequence,
                began: 0,
                ended: 0,
                gone: Time::MAX,
            }]
        };
        let group = |chunk: &[Sequence]| Mutex::new(chunk.iter().map(write).collect());
        Ledger {
            clock: AtomicU64::new(1),
            active: Mutex::default(),
            groups: before.chunks(GROUP).map(group).collect(),
            blocks: before.len(),
        }
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    fn active(&self) -> MutexGuard<'_, BTreeSet<Time>> {
        self.active.lock().unwrap()
    }

    fn now(&self) -> Time {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// A request begins. The caller must call [`Ledger::end`] for it.
    pub fn begin(&self) -> Time {
        let mut active = self.active();
        let now = self.now();
        active.insert(now);
        now
    }

    pub fn end(&self, began: Time) {
        self.active().remove(&began);
    }

    fn each(&self, blocks: Range<usize>, mut visit: impl FnMut(usize, &mut Vec<Write>)) {
        let mut block = blocks.start;
        while block < blocks.end {
            let end = ((block / GROUP + 1) * GROUP).min(blocks.end);
            let mut group = self.groups[block / GROUP].lock().unwrap();
            for block in block..end {
                visit(block, &mut group[block % GROUP]);
            }
            block = end;
        }
    }

    /// A request that began then is about to write.
    pub fn writes(&self, blocks: Range<usize>, began: Time, sequence: Sequence) {
        self.each(blocks, |_, writes| {
            writes.push(Write {
                sequence,
                began,
                ended: Time::MAX,
                gone: Time::MAX,
            });
        });
    }

    /// The write has ended. It took effect if it is `certain`, else it may have.
    pub fn wrote(&self, blocks: Range<usize>, began: Time, certain: bool) {
        let now = self.now();
        let oldest = *self.active().first().unwrap_or(&began);
        self.each(blocks, |_, writes| {
            let this = writes.iter_mut().find(|w| w.began == began);
            let this = this.expect("it has begun");
            this.ended = now;
            if certain {
                for other in writes.iter_mut().filter(|w| w.ended < began) {
                    other.gone = other.gone.min(now);
                }
            }
            writes.retain(|w| w.gone >= oldest);
        });
    }

    /// Verifies the data of a read that has just ended.
    pub fn judge(&self, blocks: Range<usize>, began: Time, bytes: &[u8]) -> Result<(), String> {
        let (first, now) = (blocks.start, self.now());
        let mut verdict = Ok(());
        self.each(blocks, |block, writes| {
            let found = &bytes[(block - first) * BLOCK..][..BLOCK];
            let seen = || {
                let writes = writes.iter();
                writes.filter(|w| w.began < now && w.gone >= began)
            };
            if verdict.is_err() || seen().any(|w| is_of(found, block, w.sequence)) {
                return;
            }
            let is_mixed = seen().any(|w| w.ended > began)
                && found.chunks(8).enumerate().all(|(nth, word)| {
                    seen().any(|w| {
                        let whole = words(block, w.sequence).nth(nth);
                        whole.is_some_and(|whole| whole.to_le_bytes() == word)
                    })
                });
            if !is_mixed {
                verdict = Err(impossible(block, found, began, now, writes));
            }
        });
        verdict
    }

    /// Verifies all data of the disk, read while no request was in flight: each block must be of
    /// one write. Returns the numbers of these writes.
    pub fn settle(&self, bytes: &[u8]) -> Result<Vec<Sequence>, String> {
        let began = self.now();
        assert!(self.active().is_empty(), "a request is in flight");
        let mut sequences = Vec::with_capacity(self.blocks);
        let mut verdict = Ok(());
        self.each(0..self.blocks, |block, writes| {
            let found = &bytes[block * BLOCK..][..BLOCK];
            let here = writes
                .iter()
                .find(|w| w.gone >= began && is_of(found, block, w.sequence));
            sequences.push(here.map_or(0, |w| w.sequence));
            if here.is_none() && verdict.is_ok() {
                verdict = Err(impossible(block, found, began, began, writes));
            }
        });
        verdict.map(|()| sequences)
    }
}

fn impossible(block: usize, found: &[u8], began: Time, ended: Time, writes: &[Write]) -> String {
    let claimed = claims(found);
    let what = match found.iter().all(|byte| *byte == 0) {
        true => "zeroes".to_string(),
        false if is_of(found, block, claimed) => format!("write {claimed}"),
        false => format!("no block: {:02x?}..", &found[..24]),
    };
    let mut lines = format!("block {block} was read as {what}, from {began} to {ended}");
    for w in writes {
        lines += &format!("\n  {w:?}");
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A write of block 0.
    fn write(ledger: &Ledger, sequence: Sequence, certain: bool) {
        let began = ledger.begin();
        ledger.writes(0..1, began, sequence);
        ledger.wrote(0..1, began, certain);
        ledger.end(began);
    }

    fn read(ledger: &Ledger, bytes: &[u8]) -> bool {
        let began = ledger.begin();
        let result = ledger.judge(0..1, began, bytes);
        ledger.end(began);
        result.is_ok()
    }

    #[test]
    fn lost_misplaced_replaced_and_torn_data_are_detected() {
        let of = |sequence| stamped(sequence, 0..1);
        let ledger = Ledger::new(&[1, 0]);
        assert!(read(&ledger, &of(1)));
        assert!(!read(&ledger, &of(0)), "lost");
        assert!(!read(&ledger, &of(2)), "invented");
        assert!(!read(&ledger, &stamped(1, 1..2)), "data of another block");
        write(&ledger, 2, true);
        assert!(read(&ledger, &of(2)));
        assert!(!read(&ledger, &of(1)), "replaced");
        write(&ledger, 0, false);
        assert!(read(&ledger, &of(2)) && read(&ledger, &of(0)), "discarded");
        let mixed = [&of(2)[..256], &of(3)[256..]].concat();
        let began = ledger.begin();
        ledger.writes(0..1, began, 3);
        assert!(read(&ledger, &of(2)) && read(&ledger, &of(3)), "in flight");
        assert!(read(&ledger, &mixed), "torn in flight");
        assert!(!read(&ledger, &[&of(1)[..256], &of(3)[256..]].concat()));
        // A read that began before the write ended may return a mixture or the old data.
        let reading = ledger.begin();
        ledger.wrote(0..1, began, true);
        ledger.end(began);
        assert!(ledger.judge(0..1, reading, &mixed).is_ok());
        assert!(ledger.judge(0..1, reading, &of(2)).is_ok());
        ledger.end(reading);
        assert!(!read(&ledger, &mixed), "torn afterwards");
        assert!(!read(&ledger, &of(2)));
        let whole = [of(3), of(0)].concat();
        assert_eq!(ledger.settle(&whole), Ok(vec![3, 0]));
        assert!(ledger.settle(&[mixed, of(0)].concat()).is_err());
    }
}
