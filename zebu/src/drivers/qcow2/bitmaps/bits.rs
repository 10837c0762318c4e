//! The bits of a dirty bitmap, which any number of threads set.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Words of a chunk, the unit in which memory is taken: 4 KiB.
const CHUNK_WORDS: usize = 512;
/// Bits of a chunk.
const CHUNK_BITS: u64 = CHUNK_WORDS as u64 * 64;

/// Bits of which each stands for `1 << granularity_bits` bytes of a disk. Chunks without a set bit,
/// and those with all bits set, take no memory.
///
/// Bits are only set while the image is shared, and cleared with exclusive access.
#[derive(Debug)]
pub(crate) struct Bits {
    size: u64,
    granularity_bits: u8,
    chunks: Vec<OnceLock<Box<[AtomicU64]>>>,
    /// A bit for each chunk whose bits are all set, whatever the chunk itself has.
    full: Vec<AtomicU64>,
    /// Whether a bit was set or cleared since the bitmap was stored.
    changed: AtomicBool,
}

impl Bits {
    /// No bit is set. `size`: of the disk in bytes.
    pub(crate) fn new(size: u64, granularity_bits: u8) -> Self {
        let mut bits = Bits {
            size: 0,
            granularity_bits,
            chunks: Vec::new(),
            full: Vec::new(),
            changed: AtomicBool::new(false),
        };
        bits.resize(size);
        bits
    }

    /// Number of bits.
    pub(crate) fn len(&self) -> u64 {
        bits_for(self.size, self.granularity_bits)
    }

    /// Size of the disk in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of the disk to a bit, as a power of two.
    pub(crate) fn granularity_bits(&self) -> u8 {
        self.granularity_bits
    }

    /// The disk has another size. Bits of what it gained are not set.
    pub(crate) fn resize(&mut self, size: u64) {
        let old = self.len();
        self.size = size;
        let new = self.len();
        // A full chunk at the old end has bits set behind it, and one at the new end keeps some.
        for end in [old, new] {
            if !end.is_multiple_of(CHUNK_BITS) {
                self.unpack(end / CHUNK_BITS);
            }
        }
        let chunks = new.div_ceil(CHUNK_BITS) as usize;
        for chunk in chunks..self.chunks.len() {
            self.set_full(chunk as u64, false);
        }
        self.chunks.resize_with(chunks, OnceLock::new);
        let words = chunks.div_ceil(64);
        self.full.resize_with(words, AtomicU64::default);
        let end = old.min(new);
        let (chunk, first) = (end / CHUNK_BITS, end % CHUNK_BITS);
        if let Some(words) = self
            .chunks
            .get_mut(chunk as usize)
            .and_then(OnceLock::get_mut)
        {
            for (nth, word) in words.iter_mut().enumerate() {
                *word.get_mut() &= below(first, nth);
            }
        }
        self.changed = AtomicBool::new(true);
    }

    /// No bit is set.
    pub(crate) fn clear(&mut self) {
        *self = Bits::new(self.size, self.granularity_bits);
        self.changed = AtomicBool::new(true);
    }

    /// Whether a bit was set or cleared since [`Bits::stored`].
    pub(crate) fn is_changed(&self) -> bool {
        self.changed.load(Ordering::SeqCst)
    }

    /// Its bits are on the disk, but for those that are set from now on. To be called before they
    /// are looked at; `false` takes that back.
    pub(crate) fn stored(&self, stored: bool) {
        self.changed.store(!stored, Ordering::SeqCst);
    }

    /// Sets the bits of a range of the disk, in bytes.
    pub(crate) fn set(&self, range: Range<u64>) {
        let end = range.end.min(self.size);
        if range.start >= end {
            return;
        }
        let first = range.start >> self.granularity_bits;
        let last = (end - 1) >> self.granularity_bits;
        self.set_bits(first, last + 1);
    }

    /// Sets the bits from `at` to before `end`, which exist.
    pub(crate) fn set_bits(&self, mut at: u64, end: u64) {
        while at < end {
            let chunk = at / CHUNK_BITS;
            let start = chunk * CHUNK_BITS;
            let stop = end.min(start + CHUNK_BITS);
            if !self.is_full(chunk) {
                // The last chunk may be short: it is not marked as full.
                match stop - at == CHUNK_BITS {
                    true => {
                        self.set_full(chunk, true);
                    }
                    false => self.set_in_chunk(chunk, at - start, stop - start),
                }
            }
            at = stop;
        }
        // Also if all of them were set: another request may not have come here after it set them,
        // and a store between would take the bitmap for unchanged.
        if !self.changed.load(Ordering::SeqCst) {
            self.changed.store(true, Ordering::SeqCst);
        }
    }

