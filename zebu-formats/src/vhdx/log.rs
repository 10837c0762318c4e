//! The log as it is read: changes of metadata that were perhaps not carried out before a crash
//! (section 2.3 of the specification). They are replayed in memory if the file is only read, and
//! otherwise carried out (`recover.rs`).
//!
//! The log is a ring of entries. Each names the entry that the changes begin with, its tail, and has
//! a number one higher than the entry before it. The entry with the highest number whose sequence
//! is complete tells what is replayed.

use std::collections::HashMap;
use std::sync::Arc;

use super::crc::Crc;
use super::fields::{Fields, Guid};
use super::header::Header;
use super::{MIB, refused};
use crate::drivers::{Limits, check_limit};
use crate::storage::{self, Patches, Queue, Storage};
use crate::{Error, Result};

/// Bytes of a sector of the log.
pub(super) const SECTOR: u64 = 4096;
/// Bytes of the log that are read at once.
const CHUNK: u64 = MIB;
/// Bytes of a descriptor. The header of an entry is as long as two.
pub(super) const DESCRIPTOR: usize = 32;
/// Memory for one replaced range besides its bytes, at least.
const RANGE_MEMORY: u64 = 128;

/// The log of a file.
struct Log<'a> {
    queue: &'a Queue,
    file: &'a dyn Storage,
    start: u64,
    length: u64,
    /// What valid entries have.
    id: Guid,
    /// The chunk that was read last, and where in the log it is.
    chunk: (u64, Vec<u8>),
}

/// The fields of an entry's header that are used.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Where in the log it is.
    at: u64,
    length: u64,
    /// Where the first entry of its sequence is.
    tail: u64,
    sequence: u64,
    descriptors: u32,
    /// Bytes that the file has at least.
    flushed: u64,
    /// Bytes that all structures of the file fit into.
    last: u64,
}

/// Whether an entry counts.
enum Found {
    /// There is none.
    Nothing,
    /// Its end was not written: the changes in it were not begun.
    Torn,
    /// It is damaged.
    Damaged,
    Valid(Entry),
}

/// A change of the file.
enum Descriptor {
    /// Zeroes, for so many bytes.
    Zero(u64),
    /// A sector: its first and last bytes, those that the sector in the log lacks.
    Data([u8; 8], [u8; 4]),
}

/// What is different in the file when the log is replayed.
pub(super) struct Changes {
    pub patches: Arc<Patches>,
    /// Bytes of the file then, not fewer than now.
    pub length: u64,
}

/// What is to be replayed; None: nothing.
pub(super) async fn changes(
    queue: &Queue,
    file: &dyn Storage,
    header: &Header,
    limits: Option<&Limits>,
) -> Result<Option<Changes>> {
    let Some(id) = header.log_id else {
        return Ok(None);
    };
    let file_len = file.len()?;
    if header.log.end > file_len {
        return Err(refused("The VHDX log is past the end of the file"));
    }
    let mut log = Log {
        queue,
        file,
        start: header.log.start,
        length: header.log.end - header.log.start,
        id,
        chunk: (u64::MAX, Vec::new()),
    };
    let active = log.active_sequence().await?;
    let Some(head) = active.last() else {
        return Ok(None);
    };
    if head.flushed > file_len {
        return Err(refused(format!(
            "The file has {file_len} bytes and had {} when the VHDX log was written: it was truncated",
            head.flushed
        )));
    }
    let (mut patches, mut memory) = (Patches::default(), 0);
    for entry in &active {
        log.replay(entry, &mut patches, |bytes| {
            memory += bytes;
            match limits {
                None => Ok(()),
                Some(l) => check_limit("memory", "The need for memory", memory, l.memory),
            }
        })
        .await?;
    }
    let last = head.last.checked_next_multiple_of(MIB);
    let length = last.map(|last| last.max(patches.end()).max(file_len));
    match length.filter(|length| i64::try_from(*length).is_ok()) {
        Some(length) => Ok(Some(Changes {
            patches: Arc::new(patches),
            length,
        })),
        None => Err(damaged()),
    }
}

fn damaged() -> Error {
    refused("The VHDX log is damaged")
}

