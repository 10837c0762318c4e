//! `convert`: the content of images to a new image.

mod bitmaps;
mod export;
pub mod stream;
pub mod target;

use std::ffi::{OsStr, OsString};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::{CommandFactory, Parser};
use zebu::block::Device;
use zebu::jobs::{self, CompressOptions, ConvertError, ConvertEvent, ConvertOptions, Unchanged};
use zebu::qcow2::SnapshotName;
use zebu::storage::Queue;

use super::command::{Command, Entry};
use crate::arguments::known_options::option_help;
use crate::arguments::{Reporting, SourceOptions, create_options, rate, size, source_cache};
use crate::images::named::Named;
use crate::images::new_image::{new_format_help, parse_format};
use crate::images::{appliance, open};
use crate::output::progress::{incomplete, interrupted};
use crate::output::{self, Progress, Shown};
use crate::program::{Context, Failure, Outcome};

/// The files of commands that read streams, for their man pages.
pub const FILES: [Entry; 1] = [(
    "DIR of --spill",
    "A file without a name in it, for parts of a stream that come before it is known where they belong.",
)];

pub const COMMAND: Command = Command {
    name: "convert",
    operands: "<SOURCE>... <TARGET>",
    summary: "Copy images to another, with format conversion",
    options: Arguments::command,
    run,
    examples: "
        # To raw, sparse
        zebu convert -p disk.qcow2 copy.raw
        # To a compressed qcow2 image
        zebu convert -c -O qcow2 -o compression_type=zstd disk.raw small.qcow2
        # A snapshot
        zebu convert -l before-upgrade disk.qcow2 old.raw
        # Only what differs from the backing file
        zebu convert -O qcow2 -B base.qcow2 -F qcow2 overlay.qcow2 copy.qcow2
        # For other hypervisors
        zebu convert -O vmdk -o subformat=streamOptimized disk.qcow2 disk.vmdk
        # From a web server
        zebu convert https://example.org/disk.qcow2 fetched.raw
        # The same, with a cache for the next time
        zebu convert --cache-dir cache https://example.org/disk.qcow2 fetched.raw
        # From a stream
        gzip -c disk.qcow2 | zebu convert - piped.raw
        # To a stream
        zebu convert -O qcow2 disk.qcow2 - | gzip -c > disk.qcow2.gz",
    files: &FILES,
    ..Command::PLAIN
};

/// Copy one or more images to another, with format conversion
#[derive(Default, Parser)]
#[command(
    mut_arg("format", |a| a.long("source-format").alias("format")),
    mut_arg("image_opts", |a| a.long("source-image-opts").alias("image-opts"))
)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Cache mode of the sources: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 'T', long = "source-cache", value_name = "CACHE_MODE")]
    source_cache: Option<String>,
    /// Internal snapshot of the source to convert: id, name, or
    /// snapshot.id=ID,snapshot.name=NAME
    #[arg(
        short = 'l',
        long = "snapshot",
        alias = "source-snapshot",
        value_name = "SNAPSHOT"
    )]
    snapshot: Option<OsString>,
    /// Number of the disk to convert, from 1, of an appliance (OVA or OVF); its checksum is verified
    #[arg(long, value_name = "N", value_parser = size::number::<usize>)]
    disk: Option<usize>,
    #[arg(short = 'O', long = "target-format", alias = "output-format", value_name = "FMT", help = new_format_help("target"))]
    target_format: Option<String>,
    /// Interpret the target's name as options (driver=qcow2,file.filename=PATH); needs -n
    #[arg(long)]
    target_image_opts: bool,
    /// Options of the target's format; help lists them
    #[arg(
        short = 'o',
        long = "target-format-options",
        aliases = ["target-options", "options"],
        value_name = "OPTIONS"
    )]
    options: Vec<OsString>,
    /// Cache mode of the target (default: none if the file system supports it, else writeback)
    #[arg(short = 't', long = "target-cache", value_name = "CACHE_MODE")]
    target_cache: Option<String>,
    /// Backing file of the target, equal in content to that of the source; its data are not copied
    #[arg(short = 'b', short_alias = 'B', long = "backing", value_name = "FILE")]
    backing: Option<OsString>,
    /// Format of the backing file
    #[arg(short = 'F', long = "backing-format", value_name = "FMT")]
    backing_format: Option<String>,
    /// Compress the target (see its option compression_type)
    #[arg(short = 'c', long)]
    compress: bool,
    /// Compression level: 1 to 9 for zlib, 1 to 22 for zstd
    #[arg(long, value_name = "LEVEL", value_parser = size::number::<i32>)]
    level: Option<i32>,
    /// Copy the bitmaps of the source
    #[arg(long)]
    bitmaps: bool,
    /// Leave out bitmaps that are inconsistent, with a warning
    #[arg(long)]
    skip_broken_bitmaps: bool,
    /// Use an existing target
    #[arg(short = 'n', long)]
    no_create: bool,
    /// The existing target reads as zeroes
    #[arg(long)]
    target_is_zero: bool,
    /// Shortest run of zeroes in bytes that is left unallocated; 0: allocate everything
    #[arg(short = 'S', long = "sparse-size", value_name = "SIZE")]
    sparse: Option<String>,
    /// Number of concurrent chunks, 1 to 16 (default: by the number of cores)
    #[arg(short = 'm', long = "parallel", value_name = "NUMBER")]
    workers: Option<String>,
    /// Write to the target out of order, as is always done with raw targets
    #[arg(short = 'W', long = "oob-writes")]
    unordered: bool,
    /// Copy by copy_file_range(2) where possible
    #[arg(short = 'C', long = "copy-range-offloading")]
    copy_range: bool,
    /// Rate limit in bytes per second
    #[arg(short = 'r', long = "rate-limit", alias = "rate", value_name = "RATE")]
    rate: Option<String>,
    /// Replace what cannot be read by zeroes, and go on
    #[arg(long)]
    salvage: bool,
    /// Folder for a temporary file with parts of a source that is a stream, which come before it is
    /// known where they belong
    #[arg(long, value_name = "DIR")]
    spill: Option<PathBuf>,
    /// Bytes of that file at most (default 64G)
    #[arg(long, value_name = "SIZE")]
    spill_size: Option<String>,
    #[command(flatten)]
    report: Reporting,
    /// The sources, then the target; `-` is standard input, or output
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
    /// The length in bytes of a new raw file that ends within a sector.
    #[arg(skip)]
    raw_length: Option<u64>,
}