    fn set_in_chunk(&self, chunk: u64, first: u64, end: u64) {
        let words = self.chunks[chunk as usize].get_or_init(empty_chunk);
        for nth in (first / 64) as usize..end.div_ceil(64) as usize {
            let mask = below(end, nth) & !below(first, nth);
            // Most writes meet bits that are set: these only read.
            if words[nth].load(Ordering::SeqCst) & mask != mask {
                words[nth].fetch_or(mask, Ordering::SeqCst);
            }
        }
    }

    /// Whether bit `at`, which exists, is set, and how many from there on, at least 1 and at most
    /// `limit`, are alike.
    pub(crate) fn run(&self, at: u64, limit: u64) -> (bool, u64) {
        let end = at.saturating_add(limit).min(self.len());
        let value = self.word(at / 64) >> (at % 64) & 1 != 0;
        let mut now = at;
        while now < end {
            if now.is_multiple_of(CHUNK_BITS) {
                let chunk = now / CHUNK_BITS;
                let whole = match self.is_full(chunk) {
                    true => Some(true),
                    false => self.chunks[chunk as usize].get().is_none().then_some(false),
                };
                match whole {
                    Some(whole) if whole == value => {
                        now += CHUNK_BITS;
                        continue;
                    }
                    Some(_) => break,
                    None => {}
                }
            }
            let word = self.word(now / 64);
            let others = if value { !word } else { word } >> (now % 64);
            let left = 64 - now % 64;
            let alike = u64::from(others.trailing_zeros()).min(left);
            now += alike;
            if alike < left {
                break;
            }
        }
        // Another thread may have set the first bit meanwhile.
        (value, (now.min(end) - at).max(1))
    }

    /// Sets the bits of everything that `other`, of a disk of any size and any granularity, has set.
    pub(crate) fn merge(&self, other: &Bits) {
        let mut at = 0;
        while at < other.len() {
            let (set, count) = other.run(at, u64::MAX);
            if set {
                let shift = other.granularity_bits;
                self.set(at << shift..(at + count).saturating_mul(1 << shift));
            }
            at += count;
        }
    }

    /// How many bits are set.
    pub(crate) fn count(&self) -> u64 {
        let mut count = 0;
        let mut at = 0;
        while at < self.len() {
            let (set, run) = self.run(at, u64::MAX);
            count += if set { run } else { 0 };
            at += run;
        }
        count
    }

    /// The stored form of the bits from `first` (a multiple of 8) on: one bit after the other, the
    /// lowest of a byte first. Zero past the end.
    pub(crate) fn encode(&self, first: u64, bytes: &mut [u8]) {
        for (at, byte) in (first / 8..).zip(bytes) {
            *byte = (self.word(at / 8) >> (at % 8 * 8)) as u8;
        }
    }

    /// Sets the bits of the stored form of those from `first` (a multiple of 8) on.
    pub(crate) fn decode(&self, first: u64, bytes: &[u8]) {
        let len = self.len();
        for (nth, byte) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 != 0) {
                let at = first + nth as u64 * 8 + bit;
                if at < len {
                    self.set_bits(at, at + 1);
                }
            }
        }
    }

    /// Word `nth` of the bits; zero past the end.
    fn word(&self, nth: u64) -> u64 {
        let chunk = nth / CHUNK_WORDS as u64;
        let Some(words) = self.chunks.get(chunk as usize) else {
            return 0;
        };
        if self.is_full(chunk) {
            return u64::MAX;
        }
        words.get().map_or(0, |words| {
            words[nth as usize % CHUNK_WORDS].load(Ordering::SeqCst)
        })
    }

    fn is_full(&self, chunk: u64) -> bool {
        let word = self.full.get((chunk / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::SeqCst) >> (chunk % 64) & 1 != 0)
    }

    fn set_full(&self, chunk: u64, full: bool) {
        let (word, mask) = (&self.full[(chunk / 64) as usize], 1 << (chunk % 64));
        match full {
            true => word.fetch_or(mask, Ordering::SeqCst),
            false => word.fetch_and(!mask, Ordering::SeqCst),
        };
    }

    /// Keeps the bits of a full chunk in the chunk itself.
    fn unpack(&mut self, chunk: u64) {
        if self.is_full(chunk) {
            self.set_full(chunk, false);
            if let Some(place) = self.chunks.get_mut(chunk as usize) {
                *place = OnceLock::from(
                    (0..CHUNK_WORDS)
                        .map(|_| AtomicU64::new(u64::MAX))
                        .collect::<Box<[_]>>(),
                );
            }
        }
    }
}

