//! Convert: the content of one or more devices, one after the other, into a
//! target.
//!
//! A worker takes a chunk of the target and looks up its content in the mapping (`content.rs`). It
//! reads data, looks for zeroes, and writes the rest (`work.rs`), compressed on request
//! (`pack.rs`). Ranges that need no work according to the mapping are skipped.

mod content;
mod error;
mod offload;
mod output;
mod pack;
mod work;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

pub(super) use content::{Part, Treatment};
pub use error::ConvertError;
pub(super) use output::Output;

use super::chunks::Chunks;
use super::rate_limiter::RateLimiter;
use super::target::Target;
use super::workers;
use crate::block::{BitmapInfo, Device, DirtyBits};
use crate::drivers::stream::Packing;
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::EngineKind;
use crate::{Result, lock};

/// Bytes that a worker handles at a time, unless the target's clusters are
/// larger.
const CHUNK: u64 = 1 << 20;
/// The same for compression: the chunks of a core's workers stay in its cache.
const COMPRESSED_CHUNK: u64 = 256 << 10;
/// Blocks in which zeroes are looked for, in bytes, unless the target has
/// larger ones.
const ZERO_BLOCK: u64 = 4096;

options! {
    /// How to convert.
    #[derive(Clone, Debug)]
    pub struct ConvertOptions {
        /// Chunks in work at once, over all threads (`-m`), at most [`MAX_WORKERS`](super::MAX_WORKERS); None: as many
        /// as keep all cores busy.
        pub workers: Option<usize>,
        /// Runs of at least this many zero bytes are not written (`-S`); 0 writes
        /// everything and allocates the whole target.
        pub sparse: u64,
        /// The target reads as zeroes from this offset on, in bytes; None: nothing
        /// is known of it.
        pub zero_from: Option<u64>,
        /// The target has the same backing file as the source: ranges that the source's top image
        /// leaves to it are left to it in the target (`-B`).
        pub above_backing: bool,
        /// Only what is dirty here is written, in whole clusters of the target; the target leaves
        /// the rest to its backing file. There is one source.
        pub only: Option<Arc<DirtyBits>>,
        /// Store clusters compressed (`-c`). The target is one that can. A new image that stores
        /// only compressed data is compressed without it, too.
        pub compress: Option<CompressOptions>,
        /// Place chunks in the target as they are ready, not in the order of the
        /// source (`-W`). A raw target is the same either way.
        pub any_order: bool,
        /// Let the kernel copy data from file to file where it can (`-C`): from images
        /// without compression to raw files.
        pub copy_range: bool,
        /// Go on after a read error, with zeroes for what could not be read.
        pub salvage: bool,
        /// Bitmaps that the target gets, a qcow2 image of version 3 without bitmaps of these names.
        /// Of what is listed, name and state count. With `salvage`, what could not be read is dirty
        /// in all of them, since the target has other content there.
        pub bitmaps: Vec<(BitmapInfo, DirtyBits)>,
        /// Bytes of data a second at most; what is known to be zero is not counted.
        pub rate: Option<u64>,
        /// How I/O is done.
        pub engine: EngineKind,
    }
}

options! {
    /// How to compress. The codec is the target's.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct CompressOptions {
        /// The level, as [`crate::codec::Compressor::compress`] has it.
        pub level: Option<i32>,
    }
}

impl Default for ConvertOptions {
    fn default() -> Self {
        ConvertOptions {
            workers: None,
            sparse: ZERO_BLOCK,
            zero_from: None,
            above_backing: false,
            only: None,
            compress: None,
            any_order: false,
            copy_range: false,
            salvage: false,
            bitmaps: Vec::new(),
            rate: None,
            engine: EngineKind::best(),
        }
    }
}

/// Events of a conversion, reported on the thread that called it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConvertEvent {
    /// So much of the source is done.
    Progress(Progress),
    /// Salvage: this sector could not be read, and is zero in the target.
    Unreadable {
        /// Offset in the concatenated sources, in bytes.
        offset: u64,
        /// Why, as an `errno`.
        errno: i32,
    },
}

/// What the workers share.
struct Job {
    sources: Arc<Vec<Device>>,
    output: Output,
    /// What is dirty of the source, in whole clusters of the target; None: all of it.
    only: Option<DirtyBits>,
    progress: Chunks<ConvertError>,
    /// Of data; what is known to be zero is not counted.
    rate_limiter: RateLimiter,
    /// Bytes of a chunk: whole clusters of the target.
    chunk: u64,
    unreadable: Mutex<Vec<(u64, i32)>>,
    /// Those that the target gets.
    bitmaps: Mutex<Vec<(BitmapInfo, DirtyBits)>>,
    /// Whether data are offered to the kernel to copy.
    offload: AtomicBool,
}