impl Arguments {
    /// Those of an import: to a new image of this format.
    pub fn of_import(
        target_format: Option<String>,
        options: Vec<OsString>,
        names: [&OsStr; 2],
        spill: Option<PathBuf>,
        spill_size: Option<String>,
    ) -> Arguments {
        Arguments {
            target_format,
            options,
            names: names.map(OsStr::to_owned).into(),
            spill,
            spill_size,
            ..Arguments::default()
        }
    }

    fn target_format(&self) -> &str {
        self.target_format.as_deref().unwrap_or("raw")
    }

    /// The name of the appliance that is read.
    fn appliance(&self) -> Option<&OsString> {
        self.disk.and(self.names.first())
    }

    fn target(&self) -> &OsStr {
        self.names
            .last()
            .map_or(OsStr::new(""), OsString::as_os_str)
    }
}

/// What qemu-img allows for `-S`.
const MAX_SPARSE: u64 = 16 << 20;
/// What qemu-img allows for `-m`.
const MAX_WORKERS: u64 = 16;

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    run_parsed(context, &super::parse(context, arguments)?)
}

/// Runs the command to a new file, which gets the length `raw_length` if it is raw.
pub fn run_to_length(
    context: &Context,
    arguments: Vec<OsString>,
    raw_length: Option<u64>,
) -> Outcome {
    let mut arguments: Arguments = super::parse(context, arguments)?;
    arguments.raw_length = raw_length;
    run_parsed(context, &arguments)
}

fn run_parsed(context: &Context, arguments: &Arguments) -> Outcome {
    let lists = &arguments.options;
    for list in lists {
        create_options::check_list(list)?;
    }
    if create_options::asks_for_help(lists) {
        let format = parse_format(arguments.target_format()).map_err(Failure::new)?;
        let target = arguments.names.last().map(OsString::as_os_str);
        return output::report(&option_help(format, target));
    }
    let options = job_options(arguments)?;
    if arguments.names.len() < 2 {
        return Err(Failure::new("Must specify image file name"));
    }
    check_combinations(arguments)?;
    let output = export::open(arguments)?;
    let shows = arguments.report.has_progress();
    let mut progress = match &output {
        None => Progress::begun(shows),
        Some(output) => output.progress(shows),
    };
    let outcome = run_job(context, arguments, options, output, &mut progress);
    progress.finish(outcome.is_ok());
    outcome
}

