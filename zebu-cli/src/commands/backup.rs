//! `backup`: incremental backups of disks in a directory, and restoring them.

use std::ffi::{OsStr, OsString};
use std::ops::ControlFlow;
use std::path::Path;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use zebu::block::NbdSpec;
use zebu::qcow2::Compression;
use zebu::storage::{CacheMode, OpenFile};
use zebu_backup::{Disk, Entry, Manifest, Set, Step, TakeOptions};

use super::command::Command;
use crate::arguments::file_name::file_of;
use crate::arguments::{Reporting, SourceOptions, objects, rate, size};
use crate::images::{open, same_file, streams};
use crate::output::progress::interrupted;
use crate::output::{self, Progress, Shown, localtime};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "backup",
    operands: "<SOURCE>... --to <DIR>",
    summary: "Back up disks incrementally, and restore them",
    options: Arguments::command,
    run,
    examples: "
        # A full backup
        zebu backup disk.qcow2 --to backups
        # Later, what has changed; older points than 30 are merged
        zebu backup disk.qcow2 --to backups --keep 30
        # The points in time
        zebu backup list backups
        # Back to the first one
        zebu backup restore backups --point 1 restored.raw
        # Whether all files are as they were written
        zebu backup verify backups",
    files: &[
        (
            "DIR/manifest.json",
            "The points in time, with sizes and SHA-256 of the files.",
        ),
        (
            "DIR/DISK.N.qcow2",
            "The disk as it was at point N: what has changed since the point before.",
        ),
        ("DIR/lock", "Locked by the program that changes the set."),
    ],
    exit_status_of_subcommands: &[(
        "verify",
        &[
            ("0", "All files are as they were written."),
            ("1", "The set could not be verified."),
            ("2", "A file is missing or damaged."),
        ],
    )],
    ..Command::PLAIN
};

/// Back up disks incrementally, and restore them
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    take: Take,
}

#[derive(Subcommand)]
enum Action {
    /// List the points in time of a set of backups
    List(List),
    /// Compare the files of a set with its manifest
    Verify(Verify),
    /// Restore a disk: a conversion of its image at a point in time
    Restore(Restore),
    /// Forget the oldest points of each disk, merging their increments
    Keep(Keep),
}

/// How results are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Human,
    Json,
}

#[derive(Args)]
struct Take {
    #[command(flatten)]
    source: SourceOptions,
    /// Directory of the backups; it is created
    #[arg(long, value_name = "DIR")]
    to: Option<OsString>,
    /// Names of the disks in the set, in the order of the sources; by default those of their files
    #[arg(long = "name", value_name = "NAME")]
    disk_names: Vec<String>,
    /// Bitmap of an NBD export that has what changed since the last backup
    #[arg(short = 'B', long, value_name = "BITMAP")]
    bitmap: Option<String>,
    /// Take full backups, not increments
    #[arg(long)]
    full: bool,
    /// Compress, with zlib or zstd (the default)
    #[arg(short = 'c', long, value_name = "TYPE", num_args = 0..=1, require_equals = true,
          default_missing_value = "zstd")]
    compress: Option<String>,
    /// Compare each disk with its backup afterwards, and record a hash of its content
    #[arg(long)]
    verify: bool,
    /// Points of each of these disks to keep: older ones are merged away
    #[arg(long, value_name = "N", value_parser = size::number::<usize>)]
    keep: Option<usize>,
    /// Bytes a second at most
    #[arg(short = 'r', long, value_name = "RATE")]
    rate_limit: Option<String>,
    #[command(flatten)]
    report: Reporting,
    /// Format of the result: human or json
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: Output,
    /// The disks: images, block devices, NBD exports
    #[arg(value_name = "SOURCE")]
    names: Vec<OsString>,
}

#[derive(Args)]
struct List {
    /// Format of the list: human or json
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: Output,
    /// Directory of the backups
    #[arg(value_name = "DIR")]
    directory: OsString,
}

#[derive(Args)]
struct Verify {
    /// Hash the content of the disks, too, where the manifest has a hash of it
    #[arg(long)]
    content: bool,
    #[command(flatten)]
    report: Reporting,
    /// Format of the result: human or json
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: Output,
    /// Directory of the backups
    #[arg(value_name = "DIR")]
    directory: OsString,
}

