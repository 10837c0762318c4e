//! `convert`: the content of images to a new image.

use std::ffi::OsString;
use std::sync::Arc;

use clap::Parser;
use zebu::block::Device;
use zebu::image::SnapshotName;
use zebu::jobs::{self, ConvertError, ConvertEvent, ConvertOptions};
use zebu::storage::{self, CacheMode, EngineKind, File, LockRequest, OpenFile, Queue, Storage};

use crate::failure::{Failure, Outcome};
use crate::open;
use crate::options::{SourceOptions, source_cache, target_cache};
use crate::program::Invocation;
use crate::progress::Progress;
use crate::size;

/// Copy one or more images to another, with format conversion
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Options of the source (the same as --image-opts)
    #[arg(long)]
    source_image_opts: bool,
    /// Cache mode of the sources
    #[arg(short = 'T', long = "source-cache", value_name = "CACHE_MODE")]
    source_cache: Option<String>,
    /// Internal snapshot of the source to convert: id, name, or
    /// snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long = "source-snapshot", value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Format of the target: raw
    #[arg(short = 'O', long = "target-format", value_name = "FMT")]
    target_format: Option<String>,
    /// The target is named by options: refused
    #[arg(long)]
    target_image_opts: bool,
    /// Options of the target's format: preallocation=off|falloc|full
    #[arg(short = 'o', long = "target-options", value_name = "OPTIONS")]
    options: Vec<String>,
    /// Cache mode of the target; if not given, direct I/O where the file
    /// system has it, else the page cache
    #[arg(short = 't', long = "target-cache", value_name = "CACHE_MODE")]
    target_cache: Option<String>,
    /// Backing file of the target
    #[arg(short = 'B', long = "backing", value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long = "backing-format", value_name = "FMT")]
    backing_format: Option<String>,
    /// Compress the target
    #[arg(short = 'c', long)]
    compress: bool,
    /// Copy bitmaps too
    #[arg(long)]
    bitmaps: bool,
    /// Leave broken bitmaps out
    #[arg(long)]
    skip_broken_bitmaps: bool,
    /// Use the target that is there
    #[arg(short = 'n', long)]
    no_create: bool,
    /// The target that is there reads as zeroes
    #[arg(long)]
    target_is_zero: bool,
    /// Bytes of zeroes in a row that are left out of the target; 0 allocates
    /// all of it
    #[arg(
        short = 'S',
        long = "sparse-size",
        value_name = "SIZE",
        allow_hyphen_values = true
    )]
    sparse: Option<String>,
    /// Chunks in work at once, 1 to 16; if not given, by the number of cores
    #[arg(
        short = 'm',
        long = "parallel",
        value_name = "NUMBER",
        allow_hyphen_values = true
    )]
    lanes: Option<String>,
    /// Write in any order. The order never changes the result; a raw target is
    /// always written so
    #[arg(short = 'W', long = "oob-writes")]
    unordered: bool,
    /// Bytes a second at most
    #[arg(short = 'r', long, value_name = "RATE", allow_hyphen_values = true)]
    rate: Option<String>,
    /// Go on after read errors, with zeroes
    #[arg(long)]
    salvage: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The sources, then the target
    names: Vec<String>,
}

/// What qemu-img allows for `-S`.
const MAX_SPARSE: u64 = 16 << 20;
/// What qemu-img allows for `-m`.
const MAX_LANES: u64 = 16;

/// What is allocated ahead in the target.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Preallocation {
    Off,
    Falloc,
    Full,
}

