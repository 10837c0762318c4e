//! `compare`: whether two images have the same content.

use std::ffi::{OsStr, OsString};

use clap::{CommandFactory, Parser};
use zebu::block::Device;
use zebu::jobs::{self, CompareError, CompareOptions, Comparison, Unchanged};
use zebu::storage::{CacheMode, Queue};

use super::command::Command;
use crate::arguments::{Reporting, SourceOptions, source_cache};
use crate::images::open;
use crate::output::progress::interrupted;
use crate::output::{self, Progress, Shown};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "compare",
    operands: "<FILENAME1> <FILENAME2>",
    summary: "Check if two images have the same contents",
    options: Arguments::command,
    run,
    examples: "
        # Content of two images of any formats
        zebu compare disk.qcow2 disk.raw
        # Where the formats are known
        zebu compare -p -f qcow2 -F raw disk.qcow2 disk.raw",
    exit_status: &[
        ("0", "The images are the same."),
        ("1", "The images differ."),
        ("2", "The comparison could not be done."),
        ("3", "The tables of an image cannot be read."),
        ("4", "The data of an image cannot be read."),
    ],
    ..Command::PLAIN
};

/// Check if two images have the same contents
#[derive(Parser)]
#[command(mut_arg("format", |a| a.long("a-format").alias("format")))]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Format of the second image
    #[arg(short = 'F', long = "b-format", value_name = "FMT")]
    second_format: Option<String>,
    /// Compare sizes and allocation, too
    #[arg(short, long)]
    strict: bool,
    #[command(flatten)]
    report: Reporting,
    /// Cache mode of the images: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 'T', long = "cache", value_name = "CACHE_MODE")]
    cache: Option<String>,
    /// The images
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// The images differ.
const DIFFERENT: u8 = 1;
/// It cannot be done at all: 1 always means that the images differ.
const FAILED: u8 = 2;
/// The tables of an image cannot be read.
const NO_STATUS: u8 = 3;
/// The data of an image cannot be read.
const CANNOT_READ: u8 = 4;

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    run_inner(context, arguments).map_err(|failure| match failure.status() {
        // QEMU has the status of images that differ for wrong arguments.
        1 if context.is_as_qemu() && failure.is_usage() => failure,
        1 => failure.with_status(FAILED),
        _ => failure,
    })
}

fn run_inner(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let [first, second] = arguments.names.as_slice() else {
        return Err(Failure::new("Expecting two image file names").with_hint());
    };
    let names = [first.as_os_str(), second.as_os_str()];
    let cache = source_cache(arguments.cache.as_deref())?;
    let queue = open::queue()?;
    let devices = open_both(context, &queue, &arguments, names, cache)?;
    compare(context, &queue, &arguments, names, devices)
}

fn open_both(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    names: [&OsStr; 2],
    cache: CacheMode,
) -> Result<[Device; 2], Failure> {
    let mut second = arguments.source.clone();
    second.name.format = arguments.second_format.clone();
    Ok([
        open::device(context, queue, names[0], &arguments.source, cache)?,
        open::device(context, queue, names[1], &second, cache)?,
    ])
}

fn compare(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    names: [&OsStr; 2],
    devices: [Device; 2],
) -> Outcome {
    let say = |text: &str| {
        if !arguments.report.quiet {
            output::say(text);
        }
    };
    let sizes = [devices[0].size(), devices[1].size()];
    let mut progress = Progress::new(arguments.report.has_progress(), sizes[0].max(sizes[1]));
    progress.weigh(context, queue, &[&[&devices[0], &devices[1]]]);
    let _ = progress.set(0);
    if arguments.strict && sizes[0] != sizes[1] {
        say("Strict mode: Image size mismatch!\n");
        progress.finish(false);
        return Ok(DIFFERENT);
    }
    let options = CompareOptions::default().strict(arguments.strict);
    let unchanged = Unchanged::of(&devices);
    let result = jobs::compare(devices, &options, |now| progress.set(now.done));
    if result.is_ok()
        && let Err(why) = unchanged.check()
    {
        progress.finish(false);
        return Err(Failure::new(why.to_string()));
    }
    let same = matches!(result, Ok(Comparison::Identical));
    if same {
        // qemu-img ends the line only after the verdict.
        let _ = progress.set(sizes[0].max(sizes[1]));
    }
    let common = match &result {
        Ok(Comparison::Content(offset)) => *offset >= sizes[0].min(sizes[1]),
        result => result.is_ok(),
    };
    if common && sizes[0] != sizes[1] {
        say("Warning: Image size mismatch!\n");
    }
    let outcome = match result {
        Ok(Comparison::Identical) => {
            say("Images are identical.\n");
            Ok(0)
        }
        Ok(Comparison::Content(offset)) => {
            say(&format!("Content mismatch at offset {offset}!\n"));
            Ok(DIFFERENT)
        }
        Ok(Comparison::Status(offset)) => {
            say(&format!(
                "Strict mode: Offset {offset} block status mismatch!\n"
            ));
            Ok(DIFFERENT)
        }
        Err(CompareError::Engine(e)) => {
            let other = || Failure::new(zebu::strerror(&e).to_string());
            Err(interrupted("no difference was found so far").unwrap_or_else(other))
        }
        Err(CompareError::Status { device, source, .. }) => Err(Failure::new(format!(
            "Sector allocation test failed for {}: {source}",
            names[device].shown()
        ))
        .with_status(NO_STATUS)),
        Err(CompareError::Read {
            device,
            offset,
            source,
        }) => Err(Failure::new(format!(
            "Error while reading offset {offset} of {}: {source}",
            names[device].shown()
        ))
        .with_status(CANNOT_READ)),
    };
    progress.finish(same);
    outcome
}
