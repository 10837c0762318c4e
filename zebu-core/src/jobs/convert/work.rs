//! What the workers of a conversion do with a chunk: read, and hand it to the output.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::content::{Part, Piece, Treatment};
use super::{ConvertError, Job, lock};
use crate::jobs::join_set::JoinSet;
use crate::jobs::sequencer::Ticket;
use crate::jobs::workers::{self, Cursor};
use crate::storage::{Buffer, Iov, Queue};

impl workers::Job for Job {
    fn cursor(&self) -> &Cursor {
        self.progress.cursor()
    }

    async fn worker(&self, queue: &Queue) {
        // No cluster of the target and no block is in two chunks, so workers do not write to the
        // same one.
        while let Some((ticket, chunk)) = self
            .output
            .sequencer
            .take(|| self.progress.take(self.chunk))
        {
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
        let output = &self.output;
        output.put(queue, chunk, &parts, buffer, Some(ticket)).await
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
        for part in parts.iter().filter(|p| p.content == Treatment::Data) {
            self.rate_limiter
                .wait(part.range.end - part.range.start, self.progress.cursor());
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
            Err(e) if self.output.options.salvage && e.limit().is_none() => {
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
                let start = piece.range.start + at;
                for (_, bits) in &mut *lock(&self.bitmaps) {
                    bits.set(start..start + sector.len() as u64);
                }
                lock(&self.unreadable).push((start, e.errno()));
            }
        }
    }
}
