//! `info`: what an image is.

mod limits;
mod report;
mod specific;
mod summary;
mod text;
mod untrusted_report;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{CommandFactory, Parser};
use zebu::block::{Device, OpenOptions};
use zebu::names::Source;
use zebu::qcow2::Snapshot;
use zebu::storage::Queue;

use crate::arguments::{OutputFormat, SourceOptions, one_name, target_cache};
use crate::images::{appliance, open};
use crate::output::json::{self, Value};
use crate::output::{self, colours, printable};
use crate::program::{Context, Failure, Outcome};

use super::command::Command;
use report::Report;
use untrusted_report::Untrusted;

pub const COMMAND: Command = Command {
    name: "info",
    operands: "<FILENAME>",
    summary: "Display information about image",
    options: Arguments::command,
    run,
    examples: "
        # Of one image
        zebu info disk.qcow2
        # With its backing files
        zebu info --backing-chain overlay.qcow2
        # What an untrusted image would open
        zebu info --untrusted --output=json overlay.qcow2",
    ..Command::PLAIN
};

/// Display information about image
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Show the whole backing chain
    #[arg(short, long)]
    backing_chain: bool,
    /// Cache mode of the image: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// Show what requests to the image must be like, which the cache mode may change
    #[arg(long)]
    limits: bool,
    /// Output format: human or json
    #[arg(long, value_name = "FORMAT")]
    output: Option<String>,
    /// Show a summary instead: how full the image is, its snapshots, its chain, warnings
    #[arg(long)]
    human: bool,
    /// The image
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// The part that is specific to the format of a device's top image as text, also for `io`.
pub fn specific_text(context: &Context, queue: &Queue, device: &Device) -> zebu::Result<Vec<u8>> {
    let mut out = Vec::new();
    text::specific(context, &mut out, specific::of(queue, device)?.as_ref());
    Ok(out)
}

/// The list of snapshots, also for `snapshot`.
pub fn snapshot_list(context: &Context, snapshots: &[Snapshot]) -> Vec<u8> {
    let mut out = Vec::new();
    text::snapshots(context, &mut out, snapshots);
    out
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let format = OutputFormat::parse(arguments.output.as_deref())?;
    let cache = target_cache(arguments.cache.as_deref())?;
    let name = one_name(&arguments.names)?;
    if arguments.human && arguments.limits {
        return Err(Failure::new("--human and --limits are mutually exclusive"));
    }
    if arguments.human && arguments.output.is_some() {
        let text = "--human and --output are mutually exclusive";
        return Err(Failure::new(text));
    }
    if context.role != "qemu-img" && appliance::is_named_so(name, &arguments.source.name) {
        let given = [
            (arguments.human, "--human"),
            (arguments.backing_chain, "--backing-chain"),
            (arguments.limits, "--limits"),
        ];
        return match given.into_iter().find(|(is_given, _)| *is_given) {
            Some((_, option)) => Err(Failure::new(format!("{option} is not for appliances"))),
            None => appliance::report(context, name, format),
        };
    }
    // Never under QEMU's name.
    let has_colours = context.role != "qemu-img" && colours::are_wanted(&std::io::stdout());
    let queue = open::queue()?;
    if arguments.human {
        let options = open::options(context, name, &arguments.source, cache)?
            .l2_cache_size(Some(open::ONCE_THROUGH));
        let device = open::device_with(context, &queue, name, &arguments.source, &options)?;
        let summary = summary::of(&queue, &device, has_colours);
        return output::report(&summary.map_err(|e| open::failure(name, &e))?);
    }
    let options = open::options(context, name, &arguments.source, cache)?.inspect(true);
    let source = open::source(name, &arguments.source);
    let shown = Shown {
        chain: arguments.backing_chain,
        limits: arguments.limits,
    };
    let reports = collect(context, &queue, name, source, options, shown)?;
    let text = match format {
        OutputFormat::Human if has_colours => text::coloured(&text::reports(context, &reports)),
        OutputFormat::Human => text::reports(context, &reports),
        OutputFormat::Json if arguments.backing_chain => {
            let list = Value::List(reports.iter().map(Report::to_json).collect());
            json::pretty(&list).into_bytes()
        }
        OutputFormat::Json => json::pretty(&reports[0].to_json()).into_bytes(),
    };
    output::report(&text)
}

/// What is shown besides the image.
#[derive(Clone, Copy)]
struct Shown {
    chain: bool,
    limits: bool,
}

/// The image, and with `chain` those behind it: at least one.
fn collect(
    context: &Context,
    queue: &Queue,
    name: &OsStr,
    mut source: Source,
    mut options: OpenOptions,
    shown: Shown,
) -> Result<Vec<Report>, Failure> {
    let chain = shown.chain;
    let mut name = name.to_owned();
    let mut seen = HashSet::new();
    let mut reports = Vec::new();
    // Options are checked against the format that they name when they are parsed.
    let guessed = options.format.is_none()
        && source
            .resolve(None, None)
            .is_ok_and(|spec| spec.format.is_none());
    loop {
        if !seen.insert(name.clone()) {
            return Err(Failure::new(format!(
                "Backing file '{}' creates an infinite loop.",
                printable(name.as_bytes())
            )));
        }
        let device =
            Device::open(queue, &source, &options).map_err(|e| open::failure(&name, &e))?;
        open::check_output(&device).map_err(|e| open::failure(&name, &e))?;
        open::warn_if_guessed(&device);
        let report = Report::of(queue, &device, shown.limits);
        let mut report = report.map_err(|e| open::failure(&name, &e))?;
        if report.is_filter && !context.is_untrusted() {
            let chain = chain_below(queue, &source, &options, shown, &mut report);
            chain.map_err(|e| open::failure(&name, &e))?;
        }
        if context.is_untrusted() {
            report.untrusted = Some(Untrusted::of(&device, guessed));
        }
        if let Some(backing) = report
            .backing
            .as_ref()
            .filter(|_| chain && context.is_untrusted())
        {
            let text = format!(
                "The image names a backing file ('{}'), which it may not open",
                printable(backing.name.as_bytes())
            );
            return Err(open::failure(&name, &zebu::Error::Refused(text)));
        }
        let next = report.backing.as_ref().map(|backing| {
            let format = backing.format.as_deref();
            (backing.full_name.clone(), format.map(str::to_string))
        });
        reports.push(report);
        let Some((next, format)) = next.filter(|_| chain) else {
            return Ok(reports);
        };
        options.format = None;
        source = Source::with_driver(next.clone(), format.as_deref())
            .map_err(|e| open::failure(&next, &e))?;
        name = next;
    }
}

/// Adds what is behind the image below a filter. As in QEMU, which looks at an image alone unless it is
/// below a filter.
fn chain_below(
    queue: &Queue,
    source: &Source,
    options: &OpenOptions,
    shown: Shown,
    report: &mut Report,
) -> zebu::Result<()> {
    let chain = Device::open(queue, source, &options.clone().inspect(false))?;
    let options = options.clone().format(None).no_backing(true);
    let mut behind: Option<Report> = None;
    for layer in chain.layers().iter().skip(1).rev() {
        let device = Device::open_spec(queue, layer.whole_spec().clone(), &options)?;
        let mut found = Report::of(queue, &device, shown.limits)?;
        if let Some(behind) = behind.take() {
            found.put_behind(behind);
        }
        behind = Some(found);
    }
    if let Some(behind) = behind {
        report.put_behind(behind);
    }
    Ok(())
}
