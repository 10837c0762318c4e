//! The expected content of a disk, in memory.

use std::ops::Range;

/// The content that a disk must have, and that it may have if the device is dropped without being
/// closed.
pub struct Disk {
    pub bytes: Vec<u8>,
    cluster: usize,
    /// Whether a cluster may be allocated, so that compressed data may be
    /// refused.
    pub may_be_allocated: Vec<bool>,
    /// The content at the last flush.
    flushed: Vec<u8>,
    /// The changes since then: start and content.
    unflushed: Vec<(usize, Vec<u8>)>,
    /// The number of changes before `unflushed`.
    before: usize,
}

impl Disk {
    pub fn new(bytes: Vec<u8>, cluster: u64) -> Disk {
        let cluster = cluster as usize;
        Disk {
            flushed: bytes.clone(),
            may_be_allocated: vec![false; bytes.len().div_ceil(cluster)],
            bytes,
            cluster,
            unflushed: Vec::new(),
            before: 0,
        }
    }

    /// The clusters that a range touches.
    pub fn clusters(&self, range: &Range<usize>) -> Range<usize> {
        match range.is_empty() {
            true => 0..0,
            false => range.start / self.cluster..range.end.div_ceil(self.cluster),
        }
    }

    /// The bytes of a cluster.
    pub fn cluster(&self, index: usize) -> Range<usize> {
        index * self.cluster..((index + 1) * self.cluster).min(self.bytes.len())
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.unflushed.push((at, bytes.to_vec()));
    }

    /// Notes that all clusters that a range touches may be allocated.
    pub fn set_allocated(&mut self, range: &Range<usize>) {
        let clusters = self.clusters(range);
        self.may_be_allocated[clusters].fill(true);
    }

    /// The disk gets another size. Everything is durable.
    pub fn resize(&mut self, size: usize) {
        self.flush(self.changes());
        let old = self.bytes.len();
        self.bytes.resize(size, 0);
        self.flushed.resize(size, 0);
        self.may_be_allocated
            .resize(size.div_ceil(self.cluster), false);
        // The added part may be preallocated, and the old last cluster with it.
        self.set_allocated(&(old.min(size).saturating_sub(1)..size));
    }

    /// The disk gets these bytes. Everything is durable.
    pub fn replace(&mut self, bytes: Vec<u8>) {
        self.flush(self.changes());
        self.flushed.copy_from_slice(&bytes);
        self.bytes = bytes;
    }

    /// How many changes there were.
    pub fn changes(&self) -> usize {
        self.before + self.unflushed.len()
    }

    /// The first `changes` changes are durable.
    pub fn flush(&mut self, changes: usize) {
        let count = changes.saturating_sub(self.before);
        for (at, bytes) in self.unflushed.drain(..count) {
            self.flushed[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        self.before += count;
    }

    /// Takes the content that was found after the device was dropped without being closed. An error
    /// describes a byte that it may not have.
    pub fn recover(&mut self, found: Vec<u8>) -> Result<(), String> {
        for (at, &byte) in found.iter().enumerate() {
            let possible = byte == self.bytes[at]
                || byte == self.flushed[at]
                || self.unflushed.iter().any(|(start, bytes)| {
                    at.checked_sub(*start).and_then(|n| bytes.get(n)) == Some(&byte)
                });
            if !possible {
                return Err(format!(
                    "byte {at:#x} is {byte:#04x}, was {:#04x} when it was flushed and {:#04x} last",
                    self.flushed[at], self.bytes[at]
                ));
            }
        }
        // Unflushed writes may have allocated clusters.
        self.flushed.copy_from_slice(&found);
        self.bytes = found;
        self.before += self.unflushed.len();
        self.unflushed.clear();
        Ok(())
    }
}

/// Fails the test at the first byte that differs.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8], start: usize, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    if found == expected {
        return;
    }
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    let at = at.expect("they differ");
    let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    let show = |bytes: &[u8]| {
        let bytes = &bytes[at..(at + 16).min(bytes.len())];
        bytes.iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    panic!(
        "{what}: {wrong} of {} bytes are wrong, the first at {:#x}: {} instead of {}",
        found.len(),
        start + at,
        show(found),
        show(expected)
    );
}
