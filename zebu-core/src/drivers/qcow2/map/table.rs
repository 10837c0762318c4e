//! The L1 table, and slices of L2 tables: big-endian tables as atomics in
//! host order, so that readers never wait for a writer.

use std::io;

use crate::drivers::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use crate::drivers::sync::hint;

use crate::drivers::qcow2::structures::{Geometry, L1Entry, L2Entry};
use crate::storage;

/// The active L1 table, or that of a snapshot.
#[derive(Debug)]
pub(crate) struct L1Table {
    entries: Vec<AtomicU64>,
}

fn words(bytes: &[u8]) -> impl Iterator<Item = AtomicU64> {
    bytes
        .chunks_exact(8)
        .map(|word| AtomicU64::new(u64::from_be_bytes(word.try_into().expect("8 bytes"))))
}

impl L1Table {
    /// No entries yet, with memory for some.
    pub(crate) fn reserved(entries: usize) -> io::Result<Self> {
        Ok(L1Table {
            entries: storage::reserved(entries)?,
        })
    }

    /// Adds entries as they are on the disk.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.entries.extend(words(bytes));
    }

    /// Entry `index`; beyond the end nothing is allocated.
    pub(crate) fn get(&self, index: u64) -> L1Entry {
        let entry = usize::try_from(index)
            .ok()
            .and_then(|index| self.entries.get(index));
        match entry {
            Some(entry) => L1Entry(entry.load(Ordering::Acquire)),
            None => L1Entry::UNALLOCATED,
        }
    }
}

impl L1Table {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Sets entry `index`, which is in the table.
    pub(crate) fn set(&self, index: u64, entry: L1Entry) {
        self.entries[index as usize].store(entry.0, Ordering::Release);
    }

    /// Encodes `bytes.len() / 8` entries from `index` on; zeroes past the end.
    pub(crate) fn encode(&self, index: u64, bytes: &mut [u8]) {
        for (place, index) in bytes.chunks_exact_mut(8).zip(index..) {
            place.copy_from_slice(&self.get(index).to_be_bytes());
        }
    }

    /// The whole table as it is on the disk, for one that shares everything
    /// with another: no copied flag.
    pub(crate) fn encode_shared(&self) -> Vec<u8> {
        let entries = (0..self.len() as u64).map(|index| self.get(index).with_copied(false));
        entries.flat_map(L1Entry::to_be_bytes).collect()
    }

    /// Clears every copied flag: another table shares everything.
    pub(crate) fn share(&mut self) {
        for entry in &mut self.entries {
            let shared = L1Entry(*entry.get_mut()).with_copied(false);
            *entry.get_mut() = shared.0;
        }
    }

    /// Makes the table `entries` long: new ones are unallocated.
    pub(crate) fn resize(&mut self, entries: usize) {
        self.entries.resize_with(entries, Default::default);
    }
}

/// Some consecutive entries of one L2 table.
///
/// # Concurrency
/// Readers never wait. An entry has one writer at a time (the holder of its guest
/// cluster, see `change.rs`), but entries side by side may be written at once.
/// A standard entry is one word. An extended one is two, and is guarded by
/// `version`, a sequence lock: odd while a writer is at work.
#[derive(Debug)]
pub(crate) struct Slice {
    words: Box<[AtomicU64]>,
    version: AtomicU32,
    /// Whether it differs from the disk, and is on the list of those.
    dirty: AtomicBool,
}

impl Slice {
    /// The slice as it is on the disk.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        Slice {
            words: words(bytes).collect(),
            version: AtomicU32::new(0),
            dirty: AtomicBool::new(false),
        }
    }

    /// Entry `index` of the slice.
    #[inline]
    pub(crate) fn get(&self, index: usize, geometry: &Geometry) -> L2Entry {
        if !geometry.has_extended_l2() {
            return L2Entry {
                desc: self.words[index].load(Ordering::Acquire),
                bitmap: 0,
            };
        }
        loop {
            let before = self.version.load(Ordering::Acquire);
            let entry = L2Entry {
                desc: self.words[2 * index].load(Ordering::Acquire),
                bitmap: self.words[2 * index + 1].load(Ordering::Acquire),
            };
            if before & 1 == 0 && self.version.load(Ordering::Relaxed) == before {
                return entry;
            }
            hint::spin_loop();
        }
    }

    /// Sets entry `index`. The caller holds its guest cluster, and notifies the
    /// image that the slice is dirty afterwards.
    pub(crate) fn set(&self, index: usize, entry: L2Entry, geometry: &Geometry) {
        if !geometry.has_extended_l2() {
            self.words[index].store(entry.desc, Ordering::Release);
            return;
        }
        let mut version = self.version.load(Ordering::Relaxed) & !1;
        while let Err(now) = self.version.compare_exchange_weak(
            version,
            version.wrapping_add(1),
            Ordering::Acquire,
            Ordering::Relaxed,
        ) {
            // Another entry of the slice is being set.
            version = now & !1;
            hint::spin_loop();
        }
        // No reader sees a new word without seeing the odd version.
        fence(Ordering::Release);
        self.words[2 * index].store(entry.desc, Ordering::Release);
        self.words[2 * index + 1].store(entry.bitmap, Ordering::Release);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// Notes that entries were set; whether that is news. For `dirty.rs` alone,
    /// which lists the slice with it.
    pub(crate) fn set_dirty(&self) -> bool {
        // Sequentially consistent, as `clean` is: an entry set before a `clean` is seen by the
        // `encode` after it; one set later makes the slice dirty again.
        !self.dirty.swap(true, Ordering::SeqCst)
    }

    /// Whether it is noted already: then what was set before is in the next
    /// copy. (A read-modify-write, in one order with those of `clean`.)
    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty
            .compare_exchange(true, true, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// Takes the note back.
    pub(crate) fn clean(&self) {
        self.dirty.swap(false, Ordering::SeqCst);
    }

    /// Writes the entries into `bytes`, as they are on the disk. Each is whole;
    /// they need not be of one instant.
    pub(crate) fn encode(&self, bytes: &mut [u8], geometry: &Geometry) {
        for index in 0..bytes.len() / geometry.l2_entry_size() {
            let fits = self.get(index, geometry).write(bytes, index, geometry);
            debug_assert!(fits);
        }
    }
}
