//! What the workers of a conversion do with the data of a chunk: look for zeroes, compress, and
//! write in the order of the chunks.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::content::{Part, Treatment};
use super::{ConvertError, ConvertOptions, Target, ZERO_BLOCK};
use crate::jobs::join_set::JoinSet;
use crate::jobs::out_stream::OutStream;
use crate::jobs::sequencer::{Sequencer, Ticket};
use crate::jobs::zero;
use crate::storage::{Buffer, Iov, Queue, yield_once};

/// Where a conversion goes, shared by its workers.
pub(in crate::jobs) struct Output {
    pub(in crate::jobs) target: Target,
    pub(in crate::jobs) options: ConvertOptions,
    /// The order of the chunks.
    pub(in crate::jobs) sequencer: Sequencer,
    /// Whether any worker had something to write at its position.
    has_written: AtomicBool,
}

/// A range that is written in one way.
struct Run {
    range: Range<u64>,
    zero: bool,
}

/// Operations on a chunk.
pub(super) type Operations<'a> = JoinSet<'a, ConvertError>;

impl Output {
    /// To a target, of which nothing is written yet.
    pub(in crate::jobs) fn new(target: Target, options: ConvertOptions) -> Self {
        Output {
            target,
            options,
            sequencer: Sequencer::default(),
            has_written: AtomicBool::new(false),
        }
    }

    /// Whether a range that starts at `at` needs no work.
    pub(super) fn is_left(&self, at: u64, content: Treatment) -> bool {
        match content {
            Treatment::Data => false,
            Treatment::Zero => self.is_zero_already(at),
            Treatment::Backing => true,
        }
    }

    /// Whether the target already reads as zeroes from `at` on, and may keep them unallocated.
    pub(super) fn is_zero_already(&self, at: u64) -> bool {
        self.options.sparse > 0 && self.options.zero_from.is_some_and(|from| at >= from)
    }

    /// Stores a chunk, whose data are at their places in `buffer`, when it is its turn. Without a
    /// ticket that is at once.
    pub(in crate::jobs) async fn put(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        parts: &[Part],
        buffer: &mut Buffer,
        ticket: Option<Ticket<'_>>,
    ) -> Result<(), ConvertError> {
        match self.options.compress {
            Some(compress) => {
                // Compression keeps the thread busy longest.
                self.sequencer.yield_to_current().await;
                let packed = self.pack(queue, chunk, parts, buffer, compress)?;
                let operations = self.write_packed(queue, chunk, &packed, buffer);
                self.in_turn(queue, chunk, operations, ticket).await
            }
            None => {
                let operations = self.write(queue, chunk, parts, buffer);
                self.in_turn(queue, chunk, operations, ticket).await
            }
        }
    }

    /// Stores a range that is no data.
    pub(in crate::jobs) async fn put_range(
        &self,
        queue: &Queue,
        range: &Range<u64>,
        content: Treatment,
        ticket: Option<Ticket<'_>>,
    ) -> Result<(), ConvertError> {
        let mut operations = JoinSet::new();
        if !self.is_left(range.start, content) {
            operations.push(self.write_zeroes(queue, range.start, range.end - range.start));
        }
        self.in_turn(queue, range, operations, ticket).await
    }

    /// Starts the writes at the worker's position in the order, and waits for them after the next
    /// worker may start its own.
    async fn in_turn(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        mut operations: Operations<'_>,
        ticket: Option<Ticket<'_>>,
    ) -> Result<(), ConvertError> {
        let has_order = self.target.has_order() && !self.options.any_order;
        if has_order && !operations.is_empty() {
            if let Some(ticket) = &ticket {
                ticket.wait().await;
            }
            let offset = chunk.start;
            let found = self.target.look_up(queue, chunk).await;
            found.map_err(|source| ConvertError::Write { offset, source })?;
            if !self.has_written.swap(true, Ordering::Relaxed) {
                // The first one loads the metadata, so that the others allocate without waiting.
                return operations.finish().await;
            }
            operations.start().await;
            drop(ticket);
            // This thread's copying can wait until the current worker has continued.
            yield_once().await;
        } else {
            drop(ticket);
        }
        operations.finish().await
    }

