//! `rebase`: an image on top of another backing file.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{CommandFactory, Parser};
use zebu::block::{Device, ImageSpec};
use zebu::jobs::{self, NewBacking, RebaseError, RebaseOptions};
use zebu::names::Source;
use zebu::storage::Queue;

use super::command::Command;
use crate::arguments::{Reporting, SourceOptions, one_name, source_cache, target_cache, untrusted};
use crate::images::new_image::is_driver;
use crate::images::open;
use crate::images::same_file::{self, Fate};
use crate::output::progress::interrupted;
use crate::output::{Progress, Shown, printable};
use crate::program::{Context, Failure, Outcome, signals};

pub const COMMAND: Command = Command {
    name: "rebase",
    operands: "<FILENAME>",
    summary: "Change backing file of the image",
    options: Arguments::command,
    run,
    examples: "
        # Another backing file, and the same content
        zebu rebase -b other.qcow2 -F qcow2 overlay.qcow2
        # No backing file
        zebu rebase -b '' overlay.qcow2",
    ..Command::PLAIN
};

/// Change backing file of the image
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Cache mode of the image: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// New backing file; "" for none
    #[arg(short = 'b', long, value_name = "BACKING_FILENAME")]
    backing: Option<OsString>,
    /// Format of the new backing file
    #[arg(short = 'B', short_alias = 'F', long, value_name = "BACKING_FMT")]
    backing_format: Option<String>,
    /// Cache mode of the new backing file: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 'T', long, value_name = "BACKING_CACHE")]
    backing_cache: Option<String>,
    /// Change the name only, also if the content changes with it
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// Go on although internal snapshots that show data of the backing file change with it
    #[arg(long)]
    change_snapshots: bool,
    /// Compress the data that are written
    #[arg(short = 'c', long)]
    compress: bool,
    #[command(flatten)]
    report: Reporting,
    /// The image
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let name = one_name(&arguments.names)?;
    if arguments.backing.is_none() && !arguments.backing_unsafe {
        return Err(
            Failure::new("Must specify backing file (-b) or use unsafe mode (-u)").with_hint(),
        );
    }
    let mut progress = Progress::begun(arguments.report.has_progress());
    let outcome = open_and_rebase(context, &arguments, name, &mut progress);
    progress.finish(outcome.is_ok());
    outcome
}

fn open_and_rebase(
    context: &Context,
    arguments: &Arguments,
    name: &OsStr,
    progress: &mut Progress,
) -> Outcome {
    let cache = target_cache(arguments.cache.as_deref())?;
    let backing_cache = source_cache(arguments.backing_cache.as_deref())?;
    // It is for the new backing file; the image is written to.
    let source = SourceOptions::from(arguments.source.name.clone());
    let options = open::options(context, name, &source, cache)?
        .write(true)
        .no_backing(arguments.backing_unsafe);
    let queue = open::queue()?;
    let overlay = open::device_with(context, &queue, name, &source, &options)?;
    if arguments.compress && !overlay.top().format().can_compress() {
        return Err(Failure::new(
            "Compression not supported for this file format",
        ));
    }
    check_format_name(arguments.backing_format.as_deref())?;
    let backing = new_backing(arguments);
    let spec = match &backing {
        Some(backing) => new_spec(context, &queue, &overlay, backing, arguments.backing_unsafe)?,
        None => None,
    };
    let new = match spec {
        Some(spec) if !arguments.backing_unsafe => {
            let options = untrusted::defaults(context)
                .cache(backing_cache)
                .force_share(arguments.source.force_share);
            let new = Device::open_spec(&queue, spec, &options);
            Some(new.map_err(|e| cannot_open(&backing, &e))?)
        }
        _ => None,
    };
    if let Some(NewBacking {
        name, format: None, ..
    }) = &backing
    {
        return Err(Failure::new(format!(
            "Could not change the backing file to '{}': backing format must be specified",
            name.shown()
        )));
    }
    if let Some(why) =
        same_file::refused_open(new.as_slice(), &overlay.top().storages(), Fate::Kept)
    {
        return Err(Failure::new(format!("'{}': {why}", name.shown())));
    }
    rebase(context, &queue, arguments, overlay, new, backing, progress)
}