/// Converts files, or a stream. `output` is the target, if it is written in order.
fn run_job(
    context: &Context,
    arguments: &Arguments,
    mut options: ConvertOptions,
    output: Option<export::Output>,
    progress: &mut Progress,
) -> Outcome {
    let queue = open::queue()?;
    let (target, names) = arguments.names.split_last().expect("looked at");
    let mut names = names.to_vec();
    let kept = match stream::open(context, &queue, arguments, &mut names, output.as_ref())? {
        stream::Opened::Files(kept) => kept,
        stream::Opened::Stream(source) => {
            return stream::convert(
                context, &queue, arguments, *source, output, options, progress,
            );
        }
    };
    let sources = open_sources(context, &queue, arguments, &names, kept.is_some())?;
    let sizes = sources.devices.iter().map(Device::size);
    progress.job(sizes.fold(0, u64::saturating_add));
    // With -S 0, holes are written, too.
    if options.sparse > 0 {
        let disks: Vec<[&Device; 1]> = sources.devices.iter().map(|device| [device]).collect();
        let disks: Vec<&[&Device]> = disks.iter().map(|disk| &disk[..]).collect();
        progress.weigh(context, &queue, &disks);
    }
    if let Some(output) = output {
        return export::convert(context, arguments, sources, output, &options, progress);
    }
    if arguments.bitmaps {
        options.bitmaps = bitmaps::of_source(context, &queue, arguments, &sources.devices)?;
    }
    let content = target::Content::of(&sources.devices);
    let opened = target::open(context, &queue, arguments, target, &content, &mut options)?;
    convert(
        context, &queue, arguments, sources, opened, &options, progress,
    )
}

fn convert(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    sources: Sources,
    opened: target::Opened,
    options: &ConvertOptions,
    progress: &mut Progress,
) -> Outcome {
    let target::Opened { target, files } = opened;
    let named = Named::of(&target, files.as_ref());
    let events = events(context, arguments, progress);
    let result = jobs::convert(sources.devices, target, options, events);
    let state = || incomplete(queue, arguments.target(), files.as_ref());
    let outcome = ended(result, state)?;
    if let (Some(length), Some(files)) = (arguments.raw_length, &files) {
        files.end_within_sector(queue, length).map_err(|e| {
            let name = arguments.target().shown();
            let why = zebu::strerror(&e);
            Failure::new(format!(
                "{name}: its length could not be set to {length}: {why}"
            ))
        })?;
    }
    let why = sources.unchanged.check();
    why.map_err(|why| Failure::new(format!("{why}; {}", state())))?;
    named.check()?;
    Ok(outcome)
}

/// What is done with the events of a job.
fn events(
    context: &Context,
    arguments: &Arguments,
    progress: &mut Progress,
) -> impl FnMut(ConvertEvent) -> ControlFlow<()> {
    move |event| match event {
        ConvertEvent::Progress(now) => progress.set(now.done),
        ConvertEvent::Unreadable { offset, errno } if !arguments.report.quiet => {
            let error = std::io::Error::from_raw_os_error(errno);
            let error = zebu::strerror(&error);
            context.say(&format!(
                "warning: error while reading offset {offset}: {error}"
            ));
            ControlFlow::Continue(())
        }
        ConvertEvent::Unreadable { .. } => ControlFlow::Continue(()),
    }
}

/// The outcome of a job. `give_up` returns the state that the target is left in by one that has
/// failed.
fn ended(result: Result<(), ConvertError>, give_up: impl FnOnce() -> String) -> Outcome {
    let error = match result {
        Ok(()) => return Ok(0),
        Err(error) => error,
    };
    let state = give_up();
    if let ConvertError::TooLarge | ConvertError::NotCompressible = error {
        // Nothing was written yet.
        return Err(Failure::new(error.to_string()));
    }
    let is_cancelled = match &error {
        ConvertError::Engine(_) => true,
        // A write that waited for the reader of a stream.
        ConvertError::Write { source, .. } => source.errno() == libc::ECANCELED,
        _ => false,
    };
    if is_cancelled && let Some(failure) = interrupted(&state) {
        return Err(failure);
    }
    let why = match &error {
        ConvertError::Engine(e) => zebu::strerror(e).to_string(),
        other => other.to_string(),
    };
    Err(Failure::new(format!("{why}; {state}")))
}

