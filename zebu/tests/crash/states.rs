//! The states that a power cut may leave: all durable operations, and any part of the others, sector
//! by sector.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use zebu::storage::{Iov, OpKind, Queue, Started, Storage};

use crate::common::Rng;
use crate::disk::{Entry, File, Time, What};

/// The atomic unit of writes, in bytes.
pub const SECTOR: u64 = 512;
/// The most operations of which every combination is tried.
const FEW: usize = 5;
/// The unit of copy on write, in bytes.
const PAGE: usize = 4096;

/// A file as it may be after a power cut: the durable content, which all states share, and pages
/// that differ. It can be written.
#[derive(Debug)]
pub struct Left {
    base: Arc<Vec<u8>>,
    own: Mutex<Own>,
}

#[derive(Debug)]
struct Own {
    pages: HashMap<usize, Box<[u8; PAGE]>>,
    length: usize,
    /// The length of the base that is valid.
    valid: usize,
}

impl Left {
    fn new(base: Arc<Vec<u8>>) -> Self {
        let length = base.len();
        Left {
            base,
            own: Mutex::new(Own {
                pages: HashMap::new(),
                length,
                valid: length,
            }),
        }
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap()
    }

    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.own().length];
        self.read_at(0, &mut bytes);
        bytes
    }

    fn read_at(&self, offset: usize, bytes: &mut [u8]) {
        let own = self.own();
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done;
            let start = at % PAGE;
            let count = (PAGE - start).min(bytes.len() - done);
            let place = &mut bytes[done..done + count];
            match own.pages.get(&(at / PAGE)) {
                Some(page) => place.copy_from_slice(&page[start..start + count]),
                None => {
                    let there = own.valid.saturating_sub(at).min(count);
                    place[..there].copy_from_slice(&self.base[at.min(own.valid)..][..there]);
                    place[there..].fill(0);
                }
            }
            done += count;
        }
    }

    /// Writes `source`, or zeroes.
    fn write_at(&self, offset: usize, length: usize, source: Option<&[u8]>) {
        let mut own = self.own();
        own.length = own.length.max(offset + length);
        let mut done = 0;
        while done < length {
            let at = offset + done;
            let start = at % PAGE;
            let count = (PAGE - start).min(length - done);
            let number = at / PAGE;
            let valid = own.valid;
            let page = own.pages.entry(number).or_insert_with(|| {
                let mut page = Box::new([0; PAGE]);
                let from = (number * PAGE).min(valid);
                let to = ((number + 1) * PAGE).min(valid);
                page[..to - from].copy_from_slice(&self.base[from..to]);
                page
            });
            let place = &mut page[start..start + count];
            match source {
                Some(bytes) => place.copy_from_slice(&bytes[done..done + count]),
                None => place.fill(0),
            }
            done += count;
        }
    }

    fn resize(&self, length: usize) {
        let mut own = self.own();
        if length < own.length {
            own.valid = own.valid.min(length);
            own.pages.retain(|number, _| number * PAGE < length);
            if let Some(page) = own.pages.get_mut(&(length / PAGE)) {
                page[length % PAGE..].fill(0);
            }
        }
        own.length = length;
    }

    /// Applies an operation to the sectors for which `keeps` is true.
    fn apply(&self, what: &What, mut keeps: impl FnMut() -> bool) {
        let mut each_sector = |offset: u64, length: u64, source: Option<&[u8]>| {
            let mut done = 0;
            while done < length {
                let at = offset + done;
                let count = (SECTOR - at % SECTOR).min(length - done);
                if keeps() {
                    let from = done as usize;
                    let part = source.map(|bytes| &bytes[from..from + count as usize]);
                    self.write_at(at as usize, count as usize, part);
                }
                done += count;
            }
        };
        match what {
            What::Write(offset, bytes) => each_sector(*offset, bytes.len() as u64, Some(bytes)),
            What::Zero(offset, length) => {
                let inside = (self.own().length as u64).saturating_sub(*offset);
                each_sector(*offset, (*length).min(inside), None);
            }
            What::SetLen(length) => {
                if keeps() {
                    self.resize(*length as usize);
                }
            }
            What::Reach(length) => {
                let length = (*length as usize).max(self.own().length);
                if keeps() {
                    self.resize(length);
                }
            }
            What::Flush => {}
        }
    }
}

/// Which of the operations that are not durable took effect.
#[derive(Clone, Copy, Debug)]
enum Pick {
    All,
    Nothing,
    /// Those whose bits are set.
    Subset(u64),
    /// The last one alone.
    OnlyNewest,
    /// All but one.
    AllBut(usize),
    /// Each with this chance.
    Some(u64),
    /// Each sector with this chance.
    Torn(u64),
}

/// Builds the states that a power cut may leave at each moment of a log.
pub struct Cutter<'a> {
    log: &'a [Entry],
    /// The index of the first entry that has not begun.
    next: usize,
    /// The durable content of each file.
    durable: Vec<Arc<Vec<u8>>>,
    /// The entries that are not durable, in the order in which they ended.
    pending: Vec<usize>,
}

impl<'a> Cutter<'a> {
    pub fn new(files: &[Arc<File>], log: &'a [Entry]) -> Self {
        Cutter {
            log,
            next: 0,
            durable: files.iter().map(|f| Arc::new(f.before.clone())).collect(),
            pending: Vec::new(),
        }
    }

