//! Conversion of an image that is a stream: a pipe, a socket, a decompressor.
//!
//! A thread reads the stream once, from its start to its end. The reader of its format says for
//! each part of it what range of the disk it is, and workers write these ranges to the target in
//! any order. Nothing is read twice: what is known too late waits in memory or in a file. What a format does for
//! that is in `drivers/stream`.

mod raw;
mod source;
mod work;

use std::sync::{Arc, Mutex};

pub use source::{ImageStream, unpacked};
use work::Job;

use super::convert::{ConvertError, ConvertEvent, ConvertOptions, Output};
use super::rate_limiter::RateLimiter;
use super::target::Target;
use super::workers::{self, Cursor};
use crate::block::{Device, Preallocation};
use crate::drivers::stream::Packing;
use crate::drivers::stream::{
    Channel, Fault, Piece, Pool, Reader, Reading, Sink, Spill, WAITING, read_full,
};
use crate::progress::IntoControlFlow;
use crate::storage::{self, EngineKind};
use crate::{Error, Result, lock};

options! {
    /// How to convert a stream.
    #[derive(Debug)]
    pub struct StreamOptions {
        /// The backing file of the image, if it has one.
        pub backing: Option<Device>,
        /// Where parts of the stream are held that do not fit in memory.
        pub spill: Option<Spill>,
        /// Bytes that the target can have, for a stream that does not say its size.
        pub most: u64,
        /// The target gets the size of the disk at the end.
        pub resize: bool,
    }
}

impl Default for StreamOptions {
    fn default() -> Self {
        StreamOptions {
            backing: None,
            spill: None,
            most: u64::MAX,
            resize: false,
        }
    }
}

/// What the thread that reads returns: the size of the disk.
type Ended = Result<u64, ConvertError>;

/// Writes the image in a stream to the start of `target`, which is long enough. If the stream does
/// not say the size of the disk, the target is a raw file or a qcow2 image, whose size is set at the
/// end.
///
/// Of the options, `above_backing`, `only`, `copy_range`, `salvage` and `bitmaps` have no meaning
/// here. The rest is as for [`convert`](super::convert()).
///
/// # Errors
/// As for [`convert`](super::convert()), and [`ConvertError::Stream`]. If the job is cancelled while
/// the stream has nothing to read, the thread that reads it ends when it has, or with the process.
pub fn convert_stream<G: IntoControlFlow>(
    stream: ImageStream,
    target: Target,
    stream_options: StreamOptions,
    options: &ConvertOptions,
    mut on_progress: impl FnMut(ConvertEvent) -> G,
) -> Result<(), ConvertError> {
    let mut options = options.clone();
    match target.packing() {
        None if options.compress.is_some() => return Err(ConvertError::NotCompressible),
        Some(Packing::Zlib) => {
            options.compress.get_or_insert_default();
        }
        _ => {}
    }
    match (target.reads_as_zeroes(), &target) {
        (Some(is_zero), _) => options.zero_from = is_zero.then_some(0),
        (None, Target::Stream(_)) => options.zero_from = Some(0),
        (None, _) => {}
    }
    let (engine, workers) = (options.engine, options.workers);
    let (size, resize) = (stream.size(), stream_options.resize);
    let pool = Pool::new(stream.block_len().max(target.cluster_size()) as usize);
    let StreamOptions {
        backing,
        spill,
        most,
        ..
    } = stream_options;
    let reading = Reading {
        has_backing: backing.is_some(),
        spill,
        pool: pool.clone(),
    };
    let (bytes, reader) = stream.into_reader(most, reading);
    let channel = Arc::new(Channel::new(WAITING));
    let job = Arc::new(Job {
        channel: channel.clone(),
        cursor: Cursor::new(size.unwrap_or(u64::MAX)),
        failure: Mutex::new(None),
        rate_limiter: RateLimiter::new(options.rate),
        backing,
        output: Output::new(target, options),
    });
    let ended: Arc<Mutex<Option<Ended>>> = Arc::default();
    let reading = {
        let (channel, ended) = (channel.clone(), ended.clone());
        std::thread::Builder::new()
            .name("zebu-stream".into())
            .spawn(move || {
                let result = read(bytes, reader, &pool, &channel);
                *lock(&ended) = result;
                channel.end();
            })
            .map_err(ConvertError::Engine)?
    };
    let ran = workers::run(&job, engine, workers, || {
        let progress = job.cursor.progress();
        let flow = on_progress(ConvertEvent::Progress(progress)).into_control_flow();
        if flow.is_break() {
            channel.stop();
            job.output.target.stop();
        }
        flow
    });
    if ran.is_err() {
        channel.stop();
    }
    if let Some(failure) = lock(&job.failure).take() {
        return Err(failure);
    }
    ran.map_err(ConvertError::Engine)?;
    // The thread ends before the last worker does, unless all were stopped.
    let Some(ended) = lock(&ended).take() else {
        return Err(ConvertError::Engine(crate::progress::cancelled_error()));
    };
    let size = ended?;
    let _ = reading.join();
    let job = Arc::into_inner(job).expect("all workers have ended");
    let closed = finish(job.output.target, resize.then_some(size), engine);
    closed.map_err(|source| ConvertError::Write {
        offset: size,
        source,
    })
}

/// Reads the stream to its end. None: the workers have stopped.
fn read(
    mut bytes: Box<dyn std::io::Read + Send>,
    mut reader: Box<dyn Reader>,
    pool: &Arc<Pool>,
    channel: &Channel<Piece>,
) -> Option<Ended> {
    let mut sink = Sink::new(channel);
    let mut offset = 0;
    let mut step = || -> Result<u64, Fault> {
        loop {
            let block = pool.block(|out| read_full(&mut *bytes, out))?;
            if block.is_empty() {
                break;
            }
            let (at, is_last) = (offset, block.len() < pool.block_len());
            offset += block.len() as u64;
            reader.block(at, block, &mut sink)?;
            if is_last {
                break;
            }
        }
        let size = reader.end(offset, &mut sink)?;
        sink.flush()?;
        Ok(size)
    };
    match step() {
        Ok(size) => Some(Ok(size)),
        Err(Fault::Stopped) => None,
        Err(Fault::Stream(source)) => Some(Err(ConvertError::Stream { offset, source })),
    }
}

/// Makes everything durable, after the target has got this size.
fn finish(mut target: Target, size: Option<u64>, engine: EngineKind) -> Result<(), Error> {
    let queue = workers::queue(engine)?;
    queue.block_on(async {
        match (&mut target, size) {
            (Target::Raw(storage), Some(size)) => {
                storage::set_len(&**storage, &queue, size).await?;
            }
            (Target::Image(device), Some(size)) => {
                device.resize(&queue, size, Preallocation::Off).await?;
            }
            (Target::Stream(stream), Some(size)) => stream.set_size(size),
            _ => {}
        }
        target.close(&queue, true).await
    })
}
