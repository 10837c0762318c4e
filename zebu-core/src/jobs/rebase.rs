//! Rebase: put an image on top of another backing file, its content unchanged.
//!
//! Ranges that the image does not allocate are read from its backing file. Where the new backing
//! file differs there, the image must hold the old content itself. A worker reads a chunk of both,
//! and writes the differences into the image, durably before the header names the new backing file.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::chunks::{At, Chunks};
use super::create::NewBacking;
use super::snapshots::refuse_change_behind;
use super::workers;
use super::zero::is_zero;
use crate::block::{Device, FileSpec, ImageSpec, Layer, OpenOptions, Policy, Status, Zeroing};
use crate::names::Source;
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::{Buffer, EngineKind, Queue, Storage};
use crate::{Error, Result};

/// Bytes that a worker handles at a time, unless clusters are larger.
const CHUNK: u64 = 1 << 20;

options! {
    /// How to rebase.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct RebaseOptions {
        /// Compress what is written into the image, where whole clusters are.
        pub compress: bool,
        /// Go on although internal snapshots show the backing file where they have nothing of their
        /// own, and so change with it.
        pub change_snapshots: bool,
        /// How I/O is done.
        pub engine: EngineKind,
    }
}

/// The step at which a rebase failed. The image still has its old backing file and its content.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RebaseError {
    /// An internal snapshot would change, or cannot be read.
    #[error(transparent)]
    Snapshot(Error),
    /// Reading the image and its backing chain.
    #[error("error while reading from old backing file: {0}")]
    ReadOld(Error),
    /// Reading the new backing file.
    #[error("error while reading from new backing file: {0}")]
    ReadNew(Error),
    /// Writing to the image.
    #[error("Error while writing to COW image: {0}")]
    Write(Error),
    /// Changing the header.
    #[error(transparent)]
    Header(Error),
    /// The I/O engine could not be started.
    #[error(transparent)]
    Engine(#[from] io::Error),
}

/// Puts `overlay`, open for writing with its old chain, on top of `new`, which `backing` names;
/// None: on top of nothing. Blocks; uses all cores.
///
/// `on_progress` is called on this thread with the bytes done; if it breaks, the job ends with the
/// error `ECANCELED`, and the image keeps its content and its backing file.
///
/// # Errors
/// If an internal snapshot of the image shows its backing file, or would show the new one, unless
/// that is the old one or [`RebaseOptions::change_snapshots`] is set. If an image cannot be read or
/// written, or the job is cancelled.
pub fn rebase<G: IntoControlFlow>(
    queue: &Queue,
    mut overlay: Device,
    new: Option<Device>,
    backing: Option<&NewBacking>,
    options: &RebaseOptions,
    mut on_progress: impl FnMut(Progress) -> G,
) -> Result<(), RebaseError> {
    let fits = new.as_ref().map_or(Ok(()), Device::check_overlay);
    fits.map_err(RebaseError::ReadNew)?;
    // Backing files are compared, which are below them.
    overlay.leave_out_changes();
    let unit = overlay.top().image.zero_unit();
    let cluster = overlay.top().image.cluster_size().unwrap_or(1);
    let common = common_layer(&overlay, new.as_ref());
    if !options.change_snapshots {
        let refused = queue.block_on(refuse_changed_snapshots(queue, &overlay, &new, common));
        refused.map_err(RebaseError::Snapshot)?;
    }
    let job = Arc::new(Job {
        common,
        progress: Chunks::new(overlay.size()),
        zero_flag: overlay.top().image.has_zero_units(),
        chunk: CHUNK.max(cluster),
        overlay,
        new,
        unit,
        cluster,
        compress: options.compress,
    });
    let ran = workers::run(&job, options.engine, None, || {
        on_progress(job.progress.cursor().progress()).into_control_flow()
    });
    let result = ran.map_err(RebaseError::Engine);
    let result = result.and_then(|()| job.progress.result());
    let job = Arc::into_inner(job).expect("all workers have ended");
    let mut overlay = job.overlay;
    queue.block_on(async {
        let result = match result {
            Ok(()) => name_backing(queue, &mut overlay, backing).await,
            failed => failed,
        };
        let closed = overlay.close(queue).await;
        result.and(closed.map_err(RebaseError::Write))
    })
}

