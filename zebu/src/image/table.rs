//! The L1 table, and slices of L2 tables: big-endian tables as atomics in
//! host order, so that readers never wait for a writer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::format::{Geometry, L1Entry, L2Entry};

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
    /// No entries yet, and room for some.
    pub(crate) fn with_capacity(entries: usize) -> Self {
        L1Table {
            entries: Vec::with_capacity(entries),
        }
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

/// Some consecutive entries of one L2 table.
#[derive(Debug)]
pub(crate) struct Slice {
    words: Box<[AtomicU64]>,
}

impl Slice {
    /// The slice as it is on the disk.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        Slice {
            words: words(bytes).collect(),
        }
    }

    /// Entry `index` of the slice.
    pub(crate) fn get(&self, index: usize, geometry: &Geometry) -> L2Entry {
        if geometry.has_extended_l2() {
            L2Entry {
                desc: self.words[2 * index].load(Ordering::Acquire),
                bitmap: self.words[2 * index + 1].load(Ordering::Acquire),
            }
        } else {
            L2Entry {
                desc: self.words[index].load(Ordering::Acquire),
                bitmap: 0,
            }
        }
    }
}
