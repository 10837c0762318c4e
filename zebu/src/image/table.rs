//! The L1 table, and slices of L2 tables: big-endian tables as atomics in
//! host order, so that readers never wait for a writer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::format::{Geometry, L1Entry, L2Entry};

/// The active L1 table, or that of a snapshot.
#[derive(Debug)]
pub(crate) struct L1Table {
    entries: Box<[AtomicU64]>,
}

fn words(bytes: &[u8]) -> Box<[AtomicU64]> {
    bytes
        .chunks_exact(8)
        .map(|word| AtomicU64::new(u64::from_be_bytes(word.try_into().expect("8 bytes"))))
        .collect()
}

impl L1Table {
    /// The table as it is on the disk.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        L1Table {
            entries: words(bytes),
        }
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
            words: words(bytes),
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