    /// The parts of a chunk in `buffer` that are to be written: all except zeroes.
    #[allow(unsafe_code)]
    fn write<'a>(
        &'a self,
        queue: &'a Queue,
        chunk: &Range<u64>,
        parts: &[Part],
        buffer: &'a mut Buffer,
    ) -> Operations<'a> {
        let runs = self.runs(chunk, parts, buffer);
        let mut operations = JoinSet::new();
        if let Target::Stream(stream) = &self.target {
            let data = runs.into_iter().filter(|run| !run.zero);
            let ranges: Vec<_> = data.map(|run| run.range).collect();
            if !ranges.is_empty() {
                operations.push(write_to_stream(stream, chunk.start, ranges, buffer));
            }
            return operations;
        }
        // SAFETY: the operations borrow `buffer`, which nothing writes to until they have ended.
        let iov = unsafe { buffer.iov() };
        for Run { range, zero } in runs {
            let data = (!zero).then(|| {
                let at = (range.start - chunk.start) as usize;
                iov.slice(at, (range.end - range.start) as usize)
            });
            operations.push(self.write_run(queue, range, data));
        }
        operations
    }

    /// The parts of a chunk to be written, in order.
    fn runs(&self, chunk: &Range<u64>, parts: &[Part], bytes: &[u8]) -> Vec<Run> {
        let sparse = self.options.sparse;
        // Blocks in which zeroes are looked for.
        let block = (self.target.zero_unit()).max(sparse.clamp(1, ZERO_BLOCK)) as usize;
        let mut runs = Vec::new();
        for Part { range, content } in parts {
            if self.is_left(range.start, *content) {
                continue;
            }
            if *content != Treatment::Data {
                runs.push(Run {
                    range: range.clone(),
                    zero: true,
                });
                continue;
            }
            let at = (range.start - chunk.start) as usize;
            let length = (range.end - range.start) as usize;
            let found = match sparse {
                0 => vec![(0, length, false)],
                _ => zero::runs(&bytes[at..at + length], block, sparse as usize),
            };
            runs.extend(found.into_iter().map(|(start, length, zero)| {
                let start = range.start + start as u64;
                Run {
                    range: start..start + length as u64,
                    zero,
                }
            }));
        }
        runs.retain(|run| !run.zero || !self.is_zero_already(run.range.start));
        runs
    }

    /// Writes `data`, or zeroes.
    async fn write_run(
        &self,
        queue: &Queue,
        range: Range<u64>,
        data: Option<Iov>,
    ) -> Result<(), ConvertError> {
        match data {
            Some(iov) => self.write_data(queue, range.start, iov).await,
            None => {
                let length = range.end - range.start;
                self.write_zeroes(queue, range.start, length).await
            }
        }
    }

    pub(super) async fn write_data(
        &self,
        queue: &Queue,
        offset: u64,
        iov: Iov,
    ) -> Result<(), ConvertError> {
        let written = self.target.write(queue, offset, iov).await;
        written.map_err(|source| ConvertError::Write { offset, source })
    }

    pub(super) async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
    ) -> Result<(), ConvertError> {
        // Without sparseness the target is to be fully allocated.
        let allocate = self.options.sparse == 0;
        let written = self
            .target
            .write_zeroes(queue, offset, length, allocate)
            .await;
        written.map_err(|source| ConvertError::Write { offset, source })
    }
}

/// Writes ranges of a buffer, which begins at `start`, to a stream.
pub(super) async fn write_to_stream(
    stream: &OutStream,
    start: u64,
    ranges: Vec<Range<u64>>,
    buffer: &mut Buffer,
) -> Result<(), ConvertError> {
    let offset = ranges.first().map_or(start, |range| range.start);
    let written = stream.write(start, ranges, buffer);
    written.map_err(|source| ConvertError::Write { offset, source })
}
