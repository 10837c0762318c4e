//! Conversion.

use zebu::jobs::{CompressOptions, ConvertOptions};
use zebu::{Queue, QueueOptions};

use super::{Job, Outcome, start};
use crate::error::{Failure, Out, call_object};
use crate::new_image::creation;
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
        let name = target.name("target")?;
        let target = creation(name, format.unwrap_or("raw"), options.target_options)?;
        let compress = options.flags & COMPRESS != 0;
        target.check_target(compress)?;
        if options.level != 0 && !compress {
            return Err(Failure::misuse("A level needs ZEBU_CONVERT_COMPRESS"));
        }
        let level = (options.level != 0).then_some(options.level);
        let compress = compress.then_some(CompressOptions::default().level(level));
        let engine = opening.engine;
        let job = ConvertOptions::default()
            .rate((options.rate != 0).then_some(options.rate))
            .engine(engine);
        let prepare = move || {
            let queue = Queue::new(QueueOptions::default().engine(engine))?;
            let source = opening.open(&queue)?;
            let begun = target.begin(&queue, &source, compress)?;
            Ok((source, begun))
        };
        start(prepare, move |(source, begun), state| {
            begun.fill(source, job, |now| state.progress(now))?;
            Ok(Outcome::Converted)
        })
    })
}