/// Refuses another backing file if an internal snapshot shows it, or the one before.
async fn refuse_changed_snapshots(
    queue: &Queue,
    overlay: &Device,
    new: &Option<Device>,
    common: Option<usize>,
) -> Result<()> {
    let old = overlay.layers().get(1).map_or(0, Layer::size);
    let end = match common {
        // It is the same one.
        Some(1) => 0,
        _ => old.max(new.as_ref().map_or(0, Device::size)),
    };
    refuse_change_behind(queue, &overlay.layers()[..1], end).await
}

/// Writes only the header: allocated ranges keep their content, and ranges read from the backing
/// file may change, also those of internal snapshots. Blocks.
///
/// # Errors
/// If the header cannot be written, or has no space for the name.
pub fn rebase_unsafe(
    queue: &Queue,
    mut overlay: Device,
    backing: Option<&NewBacking>,
) -> Result<(), RebaseError> {
    queue.block_on(async {
        let result = name_backing(queue, &mut overlay, backing).await;
        let closed = overlay.close(queue).await;
        result.and(closed.map_err(RebaseError::Write))
    })
}

async fn name_backing(
    queue: &Queue,
    overlay: &mut Device,
    backing: Option<&NewBacking>,
) -> Result<(), RebaseError> {
    let name = backing.map(|b| b.name.as_os_str());
    let format = backing.and_then(|b| b.format.as_deref());
    overlay
        .set_backing(queue, name, format)
        .await
        .map_err(RebaseError::Header)
}

/// Refuses a chain, from `spec` down, that contains the file `image` or its external data file: an
/// image cannot be based on itself. The chain is followed as far as it can be opened and `policy`
/// allows. Blocks.
///
/// # Errors
/// If it is such a chain.
pub fn check_no_loop(
    queue: &Queue,
    image: &Path,
    data_file: Option<&Path>,
    spec: &ImageSpec,
    policy: Policy,
) -> Result<()> {
    let Ok(image) = identity(image) else {
        return Ok(());
    };
    let data_file = data_file.and_then(|path| identity(path).ok());
    let is_data_file = |file: &FileSpec| {
        data_file.is_some_and(|own| identity(&file.path).is_ok_and(|found| found == own))
    };
    let mut seen = HashSet::new();
    let mut next = Some(spec.clone());
    while let Some(spec) = next {
        let Ok(found) = identity(&spec.file.path) else {
            return Ok(());
        };
        let refuse = |what: &str| {
            let name = spec.file.name();
            let name = name.display();
            Err(Error::Refused(format!("Backing file '{name}' {what}.")))
        };
        if found == image {
            return refuse("creates an infinite loop");
        }
        if is_data_file(&spec.file) {
            return refuse("is the data file of the image");
        }
        if !seen.insert(found) {
            return Ok(());
        }
        let (below, its_data_file) = match policy {
            Policy::Follow => behind(queue, spec.clone()),
            Policy::Nothing | Policy::Untrusted(_) => (None, None),
        };
        if its_data_file.is_some_and(|file| is_data_file(&file)) {
            return refuse("has the data file of the image, too");
        }
        next = below;
    }
    Ok(())
}

/// The backing file and the external data file of an image, as far as they can be determined.
fn behind(queue: &Queue, spec: ImageSpec) -> (Option<ImageSpec>, Option<FileSpec>) {
    let look = OpenOptions {
        inspect: true,
        force_share: true,
        ..OpenOptions::default()
    };
    match Device::open_spec(queue, spec, &look) {
        Ok(device) => (backing_of(&device), device.top().spec.data_file.clone()),
        Err(_) => (None, None),
    }
}

/// What a backing file's name in the header means.
fn backing_of(device: &Device) -> Option<ImageSpec> {
    let backing = device.top().backing()?;
    let name = OsStr::from_bytes(backing.name).to_owned();
    let format = backing.format.map(String::from_utf8_lossy);
    let source = Source::with_driver(name, format.as_deref()).ok()?;
    source
        .resolve(Some(device.top().spec.file.name()), None)
        .ok()
}

/// The identity of what a path leads to.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    Ok(crate::storage::file::identity(&std::fs::metadata(path)?))
}

/// The layer of `overlay` from which on its chain is also that of the new backing file, if there is
/// one: data from there need no comparing.
fn common_layer(overlay: &Device, new: Option<&Device>) -> Option<usize> {
    let new = new.filter(|new| new.keeps_bytes())?;
    let (old, new) = (overlay.layers(), new.layers());
    let common = old.len().checked_sub(new.len())?;
    let alike = old[common..].iter().zip(new).all(|(a, b)| is_same(a, b));
    alike.then_some(common)
}

