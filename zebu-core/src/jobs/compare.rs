//! Compare: whether two devices have the same content.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::chunks::{At, Chunks};
use super::workers::{self, Cursor};
use super::zero::is_zero;
use crate::Error;
use crate::block::{Device, DirtyBits, Status};
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::{EngineKind, Iov, PoolBuffer, Queue};

/// Bytes that a worker compares at a time.
const CHUNK: u64 = 1 << 20;
/// A difference is reported at the start of its sector, as in QEMU.
const SECTOR: usize = 512;

options! {
    /// How to compare.
    #[derive(Clone, Debug, Default)]
    pub struct CompareOptions {
        /// Sizes and the allocation of every range must agree too (`-s`).
        pub strict: bool,
        /// How I/O is done.
        pub engine: EngineKind,
    }
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// The same content. If the sizes differ, the rest of the larger one
    /// reads as zeroes.
    Identical,
    /// The content of the sector at this offset differs.
    Content(u64),
    /// Strict: the allocation from this offset on differs.
    Status(u64),
}

/// A device could not be read.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// Finding out how a range is stored failed.
    #[error("Sector allocation test failed at offset {offset}: {source}")]
    Status {
        /// Which: 0 or 1.
        device: usize,
        /// Where, in bytes.
        offset: u64,
        /// Why.
        source: Error,
    },
    /// Reading failed.
    #[error("Error while reading offset {offset}: {source}")]
    Read {
        /// Which: 0 or 1.
        device: usize,
        /// Where, in bytes.
        offset: u64,
        /// Why.
        source: Error,
    },
    /// The I/O engine could not be started.
    #[error(transparent)]
    Engine(#[from] std::io::Error),
}

/// Compares two devices. Of several differences and errors the one with the lowest offset is
/// reported. `on_progress` is called on this thread with the bytes done; if it breaks, the job ends
/// with the error `ECANCELED`.
///
/// Strict comparison of the sizes is up to the caller: it needs no reading.
///
/// # Errors
/// If a device cannot be read, the I/O engine cannot be started, or the job is cancelled.
pub fn compare<G: IntoControlFlow>(
    devices: [Device; 2],
    options: &CompareOptions,
    mut on_progress: impl FnMut(Progress) -> G,
) -> Result<Comparison, CompareError> {
    let job = Job::new(devices, options.strict, None);
    job.run(options.engine, &mut on_progress)
}