#[derive(Args)]
struct Restore {
    /// The point in time, by number; the last one by default
    #[arg(long, value_name = "N", value_parser = size::number::<u64>)]
    point: Option<u64>,
    /// The disk; needed if the point has several
    #[arg(long, value_name = "NAME")]
    disk: Option<String>,
    /// Format of the target
    #[arg(short = 'O', long, value_name = "FMT", default_value = "raw")]
    target_format: OsString,
    /// Write to a target that exists: a block device, an NBD export
    #[arg(short = 'n', long)]
    no_create: bool,
    /// Replace a file that exists
    #[arg(long, conflicts_with = "no_create")]
    overwrite: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Directory of the backups
    #[arg(value_name = "DIR")]
    directory: OsString,
    /// The target
    #[arg(value_name = "TARGET")]
    target: OsString,
}

#[derive(Args)]
struct Keep {
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Directory of the backups
    #[arg(value_name = "DIR")]
    directory: OsString,
    /// Points to keep of each disk
    #[arg(value_name = "N")]
    points: usize,
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    match arguments.action {
        None => take(context, &arguments.take),
        Some(Action::List(list)) => print_points(&list),
        Some(Action::Verify(verify)) => print_findings(context, &verify),
        Some(Action::Restore(restore)) => restore_disk(context, &restore),
        Some(Action::Keep(keep)) => forget(&keep),
    }
}

fn take(context: &Context, arguments: &Take) -> Outcome {
    let Some(directory) = &arguments.to else {
        return Err(Failure::new("Expecting the directory of the backups (--to)").with_hint());
    };
    let disks = disks(context, arguments)?;
    let mut options = TakeOptions::default();
    options.full = arguments.full;
    options.verify = arguments.verify;
    options.compress = match arguments.compress.as_deref() {
        None => None,
        Some("zlib") => Some(Compression::Zlib),
        Some("zstd") => Some(Compression::Zstd),
        Some(other) => return Err(Failure::new(format!("Unknown compression type '{other}'"))),
    };
    options.rate = rate(arguments.rate_limit.as_deref())?;
    if arguments.keep == Some(0) {
        return Err(Failure::new("At least one point must be kept"));
    }
    let queue = open::queue()?;
    // From here on signals let it end with what it made removed.
    let mut steps = Steps::new(arguments.report.has_progress());
    let mut set = Set::open_or_create(directory).map_err(failure)?;
    let taken = set.take(&queue, &disks, &options, &mut |step, name, done, total| {
        steps.show(step, name, done, total)
    });
    steps.finish();
    if !arguments.report.quiet {
        for note in set.take_notes() {
            context.say(&note);
        }
    }
    let number = taken.map_err(failure)?;
    let kept = match arguments.keep {
        None => Ok(()),
        Some(keep) => {
            let is_meant = |name: &str| disks.iter().any(|disk| disk.name == name);
            set.keep(&queue, keep, &is_meant, &mut |step, name, done, total| {
                steps.show(step, name, done, total)
            })
        }
    };
    steps.finish();
    if !arguments.report.quiet {
        let manifest = set.manifest();
        match arguments.output {
            Output::Json => {
                json(manifest.point(number).map_err(failure)?)?;
            }
            Output::Human => {
                let entries = manifest.point(number).map_err(failure)?.disks.iter();
                for (disk, entry) in entries {
                    line(format!(
                        "point {number}, {disk}: {} of {} in {}",
                        size::human(entry.changed),
                        size::human(entry.size),
                        Path::new(directory).join(&entry.file).shown()
                    ))?;
                }
            }
        }
    }
    kept.map_err(|error| Failure::new(format!("point {number} is taken, but: {error}")))?;
    Ok(0)
}

/// The disks with their names in the set.
fn disks(context: &Context, arguments: &Take) -> Result<Vec<Disk>, Failure> {
    if arguments.source.force_share {
        let why = "A disk that another program writes cannot be backed up (--force-share)";
        return Err(Failure::new(why));
    }
    if arguments.names.is_empty() {
        return Err(Failure::new("Expecting at least one disk").with_hint());
    }
    let given = arguments.disk_names.len();
    if given > 0 && given != arguments.names.len() {
        return Err(Failure::new(
            "There must be as many names (--name) as disks",
        ));
    }
    if arguments.bitmap.is_some() && arguments.names.len() > 1 {
        return Err(Failure::new("--bitmap is for one disk"));
    }
    let mut disks = Vec::new();
    for (index, name) in arguments.names.iter().enumerate() {
        let file = file_of(name).ok().filter(same_file::is_local);
        if file.is_some_and(|file| same_file::is_printed_to(&file.bottom().path)) {
            let why = format!("{}: {}", name.shown(), same_file::PRINTED_TO);
            return Err(Failure::new(why));
        }
        let disk_name = match arguments.disk_names.get(index) {
            Some(name) => name.clone(),
            None => disk_name(name)?,
        };
        disks.push(Disk {
            name: disk_name,
            source: open::source(name, &arguments.source),
            options: open::options(context, name, &arguments.source, CacheMode::default())?,
            bitmap: arguments.bitmap.clone(),
        });
    }
    Ok(disks)
}