/// The options of the job.
fn job_options(arguments: &Arguments) -> Result<ConvertOptions, Failure> {
    let sparse = sparse_size(arguments.sparse.as_deref())?;
    let workers = match &arguments.workers {
        None => None,
        Some(text) => Some(size::parse_number(
            "number of coroutines",
            text,
            1..=MAX_WORKERS,
        )?),
    };
    let rate = rate(arguments.rate.as_deref())?;
    Ok(ConvertOptions::default()
        .workers(workers.map(|n| n as usize))
        .sparse(sparse)
        .zero_from(arguments.target_is_zero.then_some(0))
        .compress(
            arguments
                .compress
                .then_some(CompressOptions::default().level(arguments.level)),
        )
        .any_order(arguments.unordered)
        .copy_range(arguments.copy_range)
        .salvage(arguments.salvage)
        .rate(rate))
}

/// The value of `-S`.
pub fn sparse_size(text: Option<&str>) -> Result<u64, Failure> {
    let Some(text) = text else {
        return Ok(4096);
    };
    let size = size::parse_option("buffer size for sparse output", text)?;
    match size % 512 == 0 && size <= MAX_SPARSE {
        true => Ok(size),
        false => Err(Failure::new(format!(
            "Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up \
             to {MAX_SPARSE}. Select 0 to disable sparse detection (fully allocates output)."
        ))),
    }
}

/// Refuses invalid combinations, and what is not supported.
fn check_combinations(arguments: &Arguments) -> Result<(), Failure> {
    let refused = [
        (
            arguments.skip_broken_bitmaps && !arguments.bitmaps,
            "Use of --skip-broken-bitmaps requires --bitmaps",
        ),
        (
            arguments.bitmaps && arguments.snapshot.is_some(),
            "--bitmaps cannot be used with -l: bitmaps tell what changed in the active disk, not \
             in a snapshot; leave out --bitmaps",
        ),
        (
            arguments.copy_range && arguments.sparse.is_some(),
            "Cannot enable copy offloading when -S is used",
        ),
        (
            arguments.copy_range && arguments.compress,
            "Cannot enable copy offloading when -c is used",
        ),
        (
            arguments.copy_range && arguments.salvage,
            "Cannot use copy offloading in salvaging mode",
        ),
        (
            arguments.target_image_opts && !arguments.no_create,
            "--target-image-opts requires use of -n flag",
        ),
        (
            arguments.target_image_opts && arguments.target_format.is_some(),
            "--image-opts and --format are mutually exclusive",
        ),
        (
            arguments.target_is_zero && !arguments.no_create,
            "--target-is-zero requires use of -n flag",
        ),
        (
            arguments.no_create && !arguments.options.is_empty(),
            "-o has no effect when skipping image creation",
        ),
        (
            arguments.target_is_zero && arguments.backing.is_some(),
            "Cannot use --target-is-zero when the destination image has a backing file",
        ),
        (
            arguments.spill_size.is_some() && arguments.spill.is_none(),
            "--spill-size requires --spill",
        ),
        (
            arguments.level.is_some() && !arguments.compress,
            "--level requires -c",
        ),
    ];
    match refused.iter().find(|(given, _)| *given) {
        Some((_, why)) => Err(Failure::new(*why)),
        None => Ok(()),
    }
}

/// What is read, and what tells whether it was changed since it was opened.
struct Sources {
    devices: Vec<Device>,
    unchanged: Unchanged,
}

/// Opens the sources. `is_kept`: the only one is the copy of a stream.
fn open_sources(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    names: &[OsString],
    is_kept: bool,
) -> Result<Sources, Failure> {
    let cache = source_cache(arguments.source_cache.as_deref())?;
    let snapshot = arguments
        .snapshot
        .as_deref()
        .map(OsStr::as_bytes)
        .map(SnapshotName::from);
    if arguments.disk.is_some() && (names.len() > 1 || arguments.source.name.image_opts) {
        return Err(Failure::new("--disk takes one appliance, by its name"));
    }
    if snapshot.is_some() && arguments.disk.is_some() {
        return Err(Failure::new(
            "the disks of an appliance have no snapshots: leave out -l",
        ));
    }
    if snapshot.is_some() && names.len() > 1 {
        return Err(Failure::new(
            "No support for concatenating multiple snapshot",
        ));
    }
    let mut devices = Vec::new();
    for name in names {
        let mut options = open::options(context, name, &arguments.source, cache)?;
        options.exclude_writers = true;
        options.l2_cache_size = Some(open::ONCE_THROUGH);
        options.snapshot = snapshot.clone();
        options.whole_clusters = is_kept;
        devices.push(match arguments.disk {
            None => open::device_with(context, queue, name, &arguments.source, &options)?,
            Some(number) => appliance::open_disk(context, queue, name, number, options)?,
        });
    }
    Ok(Sources {
        unchanged: Unchanged::of(&devices),
        devices,
    })
}