fn rebase(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    overlay: Device,
    new: Option<Device>,
    backing: Option<NewBacking>,
    progress: &mut Progress,
) -> Outcome {
    let result = if arguments.backing_unsafe {
        context.end_on_stop(signals::WHOLE);
        jobs::rebase_unsafe(queue, overlay, backing.as_ref())
    } else {
        progress.job(overlay.size());
        // Both backing files are read where one of them has data.
        let read: Vec<&Device> = [Some(&overlay), new.as_ref()]
            .into_iter()
            .flatten()
            .collect();
        progress.weigh(context, queue, &[&read]);
        let options = RebaseOptions::default()
            .compress(arguments.compress)
            .change_snapshots(arguments.change_snapshots);
        let tell = |now: jobs::Progress| progress.set(now.done);
        jobs::rebase(queue, overlay, new, backing.as_ref(), &options, tell)
    };
    let name = backing.map_or_else(OsString::new, |b| b.name);
    result.map_err(|e| match e {
        RebaseError::Header(e) => Failure::new(format!(
            "Could not change the backing file to '{}': {e}",
            name.shown()
        )),
        RebaseError::Engine(e) => {
            let failed = || Failure::new(zebu::strerror(&e).to_string());
            interrupted("the image has its old backing file").unwrap_or_else(failed)
        }
        RebaseError::Snapshot(e) => super::snapshot::would_change(&e),
        other => Failure::new(other.to_string()),
    })?;
    Ok(0)
}

/// What the header shall name; an empty name is none.
fn new_backing(arguments: &Arguments) -> Option<NewBacking> {
    let name = arguments.backing.clone().filter(|name| !name.is_empty())?;
    Some(NewBacking::new(name).format(arguments.backing_format.clone()))
}

/// Formats that only QEMU supports may be named, too.
fn check_format_name(name: Option<&str>) -> Result<(), Failure> {
    match name {
        Some(name) if !is_driver(name) => Err(Failure::new(format!(
            "Invalid format name: '{}'",
            name.shown()
        ))),
        _ => Ok(()),
    }
}

fn cannot_open(backing: &Option<NewBacking>, error: &zebu::Error) -> Failure {
    let name = backing.as_ref().map_or(OsStr::new(""), |b| &b.name);
    let name = name.shown();
    Failure::new(format!("Could not open new backing file '{name}': {error}"))
}

/// The new backing file, seen from the image. Refuses one that is based on the
/// image itself. None if it is not known and need not be.
fn new_spec(
    context: &Context,
    queue: &Queue,
    overlay: &Device,
    backing: &NewBacking,
    is_unsafe: bool,
) -> Result<Option<ImageSpec>, Failure> {
    let image = &overlay.top().spec.file;
    let data_file = overlay
        .top()
        .spec
        .data_file
        .as_ref()
        .map(|file| &*file.path);
    let source = Source::with_driver(backing.name.clone(), backing.format.as_deref());
    let resolve = |source: Source| {
        if !is_unsafe {
            untrusted::policy(context).check_source(&source)?;
        }
        source.resolve(Some(image.name()), None)
    };
    let spec = match source.and_then(resolve) {
        Ok(spec) => spec,
        Err(_) if is_unsafe => return Ok(None),
        Err(e) => return Err(cannot_open(&Some(backing.clone()), &e)),
    };
    jobs::check_no_loop(
        queue,
        &image.path,
        data_file,
        &spec,
        untrusted::policy(context),
    )
    .map_err(|e| {
        Failure::new(format!(
            "Could not change the backing file to '{}': {e}",
            printable(backing.name.as_bytes())
        ))
    })?;
    Ok(Some(spec))
}
