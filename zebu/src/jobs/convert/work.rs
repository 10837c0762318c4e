//! What the workers of a conversion do with a chunk: read, and write.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::content::{Content, Part, Piece};
use super::{ConvertError, ConvertOptions, Target, ZERO_BLOCK, lock};
use crate::block::{Device, DirtyBits};
use crate::jobs::join_set::JoinSet;
use crate::jobs::progress::Chunks;
use crate::jobs::rate_limiter::RateLimiter;
use crate::jobs::sequencer::{Sequencer, Ticket};
use crate::jobs::workers::{self, Cursor};
use crate::jobs::zero;
use crate::storage::{Buffer, Iov, Queue, yield_once};

/// What the workers share.
pub(super) struct Job {
    pub(super) sources: Vec<Device>,
    pub(super) target: Target,
    pub(super) options: ConvertOptions,
    /// What is dirty of the source, in whole clusters of the target; None: all of it.
    pub(super) only: Option<DirtyBits>,
    pub(super) progress: Chunks<ConvertError>,
    /// Of data; what is known to be zero is not counted.
    pub(super) rate_limiter: RateLimiter,
    /// Bytes of a chunk: whole clusters of the target.
    pub(super) chunk: u64,
    /// The order of the chunks.
    pub(super) sequencer: Sequencer,
    /// Whether any worker had something to write at its position.
    pub(super) has_written: AtomicBool,
    pub(super) unreadable: Mutex<Vec<(u64, i32)>>,
    /// Whether data are offered to the kernel to copy.
    pub(super) offload: AtomicBool,
}

/// A range that is written in one way.
struct Run {
    range: Range<u64>,
    zero: bool,
}

/// Operations on a chunk.
pub(super) type Operations<'a> = JoinSet<'a, ConvertError>;

impl workers::Job for Job {
    fn cursor(&self) -> &Cursor {
        self.progress.cursor()
    }

    async fn worker(&self, queue: &Queue) {
        // No cluster of the target and no block is in two chunks, so workers do not write to the
        // same one.
        while let Some((ticket, chunk)) = self.sequencer.take(|| self.progress.take(self.chunk)) {
            let mut buffer = queue.buffer(self.chunk as usize);
            let converted = self.convert(queue, &chunk, &mut buffer, ticket).await;
            // Released here, so that the next worker gets it while it is in the processor's cache.
            drop(buffer);
            let ended = converted.map_err(|e| (e.offset(), e));
            self.progress.end(&chunk, ended).await;
        }
    }
}

impl Job {
    async fn convert(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        buffer: &mut Buffer,
        ticket: Ticket<'_>,
    ) -> Result<(), ConvertError> {
        let mut parts = self.parts(queue, chunk).await?;
        if self.offload.load(Ordering::Relaxed) {
            self.offload(queue, &mut parts).await;
        }
        self.read(queue, chunk, &parts, buffer).await?;
        match self.options.compress {
            Some(compress) => {
                // Compression keeps the thread busy longest.
                self.sequencer.yield_to_current().await;
                let packed = self.pack(queue, chunk, &parts, buffer, compress)?;
                let operations = self.write_packed(queue, chunk, &packed, buffer);
                self.in_turn(queue, chunk, operations, ticket).await
            }
            None => {
                let operations = self.write(queue, chunk, &parts, buffer);
                self.in_turn(queue, chunk, operations, ticket).await
            }
        }
    }

    /// Starts the writes at the worker's position in the order, and waits for them after the next
    /// worker may start its own.
    async fn in_turn(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        mut operations: Operations<'_>,
        ticket: Ticket<'_>,
    ) -> Result<(), ConvertError> {
        let has_order = self.target.has_order() && !self.options.any_order;
        if has_order && !operations.is_empty() {
            ticket.wait().await;
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

    /// Reads the data of a chunk to their place in `buffer`.
    #[allow(unsafe_code)]
    async fn read(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        parts: &[Part],
        buffer: &mut Buffer,
    ) -> Result<(), ConvertError> {
        // SAFETY: `buffer` is borrowed until the reads, awaited here, have
        // ended.
        let iov = unsafe { buffer.iov() };
        let mut reads = JoinSet::new();
        for part in parts.iter().filter(|p| p.content == Content::Data) {
            self.rate_limiter.wait(part.range.end - part.range.start);
            for piece in self.pieces(part.range.clone()) {
                let length = piece.range.end - piece.range.start;
                let at = piece.range.start - chunk.start;
                let iov = iov.slice(at as usize, length as usize);
                reads.push(self.read_piece(queue, piece, iov));
            }
        }
        reads.finish().await
    }

    async fn read_piece(&self, queue: &Queue, piece: Piece, iov: Iov) -> Result<(), ConvertError> {
        let device = &self.sources[piece.source];
        match device.read(queue, piece.offset, &iov).await {
            Ok(()) => Ok(()),
            // Effort spent here is counted for the rest of the disk, too.
            Err(e) if self.options.salvage && e.limit().is_none() => {
                self.salvage(queue, &piece, &iov).await;
                Ok(())
            }
            Err(e) => Err(piece.read_error(e)),
        }
    }

    /// Reads sector by sector, and skips those that fail.
    async fn salvage(&self, queue: &Queue, piece: &Piece, iov: &Iov) {
        const SECTOR: usize = 512;
        for start in (0..iov.len()).step_by(SECTOR) {
            let sector = iov.slice(start, SECTOR.min(iov.len() - start));
            let at = start as u64;
            let device = &self.sources[piece.source];
            if let Err(e) = device.read(queue, piece.offset + at, &sector).await {
                sector.fill(0);
                lock(&self.unreadable).push((piece.range.start + at, e.errno()));
            }
        }
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
        // SAFETY: the operations borrow `buffer`, which nothing writes to until they have ended.
        let iov = unsafe { buffer.iov() };
        let mut operations = JoinSet::new();
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
            if *content != Content::Data {
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