impl Clone for Bits {
    /// The bits that are set now; those that are being set may be missing.
    fn clone(&self) -> Self {
        let bits = Bits::new(self.size, self.granularity_bits);
        bits.merge(self);
        bits
    }
}

/// How many bits a disk of `size` bytes has.
pub(crate) fn bits_for(size: u64, granularity_bits: u8) -> u64 {
    size.div_ceil(1 << granularity_bits)
}

fn empty_chunk() -> Box<[AtomicU64]> {
    (0..CHUNK_WORDS).map(|_| AtomicU64::new(0)).collect()
}

/// The bits of word `nth` that are below bit `end` of its chunk.
fn below(end: u64, nth: usize) -> u64 {
    match end.saturating_sub(nth as u64 * 64) {
        0 => 0,
        64.. => u64::MAX,
        bits => (1 << bits) - 1,
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a change that a bitmap does not show.
    use super::*;
    use proptest::prelude::*;

    /// The bits as a plain list.
    fn list(bits: &Bits) -> Vec<bool> {
        let mut list = Vec::new();
        while (list.len() as u64) < bits.len() {
            let (set, count) = bits.run(list.len() as u64, u64::MAX);
            assert!(count > 0);
            list.extend(std::iter::repeat_n(set, count as usize));
        }
        list
    }

    #[derive(Clone, Debug)]
    enum Step {
        Set(u64, u64),
        Resize(u64),
        Merge(u8, Vec<(u64, u64)>),
        Store,
    }

    const MOST: u64 = 5 << 24;

    fn step() -> impl Strategy<Value = Step> {
        let length = prop_oneof![0..2000u64, 0..MOST];
        let range = (0..MOST, length.clone());
        prop_oneof![
            4 => range.clone().prop_map(|(at, length)| Step::Set(at, length)),
            1 => (0..MOST).prop_map(Step::Resize),
            1 => (9..20u8, prop::collection::vec(range, 0..4))
                .prop_map(|(bits, ranges)| Step::Merge(bits, ranges)),
            1 => Just(Step::Store),
        ]
    }

    #[test]
    fn a_run_is_never_empty_while_bits_are_set() {
        let bits = Bits::new(1 << 30, 9);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for at in (0..bits.len()).step_by(3) {
                    bits.set_bits(at, at + 1);
                }
            });
            while !writer.is_finished() {
                let mut at = 0;
                while at < bits.len() {
                    let (_, count) = bits.run(at, 1000);
                    assert!((1..=1000).contains(&count), "{count} bits at {at}");
                    at += count;
                }
            }
        });
    }

    proptest! {
        #[test]
        fn they_are_those_of_a_plain_list(steps in prop::collection::vec(step(), 1..20)) {
            let shift = 9;
            let mut bits = Bits::new(MOST, shift);
            let mut model = vec![false; bits.len() as usize];
            let set = |model: &mut Vec<bool>, size: u64, start: u64, end: u64| {
                let end = end.min(size);
                if start < end {
                    model[(start >> shift) as usize..=((end - 1) >> shift) as usize].fill(true);
                }
            };
            for step in steps {
                match step {
                    Step::Set(at, length) => {
                        bits.set(at..at + length);
                        set(&mut model, bits.size(), at, at + length);
                    }
                    Step::Resize(size) => {
                        bits.resize(size);
                        model.resize(bits.len() as usize, false);
                    }
                    Step::Merge(granularity, ranges) => {
                        let other = Bits::new(MOST, granularity);
                        for (at, length) in ranges {
                            other.set(at..at + length);
                            let end = (at + length).min(MOST);
                            if at < end {
                                let mask = (1u64 << granularity) - 1;
                                set(&mut model, bits.size(), at & !mask, (end + mask) & !mask);
                            }
                        }
                        bits.merge(&other);
                    }
                    Step::Store => {
                        let mut bytes = vec![0; bits.len().div_ceil(8) as usize + 3];
                        bits.encode(0, &mut bytes);
                        let size = bits.size();
                        bits = Bits::new(size, shift);
                        let (first, second) = bytes.split_at(bytes.len() / 2);
                        bits.decode(0, first);
                        bits.decode(first.len() as u64 * 8, second);
                    }
                }
                prop_assert!(list(&bits) == model);
                prop_assert_eq!(bits.count(), model.iter().filter(|set| **set).count() as u64);
                prop_assert!(list(&bits.clone()) == model);
            }
        }
    }
}