/// The name of a disk in the set: that of its file without an extension.
fn disk_name(name: &OsStr) -> Result<String, Failure> {
    let text = name.to_string_lossy();
    let stem = Path::new(name).file_stem().and_then(OsStr::to_str);
    match stem {
        Some(stem) if !text.contains(':') && !text.contains('=') => Ok(stem.to_owned()),
        _ => Err(Failure::new(format!(
            "'{text}' needs a name in the set of backups (--name)"
        ))),
    }
}

fn print_points(arguments: &List) -> Outcome {
    let set = Set::open(&arguments.directory).map_err(failure)?;
    let manifest = set.manifest();
    if arguments.output == Output::Json {
        return json(&manifest.points);
    }
    line(format!(
        "{:<7} {:<19} {:<16} {:<9} {:>10} {:>10} {:>10}",
        "POINT", "TIME", "DISK", "KIND", "SIZE", "CHANGED", "FILE"
    ))?;
    for point in &manifest.points {
        for (disk, entry) in &point.disks {
            let kind = match entry.kind {
                zebu_backup::Kind::Full => "full",
                zebu_backup::Kind::Increment => "increment",
            };
            line(format!(
                "{:<7} {:<19} {:<16} {kind:<9} {:>10} {:>10} {:>10}",
                point.number,
                localtime::format(point.time as i64),
                disk,
                size::human(entry.size),
                size::human(entry.changed),
                size::human(entry.length)
            ))?;
        }
    }
    Ok(0)
}

/// Prints a value as JSON, with a line feed.
fn json(value: &impl serde::Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value).expect("strings and numbers");
    output::report(&format!("{text}\n"))
}

fn line(mut text: String) -> Outcome {
    text.push('\n');
    output::report(&text)
}

fn print_findings(context: &Context, arguments: &Verify) -> Outcome {
    let queue = open::queue()?;
    let set = Set::open(&arguments.directory).map_err(failure)?;
    let mut steps = Steps::new(arguments.report.has_progress());
    let found = set.verify(&queue, arguments.content, &mut |step, name, done, total| {
        steps.show(step, name, done, total)
    });
    steps.finish();
    let found = found.map_err(failure)?;
    if arguments.output == Output::Json {
        json(&found)?;
    }
    if found.is_empty() {
        if arguments.output == Output::Human && !arguments.report.quiet {
            line(verified(set.manifest(), arguments.content))?;
        }
        return Ok(0);
    }
    for finding in &found {
        context.say(&finding.text);
    }
    Ok(2)
}

/// What was verified of a sound set, in a line.
fn verified(manifest: &Manifest, with_content: bool) -> String {
    let entries = manifest
        .points
        .iter()
        .flat_map(|point| point.disks.values());
    let entries: Vec<_> = entries.collect();
    // The hash of a merged file is known when the merge is finished.
    let is_merging = |entry: &&&Entry| manifest.merging.iter().any(|m| m.top == entry.file);
    let merging: Vec<_> = entries.iter().filter(is_merging).collect();
    let all: u64 = entries.iter().map(|entry| entry.length).sum();
    let unhashed: u64 = merging.iter().map(|entry| entry.length).sum();
    let mut text = format!(
        "{} and {} as in the manifest: {} hashed",
        count(manifest.points.len(), "point"),
        count(entries.len(), "file"),
        size::human(all - unhashed)
    );
    if !merging.is_empty() {
        text += &format!(", not {} being merged", count(merging.len(), "file"));
    }
    if with_content {
        let known = entries.iter().filter(|e| e.content_sha256.is_some());
        let known: Vec<_> = known.collect();
        let bytes: u64 = known.iter().map(|entry| entry.size).sum();
        let (disks, bytes) = (count(known.len(), "disk"), size::human(bytes));
        text += &format!("; the content of {disks}, {bytes}, too");
    }
    text
}

fn count(number: usize, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    }
}

