//! Conversion to a stream: an image that is written in order, without a look back.
//!
//! A raw image is the disk from its start to its end. A qcow2 image has its tables before its data,
//! so its layout must be known before: by the mapping of the sources, or, if clusters are to be
//! compressed or zeroes to be found, by a first pass over the data. A streamOptimized VMDK has its
//! tables after its data.

use std::sync::Arc;

use super::convert::{self, ConvertError, ConvertEvent, ConvertOptions};
use super::create::CreateQcow2;
use super::out_stream::OutStream;
use super::target::Target;
use super::workers;
use crate::block::Device;
use crate::drivers::qcow2::stream::Layout;
use crate::drivers::raw::RawStream;
use crate::drivers::stream::{Pipe, StreamImage, StreamSink};
use crate::drivers::{CreateValues, Format};
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::Queue;
use crate::{Error, Result};

/// The format of a stream that is written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportFormat {
    /// The bytes of the disk.
    Raw,
    /// qcow2, with these options: without preallocation, data file and backing file. The size is
    /// that of the sources. With `scan`, zeroes are looked for in the data, which are read twice
    /// then.
    Qcow2 {
        /// The image.
        image: Box<CreateQcow2>,
        /// Whether to look for zeroes in data.
        scan: bool,
    },
    /// streamOptimized VMDK, with these options of the format.
    Vmdk(CreateValues),
}

/// Writes the bytes of `sources`, one after the other, as an image to a stream. Returns its length
/// in bytes. The sources must not change meanwhile.
///
/// Of the options, `above_backing`, `only`, `copy_range`, `any_order` and `bitmaps` have no meaning
/// here; with `sparse` 0 all clusters of the image are allocated. The rest is as for
/// [`convert`](super::convert()).
///
/// # Errors
/// As for [`convert`](super::convert()). Then the stream is not complete, and what was written of
/// it is no valid image, unless it is a raw one. An upload is to be aborted then.
pub fn convert_to_stream<G: IntoControlFlow>(
    sources: Vec<Device>,
    sink: Box<dyn StreamSink>,
    format: &ExportFormat,
    options: &ConvertOptions,
    mut on_progress: impl FnMut(ConvertEvent) -> G,
) -> Result<u64, ConvertError> {
    let options = in_order(options);
    let size = total(&sources)?;
    let sources = Arc::new(sources);
    let scan = is_scanned(format, &options);
    // The first pass over the data is one half of the work, if there is one.
    let mut report = |second: bool, event: ConvertEvent| match event {
        ConvertEvent::Progress(Progress { done, total }) if scan => {
            let before = if second { total / 2 } else { 0 };
            let done = match done == total && second {
                true => total,
                false => before + done / 2,
            };
            on_progress(ConvertEvent::Progress(Progress { done, total }))
        }
        // It was reported by the first pass.
        ConvertEvent::Unreadable { .. } if second && scan => {
            on_progress(ConvertEvent::Progress(Progress {
                done: size / 2,
                total: size,
            }))
        }
        event => on_progress(event),
    };
    let image = plan(&sources, format, &options, |event| report(false, event))?;
    let pipe = Pipe::new(sink).map_err(ConvertError::Engine)?;
    let stream = OutStream::new(image, pipe).map_err(failure)?;
    let target = Target::Stream(stream.clone());
    let report = |event| report(true, event);
    convert::convert_shared(&sources, target, &options, report)?;
    Ok(stream.length())
}

/// The length in bytes of what [`convert_to_stream`] writes with the same arguments. Reads what is
/// needed to know it: the data only if they are compressed or looked at for zeroes.
///
/// # Errors
/// As for [`convert_to_stream`]. The length of a VMDK is known only when it is written.
pub fn measure_stream<G: IntoControlFlow>(
    sources: Vec<Device>,
    format: &ExportFormat,
    options: &ConvertOptions,
    on_progress: impl FnMut(ConvertEvent) -> G,
) -> Result<u64, ConvertError> {
    let image = plan(&Arc::new(sources), format, &in_order(options), on_progress)?;
    image.length().ok_or_else(|| {
        failure(Error::Refused(
            "The length of a streamOptimized VMDK is known only when it is written".into(),
        ))
    })
}

