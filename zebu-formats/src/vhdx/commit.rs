//! Writing entries of blocks to the disk, through the log (`entry.rs`).
//!
//! A commit takes the sectors with entries that changed, some at a time:
//! 1. they are copied, and the copy is written to the log, where it is not valid yet;
//! 2. the file is made durable: the data that the entries lead to, the copy, and what the commit before
//!    wrote in step 5;
//! 3. the entry in the log becomes valid;
//! 4. the file is made durable: from now on the entries are, since the log is replayed;
//! 5. the copied sectors are written where they belong.
//!
//! A power cut in any step leaves the entry of the commit before, which changes nothing any more, or
//! this one, which carries out step 5.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::entry::{self, EntryFields, MOST, NewSector};
use super::fields::Guid;
use super::header::Header;
use super::log::SECTOR;
use super::tables::{PIECE, Piece};
use super::writer::Writer;
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::lock;
use crate::storage::{self, Queue};

/// The log of an image that is written. Only the commit that runs uses it.
#[derive(Debug)]
pub(super) struct Log {
    /// Where it is in the file.
    range: Range<u64>,
    state: Mutex<State>,
    /// The sectors of the entry that is valid, as far as it is not known that they are written where they
    /// belong, and the pieces that have newer content.
    unwritten: Mutex<Vec<(Arc<NewSector>, Arc<Piece>)>>,
}

/// The identity of entries, while the header has one, and the number of the last one that is valid.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    id: Option<Guid>,
    sequence: u64,
}

/// Sectors that a commit has taken, and gives back if it fails or is dropped.
struct Taken<'a> {
    writer: &'a Writer,
    sectors: Vec<(u64, Arc<Piece>)>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        lock(&self.writer.dirty).extend(self.sectors.drain(..));
    }
}

impl Log {
    pub(super) fn new(range: Range<u64>) -> Self {
        Log {
            range,
            state: Mutex::default(),
            unwritten: Mutex::default(),
        }
    }

    /// The next entry needs another header.
    pub(super) fn end(&self) {
        lock(&self.state).id = None;
    }
}

impl Writer {
    /// Makes the data and entries durable that have changed before the call.
    pub(super) async fn commit_entries(&self, queue: &Queue) -> Result<()> {
        // Of a commit that failed, or was dropped. No entry follows before.
        self.write_tables(queue).await?;
        let mut taken = Taken {
            writer: self,
            sectors: std::mem::take(&mut *lock(&self.dirty))
                .into_iter()
                .collect(),
        };
        if taken.sectors.is_empty() {
            return self.flush_file(queue).await;
        }
        self.begin_log(queue).await?;
        while !taken.sectors.is_empty() {
            let count = taken.sectors.len().min(MOST);
            self.log_sectors(queue, &mut taken, count).await?;
            if taken.sectors.is_empty() || !is_broken(Rule::TablesBeforeNextEntry) {
                self.write_tables(queue).await?;
            }
        }
        Ok(())
    }

    /// Steps 1 to 4, for the last `count` sectors.
    async fn log_sectors(&self, queue: &Queue, taken: &mut Taken<'_>, count: usize) -> Result<()> {
        let file = &*self.file;
        let State { id, sequence } = *lock(&self.log.state);
        let log_id = id.expect("the log was begun");
        let first = taken.sectors.len() - count;
        let copies: Vec<NewSector> = taken.sectors[first..].iter().map(copy).collect();
        let sequence = sequence + 1;
        let nth = match is_broken(Rule::EntryStaysWhole) {
            true => 0,
            false => sequence % 2,
        };
        let at = entry::places(&self.log.range)[nth as usize];
        let fields = EntryFields {
            log_id,
            sequence,
            at,
            flushed: self.tail.length(),
            last: self.places.end(),
        };
        let encoded = entry::encode(&fields, &copies);
        let start = self.log.range.start + at;
        storage::write_slice(file, queue, start + SECTOR, &encoded.data).await?;
        if !is_broken(Rule::BlocksBeforeLog) {
            self.flush_file(queue).await?;
        }
        storage::write_slice(file, queue, start, &encoded.head).await?;
        if !is_broken(Rule::LogIsDurable) {
            self.flush_file(queue).await?;
        }
        lock(&self.log.state).sequence = sequence;
        let pieces = taken.sectors.drain(first..).map(|(_, piece)| piece);
        let copies = copies.into_iter().map(Arc::new);
        lock(&self.log.unwritten).extend(copies.zip(pieces));
        Ok(())
    }

    /// Step 5.
    async fn write_tables(&self, queue: &Queue) -> Result<()> {
        let sectors: Vec<_> = lock(&self.log.unwritten)
            .iter()
            .map(|s| s.0.clone())
            .collect();
        for sector in sectors {
            storage::write_slice(&*self.file, queue, sector.offset, &sector.bytes).await?;
        }
        lock(&self.log.unwritten).clear();
        Ok(())
    }

    /// Makes the header say that there are entries in the log.
    async fn begin_log(&self, queue: &Queue) -> Result<()> {
        if lock(&self.log.state).id.is_some() {
            return Ok(());
        }
        // Entries of other programs are not of this identity, so no reader takes them for valid.
        let id = Guid::random()?;
        for at in entry::places(&self.log.range) {
            let start = self.log.range.start + at;
            storage::write_slice(&*self.file, queue, start, &[0; SECTOR as usize]).await?;
        }
        let change = |header: &mut Header| header.log_id = Some(id);
        self.replace_header(queue, change).await?;
        *lock(&self.log.state) = State {
            id: Some(id),
            sequence: 0,
        };
        Ok(())
    }
}

/// The current bytes of a sector of the tables.
fn copy((number, piece): &(u64, Arc<Piece>)) -> NewSector {
    let offset = number * SECTOR;
    let first = (offset % PIECE / 8) as usize;
    let mut bytes = [0; SECTOR as usize];
    for (place, word) in bytes.chunks_exact_mut(8).zip(&piece[first..]) {
        place.copy_from_slice(&word.load(Ordering::Acquire).to_le_bytes());
    }
    NewSector { offset, bytes }
}
