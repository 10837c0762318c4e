//! Readahead of the tables of a file.

use std::collections::VecDeque;
use std::io;
use std::iter::Peekable;
use std::sync::Arc;

use super::{Begun, PoolBuffer, Queue, Storage, read_pooled};

/// Neighbouring tables are read together up to this many bytes.
const RUN: usize = 256 << 10;
/// Bytes of tables in memory, read or being read, unless one table is larger.
const AHEAD: usize = 1 << 20;

/// Tables that are read in order, several reads in flight.
pub struct Ahead<I: Iterator<Item = u64>> {
    queue: Queue,
    file: Arc<dyn Storage>,
    tables: Peekable<I>,
    size: usize,
    in_flight: VecDeque<Run>,
    /// Of all in `in_flight`.
    bytes: usize,
    /// The run whose tables are returned, how many were, and how many there are.
    current: Option<(PoolBuffer, usize, usize)>,
}

/// Neighbouring tables in one read.
struct Run {
    tables: usize,
    /// Cancelled when dropped.
    read: Begun<io::Result<PoolBuffer>>,
}

impl<I: Iterator<Item = u64>> Ahead<I> {
    /// Tables of `size` bytes at these offsets of a file. Bytes past its end are zero.
    pub(crate) fn new(queue: &Queue, file: &Arc<dyn Storage>, tables: I, size: usize) -> Self {
        Ahead {
            queue: queue.clone(),
            file: file.clone(),
            tables: tables.peekable(),
            size,
            in_flight: VecDeque::new(),
            bytes: 0,
            current: None,
        }
    }

    /// The next table, or `None` after the last.
    pub(crate) async fn next(&mut self) -> io::Result<Option<&[u8]>> {
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

    /// Starts reads up to the limit of memory, and at least one.
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
            let file = self.file.clone();
            let length = tables * self.size;
            let read = self
                .queue
                .begin(|queue| async move { read_pooled(&*file, &queue, offset, length).await });
            self.in_flight.push_back(Run { tables, read });
        }
    }
}