/// Writes the bytes of `sources`, one after the other, to the start of
/// `target`, which is long enough.
///
/// `on_progress` is called on this thread at intervals; if it breaks, the job ends with the error
/// `ECANCELED`. On return everything was written and, unless the target's cache mode says
/// otherwise, is durable.
///
/// ```no_run
/// use std::ops::ControlFlow;
///
/// use zebu::jobs::{ConvertEvent, ConvertOptions, Target, convert};
/// use zebu::storage::{OpenFile, open_file, set_len};
/// use zebu::{Device, OpenOptions, Queue, QueueOptions, Source};
///
/// # fn is_cancelled() -> bool { false }
/// let queue = Queue::new(QueueOptions::default())?;
/// let name = Source::Name("disk.qcow2".into());
/// let source = Device::open(&queue, &name, &OpenOptions::default())?;
/// let target = open_file("disk.raw", OpenFile::default().write(true).create(true))?;
/// queue.block_on(set_len(&*target, &queue, source.size()))?;
/// let options = ConvertOptions::default();
/// convert(vec![source], Target::Raw(target), &options, |event| {
///     if let ConvertEvent::Progress(progress) = event {
///         println!("{} of {} bytes", progress.done, progress.total);
///     }
///     match is_cancelled() {
///         true => ControlFlow::Break(()),
///         false => ControlFlow::Continue(()),
///     }
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a source cannot be read, the target cannot be written, or the job is cancelled. The target's
/// content is unspecified then. Or if the options do not fit the sources and the target.
pub fn convert<G: IntoControlFlow>(
    sources: Vec<Device>,
    target: Target,
    options: &ConvertOptions,
    on_progress: impl FnMut(ConvertEvent) -> G,
) -> Result<(), ConvertError> {
    convert_shared(&Arc::new(sources), target, options, on_progress)
}

/// [`convert`] of sources that are used once more.
pub(super) fn convert_shared<G: IntoControlFlow>(
    sources: &Arc<Vec<Device>>,
    target: Target,
    options: &ConvertOptions,
    mut on_progress: impl FnMut(ConvertEvent) -> G,
) -> Result<(), ConvertError> {
    let total = sources
        .iter()
        .try_fold(0u64, |sum, source| sum.checked_add(source.size()))
        .ok_or(ConvertError::TooLarge)?;
    let mut options = options.clone();
    if !target.shows_backing() {
        options.above_backing = false;
        options.only = None;
    }
    match target.packing() {
        None if options.compress.is_some() => return Err(ConvertError::NotCompressible),
        Some(Packing::Zlib) => {
            options.compress.get_or_insert_default();
        }
        _ => {}
    }
    if let Some(is_zero) = target.reads_as_zeroes()
        && !options.above_backing
    {
        options.zero_from = is_zero.then_some(0);
    }
    let (engine, workers) = (options.engine, options.workers);
    // Before the target is touched.
    workers::check(workers).map_err(ConvertError::Engine)?;
    let bitmaps = std::mem::take(&mut options.bitmaps);
    let job = Arc::new(Job {
        chunk: target.cluster_size().max(match options.compress {
            Some(_) => COMPRESSED_CHUNK,
            None => CHUNK,
        }),
        only: options.only.as_ref().map(|only| {
            let unit = target.cluster_size().max(only.granularity());
            let mut whole = DirtyBits::new(only.size(), unit);
            whole.merge(only);
            whole
        }),
        sources: sources.clone(),
        progress: Chunks::new(total),
        rate_limiter: RateLimiter::new(options.rate),
        unreadable: Mutex::new(Vec::new()),
        bitmaps: Mutex::new(bitmaps),
        offload: options.copy_range.into(),
        output: Output::new(target, options),
    });
    let ran = workers::run(&job, engine, workers, || {
        for (offset, errno) in std::mem::take(&mut *lock(&job.unreadable)) {
            on_progress(ConvertEvent::Unreadable { offset, errno }).into_control_flow()?;
        }
        let progress = job.progress.cursor().progress();
        let flow = on_progress(ConvertEvent::Progress(progress)).into_control_flow();
        if flow.is_break() {
            job.output.target.stop();
        }
        flow
    });
    let ended = job.progress.result();
    let ended = ended.and(ran.map_err(ConvertError::Engine));
    let job = Arc::into_inner(job).expect("all workers have ended");
    let bitmaps = std::mem::take(&mut *lock(&job.bitmaps));
    let bitmaps = ended.is_ok().then_some(&bitmaps[..]);
    let closed = close(job.output.target, bitmaps, total, engine);
    ended.and(closed)
}

/// Closes the target, with these bitmaps if it was filled.
fn close(
    mut target: Target,
    bitmaps: Option<&[(BitmapInfo, DirtyBits)]>,
    total: u64,
    engine: EngineKind,
) -> Result<(), ConvertError> {
    let queue = workers::queue(engine).map_err(ConvertError::Engine)?;
    let closed = queue.block_on(async {
        let added = target
            .add_bitmaps(&queue, bitmaps.unwrap_or_default())
            .await;
        let is_filled = bitmaps.is_some() && added.is_ok();
        added.and(target.close(&queue, is_filled).await)
    });
    closed.map_err(|source| ConvertError::Write {
        offset: total,
        source,
    })
}