/// What differs of the first device from the second one, as a bitmap of the first. The rest of a
/// larger one is compared with zeroes. `granularity`: bytes to a bit. `on_progress` is as that of
/// [`compare`].
///
/// # Panics
///
/// If the granularity is not a power of two from 512 bytes to 1 MiB.
pub fn differences<G: IntoControlFlow>(
    devices: [Device; 2],
    granularity: u64,
    engine: EngineKind,
    mut on_progress: impl FnMut(Progress) -> G,
) -> Result<DirtyBits, CompareError> {
    assert!(granularity <= CHUNK, "a granularity of {granularity} bytes");
    let bits = DirtyBits::new(devices[0].size(), granularity);
    let job = Job::new(devices, false, Some(Mutex::new(bits)));
    job.run(engine, &mut on_progress)?;
    let job = Arc::into_inner(job).expect("all workers have ended");
    let bits = job.differences.expect("given above");
    Ok(bits.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// What ends a comparison: a difference or an error.
type Found = At<Result<Comparison, CompareError>>;

struct Job {
    devices: [Device; 2],
    strict: bool,
    /// All differences, if they do not end the job.
    differences: Option<Mutex<DirtyBits>>,
    progress: Chunks<Result<Comparison, CompareError>>,
}

impl workers::Job for Job {
    fn cursor(&self) -> &Cursor {
        self.progress.cursor()
    }

    async fn worker(&self, queue: &Queue) {
        // Buffers are released after each chunk, so that the next worker gets them while they are
        // in the processor's cache.
        let compare = async |chunk: &Range<u64>| {
            let mut buffers = [(); 2].map(|()| queue.buffer(CHUNK as usize));
            self.compare(queue, chunk, &mut buffers).await
        };
        self.progress.each_chunk(CHUNK, compare).await;
    }
}

/// A range of a device with one kind of allocation, up to `end`.
struct Segment {
    end: u64,
    status: Status,
}

impl Job {
    fn new(devices: [Device; 2], strict: bool, differences: Option<Mutex<DirtyBits>>) -> Arc<Self> {
        let total = devices[0].size().max(devices[1].size());
        Arc::new(Job {
            devices,
            strict,
            differences,
            progress: Chunks::new(total),
        })
    }

    fn run<G: IntoControlFlow>(
        self: &Arc<Self>,
        engine: EngineKind,
        on_progress: &mut impl FnMut(Progress) -> G,
    ) -> Result<Comparison, CompareError> {
        workers::run(self, engine, None, || {
            on_progress(self.progress.cursor().progress()).into_control_flow()
        })?;
        match self.progress.result() {
            Ok(()) => Ok(Comparison::Identical),
            Err(found) => found,
        }
    }

    async fn compare(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        buffers: &mut [PoolBuffer; 2],
    ) -> Result<(), Found> {
        let (a, a_failed) = self.segments(queue, 0, chunk).await;
        let (b, b_failed) = self.segments(queue, 1, chunk).await;
        let (mut i, mut j, mut at) = (0, 0, chunk.start);
        while at < chunk.end {
            if i == a.len() || j == b.len() {
                // A status query failed here, and there was no difference before.
                let failed = [a_failed, b_failed].into_iter().flatten();
                return Err(failed.min_by_key(|f| f.0).expect("one has failed"));
            }
            let end = a[i].end.min(b[j].end);
            let [a_is, b_is] = [&a[i].status, &b[j].status];
            let inside = at < self.devices[0].size().min(self.devices[1].size());
            if self.strict && inside && key(a_is) != key(b_is) {
                return Err((at, Ok(Comparison::Status(at))));
            }
            if a_is.zero && b_is.zero {
                // Both may continue alike far beyond the chunk.
                self.progress.cursor().skip(chunk.end, end / CHUNK * CHUNK);
            } else {
                let length = (end.min(chunk.end) - at) as usize;
                self.compare_data(queue, at, length, [a_is.zero, b_is.zero], buffers)
                    .await?;
            }
            i += usize::from(a[i].end == end);
            j += usize::from(b[j].end == end);
            at = end;
        }
        Ok(())
    }

    /// The segments of a device in a chunk; adjacent segments of one kind are joined. The last one
    /// ends at or after the end of the chunk, or where the status is not known.
    async fn segments(
        &self,
        queue: &Queue,
        device: usize,
        chunk: &Range<u64>,
    ) -> (Vec<Segment>, Option<Found>) {
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = chunk.start;
        while at < chunk.end {
            let status = match self.status(queue, device, at).await {
                Ok(status) => status,
                Err(failed) => return (segments, Some(failed)),
            };
            at += status.length;
            match segments.last_mut() {
                Some(last) if key(&last.status) == key(&status) => last.end = at,
                _ => segments.push(Segment { end: at, status }),
            }
        }
        (segments, None)
    }

    /// The status at `at`; past the end of the device everything is zero.
    async fn status(&self, queue: &Queue, device: usize, at: u64) -> Result<Status, Found> {
        let size = self.devices[device].size();
        if at >= size {
            return Ok(Status {
                zero: true,
                present: true,
                ..Status::unallocated(u64::MAX - at)
            });
        }
        let status = self.devices[device].status(queue, at, size - at).await;
        status.map_err(|source| {
            let error = CompareError::Status {
                device,
                offset: at,
                source,
            };
            (at, Err(error))
        })
    }

    #[allow(unsafe_code)]
    async fn compare_data(
        &self,
        queue: &Queue,
        at: u64,
        length: usize,
        zero: [bool; 2],
        buffers: &mut [PoolBuffer; 2],
    ) -> Result<(), Found> {
        let [a, b] = buffers;
        {
            // SAFETY: the buffers are borrowed until both reads, awaited
            // here, have ended.
            let iovs = unsafe { [a.iov().slice(0, length), b.iov().slice(0, length)] };
            for device in [0, 1] {
                if !zero[device] {
                    self.read(queue, device, at, &iovs[device]).await?;
                }
            }
        }
        let differ = |range: &Range<usize>| match zero {
            [true, _] => !is_zero(&b[range.clone()]),
            [_, true] => !is_zero(&a[range.clone()]),
            _ => a[range.clone()] != b[range.clone()],
        };
        if !differ(&(0..length)) {
            return Ok(());
        }
        if let Some(differences) = &self.differences {
            let mut bits = crate::lock(differences);
            let unit = bits.granularity() as usize;
            for range in pieces(length, unit).filter(differ) {
                bits.set(at + range.start as u64..at + range.end as u64);
            }
            return Ok(());
        }
        let first = pieces(length, SECTOR).find(differ).expect("they differ");
        let offset = at + first.start as u64;
        Err((offset, Ok(Comparison::Content(offset))))
    }

    async fn read(&self, queue: &Queue, device: usize, at: u64, iov: &Iov) -> Result<(), Found> {
        let read = self.devices[device].read(queue, at, iov).await;
        read.map_err(|source| {
            let error = CompareError::Read {
                device,
                offset: at,
                source,
            };
            (at, Err(error))
        })
    }
}

/// The ranges of `unit` bytes that `length` bytes consist of.
fn pieces(length: usize, unit: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length)
        .step_by(unit)
        .map(move |start| start..(start + unit).min(length))
}

/// How a range is allocated.
fn key(s: &Status) -> (bool, bool, bool, bool, bool) {
    (s.data, s.zero, s.present, s.compressed, s.host.is_some())
}
