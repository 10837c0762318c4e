//! Damage to the file of the closed image, and cuts of its end.

use super::{Run, Verdict};
use crate::cell::Cell;
use crate::content::ZERO;
use crate::disk::SECTOR;
use crate::steps::Damage;
use crate::walk::walk;
use zebu_testkit::Rng;

/// The autoclear features in the header, and those that are known: bitmaps, raw data files.
const AUTOCLEAR: std::ops::Range<usize> = 88..96;
const KNOWN_AUTOCLEAR: u64 = 3;

impl Run<'_> {
    pub(super) fn trim(&mut self, bytes: u64) {
        let mut content = self.disk.bytes(self.image);
        let walk = walk(&content);
        let has_snapshots = !self.model.snapshots.is_empty() || self.lost_snapshots;
        if has_snapshots || self.damaged || self.data.is_some() || self.refused {
            return;
        }
        let last = walk
            .mapped
            .iter()
            .filter_map(|m| m.host)
            .map(|h| h.0 + 1)
            .max();
        let used = content
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |at| at as u64 + 1);
        let needed = used.max(walk.end_of_tables()).max(last.unwrap_or(0));
        let length = content.len() as u64;
        if needed < length {
            content.truncate((needed + bytes % (length - needed)) as usize);
            self.disk.set_bytes(self.image, content);
            self.marked = None;
        }
    }

    /// Leaves an autoclear bit that nobody knows in the header.
    pub(super) fn mark(&mut self, bit: u32) {
        if self.version < 3 || self.damaged || self.refused {
            return;
        }
        let mut bytes = self.disk.bytes(self.image);
        let field: &mut [u8] = &mut bytes[AUTOCLEAR];
        let value = u64::from_be_bytes(field.try_into().expect("8 bytes")) | 1 << bit;
        field.copy_from_slice(&value.to_be_bytes());
        self.disk.set_bytes(self.image, bytes.clone());
        self.marked = Some(bytes);
    }

    /// A program that does not know an autoclear bit clears it before it changes anything but the length. Behind
    /// its header there may be the name that a header has which was not written any more.
    pub(super) fn check_mark(&mut self) -> Verdict {
        let bytes = self.disk.bytes(self.image);
        let is_same = |marked: &Vec<u8>| {
            let cluster = (self.cluster * 512).min(marked.len());
            let (header, name) = header_and_name(marked);
            bytes.get(..header) == Some(&marked[..header])
                && bytes.get(name.clone()) == Some(&marked[name])
                && bytes.get(cluster..marked.len()) == Some(&marked[cluster..])
                && bytes[marked.len()..].iter().all(|byte| *byte == 0)
        };
        if self.damaged || self.marked.as_ref().is_none_or(is_same) {
            return Ok(());
        }
        self.marked = None;
        let value = bytes.get(AUTOCLEAR).and_then(|field| field.try_into().ok());
        let unknown = value.map_or(0, u64::from_be_bytes) & !KNOWN_AUTOCLEAR;
        match self.version >= 3 && unknown != 0 {
            true => Err(format!(
                "content: the image has changed, and autoclear bits {unknown:#x} stay"
            )),
            false => Ok(()),
        }
    }

    /// Nothing is mapped behind the end of the disk, where VM state is, if there is none.
    pub(super) fn check_behind_end(&self) -> Verdict {
        let is_other = self.scenario.origin.other.is_some();
        let has_state = self.lost_snapshots || self.model.vm_state.is_some();
        if self.damaged || self.untidy || has_state || is_other {
            return Ok(());
        }
        let walk = walk(&self.disk.bytes(self.image));
        let behind = walk.mapped.iter().find(|mapped| mapped.guest >= walk.size);
        match behind {
            Some(mapped) => Err(format!(
                "content: {:#x} is mapped, behind the end of the disk at {:#x}",
                mapped.guest, walk.size
            )),
            None => Ok(()),
        }
    }

    /// Damages the file, and marks the sectors that are affected.
    pub(super) fn damage(&mut self, damage: Damage) {
        self.marked = None;
        let mut bytes = self.disk.bytes(self.image);
        let seen = walk(&bytes);
        let version = self.version;
        // A reserved bit, a bit that makes the offset unaligned, or one that makes it larger than
        // any file.
        let bit = |n: u64, low: u64| {
            let align = seen.cluster.trailing_zeros() as u64;
            let bits: Vec<u64> = (low..align)
                .chain(40..56)
                .chain(if version >= 3 { 57..62 } else { 0..0 })
                .collect();
            bits[(n >> 20) as usize % bits.len()]
        };
        let entry = match damage {
            Damage::L1(n) => {
                let all: Vec<_> = seen.l1.iter().map(|e| e.1).collect();
                (!all.is_empty()).then(|| (all[n as usize % all.len()], bit(n, 1)))
            }
            Damage::L2(n) => {
                let plain = |m: &&crate::walk::Mapped| m.entry.value >> 62 & 1 == 0;
                let all: Vec<_> = seen.mapped.iter().filter(plain).map(|m| m.entry).collect();
                (!all.is_empty()).then(|| (all[n as usize % all.len()], bit(n, 1)))
            }
            Damage::Refcount(n) => {
                let all = &seen.refcounts;
                (!all.is_empty()).then(|| (all[n as usize % all.len()], bit(n, 0)))
            }
            Damage::Truncate(n) => {
                if bytes.is_empty() {
                    return;
                }
                let length = n % bytes.len() as u64;
                self.truncated(&seen, length, bytes.len() as u64);
                bytes.truncate(length as usize);
                self.disk.set_bytes(self.image, bytes);
                return;
            }
            Damage::Extend(n) => {
                let mut rng = Rng::new(n);
                // The rest of the last cluster becomes zeroes.
                bytes.resize(bytes.len().next_multiple_of(seen.cluster as usize), 0);
                let noise = (0..n).map(|_| rng.next() as u8);
                bytes.extend(noise);
                self.disk.set_bytes(self.image, bytes);
                // Truncated sectors may be inside of the file again, as noise.
                let cut = self.model.cells.iter_mut().filter(|cell| cell.cut);
                cut.for_each(|cell| cell.wild = true);
                self.untidy = true;
                return;
            }
        };
        let Some((entry, bit)) = entry else {
            return;
        };
        let value = entry.value ^ 1 << bit;
        bytes[entry.at as usize..][..8].copy_from_slice(&value.to_be_bytes());
        self.disk.set_bytes(self.image, bytes);
        self.damaged = true;
        self.untidy = true;
    }

    /// The file was truncated: sectors behind its end are errors, or as before.
    pub(super) fn truncated(&mut self, seen: &crate::walk::Walk, length: u64, old: u64) {
        if length == old {
            return;
        }
        self.damaged = true;
        self.untidy = true;
        self.lost_snapshots = true;
        self.model.bitmaps.clear();
        let now = self.now();
        let lost = |at: u64, size: u64| at + size > length;
        let sectors = self.model.cells.len();
        let cells = &mut self.model.cells;
        let mut each = |guest: u64, size: u64, change: &mut dyn FnMut(&mut Cell)| {
            let first = (guest / SECTOR) as usize;
            let last = ((guest + size).div_ceil(SECTOR) as usize).min(sectors);
            cells[first.min(last)..last].iter_mut().for_each(change);
        };
        // Where a table was truncated, sectors may be those of the base, or zero.
        let main = seen.tables.first().is_some_and(|t| lost(t.0, t.1));
        if main {
            each(0, u64::MAX >> 1, &mut |cell| cell.wild = true);
        }
        for (guest, entry) in &seen.l1 {
            let table = entry.value & 0x00ff_ffff_ffff_fe00;
            // (The next damage may make an unaligned entry valid again.)
            let is_unaligned = !table.is_multiple_of(seen.cluster);
            if is_unaligned || lost(table, seen.cluster) || lost(entry.at, 8) {
                each(*guest, seen.coverage, &mut |cell| cell.wild = true);
            }
        }
        for mapped in &seen.mapped {
            if let Some((host, size)) = mapped.host
                && lost(host, size)
            {
                each(mapped.guest, seen.cluster, &mut |cell| cell.cut = true);
                let compressed = mapped.entry.value >> 62 & 1 == 1;
                let is_damaged = !compressed && (host + size > old || host % seen.cluster != 0);
                if host < length && compressed || is_damaged {
                    each(mapped.guest, seen.cluster, &mut |cell| cell.wild = true);
                } else if host < length {
                    // The rest of the cluster where the file ends is zero.
                    let end = mapped.guest + (length - host) / SECTOR * SECTOR;
                    each(end, SECTOR, &mut |cell| cell.wild = true);
                    let rest = seen.cluster - (length - host) / SECTOR * SECTOR;
                    each(end, rest, &mut |cell| cell.add(ZERO, now));
                }
            }
        }
    }

    /// A damaged file is opened for writing, and may grow: truncated sectors are zero then.
    pub(super) fn regrow(&mut self) {
        let now = self.now();
        let cut = self.model.cells.iter_mut().filter(|cell| cell.cut);
        cut.for_each(|cell| cell.add(ZERO, now));
    }
}

/// Where the header of a version 3 image ends with its extensions, and where the name of the backing file is.
fn header_and_name(bytes: &[u8]) -> (usize, std::ops::Range<usize>) {
    let word = |at: usize| {
        let field = bytes[at..at + 4].try_into().expect("4 bytes");
        u32::from_be_bytes(field) as usize
    };
    let mut end = word(100);
    loop {
        let (kind, length) = (word(end), word(end + 4));
        end += 8 + length.next_multiple_of(8);
        if kind == 0 {
            let name = word(12);
            return (end, name..name + word(16));
        }
    }
}