/// Runs the command.
pub fn run(invocation: &Invocation, arguments: Vec<OsString>) -> Outcome {
    let mut arguments: Arguments = super::parse(invocation, arguments)?;
    arguments.source.image_opts |= arguments.source_image_opts;
    let mut options = job_options(&arguments)?;
    let (sources, target) = match arguments.names.split_last() {
        Some((target, sources)) if !sources.is_empty() => (sources, target),
        _ => return Err(Failure::new("Must specify image file name")),
    };
    let preallocation = check_target(&arguments)?;
    let target_cache = match &arguments.target_cache {
        None => None,
        Some(_) => Some(target_cache(arguments.target_cache.as_deref())?),
    };

    let queue = open::queue()?;
    let sources = open_sources(&queue, &arguments, sources)?;
    let total = sources
        .iter()
        .try_fold(0u64, |sum, source| sum.checked_add(source.size()))
        .ok_or_else(|| creation_failure(target, &ConvertError::TooLarge.to_string()))?;
    // Writes are aligned where all of the sources are.
    let aligned = sources.iter().all(|s| s.size().is_multiple_of(4096));
    let file = open_target(&arguments, target, target_cache, aligned)?;
    if !arguments.no_create && !file.is_device() {
        options.target_is_zero = true;
        create(&queue, &file, total, preallocation)
            .map_err(|e| creation_failure(target, &zebu::strerror(&e).to_string()))?;
    }
    if arguments.no_create || file.is_device() {
        let length = file
            .len()
            .map_err(|e| Failure::new(zebu::strerror(&e).to_string()))?;
        if length < total {
            return Err(match arguments.no_create {
                true => Failure::new("output file is smaller than input file"),
                false => creation_failure(target, "Cannot grow device files"),
            });
        }
    }
    convert(
        invocation, &arguments, sources, total, file, target, &options,
    )
}

fn convert(
    invocation: &Invocation,
    arguments: &Arguments,
    sources: Vec<Device>,
    total: u64,
    file: File,
    target: &str,
    options: &ConvertOptions,
) -> Outcome {
    let mut progress = Progress::new(arguments.progress && !arguments.quiet, total);
    let result = jobs::convert(sources, Arc::new(file), options, |event| match event {
        ConvertEvent::Progress(done) => progress.set(done),
        ConvertEvent::Unreadable { offset, errno } if !arguments.quiet => {
            let error = std::io::Error::from_raw_os_error(errno);
            let error = zebu::strerror(&error);
            invocation.say(&format!(
                "warning: error while reading offset {offset}: {error}"
            ));
        }
        ConvertEvent::Unreadable { .. } => {}
    });
    progress.finish(result.is_ok());
    match result {
        Ok(()) => Ok(0),
        Err(ConvertError::Write { offset, source }) => Err(Failure::new(format!(
            "error while writing at byte {offset}: {source}; '{target}' is incomplete"
        ))),
        Err(e) => Err(Failure::new(e.to_string())),
    }
}

/// What the options say of the job itself.
fn job_options(arguments: &Arguments) -> Result<ConvertOptions, Failure> {
    let sparse = match &arguments.sparse {
        None => 4096,
        Some(text) => size::parse(text)
            .ok()
            .filter(|n| n % 512 == 0 && *n <= MAX_SPARSE)
            .ok_or_else(|| {
                Failure::new(format!(
                    "Invalid buffer size for sparse output specified. Valid sizes are multiples \
                     of 512 up to {MAX_SPARSE}. Select 0 to disable sparse detection (fully \
                     allocates output)."
                ))
            })?,
    };
    let lanes = match &arguments.lanes {
        None => None,
        Some(text) => {
            let number = text.parse().ok().filter(|n| (1..=MAX_LANES).contains(n));
            Some(number.ok_or_else(|| {
                Failure::new(format!(
                    "Invalid number of coroutines specified. Must be between 1 and {MAX_LANES}."
                ))
            })?)
        }
    };
    let rate = match &arguments.rate {
        None => None,
        Some(text) => Some(
            size::parse(text)
                .map_err(|_| Failure::new(format!("Invalid rate limit specified: '{text}'.")))?,
        ),
    };
    if arguments.target_is_zero && !arguments.no_create {
        return Err(Failure::new("--target-is-zero requires use of -n flag"));
    }
    Ok(ConvertOptions {
        lanes: lanes.map(|n| n as usize),
        sparse,
        target_is_zero: arguments.target_is_zero,
        salvage: arguments.salvage,
        rate,
        engine: EngineKind::best(),
    })
}

