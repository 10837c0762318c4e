//! `check`: find errors and leaks in an image, and repair them.

use std::ffi::{OsStr, OsString};
use std::io::Write;

use clap::{CommandFactory, Parser};
use zebu::block::Layer;
use zebu::jobs::{self, CheckReport, RepairMode};
use zebu::qcow2::Image;
use zebu::storage::Queue;

use super::command::Command;
use crate::arguments::{OutputFormat, SourceOptions, one_name, source_cache};
use crate::images::open;
use crate::output;
use crate::output::json::{self, Map, Value};
use crate::output::progress::Share;
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "check",
    operands: "<FILENAME>",
    summary: "Check basic image integrity",
    options: Arguments::command,
    run,
    examples: "
        # Look, and change nothing
        zebu check disk.qcow2
        # Free clusters that nothing uses
        zebu check -r leaks disk.qcow2
        # Repair everything that can be
        zebu check -r all disk.qcow2",
    exit_status: &[
        ("0", "The image has no errors, or they were repaired."),
        ("1", "The check could not be done."),
        ("2", "The image has errors."),
        ("3", "The image has leaked clusters, and no errors."),
        ("63", "Images of this format cannot be checked."),
    ],
    ..Command::PLAIN
};

/// Check basic image integrity
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Do not print the report
    #[arg(short, long)]
    quiet: bool,
    /// Show progress on standard error, if that is a terminal
    #[arg(short, long)]
    progress: bool,
    /// Cache mode of the image: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 'T', long = "cache", value_name = "CACHE_MODE")]
    cache: Option<String>,
    /// Output format: human or json
    #[arg(long, value_name = "FORMAT")]
    output: Option<String>,
    /// Repair: leaks or all
    #[arg(short, long, value_name = "leaks|all")]
    repair: Option<String>,
    /// The image
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// The image has errors.
const CORRUPT: u8 = 2;
/// The image has leaks, and no errors.
const LEAKS: u8 = 3;
/// Images of this format cannot be checked.
const NO_CHECKS: u8 = 63;

/// Formats without a repair in zebu, for which QEMU has one.
const REPAIRED_BY_QEMU: [&str; 2] = ["parallels", "qed"];
/// Formats whose repair is that the log is carried out, which opening an image for it does.
const REPAIRED_BY_OPENING: [&str; 1] = ["vhdx"];

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let format = OutputFormat::parse(arguments.output.as_deref())?;
    let mode = repair_mode(arguments.repair.as_deref())?;
    let name = one_name(&arguments.names)?;
    arguments.source.validate(context)?;
    let cache = source_cache(arguments.cache.as_deref())?;
    let progress = arguments.progress && !arguments.quiet;

    let queue = open::queue()?;
    let options = open::options(context, name, &arguments.source, cache)?
        .write(mode.is_some())
        .check(true);
    let device = open::device_with(context, &queue, name, &arguments.source, &options)?;
    if mode.is_some() && device.top().as_qcow2().is_some() {
        context.end_on_stop("the image is no worse than it was; repair it again");
    }
    let Some(mut report) = check(context, &queue, device.top(), mode, progress)? else {
        let failure = Failure::new("This image format does not support checks");
        return Err(failure.with_status(NO_CHECKS));
    };
    let (corruptions_fixed, leaks_fixed) = (report.corruptions_fixed, report.leaks_fixed);
    if corruptions_fixed != 0 || leaks_fixed != 0 {
        if format == OutputFormat::Human && !arguments.quiet {
            output::say(&repaired_text(&report));
        }
        report = check(context, &queue, device.top(), None, progress)?.unwrap_or_default();
        report.corruptions_fixed = corruptions_fixed;
        report.leaks_fixed = leaks_fixed;
    }
    match format {
        _ if arguments.quiet => {}
        OutputFormat::Json => {
            let report = to_json(&report, name, device.top().format().name());
            output::report(&json::pretty(&report))?;
        }
        OutputFormat::Human => {
            output::report(&to_text(&report))?;
        }
    }
    exit_status(&report)
}

/// The value of `-r`.
fn repair_mode(value: Option<&str>) -> Result<Option<RepairMode>, Failure> {
    match value {
        None => Ok(None),
        Some("leaks") => Ok(Some(RepairMode::Leaks)),
        Some("all") => Ok(Some(RepairMode::All)),
        Some(other) => {
            let text = format!("--repair (-r) expects 'leaks' or 'all', not '{other}'");
            Err(Failure::new(text).with_hint())
        }
    }
}

