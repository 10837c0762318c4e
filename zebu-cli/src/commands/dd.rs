//! `dd`: a part of an image to a new image.

use std::ffi::{OsStr, OsString};
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;

use clap::{CommandFactory, Parser};
use zebu::block::{Device, FileSpec, Format};
use zebu::jobs::{self, CopyOptions, Target, TransferError, Unchanged};
use zebu::names::Source;
use zebu::storage::{CacheMode, Queue};

use super::command::{Command, ValueOf, Values};
use crate::arguments::create_options::CreateOptions;
use crate::arguments::file_name::{file_as, file_of};
use crate::arguments::{SourceOptions, objects, size, untrusted};
use crate::images::new_image::{NewFiles, new_format_help, parse_format, plan_to_fill};
use crate::images::open;
use crate::images::same_file::{self, Fate};
use crate::output::progress::{incomplete, interrupted};
use crate::output::{Progress, Shown};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "dd",
    operands: "if=<INPUT> of=<OUTPUT> [OPERANDS]",
    summary: "Copy a part of an image to another, with format conversion",
    options: Arguments::command,
    run,
    examples: "
        # From the fifth to the eighth MiB of a disk
        zebu dd -O qcow2 bs=1M skip=4 count=8 if=disk.raw of=part.qcow2",
    values: &[(
        ValueOf::Operands,
        Values::Assignments {
            files: &["if", "of"],
            others: &["bs", "count", "skip"],
        },
    )],
    ..Command::PLAIN
};

/// Copy input to output with optional format conversion
#[derive(Parser)]
#[command(after_help = "\
Operands:
  if=INPUT            The image to read
  of=OUTPUT           The image to create
  bs=BLOCK_SIZE       Block size in bytes (default 512)
  count=BLOCKS        End of the range, in blocks from the start of the input (default: its end)
  skip=BLOCKS         Start of the range, in blocks from the start of the input (default 0)")]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    #[arg(short = 'O', long = "output-format", value_name = "FMT", help = new_format_help("output"))]
    output_format: Option<String>,
    /// What is copied from where to where
    #[arg(value_name = "OPERANDS", hide = true)]
    operands: Vec<OsString>,
}

/// The number of blocks that `count` and `skip` take.
const BLOCKS: RangeInclusive<u64> = 0..=i64::MAX as u64;

/// The operands. `count` is relative to the start of the input, also with `skip`, as in qemu-img.
struct Operands {
    input: OsString,
    output: OsString,
    block: u64,
    count: Option<u64>,
    skip: u64,
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let operands = Operands::parse(&arguments.operands)?;
    arguments.source.validate(context)?;
    let queue = open::queue()?;
    let input = &operands.input;
    let source = open::device(
        context,
        &queue,
        input,
        &arguments.source,
        CacheMode::WriteBack,
    )?;
    let unchanged = Unchanged::of(std::slice::from_ref(&source));
    let format_name = arguments.output_format.as_deref().unwrap_or("raw");
    let format = output_format(format_name)?;
    let range = operands.range(source.size());
    let (start, length) = range.unwrap_or_default();
    refuse_same_file(context, &source, &operands.output)?;
    let file = file_as(&operands.output, format_name).map_err(Failure::new)?;
    let (target, files) = make_target(
        context,
        &queue,
        format,
        &operands.output,
        &file,
        length,
        &source,
    )?;
    if range.is_none() {
        let input = input.shown();
        context.say(&format!("{input}: cannot skip to specified offset"));
    }
    let is_zero = files.reads_as_zeroes();
    let options = CopyOptions::new(start, length).target_is_zero(is_zero);
    let mut progress = Progress::new(false, length);
    let result = jobs::copy(&queue, source, target, &options, |now| {
        progress.set(now.done)
    });
    result.map_err(|e| {
        let state = incomplete(&queue, &operands.output, Some(&files));
        let side = match &e {
            TransferError::Read { .. } => "reading from input",
            TransferError::Write { .. } => "writing to output",
            TransferError::Engine(_) => {
                let other = || Failure::new(format!("{}; {state}", e.reason()));
                return interrupted(&state).unwrap_or_else(other);
            }
        };
        let why = e.reason();
        Failure::new(format!("error while {side} image file: {why}; {state}"))
    })?;
    unchanged.check().map_err(|why| {
        let state = incomplete(&queue, &operands.output, Some(&files));
        Failure::new(format!("{why}; {state}"))
    })?;
    let named = files.check_names();
    named.map_err(|why| Failure::new(why.to_string()))?;
    Ok(0)
}

