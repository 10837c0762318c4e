//! `import`: an image that nobody trusts, from anywhere, to a file or a device: fetched, verified,
//! unpacked and converted in one pass, within limits, with a verdict for the program that asked.
//!
//! A thread does it; the one that began it watches the limits and signals, and reports.

mod digest;
mod job;
mod limits;
mod source;
mod verdict;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use clap::{CommandFactory, Parser};
use zebu::block::Format;

use super::command::{Command, ValueOf, Values};
use crate::arguments::create_options::{self, CreateOptions};
use crate::arguments::known_options::option_help;
use crate::arguments::{NameOptions, SourceOptions, size, untrusted};
use crate::images::{same_file, streams};
use crate::output::{self, Progress, Shown};
use crate::program::{Context, Failure, Outcome, signals};
use digest::{Digest, Digests};
use job::Job;
use limits::{Bounds, Watch};
use verdict::{Cause, Record, Trouble};

pub const COMMAND: Command = Command {
    name: "import",
    operands: "<SOURCE> <TARGET>",
    summary: "Fetch, verify, unpack and convert an untrusted image",
    options: Arguments::command,
    run,
    examples: "
        # Verified by a list of checksums
        zebu import --sums SHA256SUMS disk.qcow2 imported.raw
        # From a web server, within limits
        zebu import --max-virtual-size 100G --max-download 10G --max-time 600 \
          https://example.org/disk.qcow2 fetched.raw
        # From a stream
        gzip -c disk.qcow2 | zebu import -O qcow2 - piped.qcow2",
    values: &[(
        ValueOf::Option("target_format"),
        Values::Words(&["raw", "qcow2"]),
    )],
    exit_status: &[
        ("0", "The image is in the target."),
        ("1", "The arguments are wrong, or any other error."),
        ("2", "The image is refused."),
        ("3", "The source has another checksum."),
        ("4", "A limit was exceeded."),
        ("5", "The source could not be read."),
        ("6", "The target could not be written."),
        ("128 + n", "Signal n stopped it."),
    ],
    files: &super::convert::FILES,
    ..Command::PLAIN
};

/// Import an untrusted image: fetch, verify, unpack and convert it in one pass
#[derive(Clone, Parser)]
#[command(after_help = STATUS)]
pub struct Arguments {
    #[command(flatten)]
    name: NameOptions,
    /// Format of the target: raw (default) or qcow2
    #[arg(short = 'O', long = "target-format", value_name = "FMT")]
    target_format: Option<String>,
    /// Options of the target's format; help lists them
    #[arg(short = 'o', long = "target-options", value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// SHA-256 that the source must have
    #[arg(long, value_name = "HEX")]
    sha256: Option<String>,
    /// SHA-512 that the source must have
    #[arg(long, value_name = "HEX")]
    sha512: Option<String>,
    /// List of checksums, as sha256sum and sha512sum write them, with that of the source's name:
    /// a file or a URL
    #[arg(long, value_name = "FILE|URL")]
    sums: Option<OsString>,
    /// Bytes of the disk at most (default 64T)
    #[arg(long, value_name = "SIZE")]
    max_virtual_size: Option<String>,
    /// Bytes of the source at most, and of the image in it after decompression
    #[arg(long, value_name = "SIZE")]
    max_download: Option<String>,
    /// Seconds that it may take
    #[arg(long, value_name = "SECONDS")]
    max_time: Option<String>,
    /// Seconds of processor time that it may take
    #[arg(long, value_name = "SECONDS")]
    max_cpu: Option<String>,
    /// Folder for a temporary file, which images need that cannot be converted as they come
    #[arg(long, value_name = "DIR")]
    spill: Option<PathBuf>,
    /// Bytes of that file at most (default 64G)
    #[arg(long, value_name = "SIZE")]
    spill_size: Option<String>,
    /// Show progress on standard error, if that is a terminal
    #[arg(short, long)]
    progress: bool,
    /// The source: a file, `-`, or a name (http, https, s3, gs, az, ssh, rbd); then a file or a
    /// block device
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

const STATUS: &str = "\
Exit status: 0 imported, 1 usage and others, 2 the image is refused, 3 another checksum,
4 a limit, 5 the source could not be read, 6 the target could not be written, 7 --spill is needed,
128 + n signal n";

/// What the arguments mean.
#[derive(Clone)]
struct Wanted {
    arguments: Arguments,
    source: OsString,
    target: OsString,
    digests: Digests,
    max_download: u64,
}

/// How often limits and signals are looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let format = target_format(&arguments)?;
    for list in &arguments.options {
        create_options::check_list(list)?;
    }
    if create_options::asks_for_help(&arguments.options) {
        let target = arguments.names.last().map(OsString::as_os_str);
        return output::report(&option_help(format, target));
    }
    let seconds = |what, text: &Option<String>| {
        let text = text.as_ref();
        text.map(|text| size::parse_number(what, text, 1..=u64::from(u32::MAX)))
            .transpose()
    };
    let watch = Watch::new(
        seconds("time limit", &arguments.max_time)?,
        seconds("limit of processor time", &arguments.max_cpu)?,
    );
    let wanted = wanted(context, arguments, format)?;
    check_output(&wanted)?;
    signals::catch_stops();
    let mut progress = Progress::beside_data(wanted.arguments.progress);
    let record = Record::default();
    let result = supervised(context, &wanted, &record, &watch, &mut progress);
    progress.finish(result.is_ok());
    let trouble = result.err();
    let verdict = record.verdict(&wanted.source, &wanted.target, trouble.as_ref());
    let lost = output::try_report(&verdict).err().map(|e| {
        let why = zebu::strerror(&e);
        format!("Could not write the verdict to standard output: {why}")
    });
    match (trouble, lost) {
        (None, None) => Ok(0),
        (None, Some(lost)) => {
            let target = wanted.target.shown();
            Err(Failure::new(format!("{lost}; the image is in '{target}'")))
        }
        (Some(trouble), lost) => {
            let lost = lost.map_or(String::new(), |lost| format!("; {lost}"));
            let text = format!("{}{lost}", trouble.reason);
            Err(Failure::new(text).with_status(trouble.cause.status()))
        }
    }
}

