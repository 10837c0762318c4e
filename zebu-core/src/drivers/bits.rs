//! The bits of a dirty bitmap, which any number of threads set.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Words of a chunk: 4 KiB.
const CHUNK_WORDS: usize = 512;
/// Bits of a chunk.
const CHUNK_BITS: u64 = CHUNK_WORDS as u64 * 64;
/// Chunks of a group. Few in tests, whose bitmaps are small.
const GROUP_CHUNKS: usize = if cfg!(test) { 2 } else { 512 };

/// Words of bits, once one of them is set.
type Chunk = OnceLock<Box<[AtomicU64]>>;

/// Bits of which each stands for `1 << granularity_bits` bytes of a disk.
///
/// Chunks without a set bit, and those with all bits set, take no memory. Nor do groups of such
/// chunks: an image may have thousands of bitmaps of 2^32 bits, whose tables are holes of its file.
///
/// Bits are only set while the image is shared, and cleared with exclusive access.
#[derive(Debug)]
pub struct Bits {
    size: u64,
    granularity_bits: u8,
    groups: Vec<OnceLock<Box<[Chunk]>>>,
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
            groups: Vec::new(),
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

    /// Changes the size of the disk. Bits of what is added are not set.
    pub(crate) fn resize(&mut self, size: u64) {
        let old = self.len();
        self.size = size;
        let new = self.len();
        // What is kept ends there. Of a full chunk the words may lack bits.
        let end = old.min(new);
        let last = end / CHUNK_BITS;
        if self.is_full(last) {
            let words = self.chunk_to_set(last).iter();
            words.for_each(|word| word.store(u64::MAX, Ordering::SeqCst));
        }
        for chunk in last..old.div_ceil(CHUNK_BITS) {
            self.set_full(chunk, false);
        }
        let chunks = new.div_ceil(CHUNK_BITS) as usize;
        self.full
            .resize_with(chunks.div_ceil(64), AtomicU64::default);
        self.groups
            .resize_with(chunks.div_ceil(GROUP_CHUNKS), OnceLock::new);
        let group = self.groups.get_mut(last as usize / GROUP_CHUNKS);
        if let Some(group) = group.and_then(OnceLock::get_mut) {
            let rest = &mut group[last as usize % GROUP_CHUNKS..];
            rest[1..].iter_mut().for_each(|chunk| *chunk = Chunk::new());
            for (nth, word) in (0..).zip(rest[0].get_mut().into_iter().flatten()) {
                *word.get_mut() &= below(end % CHUNK_BITS, nth);
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

    /// Notes whether the disk has the bits. A store calls it before it reads them: bits that are set
    /// from then on count as changed.
    pub(crate) fn stored(&self, stored: bool) {
        self.changed.store(!stored, Ordering::SeqCst);
    }

    /// Whether both have the same bits for a disk of one size.
    pub(crate) fn is_same(&self, other: &Bits) -> bool {
        if (self.size, self.granularity_bits) != (other.size, other.granularity_bits) {
            return false;
        }
        let mut at = 0;
        while at < self.len() {
            let (value, own) = self.run(at, self.len() - at);
            let (others, length) = other.run(at, own);
            if value != others {
                return false;
            }
            at += length;
        }
        true
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
            let stop = end.min((chunk + 1) * CHUNK_BITS);
            // The last chunk may be short: it is not marked as full.
            if stop - at == CHUNK_BITS {
                self.set_full(chunk, true);
            } else if !self.is_full(chunk) {
                for nth in at / 64..stop.div_ceil(64) {
                    self.set_in_word(nth, below(stop, nth) & !below(at, nth));
                }
            }
            at = stop;
        }
        self.note_change();
    }

    /// To be called after bits were set, also by other requests: one of these may not have come
    /// here yet, and a store between would take the bitmap for unchanged.
    fn note_change(&self) {
        if !self.changed.load(Ordering::SeqCst) {
            self.changed.store(true, Ordering::SeqCst);
        }
    }

    /// Sets bits of word `nth`, which exists.
    fn set_in_word(&self, nth: u64, mask: u64) {
        let words = self.chunk_to_set(nth / CHUNK_WORDS as u64);
        let word = &words[nth as usize % CHUNK_WORDS];
        // The bits of most writes are set already: these only read.
        if word.load(Ordering::SeqCst) & mask != mask {
            word.fetch_or(mask, Ordering::SeqCst);
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
                    false => self.chunk(chunk).is_none().then_some(false),
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

    /// The stored form of the bits from `first` (a multiple of 64) on: one bit after the other, the
    /// lowest of a byte first. Zero past the end.
    pub(crate) fn encode(&self, first: u64, bytes: &mut [u8]) {
        for (nth, bytes) in (first / 64..).zip(bytes.chunks_mut(8)) {
            bytes.copy_from_slice(&self.word(nth).to_le_bytes()[..bytes.len()]);
        }
    }

    /// Sets the bits of the stored form of those from `first` (a multiple of 64) on. What it has past
    /// the end is ignored.
    pub(crate) fn decode(&self, first: u64, bytes: &[u8]) {
        let end = self.len();
        for (nth, bytes) in (first / 64..).zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let word = u64::from_le_bytes(word) & below(end, nth);
            if word != 0 {
                self.set_in_word(nth, word);
            }
        }
        self.note_change();
    }

    /// Word `nth` of the bits; zero past the end.
    fn word(&self, nth: u64) -> u64 {
        let chunk = nth / CHUNK_WORDS as u64;
        if self.is_full(chunk) {
            return u64::MAX;
        }
        let words = self.chunk(chunk);
        words.map_or(0, |words| {
            words[nth as usize % CHUNK_WORDS].load(Ordering::SeqCst)
        })
    }

    /// The words of a chunk; none if no bit was set, or if there is no such chunk.
    fn chunk(&self, chunk: u64) -> Option<&[AtomicU64]> {
        let group = self.groups.get(chunk as usize / GROUP_CHUNKS)?.get()?;
        group[chunk as usize % GROUP_CHUNKS].get().map(Box::as_ref)
    }

    /// The words of a chunk that exists.
    fn chunk_to_set(&self, chunk: u64) -> &[AtomicU64] {
        let group = &self.groups[chunk as usize / GROUP_CHUNKS];
        let group = group.get_or_init(|| (0..GROUP_CHUNKS).map(|_| Chunk::new()).collect());
        group[chunk as usize % GROUP_CHUNKS]
            .get_or_init(|| (0..CHUNK_WORDS).map(|_| AtomicU64::new(0)).collect())
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
pub fn bits_for(size: u64, granularity_bits: u8) -> u64 {
    size.div_ceil(1 << granularity_bits)
}

/// The bits of word `nth` that are before bit `end`.
fn below(end: u64, nth: u64) -> u64 {
    match end.saturating_sub(nth * 64) {
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
                        let (first, second) = bytes.split_at(bytes.len() / 16 * 8);
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
