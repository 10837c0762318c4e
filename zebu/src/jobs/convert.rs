//! Convert: the content of one or more devices, one after the other, into a
//! raw target.
//!
//! A lane reads a chunk, looks for zeroes and writes what is left. Ranges that
//! the mapping knows to be zero are leapt over.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::lanes::{self, Cursor};
use super::zero;
use crate::block::Device;
use crate::storage::{self, Buffer, EngineKind, Iov, Queue, Storage};
use crate::{Error, Result};

/// Bytes that a lane handles at a time.
const CHUNK: u64 = 1 << 20;
/// Blocks in which zeroes are looked for, in bytes.
const ZERO_BLOCK: u64 = 4096;

/// How to convert.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Chunks in work at once, over all threads (`-m`); None: as many as keep
    /// all cores busy.
    pub lanes: Option<usize>,
    /// Runs of at least this many zero bytes are not written (`-S`); 0 writes
    /// everything and allocates the whole target.
    pub sparse: u64,
    /// The target reads as zeroes already.
    pub target_is_zero: bool,
    /// Go on after a read error, with zeroes for what could not be read.
    pub salvage: bool,
    /// Bytes of data a second at most; what is known to be zero is not counted.
    pub rate: Option<u64>,
    /// How I/O is done.
    pub engine: EngineKind,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        ConvertOptions {
            lanes: None,
            sparse: ZERO_BLOCK,
            target_is_zero: false,
            salvage: false,
            rate: None,
            engine: EngineKind::best(),
        }
    }
}

/// What a conversion tells while it runs, on the thread that called it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConvertEvent {
    /// So many bytes of the source are done.
    Progress(u64),
    /// Salvage: this sector could not be read, and is zero in the target.
    Unreadable {
        /// Offset in the concatenated sources, in bytes.
        offset: u64,
        /// Why, as an `errno`.
        errno: i32,
    },
}

/// Which side failed, and where.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source could not be read.
    #[error("error while reading at byte {offset}: {source}")]
    Read {
        /// Offset in the concatenated sources, in bytes.
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
    /// The sources have more than 2^64 bytes together.
    #[error("the images are too large together")]
    TooLarge,
    /// The I/O engine could not be started.
    #[error(transparent)]
    Engine(std::io::Error),
}

impl ConvertError {
    fn offset(&self) -> u64 {
        match self {
            ConvertError::Read { offset, .. } | ConvertError::Write { offset, .. } => *offset,
            ConvertError::TooLarge | ConvertError::Engine(_) => 0,
        }
    }
}