impl Log<'_> {
    /// A sector at an offset in the ring.
    async fn sector(&mut self, offset: u64) -> Result<&[u8]> {
        let offset = offset % self.length;
        let start = offset - offset % CHUNK;
        if self.chunk.0 != start {
            let length = CHUNK.min(self.length - start) as usize;
            let at = self.start + start;
            let bytes = storage::read_vec(self.file, self.queue, at, length).await?;
            self.chunk = (start, bytes);
        }
        let at = (offset - start) as usize;
        Ok(&self.chunk.1[at..at + SECTOR as usize])
    }

    /// The entries to be replayed, in order. None if there is no complete sequence, for example
    /// after a crash before the first entry of the log was written.
    async fn active_sequence(&mut self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let (mut at, mut is_damaged) = (0, false);
        // Valid entries do not overlap: the sectors of one begin in another way than its header.
        while at < self.length {
            match self.entry(at).await? {
                Found::Nothing | Found::Torn => {}
                Found::Damaged => is_damaged = true,
                Found::Valid(entry) => entries.push(entry),
            }
            at += SECTOR;
        }
        let active = newest_sequence(&entries, self.length);
        match active.is_empty() && is_damaged {
            true => Err(damaged()),
            false => Ok(active),
        }
    }

    /// Looks for an entry at an offset.
    async fn entry(&mut self, at: u64) -> Result<Found> {
        let (length, id) = (self.length, self.id);
        let sector = self.sector(at).await?;
        let fields = Fields(sector);
        if !sector.starts_with(b"loge") || fields.guid(32) != id {
            return Ok(Found::Nothing);
        }
        let checksum = fields.u32(4);
        let entry = Entry {
            at,
            length: fields.u32(8).into(),
            tail: fields.u32(12).into(),
            sequence: fields.u64(16),
            descriptors: fields.u32(24),
            flushed: fields.u64(48),
            last: fields.u64(56),
        };
        let is_aligned = entry.length.is_multiple_of(SECTOR) && entry.tail.is_multiple_of(SECTOR);
        let is_inside = entry.length <= length && entry.tail < length;
        let is_large_enough = entry.descriptor_sectors() * SECTOR <= entry.length;
        if !is_aligned || !is_inside || !is_large_enough || entry.sequence == 0 {
            return Ok(Found::Nothing);
        }
        let mut crc = Crc::of_start(sector);
        let mut data_sectors = 0;
        for index in 0..entry.descriptor_sectors() {
            let sector = self.sector(at + index * SECTOR).await?;
            if index > 0 {
                crc.update(sector);
            }
            for descriptor in entry.descriptors_in(index, sector) {
                match descriptor {
                    None => return Ok(Found::Damaged),
                    Some((_, Descriptor::Zero(_))) => {}
                    Some((_, Descriptor::Data(..))) => data_sectors += 1,
                }
            }
        }
        if (entry.descriptor_sectors() + data_sectors) * SECTOR != entry.length {
            return Ok(Found::Damaged);
        }
        for index in 0..data_sectors {
            let offset = at + (entry.descriptor_sectors() + index) * SECTOR;
            let sector = self.sector(offset).await?;
            if !entry.has_data_sector(sector) {
                return Ok(Found::Torn);
            }
            crc.update(sector);
        }
        Ok(match crc.finish() == checksum {
            true => Found::Valid(entry),
            false => Found::Torn,
        })
    }

    /// Adds the changes of a valid entry. `count` is told what memory they take.
    async fn replay(
        &mut self,
        entry: &Entry,
        patches: &mut Patches,
        mut count: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut data = entry.at + entry.descriptor_sectors() * SECTOR;
        for index in 0..entry.descriptor_sectors() {
            let sector = self.sector(entry.at + index * SECTOR).await?;
            let descriptors: Vec<_> = entry.descriptors_in(index, sector).collect();
            for descriptor in descriptors {
                // It was checked before, but the file may have changed.
                match descriptor.ok_or_else(damaged)? {
                    (offset, Descriptor::Zero(length)) => {
                        count(RANGE_MEMORY)?;
                        patches.put_zeroes(offset, length);
                    }
                    (offset, Descriptor::Data(first, last)) => {
                        count(RANGE_MEMORY + SECTOR)?;
                        let mut bytes = self.sector(data).await?.to_vec();
                        bytes[..8].copy_from_slice(&first);
                        bytes[SECTOR as usize - 4..].copy_from_slice(&last);
                        patches.put(offset, bytes);
                        data += SECTOR;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Sectors of the header and the descriptors.
    fn descriptor_sectors(&self) -> u64 {
        let in_sector = SECTOR / DESCRIPTOR as u64;
        (u64::from(self.descriptors) + 2).div_ceil(in_sector)
    }

    /// The descriptors in one of the first sectors of the entry, and where in the file they belong.
    /// None if one is damaged.
    fn descriptors_in(
        &self,
        index: u64,
        sector: &[u8],
    ) -> impl Iterator<Item = Option<(u64, Descriptor)>> {
        let in_sector = SECTOR / DESCRIPTOR as u64;
        let (skip, before) = match index {
            0 => (2, 0),
            _ => (0, index * in_sector - 2),
        };
        let count = (u64::from(self.descriptors) - before) as usize;
        let sequence = self.sequence;
        sector
            .chunks_exact(DESCRIPTOR)
            .skip(skip)
            .take(count)
            .map(move |bytes| Descriptor::decode(bytes, sequence))
    }

    /// Whether this is a sector of its data.
    fn has_data_sector(&self, sector: &[u8]) -> bool {
        let fields = Fields(sector);
        let low = fields.u32(SECTOR as usize - 4);
        let sequence = u64::from(fields.u32(4)) << 32 | u64::from(low);
        sector.starts_with(b"data") && sequence == self.sequence
    }
}

impl Descriptor {
    /// Decodes the descriptor of an entry with this number.
    fn decode(bytes: &[u8], sequence: u64) -> Option<(u64, Descriptor)> {
        let fields = Fields(bytes);
        let offset = fields.u64(16);
        let (descriptor, length) = if bytes.starts_with(b"zero") {
            let length = fields.u64(8);
            (Descriptor::Zero(length), length)
        } else if bytes.starts_with(b"desc") {
            let first = fields.u64(8).to_le_bytes();
            (Descriptor::Data(first, fields.u32(4).to_le_bytes()), SECTOR)
        } else {
            return None;
        };
        let is_aligned = offset.is_multiple_of(SECTOR) && length.is_multiple_of(SECTOR);
        let end = offset.checked_add(length)?;
        let is_sound = is_aligned && fields.u64(24) == sequence && i64::try_from(end).is_ok();
        is_sound.then_some((offset, descriptor))
    }
}

/// The newest complete sequence of these entries, which are in the order of a ring of `length`
/// bytes; empty: there is none.
fn newest_sequence(entries: &[Entry], length: u64) -> Vec<Entry> {
    let starts: HashMap<u64, &Entry> = entries.iter().map(|entry| (entry.at, entry)).collect();
    let next = |entry: &Entry| (entry.at + entry.length) % length;
    let ends: HashMap<u64, &Entry> = entries.iter().map(|entry| (next(entry), entry)).collect();
    let follows = |one: &Entry, other: &Entry| one.sequence.checked_add(1) == Some(other.sequence);
    let mut newest: Vec<Entry> = Vec::new();
    for head in entries {
        let is_head = starts.get(&next(head)).is_none_or(|e| !follows(head, e));
        let is_newer = newest.last().is_none_or(|e| head.sequence > e.sequence);
        if !is_head || !is_newer {
            continue;
        }
        let mut sequence = vec![*head];
        let mut first = head;
        while first.at != head.tail {
            match ends.get(&first.at).filter(|before| follows(before, first)) {
                Some(before) => first = before,
                None => break,
            }
            sequence.push(*first);
        }
        if first.at == head.tail {
            sequence.reverse();
            newest = sequence;
        }
    }
    newest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at: u64, length: u64, sequence: u64, tail: u64) -> Entry {
        Entry {
            at: at * SECTOR,
            length: length * SECTOR,
            tail: tail * SECTOR,
            sequence,
            descriptors: 0,
            flushed: 0,
            last: 0,
        }
    }

    /// The numbers of the newest sequence in a ring of 16 sectors.
    fn newest(entries: &[Entry]) -> Vec<u64> {
        let newest = newest_sequence(entries, 16 * SECTOR);
        newest.iter().map(|entry| entry.sequence).collect()
    }

    #[test]
    fn the_newest_complete_sequence_counts() {
        assert!(newest(&[]).is_empty());
        assert_eq!(newest(&[entry(3, 2, 7, 3)]), [7]);
        // What is before the tail was carried out.
        let three = [entry(0, 2, 5, 0), entry(2, 3, 6, 0), entry(5, 1, 7, 2)];
        assert_eq!(newest(&three), [6, 7]);
        // The tail is not there, or not of the sequence.
        assert!(newest(&[entry(0, 2, 5, 4)]).is_empty());
        assert_eq!(newest(&[entry(0, 2, 5, 0), entry(4, 1, 6, 0)]), [5]);
        assert_eq!(newest(&[entry(0, 2, 5, 0), entry(2, 1, 7, 0)]), [5]);
        // Around the end of the ring.
        let around = [entry(1, 1, 9, 13), entry(13, 2, 7, 13), entry(15, 2, 8, 13)];
        assert_eq!(newest(&around), [7, 8, 9]);
        // The older sequence comes last.
        assert_eq!(newest(&[entry(0, 2, 9, 0), entry(4, 1, 5, 4)]), [9]);
        // An entry as long as the ring.
        assert_eq!(newest(&[entry(0, 16, 1, 0)]), [1]);
    }
}