/// The options of a job whose target reads as zeroes and is written in order.
fn in_order(options: &ConvertOptions) -> ConvertOptions {
    let mut options = options.clone();
    options.zero_from = (options.sparse > 0).then_some(0);
    options.any_order = false;
    options.copy_range = false;
    options
}

/// Whether a first pass reads the data.
fn is_scanned(format: &ExportFormat, options: &ConvertOptions) -> bool {
    match format {
        ExportFormat::Qcow2 { scan, .. } => {
            options.compress.is_some() || *scan && options.sparse > 0
        }
        ExportFormat::Raw | ExportFormat::Vmdk(_) => false,
    }
}

fn total(sources: &[Device]) -> Result<u64, ConvertError> {
    let mut sizes = sources.iter().map(Device::size);
    let size = sizes.try_fold(0u64, u64::checked_add);
    size.ok_or(ConvertError::TooLarge)
}

fn failure(source: Error) -> ConvertError {
    ConvertError::Write { offset: 0, source }
}

fn no_vmdk() -> ConvertError {
    failure(Error::Refused("Format 'vmdk' is not there".into()))
}

/// What is written where. `on_progress` is called if a pass over the data is needed.
fn plan<G: IntoControlFlow>(
    sources: &Arc<Vec<Device>>,
    format: &ExportFormat,
    options: &ConvertOptions,
    on_progress: impl FnMut(ConvertEvent) -> G,
) -> Result<Box<dyn StreamImage>, ConvertError> {
    let size = total(sources)?;
    let image = match format {
        ExportFormat::Raw if options.compress.is_some() => {
            return Err(ConvertError::NotCompressible);
        }
        ExportFormat::Raw => return Ok(Box::new(RawStream::new(size))),
        ExportFormat::Vmdk(values) => {
            let vmdk = Format::named("vmdk").and_then(|format| format.driver().stream?.write);
            return vmdk.ok_or_else(no_vmdk)?(size, values).map_err(failure);
        }
        ExportFormat::Qcow2 { image, .. } => CreateQcow2 {
            size,
            ..(**image).clone()
        },
    };
    let mut layout = Layout::new(&image, options.compress.is_some()).map_err(failure)?;
    if is_scanned(format, options) {
        let survey = OutStream::survey(layout);
        let target = Target::Stream(survey.clone());
        convert::convert_shared(sources, target, options, on_progress)?;
        layout = survey.into_layout();
    } else if options.sparse == 0 {
        layout.push_range(0, size);
    } else {
        let queue = workers::queue(options.engine).map_err(ConvertError::Engine)?;
        queue.block_on(survey_map(&mut layout, &queue, sources))?;
    }
    Ok(layout.into_image())
}

/// Adds the clusters of which the mapping does not say that they are zero.
async fn survey_map(
    layout: &mut Layout,
    queue: &Queue,
    sources: &[Device],
) -> Result<(), ConvertError> {
    let mut base = 0;
    for source in sources {
        let mut at = 0;
        while at < source.size() {
            let status = source.status(queue, at, source.size() - at).await;
            let status = status.map_err(|source| ConvertError::Read {
                offset: base + at,
                source,
            })?;
            let end = at + status.length.max(1);
            if !status.zero {
                layout.push_range(base + at, base + end);
            }
            at = end;
        }
        base += source.size();
    }
    Ok(())
}

impl Target {
    /// A raw image that is written to a stream in order, by
    /// [`convert_stream`](super::convert_stream).
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn raw_stream(sink: Box<dyn StreamSink>) -> Result<Target> {
        let stream = OutStream::new(Box::new(RawStream::default()), Pipe::new(sink)?)?;
        Ok(Target::Stream(stream))
    }
}