impl Operands {
    fn parse(texts: &[OsString]) -> Result<Operands, Failure> {
        let (mut input, mut output) = (None, None);
        let (mut block, mut count, mut skip) = (512, None, 0);
        for text in texts {
            let unknown = |name: &str| Failure::new(format!("unrecognized operand {name}"));
            let bytes = text.as_bytes();
            if let Some(name) = bytes.strip_prefix(b"if=") {
                input = Some(OsStr::from_bytes(name).to_owned());
                continue;
            }
            if let Some(name) = bytes.strip_prefix(b"of=") {
                output = Some(OsStr::from_bytes(name).to_owned());
                continue;
            }
            let text = text.to_string_lossy();
            let (name, value) = text.split_once('=').ok_or_else(|| unknown(&text))?;
            match name {
                "bs" => block = size::parse_within(name, value, 1..=i32::MAX as u64)?,
                "count" => count = Some(size::parse_number(name, value, BLOCKS)?),
                "skip" => skip = size::parse_number(name, value, BLOCKS)?,
                _ => return Err(unknown(name)),
            }
        }
        match (input, output) {
            (Some(input), Some(output)) => Ok(Operands {
                input,
                output,
                block,
                count,
                skip,
            }),
            _ => Err(Failure::new("Must specify both input and output files")),
        }
    }

    /// Start and length of the range to copy from an input of `size` bytes. `None`: it starts past
    /// the end.
    fn range(&self, size: u64) -> Option<(u64, u64)> {
        let bytes = |blocks: u64| blocks.saturating_mul(self.block);
        let end = self.count.map_or(size, |count| bytes(count).min(size));
        let start = bytes(self.skip);
        Some((start, end.checked_sub(start)?))
    }
}

fn output_format(name: &str) -> Result<Format, Failure> {
    name.parse().map_err(|_| {
        // The message of `create` tells more about formats that exist.
        match parse_format(name) {
            Err(why) if !why.starts_with("Unknown") => Failure::new(why),
            _ => Failure::new("Unknown file format"),
        }
    })
}

/// Making the output would destroy the input.
fn refuse_same_file(context: &Context, source: &Device, output: &OsStr) -> Result<(), Failure> {
    let file = file_of(output).ok();
    let why =
        file.and_then(|file| same_file::refused_new(context, std::slice::from_ref(source), &file));
    why.map_or(Ok(()), |why| Err(creation_failure(output, why)))
}

fn creation_failure(output: &OsStr, why: &str) -> Failure {
    if why.starts_with("Format driver '") && why.ends_with("does not support image creation") {
        return Failure::new(why);
    }
    Failure::new(format!(
        "{}: error while creating output image: {why}",
        output.shown()
    ))
}

fn make_target(
    context: &Context,
    queue: &Queue,
    format: Format,
    name: &OsStr,
    file: &FileSpec,
    length: u64,
    source: &Device,
) -> Result<(Target, NewFiles), Failure> {
    let failed = |e: zebu::Error| creation_failure(name, &e.to_string());
    let options = CreateOptions::default();
    let plan = plan_to_fill(format, &file.path, length, &options).map_err(failed)?;
    let files = NewFiles::open(file, plan, &[CacheMode::WriteBack], &objects::all(context));
    let mut files = files.map_err(failed)?;
    let sources = std::slice::from_ref(source);
    if let Some(why) = same_file::refused_open(sources, &files.storages(), Fate::Replaced) {
        return Err(creation_failure(name, why));
    }
    let options = untrusted::defaults(context)
        .format(Some(format))
        .write(true);
    let begun = files.begin(queue, &Source::Name(name.to_owned()), &options);
    let target = begun.map_err(|e| match e {
        zebu::Error::Open { source, .. } => open::failure(name, &source),
        e => failed(e),
    })?;
    Ok((target, files))
}

#[cfg(test)]
mod tests {
    //! Guards against another part being copied than qemu-img copies.
    use super::*;

    fn range(texts: &[&str], size: u64) -> Option<(u64, u64)> {
        let mut all = vec![OsString::from("if=a"), "of=b".into()];
        all.extend(texts.iter().map(OsString::from));
        Operands::parse(&all).ok().unwrap().range(size)
    }

    #[test]
    fn count_is_from_the_start() {
        assert_eq!(range(&[], 5000), Some((0, 5000)));
        assert_eq!(range(&["bs=1k", "count=3"], 5000), Some((0, 3072)));
        assert_eq!(
            range(&["bs=1k", "count=3", "skip=2"], 5000),
            Some((2048, 1024))
        );
        assert_eq!(range(&["bs=1k", "count=1", "skip=2"], 5000), None);
        assert_eq!(range(&["bs=1k", "count=9"], 5000), Some((0, 5000)));
        assert_eq!(range(&["skip=9223372036854775807"], 5000), None);
        assert_eq!(range(&["bs=2500", "skip=2"], 5000), Some((5000, 0)));
    }
}