/// Whether two layers are the same image, opened alike.
fn is_same(a: &Layer, b: &Layer) -> bool {
    // The path of a disk of another image does not tell how that was opened.
    let found = |file: &dyn Storage| match file.is_in_image() {
        true => None,
        false => identity(file.path()).ok(),
    };
    let files = |layer: &Layer| found(layer.file()).zip(found(layer.data()));
    !a.is_changed_by_filters()
        && !b.is_changed_by_filters()
        && a.format() == b.format()
        && a.spec.options == b.spec.options
        && files(a).is_some_and(|found| Some(found) == files(b))
}

struct Job {
    overlay: Device,
    new: Option<Device>,
    common: Option<usize>,
    /// The unit of allocation of the image: a cluster or a subcluster.
    unit: u64,
    cluster: u64,
    /// Bytes handled at a time: whole clusters of the image.
    chunk: u64,
    /// The format can mark a cluster as zero.
    zero_flag: bool,
    compress: bool,
    progress: Chunks<RebaseError>,
}

impl workers::Job for Job {
    fn cursor(&self) -> &workers::Cursor {
        self.progress.cursor()
    }

    async fn worker(&self, queue: &Queue) {
        let length = self.chunk.min(self.overlay.size()) as usize;
        let mut buffers = [Buffer::new(length), Buffer::new(length)];
        let work = async |chunk: &Range<u64>| self.compare(queue, chunk, &mut buffers).await;
        self.progress.each_chunk(self.chunk, work).await;
    }
}

impl Job {
    async fn compare(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
        buffers: &mut [Buffer; 2],
    ) -> Result<(), At<RebaseError>> {
        for segment in self.segments(queue, chunk).await? {
            self.compare_segment(queue, segment, buffers).await?;
        }
        Ok(())
    }

    /// The parts of a chunk that may have to be written: whole units, except for the last of the
    /// disk. Adjacent parts are joined.
    async fn segments(
        &self,
        queue: &Queue,
        chunk: &Range<u64>,
    ) -> Result<Vec<Range<u64>>, At<RebaseError>> {
        let mut segments: Vec<Range<u64>> = Vec::new();
        let mut at = chunk.start;
        while at < chunk.end {
            let (length, same) = self.look(queue, at).await?;
            let mut end = chunk.end.min(at + length);
            if same {
                self.skip(chunk, at + length);
            } else {
                let mut unit = self.unit;
                if self.compress && unit != self.cluster {
                    end = end.min(at - at % self.cluster + self.cluster);
                    if self.is_free(queue, at).await? {
                        unit = self.cluster;
                    }
                }
                let whole = at / unit * unit..chunk.end.min(end.next_multiple_of(unit));
                match segments.last_mut() {
                    Some(last) if last.end >= whole.start => last.end = whole.end,
                    _ => segments.push(whole),
                }
            }
            at = end;
        }
        Ok(segments)
    }

    /// Whether nothing changes for the bytes from `at` on, according to the mapping, and for how
    /// many bytes.
    async fn look(&self, queue: &Queue, at: u64) -> Result<(u64, bool), At<RebaseError>> {
        let old = self
            .overlay
            .status(queue, at, self.overlay.size() - at)
            .await;
        let old = old.map_err(|e| (at, RebaseError::ReadOld(e)))?;
        if self.stays(&old) {
            return Ok((old.length, true));
        }
        let new = self.new_status(queue, at, old.length).await?;
        Ok((old.length.min(new.length), old.zero && new.zero))
    }

    /// Whether the image has nothing of the cluster itself, so that it can be compressed as a whole.
    async fn is_free(&self, queue: &Queue, at: u64) -> Result<bool, At<RebaseError>> {
        let mut at = at - at % self.cluster;
        let end = self.overlay.size().min(at + self.cluster);
        while at < end {
            let status = self.overlay.status(queue, at, end - at).await;
            let status = status.map_err(|e| (at, RebaseError::ReadOld(e)))?;
            if status.present && status.depth == 0 {
                return Ok(false);
            }
            at += status.length;
        }
        Ok(true)
    }

    /// Whether the image allocates the range itself, or it comes from an image that the new chain
    /// has too.
    fn stays(&self, old: &Status) -> bool {
        (old.present && old.depth == 0) || self.common.is_some_and(|common| old.depth >= common)
    }

    /// Skips what needs no work, up to `end`.
    fn skip(&self, chunk: &Range<u64>, end: u64) {
        let whole = end / self.chunk * self.chunk;
        let end = if end == self.overlay.size() {
            end
        } else {
            whole
        };
        self.progress.cursor().skip(chunk.end, end);
    }

