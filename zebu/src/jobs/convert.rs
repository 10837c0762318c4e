//! Convert: the content of one or more devices, one after the other, into a
//! raw target.
//!
//! A lane reads a chunk, looks for zeroes and writes what is left. Ranges that
//! the mapping knows to be zero are leapt over.

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
    /// Bytes a second at most.
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
    /// The I/O engine could not be started.
    #[error(transparent)]
    Engine(std::io::Error),
}

impl ConvertError {
    fn offset(&self) -> u64 {
        match self {
            ConvertError::Read { offset, .. } | ConvertError::Write { offset, .. } => *offset,
            ConvertError::Engine(_) => 0,
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
    let total = sources.iter().map(Device::size).sum();
    let job = Arc::new(Job {
        sources,
        target,
        options: options.clone(),
        cursor: Cursor::new(total),
        failure: Mutex::new(None),
        unreadable: Mutex::new(Vec::new()),
        start: Instant::now(),
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
}

impl lanes::Job for Job {
    fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    async fn lane(&self, queue: &Queue) {
        let mut buffer = Buffer::new(CHUNK as usize);
        while let Some(range) = self.cursor.take(|at| self.chunk_at(at).end()) {
            self.slow_down(range.end);
            let chunk = self.chunk_at(range.start);
            match chunk.convert(self, queue, &mut buffer).await {
                Ok(()) => self.cursor.finish(&range),
                Err(e) => self.fail(e),
            }
        }
    }
}

/// A range of one source.
#[derive(Clone, Copy)]
struct Chunk {
    source: usize,
    /// Offset in the source.
    offset: u64,
    /// Where the source starts in the target.
    base: u64,
    length: u64,
}

/// A part of a chunk that the mapping says is alike.
struct Segment {
    /// Offset in the chunk.
    at: u64,
    length: u64,
    zero: bool,
}

impl Job {
    fn fail(&self, error: ConvertError) {
        self.cursor.stop();
        let mut failure = lock(&self.failure);
        if failure.as_ref().is_none_or(|f| error.offset() < f.offset()) {
            *failure = Some(error);
        }
    }

    /// The chunk that starts at a byte of the target: up to the next multiple
    /// of the chunk size in its source, or the end of that.
    fn chunk_at(&self, at: u64) -> Chunk {
        let (mut base, mut source) = (0, 0);
        while at - base >= self.sources[source].size() {
            base += self.sources[source].size();
            source += 1;
        }
        let offset = at - base;
        let end = (offset / CHUNK + 1) * CHUNK;
        Chunk {
            source,
            offset,
            base,
            length: end.min(self.sources[source].size()) - offset,
        }
    }

    /// Sleeps until `offset` may be reached by the rate limit.
    fn slow_down(&self, offset: u64) {
        if let Some(rate) = self.options.rate.filter(|rate| *rate > 0) {
            let due = Duration::from_secs_f64(offset as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(self.start.elapsed()));
        }
    }

    /// Whether ranges that read as zeroes need nothing done.
    fn skips_zeroes(&self) -> bool {
        self.options.target_is_zero && self.options.sparse > 0
    }
}

impl Chunk {
    fn device<'a>(&self, job: &'a Job) -> &'a Device {
        &job.sources[self.source]
    }

    /// Its start in the target.
    fn target(&self) -> u64 {
        self.base + self.offset
    }

    /// Its end in the target.
    fn end(&self) -> u64 {
        self.target() + self.length
    }

    fn read_error(&self, at: u64, source: Error) -> ConvertError {
        // A request has many extents; the error may know which one it was.
        let guest = source
            .guest_offset()
            .unwrap_or(0)
            .clamp(self.offset + at, self.offset + self.length - 1);
        ConvertError::Read {
            offset: self.base + guest,
            source,
        }
    }

    async fn convert(
        &self,
        job: &Job,
        queue: &Queue,
        buffer: &mut Buffer,
    ) -> Result<(), ConvertError> {
        let segments = self.segments(job, queue).await?;
        for segment in segments.iter().filter(|s| s.zero) {
            if !job.skips_zeroes() {
                self.write_zeroes(job, queue, segment.at, segment.length)
                    .await?;
            }
        }
        for segment in segments.iter().filter(|s| !s.zero) {
            self.read(job, queue, segment, buffer).await?;
            self.write(job, queue, segment, buffer).await?;
        }
        Ok(())
    }

    /// What the chunk consists of, neighbours that are alike joined.
    async fn segments(&self, job: &Job, queue: &Queue) -> Result<Vec<Segment>, ConvertError> {
        let device = self.device(job);
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = 0;
        while at < self.length {
            let offset = self.offset + at;
            // A zero range may go on far beyond the chunk.
            let limit = match at {
                0 => device.size() - offset,
                _ => self.length - at,
            };
            let status = match device.status(queue, offset, limit).await {
                Ok(status) => status,
                // The read below finds out which sectors are to blame.
                Err(_) if job.options.salvage => crate::block::Status::data(self.length - at),
                Err(e) => return Err(self.read_error(at, e)),
            };
            let length = status.length.min(self.length - at);
            if status.zero && job.skips_zeroes() && status.length > length {
                let end = self.target() + at + status.length;
                // The cursor stays on a chunk's boundary within the source.
                let end = self.base + (end - self.base) / CHUNK * CHUNK;
                job.cursor.leap(self.end(), end);
            }
            match segments.last_mut() {
                Some(last) if last.zero == status.zero => last.length += length,
                _ => segments.push(Segment {
                    at,
                    length,
                    zero: status.zero,
                }),
            }
            at += length;
        }
        Ok(segments)
    }

    /// Reads a segment into the start of `buffer`.
    #[allow(unsafe_code)]
    async fn read(
        &self,
        job: &Job,
        queue: &Queue,
        segment: &Segment,
        buffer: &mut Buffer,
    ) -> Result<(), ConvertError> {
        // SAFETY: `buffer` is borrowed until the reads, awaited here, have
        // ended.
        let iov = unsafe { buffer.iov() }.slice(0, segment.length as usize);
        let offset = self.offset + segment.at;
        match self.device(job).read(queue, offset, &iov).await {
            Ok(()) => Ok(()),
            Err(_) if job.options.salvage => {
                self.salvage(job, queue, segment, &iov).await;
                Ok(())
            }
            Err(e) => Err(self.read_error(segment.at, e)),
        }
    }

    /// Reads sector by sector what can be read.
    async fn salvage(&self, job: &Job, queue: &Queue, segment: &Segment, iov: &Iov) {
        const SECTOR: usize = 512;
        for start in (0..iov.len()).step_by(SECTOR) {
            let sector = iov.slice(start, SECTOR.min(iov.len() - start));
            let at = segment.at + start as u64;
            if let Err(e) = self
                .device(job)
                .read(queue, self.offset + at, &sector)
                .await
            {
                sector.fill(0);
                lock(&job.unreadable).push((self.target() + at, e.errno()));
            }
        }
    }

    /// Writes a segment that is in `buffer`, but for its zeroes.
    #[allow(unsafe_code)]
    async fn write(
        &self,
        job: &Job,
        queue: &Queue,
        segment: &Segment,
        buffer: &mut Buffer,
    ) -> Result<(), ConvertError> {
        let length = segment.length as usize;
        let sparse = job.options.sparse;
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
        let start = self.target() + segment.at;
        let mut writes = Vec::with_capacity(runs.len());
        for (at, length, zero) in runs {
            let offset = start + at as u64;
            if !zero {
                let iov = iov.slice(at, length);
                writes.push((
                    offset,
                    storage::begin_write(&*job.target, queue, offset, iov),
                ));
            } else if !job.skips_zeroes() {
                self.write_zeroes(job, queue, segment.at + at as u64, length as u64)
                    .await?;
            }
        }
        for (offset, write) in writes {
            write.finish().await.map_err(|e| ConvertError::Write {
                offset,
                source: e.into(),
            })?;
        }
        Ok(())
    }

    async fn write_zeroes(
        &self,
        job: &Job,
        queue: &Queue,
        at: u64,
        length: u64,
    ) -> Result<(), ConvertError> {
        let offset = self.target() + at;
        // Without sparseness the target is to be fully allocated.
        let result = match job.options.sparse {
            0 => storage::zero_range(&*job.target, queue, offset, length).await,
            _ => storage::punch_hole(&*job.target, queue, offset, length).await,
        };
        result.map_err(|e| ConvertError::Write {
            offset,
            source: e.into(),
        })
    }
}
