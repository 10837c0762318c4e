//! Conversion.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use zebu::jobs::{self, CompressOptions, ConvertError, ConvertEvent, ConvertOptions};
use zebu::{Device, Error, Queue, QueueOptions};

use super::{Job, Outcome, State, start};
use crate::error::{Failure, Out, Result, call_object};
use crate::new_image::{Begun, Planned};
use crate::open::{COpenOptions, Opening, WRITE};
use crate::text::{Options, OptionsPointer, Text, check_flags};

const COMPRESS: u32 = 1 << 0;

/// Bytes of L2 tables that are kept of an image that is read once.
const ONCE_THROUGH: u64 = 1 << 20;

/// `zebu_convert_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CConvertOptions {
    pub struct_size: usize,
    pub flags: u32,
    pub level: i32,
    pub source: OptionsPointer<COpenOptions>,
    pub target_format: Text,
    pub target_options: Text,
    pub rate: u64,
}

// SAFETY: numbers, and pointers that may be NULL.
unsafe impl Options for CConvertOptions {
    const NAME: &'static str = "zebu_convert_options";
}

fn failure(error: ConvertError) -> Failure {
    let (what, offset, source) = match error {
        ConvertError::Engine(error) => return error.into(),
        ConvertError::Read { offset, source } => ("reading", offset, source),
        ConvertError::Write { offset, source } => ("writing", offset, source),
        other => return Error::Refused(other.to_string()).into(),
    };
    Failure::from(source).during(&format!("Error while {what} at byte {offset}"))
}

/// Fills the new image. After an error it is marked as incomplete.
fn convert(
    queue: &Queue,
    source: Device,
    begun: Begun,
    options: &ConvertOptions,
    state: &State,
) -> Result<()> {
    // It stays open, and locked, when the device is closed.
    let file = begun.target.qcow2_file();
    let progress = |event| match event {
        ConvertEvent::Progress(now) => state.progress(now),
        // Only with `salvage`, which is not set.
        ConvertEvent::Unreadable { .. } => std::ops::ControlFlow::Continue(()),
    };
    jobs::convert(vec![source], begun.target, options, progress).map_err(|error| {
        if let Some(file) = file {
            // The job has failed already.
            let _ = jobs::mark_incomplete(queue, &*file);
        }
        failure(error)
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_convert(
    source: Text,
    target: Text,
    options: OptionsPointer<CConvertOptions>,
    error: Out<'_>,
) -> Option<Box<Job>> {
    call_object(error, || {
        let options = options.get()?;
        check_flags(options.flags, COMPRESS)?;
        let mut source_options = options.source.get()?;
        source_options.flags &= !WRITE;
        let mut opening = Opening::new(source, "source", &source_options)?;
        opening.options = opening
            .options
            .exclude_writers(true)
            .l2_cache_size(Some(ONCE_THROUGH));
        let format = options.target_format.word("target_format")?;
        let target_options = OsStr::from_bytes(options.target_options.bytes().unwrap_or_default());
        let name = target.name("target")?;
        let planned = Planned::new(name, format.unwrap_or("raw"), target_options)?;
        let compress = options.flags & COMPRESS != 0;
        check(&planned, compress, options.level)?;
        let engine = opening.engine;
        let level = (options.level != 0).then_some(options.level);
        let compress = compress.then_some(CompressOptions::default().level(level));
        let job = ConvertOptions::default()
            .compress(compress)
            .rate((options.rate != 0).then_some(options.rate))
            .engine(engine);
        let prepare = move || {
            let queue = Queue::new(QueueOptions::default().engine(engine))?;
            let source = opening.open(&queue)?;
            let is_direct = compress.is_none() && source.size().is_multiple_of(4096);
            let begun = planned.begin(&queue, source.size(), is_direct)?;
            Ok((queue, source, begun))
        };
        start(prepare, move |(queue, source, begun), state| {
            let options = job.zero_from(begun.is_zero.then_some(0));
            convert(&queue, source, begun, &options, state)?;
            Ok(Outcome::Converted)
        })
    })
}

/// Refuses what cannot be done before anything is opened.
fn check(planned: &Planned, compress: bool, level: i32) -> Result<()> {
    let refused = [
        (
            planned.has_backing(),
            "The target of a conversion cannot have a backing file",
        ),
        (
            compress && !planned.format().can_compress(),
            "Compression not supported for this file format",
        ),
        (
            compress && planned.cannot_compress(),
            "Compression is not possible with preallocation or an external data file",
        ),
        (
            level != 0 && !compress,
            "A level needs ZEBU_CONVERT_COMPRESS",
        ),
    ];
    match refused.iter().find(|(is, _)| *is) {
        Some((_, why)) => Err(Error::Refused((*why).into()).into()),
        None => Ok(()),
    }
}
