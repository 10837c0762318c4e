//! How many operations go to the kernel together.
//!
//! The kernel prepares all operations of one call before the device gets the first, and merges
//! those that continue each other into one request. So few are submitted together, and those that
//! continue each other count as one.

use std::os::fd::RawFd;

use super::super::engine::{Op, OpKind};

/// Operations that continue each other count as one up to so many bytes.
const MERGED: u64 = 64 << 10;

/// Operations that were started and not submitted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch {
    /// How many, without those that continue the one before.
    count: u32,
    /// Kind, file and end of the last one.
    last: Option<(OpKind, RawFd, u64)>,
    /// Bytes since the last one that was counted.
    bytes: u64,
}

impl Batch {
    fn merges(&self, op: &Op) -> bool {
        self.last == Some((op.kind, op.fd, op.offset)) && self.bytes + op.length <= MERGED
    }

    /// Whether `op` may be submitted together with these, of which there are `most` at most.
    pub(super) fn takes(&self, op: &Op, most: u32) -> bool {
        self.count < most.max(1) || self.merges(op)
    }

    pub(super) fn add(&mut self, op: &Op) {
        if !self.merges(op) {
            self.count += 1;
            self.bytes = 0;
        }
        self.bytes = self.bytes.saturating_add(op.length);
        self.last = Some((op.kind, op.fd, op.offset.saturating_add(op.length)));
    }
}

#[cfg(test)]
mod tests {
    //! Guards against sequential operations that reach the device one by one, and others that wait
    //! for each other.
    use super::*;

    /// How many are submitted each time.
    fn batches(ops: impl Iterator<Item = (OpKind, u64, u64)>) -> Vec<usize> {
        let (mut batch, mut all) = (Batch::default(), vec![0]);
        for (kind, offset, length) in ops {
            let op = Op::without_memory(kind, 3, offset, length);
            if !batch.takes(&op, 2) {
                batch = Batch::default();
                all.push(0);
            }
            batch.add(&op);
            *all.last_mut().unwrap() += 1;
        }
        all
    }

    #[test]
    fn adjacent_operations_are_submitted_together() {
        let read = |i: u64, step: u64, length| (OpKind::Read, i * step, length);
        assert_eq!(batches((0..8).map(|i| read(i, 1 << 20, 4096))), [2; 4]);
        assert_eq!(batches((0..64).map(|i| read(i, 4096, 4096))), [32; 2]);
        assert_eq!(batches((0..4).map(|i| read(i, 1 << 20, 1 << 20))), [2; 2]);
        let mixed = (0..4).map(|i| match i % 2 {
            0 => (OpKind::Read, i * 4096, 4096),
            _ => (OpKind::Write, i * 4096, 4096),
        });
        assert_eq!(batches(mixed), [2; 2]);
    }
}
