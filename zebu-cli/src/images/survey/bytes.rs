//! What bytes of a disk are.

use zebu::block::Status;

/// Images of a chain that are told apart; those that are deeper count as the last of them.
pub const LAYERS: usize = 6;

/// Numbers of bytes, by what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Stored as they are, by image of the chain.
    pub data: [u64; LAYERS],
    /// Stored compressed, by image of the chain.
    pub compressed: [u64; LAYERS],
    /// Recorded as zeroes.
    pub zero: u64,
    /// Stored nowhere.
    pub unallocated: u64,
    /// Data of the top image that a snapshot of it holds, too; they are counted above.
    pub shared: u64,
}

impl Bytes {
    /// Counts a range.
    pub fn count(&mut self, status: &Status, length: u64) {
        let layer = status.depth.min(LAYERS - 1);
        let counter = match status {
            Status { present: false, .. } => &mut self.unallocated,
            Status { zero: true, .. } => &mut self.zero,
            Status {
                compressed: true, ..
            } => &mut self.compressed[layer],
            _ => &mut self.data[layer],
        };
        *counter += length;
    }

    /// All bytes that are stored.
    pub fn stored(&self) -> u64 {
        let all = self.data.iter().chain(&self.compressed);
        all.sum()
    }

    /// All compressed bytes.
    pub fn all_compressed(&self) -> u64 {
        self.compressed.iter().sum()
    }

    /// All bytes.
    pub fn all(&self) -> u64 {
        self.stored() + self.zero + self.unallocated
    }

    /// Adds others.
    pub fn add(&mut self, other: &Bytes) {
        let mut others = *other;
        for (to, from) in self.counters().into_iter().zip(others.counters()) {
            *to += *from;
        }
    }

    /// Bytes of which `seen` were counted, and that are `all`: each is multiplied.
    pub fn scale(&mut self, all: u64, seen: u64) {
        for counter in self.counters() {
            *counter = (u128::from(*counter) * u128::from(all) / u128::from(seen.max(1))) as u64;
        }
    }

    fn counters(&mut self) -> impl IntoIterator<Item = &mut u64> {
        let stored = self.data.iter_mut().chain(&mut self.compressed);
        stored.chain([&mut self.zero, &mut self.unallocated, &mut self.shared])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaled_and_added() {
        let mut bytes = Bytes {
            zero: 1 << 40,
            ..Bytes::default()
        };
        bytes.data[2] = 3 << 40;
        bytes.scale(1 << 50, 1 << 42);
        assert_eq!((bytes.zero, bytes.data[2]), (1 << 48, 3 << 48));
        bytes.add(&bytes.clone());
        assert_eq!((bytes.all(), bytes.stored()), (1 << 51, 6 << 48));
    }
}