/// Writes the bytes of `sources`, one after the other, to the start of
/// `target`, which is long enough.
///
/// `tell` is called on this thread, now and then. On return everything was
/// written and, unless the target's cache mode says otherwise, is durable.
/// After an error the target's content is unspecified.
pub fn convert(
    sources: Vec<Device>,
    target: Arc<dyn Storage>,
    options: &ConvertOptions,
    mut tell: impl FnMut(ConvertEvent),
) -> Result<(), ConvertError> {
    let total = sources
        .iter()
        .try_fold(0u64, |sum, source| sum.checked_add(source.size()))
        .ok_or(ConvertError::TooLarge)?;
    let job = Arc::new(Job {
        sources,
        target,
        options: options.clone(),
        cursor: Cursor::new(total),
        failure: Mutex::new(None),
        unreadable: Mutex::new(Vec::new()),
        start: Instant::now(),
        written: AtomicU64::new(0),
    });
    lanes::run(&job, options.engine, options.lanes, || {
        for (offset, errno) in std::mem::take(&mut *lock(&job.unreadable)) {
            tell(ConvertEvent::Unreadable { offset, errno });
        }
        tell(ConvertEvent::Progress(job.cursor.done()));
    })
    .map_err(ConvertError::Engine)?;
    if let Some(failure) = lock(&job.failure).take() {
        return Err(failure);
    }
    flush(&job)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

fn flush(job: &Job) -> Result<(), ConvertError> {
    let queue = lanes::queue(job.options.engine).map_err(ConvertError::Engine)?;
    queue
        .block_on(storage::flush(&*job.target, &queue))
        .map_err(|e| ConvertError::Write {
            offset: job.cursor.total(),
            source: e.into(),
        })
}

/// What the lanes share.
struct Job {
    sources: Vec<Device>,
    target: Arc<dyn Storage>,
    options: ConvertOptions,
    cursor: Cursor,
    /// The failure with the lowest offset so far.
    failure: Mutex<Option<ConvertError>>,
    unreadable: Mutex<Vec<(u64, i32)>>,
    start: Instant,
    /// Bytes of data written, or about to be; counted for the rate only.
    written: AtomicU64,
}

impl lanes::Job for Job {
    fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    async fn lane(&self, queue: &Queue) {
        let mut buffer = Buffer::new(CHUNK as usize);
        // No block of the target is in two chunks, so that a write which must
        // read and write back the blocks at its ends meets no other lane there.
        let end_of = |at: u64| ((at / CHUNK + 1) * CHUNK).min(self.cursor.total());
        while let Some(chunk) = self.cursor.take(end_of) {
            match self.convert(queue, &chunk, &mut buffer).await {
                Ok(()) => self.cursor.finish(&chunk),
                Err(e) => self.fail(e),
            }
        }
    }
}

/// A part of a chunk that comes from one source and that the mapping says is
/// alike.
struct Segment {
    source: usize,
    /// Offset in the source.
    offset: u64,
    /// Offset in the target.
    target: u64,
    length: u64,
    zero: bool,
}

impl Segment {
    /// The error of a read of the segment.
    fn read_error(&self, source: Error) -> ConvertError {
        // A request has many extents; the error may know which one it was.
        let guest = source
            .guest_offset()
            .unwrap_or(0)
            .clamp(self.offset, self.offset + self.length - 1);
        ConvertError::Read {
            offset: self.target + (guest - self.offset),
            source,
        }
    }
}

impl Job {
    fn fail(&self, error: ConvertError) {
        self.cursor.stop();
        let mut failure = lock(&self.failure);
        if failure.as_ref().is_none_or(|f| error.offset() < f.offset()) {
            *failure = Some(error);
        }
    }

    /// The source that has byte `at` of the target, and where it starts there.
    fn source_at(&self, at: u64) -> (usize, u64) {
        let (mut base, mut source) = (0, 0);
        while at - base >= self.sources[source].size() {
            base += self.sources[source].size();
            source += 1;
        }
        (source, base)
    }

    /// Sleeps until `length` more bytes may be written by the rate limit.
    fn slow_down(&self, length: u64) {
        if let Some(rate) = self.options.rate.filter(|rate| *rate > 0) {
            let written = self.written.fetch_add(length, Ordering::Relaxed) + length;
            let due = Duration::from_secs_f64(written as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(self.start.elapsed()));
        }
    }

    /// Whether ranges that read as zeroes need nothing done.
    fn skips_zeroes(&self) -> bool {
        self.options.target_is_zero && self.options.sparse > 0
    }

    async fn convert(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        buffer: &mut Buffer,
    ) -> Result<(), ConvertError> {
        let segments = self.segments(queue, chunk).await?;
        for segment in segments.iter().filter(|s| s.zero) {
            if !self.skips_zeroes() {
                self.write_zeroes(queue, segment.target, segment.length)
                    .await?;
            }
        }
        for segment in segments.iter().filter(|s| !s.zero) {
            self.slow_down(segment.length);
            self.read(queue, segment, buffer).await?;
            self.write(queue, segment, buffer).await?;
        }
        Ok(())
    }

    /// What a chunk consists of, neighbours that are alike joined.
    async fn segments(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
    ) -> Result<Vec<Segment>, ConvertError> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = chunk.start;
        while at < chunk.end {
            let (source, base) = self.source_at(at);
            let device = &self.sources[source];
            let left = device.size() - (at - base);
            let mut segment = Segment {
                source,
                offset: at - base,
                target: at,
                length: left.min(chunk.end - at),
                zero: false,
            };
            // A zero range may go on far beyond the chunk.
            let limit = match at == chunk.start {
                true => left,
                false => segment.length,
            };
            match device.status(queue, segment.offset, limit).await {
                Ok(status) => {
                    segment.zero = status.zero;
                    segment.length = segment.length.min(status.length);
                    if status.zero && self.skips_zeroes() {
                        self.cursor
                            .leap(chunk.end, (at + status.length) / CHUNK * CHUNK);
                    }
                }
                // The read will find out which sectors are to blame.
                Err(_) if self.options.salvage => {}
                Err(e) => return Err(segment.read_error(e)),
            }
            at += segment.length;
            match segments.last_mut() {
                Some(last) if last.zero == segment.zero && last.source == source => {
                    last.length += segment.length;
                }
                _ => segments.push(segment),
            }
        }
        Ok(segments)
    }

    /// Reads a segment into the start of `buffer`.
    #[allow(unsafe_code)]
    async fn read(
        &self,
        queue: &Queue,
        segment: &Segment,
        buffer: &mut Buffer,
    ) -> Result<(), ConvertError> {
        // SAFETY: `buffer` is borrowed until the reads, awaited here, have
        // ended.
        let iov = unsafe { buffer.iov() }.slice(0, segment.length as usize);
        let device = &self.sources[segment.source];
        match device.read(queue, segment.offset, &iov).await {
            Ok(()) => Ok(()),
            Err(_) if self.options.salvage => {
                self.salvage(queue, segment, &iov).await;
                Ok(())
            }
            Err(e) => Err(segment.read_error(e)),
        }
    }

    /// Reads sector by sector what can be read.
    async fn salvage(&self, queue: &Queue, segment: &Segment, iov: &Iov) {
        const SECTOR: usize = 512;
        for start in (0..iov.len()).step_by(SECTOR) {
            let sector = iov.slice(start, SECTOR.min(iov.len() - start));
            let at = start as u64;
            let device = &self.sources[segment.source];
            if let Err(e) = device.read(queue, segment.offset + at, &sector).await {
                sector.fill(0);
                lock(&self.unreadable).push((segment.target + at, e.errno()));
            }
        }
    }

    /// Writes a segment that is in `buffer`, but for its zeroes.
    #[allow(unsafe_code)]
    async fn write(
        &self,
        queue: &Queue,
        segment: &Segment,
        buffer: &mut Buffer,
    ) -> Result<(), ConvertError> {
        let length = segment.length as usize;
        let sparse = self.options.sparse;
        let runs = match sparse {
            0 => vec![(0, length, false)],
            _ => zero::runs(
                &buffer[..length],
                sparse.min(ZERO_BLOCK) as usize,
                sparse as usize,
            ),
        };
        // SAFETY: `buffer` is borrowed until the writes, awaited here, have
        // ended.
        let iov = unsafe { buffer.iov() };
        let failed = |(offset, e): (u64, std::io::Error)| ConvertError::Write {
            offset,
            source: e.into(),
        };
        let mut writes = storage::Writings::new(&*self.target, queue, runs.len());
        for (at, length, zero) in runs {
            let offset = segment.target + at as u64;
            if !zero {
                let iov = iov.slice(at, length);
                writes.write(offset, iov).await.map_err(failed)?;
            } else if !self.skips_zeroes() {
                self.write_zeroes(queue, offset, length as u64).await?;
            }
        }
        writes.finish().await.map_err(failed)
    }

    async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
    ) -> Result<(), ConvertError> {
        // Without sparseness the target is to be fully allocated.
        let result = match self.options.sparse {
            0 => storage::zero_range(&*self.target, queue, offset, length).await,
            _ => storage::punch_hole(&*self.target, queue, offset, length).await,
        };
        result.map_err(|e| ConvertError::Write {
            offset,
            source: e.into(),
        })
    }
}