/// Refuses what a raw target cannot have, and reads its options.
fn check_target(arguments: &Arguments) -> Result<Preallocation, Failure> {
    if arguments.target_image_opts {
        return Err(Failure::new(
            "--target-image-opts is not part of this version",
        ));
    }
    match arguments.target_format.as_deref() {
        None | Some("raw") => {}
        Some("qcow2") => {
            return Err(Failure::new(
                "Writing qcow2 is not part of this version; the target format is raw",
            ));
        }
        Some(other) => return Err(Failure::new(format!("Unknown file format '{other}'"))),
    }
    if arguments.backing.is_some() || arguments.backing_format.is_some() {
        return Err(Failure::new(
            "Backing file not supported for file format 'raw'",
        ));
    }
    if arguments.compress {
        return Err(Failure::new(
            "Compression not supported for this file format",
        ));
    }
    if arguments.bitmaps {
        return Err(Failure::new("Format driver 'raw' does not support bitmaps"));
    }
    if arguments.skip_broken_bitmaps {
        return Err(Failure::new(
            "Use of --skip-broken-bitmaps requires --bitmaps",
        ));
    }
    let mut preallocation = Preallocation::Off;
    for option in arguments.options.iter().flat_map(|o| o.split(',')) {
        preallocation = match option.split_once('=') {
            Some(("preallocation", "off")) => Preallocation::Off,
            Some(("preallocation", "falloc")) => Preallocation::Falloc,
            Some(("preallocation", "full")) => Preallocation::Full,
            Some(("preallocation", other)) => {
                return Err(Failure::new(format!(
                    "Invalid parameter '{other}': raw images have preallocation=off|falloc|full"
                )));
            }
            _ => {
                let name = option.split('=').next().unwrap_or(option);
                return Err(Failure::new(format!("Invalid parameter '{name}'")));
            }
        };
    }
    Ok(preallocation)
}

fn open_sources(
    queue: &Queue,
    arguments: &Arguments,
    names: &[String],
) -> Result<Vec<Device>, Failure> {
    let cache = source_cache(arguments.source_cache.as_deref())?;
    let snapshot = arguments.snapshot.as_deref().map(SnapshotName::from);
    if snapshot.is_some() && names.len() > 1 {
        return Err(Failure::new(
            "No support for concatenating multiple snapshot",
        ));
    }
    let mut devices = Vec::new();
    for name in names {
        let mut options = open::options(name, &arguments.source, cache)?;
        options.exclude_writers = true;
        options.snapshot = snapshot.clone();
        devices.push(open::device_with(queue, name, &arguments.source, &options)?);
    }
    Ok(devices)
}

fn creation_failure(target: &str, why: &str) -> Failure {
    Failure::new(format!("{target}: error while converting raw: {why}"))
}

/// Opens and locks the target. A new one is made, but what is there is not
/// touched before the lock says that nobody uses it.
fn open_target(
    arguments: &Arguments,
    name: &str,
    cache: Option<CacheMode>,
    aligned: bool,
) -> Result<File, Failure> {
    let path = name.strip_prefix("file:").unwrap_or(name);
    let open = |cache| {
        File::open(
            path,
            OpenFile {
                write: true,
                create: !arguments.no_create,
                cache,
            },
        )
    };
    let opened = match cache {
        Some(cache) => open(cache),
        // Direct I/O needs no memory for what nobody reads again soon, but a
        // bounce buffer for what is not aligned.
        None if aligned => open(CacheMode::None).or_else(|_| open(CacheMode::Unsafe)),
        None => open(CacheMode::Unsafe),
    };
    let file = opened.map_err(|e| {
        let e = zebu::strerror(&e);
        match arguments.no_create {
            true => Failure::new(format!(
                "Could not open '{name}': Could not open '{path}': {e}"
            )),
            false => creation_failure(name, &format!("Could not create '{path}': {e}")),
        }
    })?;
    file.lock(LockRequest::RAW_WRITE)
        .map_err(|e| match arguments.no_create {
            true => open::failure(name, &e),
            false => creation_failure(name, &e.to_string()),
        })?;
    Ok(file)
}

/// Makes the file empty, then long enough.
fn create(
    queue: &Queue,
    file: &File,
    total: u64,
    preallocation: Preallocation,
) -> std::io::Result<()> {
    file.set_len(0)?;
    file.set_len(total)?;
    if total == 0 {
        return Ok(());
    }
    queue.block_on(async {
        match preallocation {
            Preallocation::Off => Ok(()),
            Preallocation::Falloc => storage::allocate(file, queue, 0, total).await,
            Preallocation::Full => storage::write_zeroes(file, queue, 0, total).await,
        }
    })
}
