//! The bytes of a file: those that reads see, those that are durable, and the changes between the two.

use super::{BLOCK, SECTOR};

#[derive(Clone, Debug)]
pub(super) enum Change {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    SetLen(u64),
    Reach(u64),
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        self.apply_sectors(bytes, || true);
    }

    /// Applies it to the sectors for which `keeps` is true.
    pub(super) fn apply_sectors(&self, bytes: &mut Vec<u8>, mut keeps: impl FnMut() -> bool) {
        let mut sectors = |bytes: &mut Vec<u8>, at: u64, length: u64, source: Option<&[u8]>| {
            let mut done = 0;
            while done < length {
                let from = at + done;
                let count = (SECTOR - from % SECTOR).min(length - done);
                if keeps() {
                    let (start, end) = (from as usize, (from + count) as usize);
                    if bytes.len() < end {
                        bytes.resize(end, 0);
                    }
                    match source {
                        Some(source) => bytes[start..end]
                            .copy_from_slice(&source[done as usize..(done + count) as usize]),
                        None => bytes[start..end].fill(0),
                    }
                }
                done += count;
            }
        };
        match self {
            Change::Write(at, data) => sectors(bytes, *at, data.len() as u64, Some(data)),
            Change::Zero(at, length) => {
                let inside = (bytes.len() as u64).saturating_sub(*at).min(*length);
                sectors(bytes, *at, inside, None);
            }
            Change::SetLen(length) if keeps() => bytes.resize(*length as usize, 0),
            Change::Reach(length) if keeps() && bytes.len() < *length as usize => {
                bytes.resize(*length as usize, 0);
            }
            Change::SetLen(_) | Change::Reach(_) => {}
        }
    }
}

/// A change that is not durable.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) change: Change,
    ended: u64,
    /// A flush that covered it has failed, so no later flush makes it durable.
    lost: bool,
}

#[derive(Debug, Default)]
pub(super) struct FileState {
    pub(super) bytes: Vec<u8>,
    /// The blocks that are data and not holes.
    pub(super) data: Vec<bool>,
    pub(super) durable: Vec<u8>,
    pub(super) pending: Vec<Pending>,
}

impl FileState {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        let mut file = FileState {
            durable: bytes.clone(),
            bytes,
            ..FileState::default()
        };
        file.find_holes();
        file
    }

    /// Makes holes of all blocks of zeroes.
    pub(super) fn find_holes(&mut self) {
        let is_data = |block: &[u8]| block.iter().any(|b| *b != 0);
        self.data = self.bytes.chunks(BLOCK as usize).map(is_data).collect();
    }

    fn mark(&mut self, at: u64, length: u64, data: bool) {
        let blocks = (self.bytes.len() as u64).div_ceil(BLOCK) as usize;
        self.data.resize(blocks, false);
        let (first, last) = match data {
            true => (at / BLOCK, (at + length).div_ceil(BLOCK)),
            false => (at.div_ceil(BLOCK), (at + length) / BLOCK),
        };
        let last = last.min(blocks as u64);
        (first..last).for_each(|block| self.data[block as usize] = data);
    }

    pub(super) fn change(&mut self, change: Change, ended: u64) {
        change.apply(&mut self.bytes);
        match &change {
            Change::Write(at, data) => self.mark(*at, data.len() as u64, true),
            Change::Zero(at, length) => self.mark(*at, *length, false),
            Change::SetLen(_) | Change::Reach(_) => self.mark(0, 0, true),
        }
        self.pending.push(Pending {
            change,
            ended,
            lost: false,
        });
    }

    /// A flush that began at `began` has ended.
    pub(super) fn flushed(&mut self, began: u64) {
        let durable = &mut self.durable;
        self.pending.retain(|pending| {
            if pending.ended < began && !pending.lost {
                pending.change.apply(durable);
            }
            pending.ended >= began
        });
    }

    /// A flush that began at `began` has failed.
    pub(super) fn flush_failed(&mut self, began: u64) {
        let covered = |p: &&mut Pending| p.ended < began;
        let covered = self.pending.iter_mut().filter(covered);
        covered.for_each(|pending| pending.lost = true);
    }
}