    /// The moments at which the possible states change.
    pub fn moments(log: &[Entry]) -> Vec<Time> {
        let moment = |entry: &Entry| match entry.what {
            What::Flush => entry.ended,
            _ => entry.began,
        };
        log.iter().map(moment).filter(|t| *t != Time::MAX).collect()
    }

    /// Calls `judge` with the states of a moment, or with `samples` of them if there are many.
    /// Moments must not decrease.
    pub fn cut(
        &mut self,
        moment: Time,
        rng: &mut Rng,
        samples: usize,
        mut judge: impl FnMut(&[Arc<Left>], &mut Rng),
    ) {
        let has_new = self.advance(moment);
        let count = self.pending.len();
        let mut picks = vec![Pick::All];
        if count > 0 && !has_new {
            picks.push(Pick::Nothing);
        }
        if count > 0 && count <= FEW {
            // With the newest: the combinations without it were tried before.
            let newest = self.newest();
            let subsets = (0..1 << count).filter(|bits| bits >> newest & 1 == 1);
            picks.extend(subsets.map(Pick::Subset));
        }
        if count > FEW {
            picks.push(Pick::OnlyNewest);
            picks.push(Pick::AllBut(rng.index(count)));
        }
        for _ in 0..if count == 0 { 0 } else { samples } {
            let chance = 2 + rng.below(3);
            picks.push(match rng.below(3) {
                0 if count > FEW => Pick::Some(chance),
                1 if count > FEW => Pick::AllBut(rng.index(count)),
                _ => Pick::Torn(chance),
            });
        }
        for pick in picks {
            let state = self.build(pick, rng);
            judge(&state, rng);
        }
    }

    /// Advances to a moment. Returns whether more operations may have taken effect.
    fn advance(&mut self, moment: Time) -> bool {
        let mut has_new = false;
        while let Some(entry) = self.log.get(self.next).filter(|e| e.began <= moment) {
            if !matches!(entry.what, What::Flush) {
                self.pending.push(self.next);
                has_new = true;
            }
            self.next += 1;
        }
        for file in 0..self.durable.len() {
            let flushes = self.log[..self.next]
                .iter()
                .filter(|e| e.file == file && matches!(e.what, What::Flush) && e.ended <= moment);
            let Some(until) = flushes.map(|e| e.began).max() else {
                continue;
            };
            let log = self.log;
            let is_durable = |n: &usize| log[*n].file == file && log[*n].ended < until;
            let mut done: Vec<usize> = self.pending.iter().copied().filter(is_durable).collect();
            self.pending.retain(|n| !is_durable(n));
            done.sort_unstable_by_key(|n| log[*n].ended);
            let bytes = Arc::make_mut(&mut self.durable[file]);
            for n in done {
                log[n].what.apply(bytes);
            }
        }
        self.pending.sort_unstable_by_key(|n| self.log[*n].ended);
        has_new
    }

    /// The index of the pending entry that began last.
    fn newest(&self) -> usize {
        let pending = self.pending.iter().enumerate();
        pending.max_by_key(|(_, n)| **n).map_or(0, |(nth, _)| nth)
    }

    fn build(&self, pick: Pick, rng: &mut Rng) -> Vec<Arc<Left>> {
        let files: Vec<_> = self.durable.iter().cloned().map(Left::new).collect();
        let newest = self.newest();
        for (nth, n) in self.pending.iter().enumerate() {
            let entry = &self.log[*n];
            let whole = match pick {
                Pick::All => true,
                Pick::Nothing => false,
                Pick::Subset(bits) => bits >> nth & 1 == 1,
                Pick::OnlyNewest => nth == newest,
                Pick::AllBut(one) => nth != one,
                Pick::Some(chance) => rng.one_in(chance),
                Pick::Torn(_) => true,
            };
            let mut keeps = || match pick {
                Pick::Torn(chance) => rng.one_in(chance),
                _ => whole,
            };
            files[entry.file].apply(&entry.what, &mut keeps);
        }
        files.into_iter().map(Arc::new).collect()
    }
}

// SAFETY: each operation ends before `start` returns.
unsafe impl Storage for Left {
    unsafe fn start(
        &self,
        _queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let at = offset as usize;
        Started::done(Ok(match (kind, memory) {
            (OpKind::Read, Some(iov)) => {
                let count = iov.len().min(self.own().length.saturating_sub(at));
                let mut bytes = vec![0; count];
                self.read_at(at, &mut bytes);
                iov.slice(0, count).copy_from(&bytes);
                count
            }
            (OpKind::Write | OpKind::WriteDurable, Some(iov)) => {
                let mut bytes = vec![0; iov.len()];
                iov.copy_to(&mut bytes);
                self.write_at(at, bytes.len(), Some(&bytes));
                iov.len()
            }
            (OpKind::ZeroRange | OpKind::ZeroQuickly | OpKind::PunchHole | OpKind::Discard, _) => {
                self.apply(&What::Zero(offset, length), || true);
                0
            }
            (OpKind::Allocate, _) => {
                self.apply(&What::Reach(offset + length), || true);
                0
            }
            (OpKind::SetLength, _) => {
                self.resize(length as usize);
                0
            }
            _ => 0,
        }))
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.own().length as u64)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.len()
    }
}