/// Refuses a target that is a file with content. A device, an export and an image in a cluster exist
/// before anything can be restored to them.
fn refuse_existing(context: &Context, target: &OsStr) -> Result<(), Failure> {
    let Ok(spec) = file_of(target) else {
        // The conversion says what is wrong with it.
        return Ok(());
    };
    let exists = match spec.is_object() || spec.is_remote() {
        _ if spec.driver.get::<NbdSpec>().is_some() => false,
        true => spec
            .open(OpenFile::default(), &objects::all(context))
            .is_ok_and(|file| file.storage().len().is_ok_and(|length| length > 0)),
        false if same_file::is_local(&spec) => {
            std::fs::metadata(&spec.bottom().path).is_ok_and(|m| m.is_file() && m.len() > 0)
        }
        false => false,
    };
    match exists && streams::output(target).is_ok_and(|stream| stream.is_none()) {
        false => Ok(()),
        true => Err(Failure::new(format!(
            "{} exists: restore to another file, replace it (--overwrite), or write into it (-n)",
            target.shown()
        ))),
    }
}

fn restore_disk(context: &Context, arguments: &Restore) -> Outcome {
    let set = Set::open(&arguments.directory).map_err(failure)?;
    let manifest = set.manifest();
    let number = match (arguments.point, manifest.points.last()) {
        (Some(number), _) => number,
        (None, Some(last)) => last.number,
        (None, None) => return Err(Failure::new("There is no backup yet")),
    };
    let disks = &manifest.point(number).map_err(failure)?.disks;
    let disk = match (&arguments.disk, disks.keys().next()) {
        (Some(disk), _) => disk,
        (None, Some(disk)) if disks.len() == 1 => disk,
        _ => {
            let names: Vec<_> = disks.keys().map(String::as_str).collect();
            return Err(Failure::new(format!(
                "Point {number} has several disks: choose one by --disk ({})",
                names.join(", ")
            )));
        }
    };
    set.refuse_own(&zebu::Source::Name(arguments.target.clone()))
        .map_err(failure)?;
    if !arguments.no_create && !arguments.overwrite {
        refuse_existing(context, &arguments.target)?;
    }
    let image = set.image(&open::queue()?, disk, number).map_err(failure)?;
    // The chain of files was just checked; a conversion does the rest.
    let mut convert: Vec<OsString> = ["-f", "qcow2", "-W", "-O"].map(OsString::from).into();
    convert.push(arguments.target_format.clone());
    convert.extend(arguments.no_create.then(|| "-n".into()));
    convert.extend(arguments.progress.then(|| "-p".into()));
    convert.extend(["--".into(), image.into(), arguments.target.clone()]);
    let is_new_raw = !arguments.no_create && arguments.target_format == "raw";
    let raw_length = disks[disk].raw_length.filter(|_| is_new_raw);
    super::convert::run_to_length(context, convert, raw_length)
}

fn forget(arguments: &Keep) -> Outcome {
    let queue = open::queue()?;
    let mut set = Set::open_or_create(&arguments.directory).map_err(failure)?;
    let mut steps = Steps::new(arguments.progress);
    let on_progress = &mut |step, name: &str, done, total| steps.show(step, name, done, total);
    let kept = set.keep(&queue, arguments.points, &|_| true, on_progress);
    steps.finish();
    kept.map_err(failure)?;
    Ok(0)
}

/// The progress of steps one after the other.
struct Steps {
    asked: bool,
    now: Option<(Step, String)>,
    progress: Progress,
}

impl Steps {
    fn new(asked: bool) -> Self {
        Steps {
            asked,
            now: None,
            progress: Progress::new(false, 0),
        }
    }

    fn show(&mut self, step: Step, name: &str, done: u64, total: u64) -> ControlFlow<()> {
        let is_now = |(now, of): &(Step, String)| *now == step && of == name;
        if !self.now.as_ref().is_some_and(is_now) {
            self.finish();
            self.now = Some((step, name.to_owned()));
            if self.asked {
                let verb = match step {
                    Step::Compare => "comparing",
                    Step::Copy => "copying",
                    Step::Hash => "hashing",
                    Step::Verify => "verifying",
                    Step::Merge => "merging",
                };
                output::say(&format!("{verb} {name}\n"));
            }
            self.progress = Progress::new(self.asked, total);
        }
        self.progress.set(done)
    }

    fn finish(&mut self) {
        if self.now.take().is_some() {
            self.progress.finish(true);
        }
    }
}

fn failure(error: zebu_backup::Error) -> Failure {
    let stopped = interrupted("the backups made before are as they were");
    stopped.unwrap_or_else(|| Failure::new(error.to_string()))
}
