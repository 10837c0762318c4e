//! What of the map is not on the disk yet.

use std::collections::BTreeMap;

/// Entries of the map in a sector.
pub(super) const PIECE: u64 = 512 / 4;

/// The sectors of the map that are not on the disk as they are in memory.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    /// With the number of the last change of each.
    pub(super) pieces: BTreeMap<u64, u64>,
    changes: u64,
}

impl Dirty {
    /// The entry `index` has changed.
    pub(super) fn note(&mut self, index: u64) {
        self.changes += 1;
        self.pieces.insert(index / PIECE, self.changes);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// What a commit has written is clean, unless it has changed meanwhile.
    pub(super) fn clean(&mut self, written: &BTreeMap<u64, u64>) {
        self.pieces
            .retain(|piece, change| written.get(piece) != Some(change));
    }
}