/// Checks or repairs the image, and prints errors on standard error. `None`: the format has no
/// check.
fn check(
    context: &Context,
    queue: &Queue,
    layer: &Layer,
    mode: Option<RepairMode>,
    progress: bool,
) -> Result<Option<CheckReport>, Failure> {
    match layer.as_qcow2() {
        Some(image) => check_qcow2(context, queue, image, mode, progress).map(Some),
        None if mode.is_some() && REPAIRED_BY_QEMU.contains(&layer.format().name()) => {
            let format = layer.format().name();
            let why = format!("Images of format '{format}' are only read by zebu");
            Err(Failure::new(why))
        }
        None if mode.is_some() && !REPAIRED_BY_OPENING.contains(&layer.format().name()) => Ok(None),
        None => {
            let mut few = open::Few::new(context, std::io::stderr());
            let mut say = |text: String| few.say((), || text);
            queue
                .block_on(layer.check(queue, &mut say))
                .map_err(|e| Failure::new(format!("Check failed: {e}")))
        }
    }
}

fn check_qcow2(
    context: &Context,
    queue: &Queue,
    image: &Image,
    mode: Option<RepairMode>,
    progress: bool,
) -> Result<CheckReport, Failure> {
    let progress = Share::new(progress);
    let mut stderr = std::io::BufWriter::new(progress.beside(std::io::stderr()));
    let mut say = open::messages(context, &mut stderr);
    let show = |now: jobs::Progress| progress.set(now.done, now.total);
    let result = match mode {
        None => queue.block_on(jobs::check(queue, image, &mut say, show)),
        Some(mode) => queue.block_on(jobs::repair_image(queue, image, mode, &mut say, show)),
    };
    drop(say);
    let _ = stderr.flush();
    progress.finish();
    result.map_err(|e| Failure::new(format!("Check failed: {e}")))
}

fn repaired_text(report: &CheckReport) -> String {
    format!(
        "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} \
         corruptions\n\nDouble checking the fixed image now...\n",
        report.leaks_fixed, report.corruptions_fixed
    )
}

fn exit_status(report: &CheckReport) -> Outcome {
    if report.check_errors > 0 {
        Err(Failure::new("Check failed"))
    } else if report.corruptions > 0 {
        Ok(CORRUPT)
    } else if report.leaks > 0 {
        Ok(LEAKS)
    } else {
        Ok(0)
    }
}

fn to_text(report: &CheckReport) -> String {
    let mut text = String::new();
    if report.corruptions > 0 {
        text += &format!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to \
             the image may corrupt it.\n",
            report.corruptions
        );
    }
    if report.leaks > 0 {
        text += &format!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but \
             no harm to data.\n",
            report.leaks
        );
    }
    if report.check_errors > 0 {
        text += &format!(
            "\n{} internal errors have occurred during the check.\n",
            report.check_errors
        );
    }
    if text.is_empty() {
        text += "No errors were found on the image.\n";
    }
    if report.total_clusters != 0 && report.allocated_clusters != 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        text += &format!(
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            report.allocated_clusters,
            report.total_clusters,
            percent(report.allocated_clusters, report.total_clusters),
            percent(report.fragmented_clusters, report.allocated_clusters),
            percent(report.compressed_clusters, report.allocated_clusters),
        );
    }
    if report.image_end_offset > 0 {
        text += &format!("Image end offset: {}\n", report.image_end_offset);
    }
    text
}

/// The keys in qemu-img's order. Counts of 0 are omitted, except for one.
fn to_json(report: &CheckReport, name: &OsStr, format: &str) -> Value {
    let mut map = Map::new();
    let mut count = |key, value: u64| {
        if value != 0 || key == "check-errors" {
            map.add(key, value);
        }
    };
    count("image-end-offset", report.image_end_offset);
    count("compressed-clusters", report.compressed_clusters);
    count("total-clusters", report.total_clusters);
    count("corruptions", report.corruptions);
    count("corruptions-fixed", report.corruptions_fixed);
    count("check-errors", report.check_errors);
    count("leaks", report.leaks);
    count("leaks-fixed", report.leaks_fixed);
    count("allocated-clusters", report.allocated_clusters);
    map.add("filename", name);
    map.add("format", format);
    if report.fragmented_clusters != 0 {
        map.add("fragmented-clusters", report.fragmented_clusters);
    }
    Value::Object(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_image() {
        let mut report = CheckReport::default();
        report.total_clusters = 1024;
        report.allocated_clusters = 6;
        report.image_end_offset = 49152;
        assert_eq!(
            to_text(&report),
            "No errors were found on the image.\n6/1024 = 0.59% allocated, 0.00% fragmented, \
             0.00% compressed clusters\nImage end offset: 49152\n"
        );
        assert_eq!(exit_status(&report).unwrap(), 0);
        report.leaks = 1;
        assert_eq!(exit_status(&report).unwrap(), LEAKS);
        report.corruptions = 1;
        assert_eq!(exit_status(&report).unwrap(), CORRUPT);
    }
}
