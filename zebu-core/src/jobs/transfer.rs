//! Transfer: a range of one device into another.
//!
//! Shared by commit and copy: a worker takes a chunk of the target, looks up what the source has
//! there, and writes it, data as data and zeroes as zeroes.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::chunks::{At, Chunks};
use super::rate_limiter::RateLimiter;
use super::target::Target;
use super::workers;
use crate::Error;
use crate::block::{Device, Status};
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::{EngineKind, Queue};

/// Bytes that a worker handles at a time, unless clusters are larger.
const CHUNK: u64 = 1 << 20;

/// Where a transfer failed, and why.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The source could not be read.
    #[error("error while reading at byte {offset}: {source}")]
    Read {
        /// Offset in the source, in bytes.
        offset: u64,
        /// Why.
        source: Error,
    },
    /// The target could not be written.
    #[error("error while writing at byte {offset}: {source}")]
    Write {
        /// Offset in the target, in bytes.
        offset: u64,
        /// Why.
        source: Error,
    },
    /// The I/O engine could not be started.
    #[error(transparent)]
    Engine(#[from] io::Error),
}

impl TransferError {
    /// Why, without saying where.
    pub fn reason(&self) -> String {
        match self {
            TransferError::Read { source, .. } | TransferError::Write { source, .. } => {
                source.to_string()
            }
            TransferError::Engine(e) => crate::strerror(e).to_string(),
        }
    }
}

/// What is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Omit {
    /// Everything is written.
    Nothing,
    /// Ranges that the mapping knows to be zero: the target reads as zeroes.
    Zeroes,
    /// Ranges that no image of the source has allocated.
    Unallocated,
}

/// What is transferred, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Where it starts in the source.
    pub start: u64,
    /// How long it is.
    pub length: u64,
    pub omit: Omit,
    /// Bytes of data a second at most.
    pub rate: Option<u64>,
    pub engine: EngineKind,
}

/// Writes a range of `source` to the start of `target`, which is long enough, and returns both.
/// `on_progress` is called on this thread with the bytes done; if it breaks, the transfer ends with
/// `ECANCELED`.
///
/// Nothing is durable yet on return.
pub(super) fn transfer<G: IntoControlFlow>(
    source: Device,
    target: Target,
    plan: Plan,
    mut on_progress: impl FnMut(Progress) -> G,
) -> (Device, Target, Result<(), TransferError>) {
    let chunk = CHUNK.max(target.cluster_size());
    let job = Arc::new(Job {
        source,
        target,
        plan,
        chunk,
        rate_limiter: RateLimiter::new(plan.rate),
        progress: Chunks::new(plan.length),
    });
    let ran = workers::run(&job, plan.engine, None, || {
        on_progress(job.progress.cursor().progress()).into_control_flow()
    });
    let result = ran.map_err(TransferError::Engine);
    let result = result.and_then(|()| job.progress.result());
    let job = Arc::into_inner(job).expect("all workers have ended");
    (job.source, job.target, result)
}

struct Job {
    source: Device,
    target: Target,
    plan: Plan,
    /// Bytes handled at a time: whole clusters of the target, so that no two workers write to the
    /// same cluster.
    chunk: u64,
    rate_limiter: RateLimiter,
    progress: Chunks<TransferError>,
}

/// What is done with a part of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Omitted,
    Zero,
    Data,
}

/// A part of a chunk: where it starts in the target, and its length.
struct Segment {
    at: u64,
    length: u64,
    kind: Kind,
}

impl workers::Job for Job {
    fn cursor(&self) -> &workers::Cursor {
        self.progress.cursor()
    }

    async fn worker(&self, queue: &Queue) {
        let work = async |chunk: &Range<u64>| self.transfer(queue, chunk).await;
        self.progress.each_chunk(self.chunk, work).await;
    }
}

impl Job {
    async fn transfer(&self, queue: &Queue, chunk: &Range<u64>) -> Result<(), At<TransferError>> {
        for segment in self.segments(queue, chunk).await? {
            match segment.kind {
                Kind::Omitted => {}
                Kind::Zero => self.write_zeroes(queue, &segment).await?,
                Kind::Data => self.copy(queue, &segment).await?,
            }
        }
        Ok(())
    }

    /// The parts of a chunk; adjacent parts of one kind are joined.
    async fn segments(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
    ) -> Result<Vec<Segment>, At<TransferError>> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = chunk.start;
        while at < chunk.end {
            // A range may continue far beyond the chunk.
            let left = self.plan.length - at;
            let offset = self.plan.start + at;
            let status = self.source.status(queue, offset, left).await;
            let status = status.map_err(|e| self.read_error(at, left, e))?;
            let kind = self.kind(&status);
            if kind == Kind::Omitted {
                let end = at + status.length;
                let whole = end / self.chunk * self.chunk;
                let end = if end == self.plan.length { end } else { whole };
                self.progress.cursor().skip(chunk.end, end);
            }
            let length = status.length.min(chunk.end - at);
            match segments.last_mut() {
                Some(last) if last.kind == kind => last.length += length,
                _ => segments.push(Segment { at, length, kind }),
            }
            at += length;
        }
        Ok(segments)
    }

    fn kind(&self, status: &Status) -> Kind {
        // Past the end of an image in the middle of the chain everything is zero; images below it
        // do not matter there.
        let lowest = status.depth + 1 == self.source.layers().len();
        match self.plan.omit {
            Omit::Unallocated if !status.present && lowest => Kind::Omitted,
            Omit::Zeroes if status.zero => Kind::Omitted,
            _ if status.zero => Kind::Zero,
            _ => Kind::Data,
        }
    }

    #[allow(unsafe_code)]
    async fn copy(&self, queue: &Queue, segment: &Segment) -> Result<(), At<TransferError>> {
        let Segment { at, length, .. } = *segment;
        self.rate_limiter.wait(length, self.progress.cursor());
        let mut buffer = queue.buffer(length as usize);
        // SAFETY: the buffer lives until the read and the write, awaited here, have ended.
        let iov = unsafe { buffer.iov() }.slice(0, length as usize);
        let read = self.source.read(queue, self.plan.start + at, &iov).await;
        read.map_err(|e| self.read_error(at, length, e))?;
        let written = self.target.write(queue, at, iov).await;
        written.map_err(|e| write_error(at, e))
    }

    async fn write_zeroes(
        &self,
        queue: &Queue,
        segment: &Segment,
    ) -> Result<(), At<TransferError>> {
        self.target
            .write_zeroes(queue, segment.at, segment.length, false)
            .await
            .map_err(|e| write_error(segment.at, e))
    }

    /// The error of a read of `length` bytes for `at` of the target.
    fn read_error(&self, at: u64, length: u64, source: Error) -> At<TransferError> {
        // A request has several extents; the error may say which one failed.
        let offset = self.plan.start + at;
        let last = offset + length - 1;
        let offset = source.guest_offset().unwrap_or(0).clamp(offset, last);
        (at, TransferError::Read { offset, source })
    }
}

fn write_error(offset: u64, source: Error) -> At<TransferError> {
    (offset, TransferError::Write { offset, source })
}
