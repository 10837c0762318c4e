//! Tables of the file, read ahead.

use std::collections::VecDeque;
use std::io;
use std::iter::Peekable;
use std::sync::Arc;

use crate::Result;
use crate::storage::{self, Handle, PoolBuffer, Queue, Storage};

/// Neighbouring tables are read together up to this many bytes.
const RUN: usize = 256 << 10;
/// Bytes of tables in memory, read or being read, unless one table is larger.
const AHEAD: usize = 4 << 20;
/// Bytes of an L1 table (or another array of numbers) read at once.
pub(super) const PIECE: usize = 64 << 10;

/// Reads the file for one check.
#[derive(Clone)]
pub(super) struct Reader {
    queue: Queue,
    file: Arc<dyn Storage>,
    file_len: u64,
}

impl Reader {
    pub(super) fn new(queue: &Queue, file: &Arc<dyn Storage>, file_len: u64) -> Self {
        Reader {
            queue: queue.clone(),
            file: file.clone(),
            file_len,
        }
    }

    /// Bytes of a region that lie in the file.
    pub(super) fn inside(&self, offset: u64, length: u64) -> u64 {
        length.min(self.file_len.saturating_sub(offset))
    }

    /// The part of a region that lies in the file. The caller has bounded it.
    pub(super) async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let length = self.inside(offset, length) as usize;
        Ok(storage::read_vec(&*self.file, &self.queue, offset, length).await?)
    }

    /// Tables of `size` bytes each, at the offsets given, one after another.
    /// What lies after the end of the file is zero.
    pub(super) fn ahead<I: Iterator<Item = u64>>(&self, tables: I, size: usize) -> Ahead<I> {
        Ahead {
            queue: self.queue.clone(),
            file: self.file.clone(),
            tables: tables.peekable(),
            size,
            in_flight: VecDeque::new(),
            bytes: 0,
            current: None,
        }
    }

    /// The numbers of an array of `entries` numbers, in pieces; those after
    /// the end of the file are 0 and left out.
    pub(super) fn numbers(
        &self,
        offset: u64,
        entries: u64,
    ) -> Numbers<impl Iterator<Item = u64> + use<>> {
        let bytes = self.inside(offset, entries.saturating_mul(8)) & !7;
        let pieces = bytes.div_ceil(PIECE as u64);
        let offsets = (0..pieces).map(move |n| offset + n * PIECE as u64);
        Numbers {
            pieces: self.ahead(offsets, PIECE),
            left: bytes as usize / 8,
        }
    }
}

/// Tables that are read in order, several reads in flight.
pub(super) struct Ahead<I: Iterator<Item = u64>> {
    queue: Queue,
    file: Arc<dyn Storage>,
    tables: Peekable<I>,
    size: usize,
    in_flight: VecDeque<Run>,
    /// Of all in `in_flight`.
    bytes: usize,
    /// The run whose tables are being handed out, and how many were.
    current: Option<(PoolBuffer, usize, usize)>,
}

/// Neighbouring tables in one read.
struct Run {
    tables: usize,
    read: Handle<io::Result<PoolBuffer>>,
}

impl<I: Iterator<Item = u64>> Ahead<I> {
    /// The next table, or `None` after the last.
    pub(super) async fn next(&mut self) -> Result<Option<&[u8]>> {
        let done = self
            .current
            .as_ref()
            .is_none_or(|(_, next, tables)| next == tables);
        if done {
            self.current = None;
            self.start();
            let Some(run) = self.in_flight.pop_front() else {
                return Ok(None);
            };
            self.bytes -= run.tables * self.size;
            self.current = Some((run.read.await?, 0, run.tables));
        }
        Ok(self.current.as_mut().map(|(buffer, next, _)| {
            let at = *next * self.size;
            *next += 1;
            &buffer[at..at + self.size]
        }))
    }

    /// Starts as many reads as there is room for, and at least one.
    fn start(&mut self) {
        while self.in_flight.is_empty() || self.bytes + self.size <= AHEAD {
            let Some(offset) = self.tables.next() else {
                return;
            };
            let mut tables = 1;
            while (tables + 1) * self.size <= RUN
                && self.tables.peek() == Some(&offset.saturating_add((tables * self.size) as u64))
            {
                self.tables.next();
                tables += 1;
            }
            self.bytes += tables * self.size;
            let (queue, file) = (self.queue.clone(), self.file.clone());
            let length = tables * self.size;
            let read = self
                .queue
                .spawn(async move { storage::read_pooled(&*file, &queue, offset, length).await });
            self.in_flight.push_back(Run { tables, read });
        }
    }
}

/// Big-endian numbers of 64 bits, in pieces.
pub(super) struct Numbers<I: Iterator<Item = u64>> {
    pieces: Ahead<I>,
    left: usize,
}

impl<I: Iterator<Item = u64>> Numbers<I> {
    /// The next piece, empty after the last.
    pub(super) async fn next(&mut self) -> Result<Vec<u64>> {
        let Some(bytes) = self.pieces.next().await? else {
            return Ok(Vec::new());
        };
        let numbers: Vec<u64> = bytes
            .as_chunks::<8>()
            .0
            .iter()
            .take(self.left)
            .map(|b| u64::from_be_bytes(*b))
            .collect();
        self.left -= numbers.len();
        Ok(numbers)
    }
}