    /// The content of the new backing file; past its end everything is zero.
    async fn new_status(
        &self,
        queue: &Queue,
        at: u64,
        length: u64,
    ) -> Result<Status, At<RebaseError>> {
        let size = self.new.as_ref().map_or(0, Device::size);
        match &self.new {
            Some(new) if at < size => new
                .status(queue, at, length.min(size - at))
                .await
                .map_err(|e| (at, RebaseError::ReadNew(e))),
            _ => Ok(Status {
                zero: true,
                ..Status::data(length)
            }),
        }
    }

    /// Reads the old and the new content, and writes the old where they differ.
    #[allow(unsafe_code)]
    async fn compare_segment(
        &self,
        queue: &Queue,
        segment: Range<u64>,
        buffers: &mut [Buffer; 2],
    ) -> Result<(), At<RebaseError>> {
        let (at, length) = (segment.start, (segment.end - segment.start) as usize);
        let [old, new] = buffers;
        // SAFETY: the buffers are borrowed until the reads and writes, awaited
        // here, have ended.
        let (old_iov, new_iov) = unsafe { (old.iov(), new.iov()) };
        self.overlay
            .read(queue, at, &old_iov.slice(0, length))
            .await
            .map_err(|e| (at, RebaseError::ReadOld(e)))?;
        let size = self.new.as_ref().map_or(0, Device::size);
        let inside = size.saturating_sub(at).min(length as u64) as usize;
        if let Some(new) = self.new.as_ref().filter(|_| inside > 0) {
            new.read(queue, at, &new_iov.slice(0, inside))
                .await
                .map_err(|e| (at, RebaseError::ReadNew(e)))?;
        }
        new_iov.slice(inside, length - inside).fill(0);
        for run in self.runs(at, &old[..length], &new[..length]) {
            let iov = old_iov.slice(run.start, run.length);
            let offset = at + run.start as u64;
            let result = match run.kind {
                RunKind::Zero => {
                    let length = run.length as u64;
                    let keep = Zeroing::Keep;
                    self.overlay.write_zeroes(queue, offset, length, keep).await
                }
                RunKind::Data => self.overlay.write(queue, offset, &iov).await,
                RunKind::Packed => match self.overlay.write_compressed(queue, offset, &iov).await {
                    // A cluster has its place already, as in an image with preallocated metadata.
                    Err(e) if e.errno() == libc::EIO => {
                        self.overlay.write(queue, offset, &iov).await
                    }
                    done => done,
                },
            };
            result.map_err(|e| (offset, RebaseError::Write(e)))?;
        }
        Ok(())
    }

    /// The ranges in which `old` and `new`, which start at `at` of the disk, differ: whole units,
    /// adjacent ones of one kind joined.
    fn runs(&self, at: u64, old: &[u8], new: &[u8]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut start = 0;
        while start < old.len() {
            let size = self.step(at + start as u64, old.len() - start);
            let range = start..start + size;
            start = range.end;
            if old[range.clone()] == new[range.clone()] {
                continue;
            }
            let kind = match is_zero(&old[range.clone()]) {
                true if self.zero_flag => RunKind::Zero,
                _ if self.packs(at + range.start as u64, size) => RunKind::Packed,
                _ => RunKind::Data,
            };
            match runs.last_mut() {
                Some(last) if last.kind == kind && last.start + last.length == range.start => {
                    last.length += size;
                }
                _ => runs.push(Run {
                    start: range.start,
                    length: size,
                    kind,
                }),
            }
        }
        runs
    }

    /// Bytes from `at` on, of `left`, that are compared as one: to the end of the unit, or of the
    /// cluster if it can be compressed as a whole.
    fn step(&self, at: u64, left: usize) -> usize {
        let unit = match self.compress && at.is_multiple_of(self.cluster) {
            true if left as u64 >= self.cluster || at + left as u64 == self.overlay.size() => {
                self.cluster
            }
            _ => self.unit,
        };
        ((unit - at % unit) as usize).min(left)
    }

    /// Whether these bytes are a whole cluster, to be compressed.
    fn packs(&self, at: u64, length: usize) -> bool {
        self.compress
            && at.is_multiple_of(self.cluster)
            && (length as u64 == self.cluster || at + length as u64 == self.overlay.size())
    }
}

/// How a run is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunKind {
    Zero,
    Data,
    Packed,
}

/// Bytes of a segment that are written in one request.
struct Run {
    start: usize,
    length: usize,
    kind: RunKind,
}