/// Refuses what the verdict, or a message, would be written into, and a standard output that does not
/// take the verdict.
fn check_output(wanted: &Wanted) -> Result<(), Failure> {
    drop(output::stdout()?);
    let sums = wanted.arguments.sums.as_ref();
    for name in [&wanted.target, &wanted.source].into_iter().chain(sums) {
        let path = match name == streams::STANDARD {
            true => Path::new("/dev/stdin"),
            false => Path::new(path(name)),
        };
        let why = match name == &wanted.target && streams::is_open_file(name) {
            true => Some(same_file::IS_OPEN),
            false => same_file::is_printed_to(path).then_some(same_file::PRINTED_TO),
        };
        if let Some(why) = why {
            return Err(Failure::new(format!("{}: {why}", name.shown())));
        }
    }
    Ok(())
}

fn target_format(arguments: &Arguments) -> Result<Format, Failure> {
    match arguments.target_format.as_deref() {
        None | Some("raw") => Ok(Format::RAW),
        Some("qcow2") => Ok(Format::QCOW2),
        Some(other) => {
            let why = format!("An image is imported as raw or qcow2, not as '{other}'");
            Err(Failure::new(why))
        }
    }
}

/// Checks the arguments, and turns strict mode on.
fn wanted(context: &Context, arguments: Arguments, format: Format) -> Result<Wanted, Failure> {
    let [source, target] = &arguments.names[..] else {
        return Err(Failure::new("Expecting a source and a target").with_hint());
    };
    let (source, target) = (source.clone(), target.clone());
    if zebu::names::protocol(&target).is_some_and(|protocol| protocol != "file") || target == "-" {
        let name = target.shown();
        let why = format!("'{name}': the target must be a file or a block device");
        return Err(Failure::new(why));
    }
    let create = CreateOptions::parse(format, &arguments.options).map_err(Failure::new)?;
    for option in ["backing_file", "data_file"] {
        if create.value(option).is_some() {
            let why = format!("An image is not imported with the option '{option}'");
            return Err(Failure::new(why));
        }
    }
    SourceOptions::from(arguments.name.clone()).validate(context)?;
    if arguments.spill_size.is_some() && arguments.spill.is_none() {
        return Err(Failure::new("--spill-size requires --spill"));
    }
    let bytes = |what, text: &Option<String>| {
        let text = text.as_ref();
        text.map(|text| size::parse_option(what, text)).transpose()
    };
    // Whatever was said of it before the command.
    match bytes("virtual size", &arguments.max_virtual_size)? {
        Some(most) => untrusted::set(context, &format!("virtual-size={most}"))?,
        None => untrusted::set(context, "")?,
    }
    let mut digests = Digests::default();
    let given = [
        (Digest::Sha256, &arguments.sha256),
        (Digest::Sha512, &arguments.sha512),
    ];
    for (kind, hex) in given {
        if let Some(hex) = hex {
            let wrong = |why| Failure::new(format!("--{}: {why}", kind.name()));
            digests.add(kind, hex).map_err(wrong)?;
        }
    }
    Ok(Wanted {
        max_download: bytes("download size", &arguments.max_download)?.unwrap_or(u64::MAX),
        arguments,
        source,
        target,
        digests,
    })
}

/// Runs the job on a thread of its own. One that waits for the source is left, if that is too late:
/// it ends with the process.
fn supervised(
    context: &Context,
    wanted: &Wanted,
    record: &Record,
    watch: &Watch,
    progress: &mut Progress,
) -> Result<(), Trouble> {
    let (sender, receiver) = channel();
    let job = Job::new(
        context.clone(),
        wanted.clone(),
        record.clone(),
        watch.clone(),
    );
    let done = job.progress.clone();
    std::thread::Builder::new()
        .name("zebu-import-job".into())
        .spawn(move || sender.send(job.run()))
        .map_err(|e| Trouble::new(Cause::Other, zebu::strerror(&e).to_string()))?;
    loop {
        let result = receiver.recv_timeout(LOOK);
        done.show(progress);
        match result {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Trouble::new(Cause::Other, "The import has panicked"));
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Some(trouble) = watch.look() {
                    return Err(trouble);
                }
            }
        }
    }
}

/// What follows `file:`, or the name.
fn path(name: &OsStr) -> &OsStr {
    crate::arguments::file_name::after_file(name).unwrap_or(name)
}
