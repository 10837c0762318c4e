//! `commit`: what an image says, into the image that it is based on.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};
use zebu::block::{BackingSpec, Device, ImageSpec, Layer};
use zebu::jobs::{self, CommitError, CommitOptions};
use zebu::names::protocol;
use zebu::storage::Queue;

use super::command::Command;
use crate::arguments::{NameOptions, Reporting, SourceOptions, one_name, rate, target_cache};
use crate::images::open;
use crate::images::same_file::{self, Fate};
use crate::output::progress::interrupted;
use crate::output::{self, Progress, Shown};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "commit",
    operands: "<FILENAME>",
    summary: "Commit image to its backing file",
    options: Arguments::command,
    run,
    examples: "
        # Move the changes to the backing file
        zebu commit overlay.qcow2",
    ..Command::PLAIN
};

/// Commit image to its backing file
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    name: NameOptions,
    /// Cache mode of the images: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 't', long, value_name = "CACHE_MODE")]
    cache: Option<String>,
    /// Commit into this image of the chain; the image is not emptied
    #[arg(short = 'b', long, value_name = "BASE_IMG")]
    base: Option<OsString>,
    /// Do not empty the image
    #[arg(short = 'd', long)]
    drop: bool,
    /// Go on although internal snapshots that show data of the backing file change with it
    #[arg(long)]
    change_snapshots: bool,
    /// Rate limit in bytes per second
    #[arg(short = 'r', long = "rate-limit", alias = "rate", value_name = "RATE")]
    rate: Option<String>,
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
    let source = SourceOptions::from(arguments.name.clone());
    let rate = rate(arguments.rate.as_deref())?;
    let cache = target_cache(arguments.cache.as_deref())?;
    let queue = open::queue()?;
    let options = open::options(context, name, &source, cache)?
        .write(true)
        .discard(Some(true));
    let whole = open::device_with(context, &queue, name, &source, &options)?;
    let mut progress = Progress::new(arguments.report.has_progress(), whole.size());
    let _ = progress.set(0);
    let Some(depth) = base_depth(&whole, arguments.base.as_deref()) else {
        progress.finish(false);
        return Err(Failure::new(match &arguments.base {
            Some(base) => {
                let (base, name) = (base.shown(), name.shown());
                format!("Did not find '{base}' in the backing chain of '{name}'")
            }
            None => "Image does not have a backing file".into(),
        }));
    };
    let (top, base) = cut(&whole, depth);
    // Its locks are in the way of the two that come now.
    drop(whole);
    let base = jobs::open_spec(
        &queue,
        base,
        &options,
        &mut open::messages(context, std::io::stderr()),
    )
    .map_err(|e| Failure::new(e.to_string()))?;
    let top = jobs::open_spec(
        &queue,
        top,
        &options,
        &mut open::messages(context, std::io::stderr()),
    )
    .map_err(|e| open::failure(name, &e))?;
    // By another name: the chain has each name once.
    if let Some(why) = same_file::refused_open(
        std::slice::from_ref(&top),
        &base.top().storages(),
        Fate::Kept,
    ) {
        progress.finish(false);
        let name = base.top().spec.display_name();
        return Err(Failure::new(format!("'{}': {why}", name.shown())));
    }
    commit(context, &queue, &arguments, top, base, rate, &mut progress)
}

fn commit(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    top: Device,
    base: Device,
    rate: Option<u64>,
    progress: &mut Progress,
) -> Outcome {
    let options = CommitOptions::default()
        .empty(!arguments.drop && arguments.base.is_none())
        .change_snapshots(arguments.change_snapshots)
        .rate(rate);
    progress.weigh(context, queue, &[&[&top]]);
    let result = jobs::commit(queue, top, base, &options, |now| progress.set(now.done));
    progress.finish(result.is_ok());
    result.map_err(|e| match e {
        CommitError::Transfer(e) => {
            let failed = || Failure::new(format!("Block job failed: {}", e.reason()));
            interrupted("no image has lost anything").unwrap_or_else(failed)
        }
        CommitError::Snapshot(e) => super::snapshot::would_change(&e),
        other => Failure::new(other.to_string()),
    })?;
    if !arguments.report.quiet {
        output::say("Image committed.\n");
    }
    Ok(0)
}

/// The depth of the image that `base` names. Without it, the first backing file.
fn base_depth(device: &Device, base: Option<&OsStr>) -> Option<usize> {
    let layers = device.layers();
    let Some(base) = base else {
        return (layers.len() > 1).then_some(1);
    };
    (1..layers.len()).find(|depth| is_named(device, *depth, base))
}

/// Whether `name` is the name of an image of the chain: as the image above stores it, or as a path
/// relative to that; of one that options describe, the name that is shown.
fn is_named(device: &Device, depth: usize, name: &OsStr) -> bool {
    let (above, image) = (&device.layers()[depth - 1], &device.layers()[depth]);
    let stored = above.backing().map(|named| OsStr::from_bytes(named.name));
    let Some(stored) = stored.filter(|_| !matches!(above.spec.backing, BackingSpec::Image(_)))
    else {
        return image.spec.display_name() == name;
    };
    if stored == name || protocol(stored).is_some() || protocol(name).is_some() {
        return stored == name;
    }
    let folder = above.spec.file.path.parent().unwrap_or(Path::new(""));
    let same = |path: PathBuf| path.canonicalize().ok();
    let found = same(folder.join(name));
    found.is_some() && found == same(image.spec.file.path.clone())
}

/// The images above `depth`, and the others. As in QEMU, the filters over the image that is written stay
/// away, and those over the top one; but not where one changes bytes, and what is written must pass it.
fn cut(device: &Device, depth: usize) -> (ImageSpec, ImageSpec) {
    let chain = |layers: &[Layer]| {
        let (top, others) = layers.split_first().expect("both parts have an image");
        let mut backing = BackingSpec::None;
        for layer in others.iter().rev() {
            backing = BackingSpec::Image(Box::new(layer.whole_spec_over(backing)));
        }
        if top.is_changed_by_filters() {
            return top.whole_spec_over(backing);
        }
        let mut spec = top.spec.clone();
        spec.backing = backing;
        spec
    };
    let (upper, lower) = device.layers().split_at(depth);
    (chain(upper), chain(lower))
}
