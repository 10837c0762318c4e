//! Opening images as the options say, and saying why one cannot be opened.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Display;
use std::hash::Hash;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use zebu::block::{Device, FileDriver, Format, OpenOptions};
use zebu::jobs::{self, CheckMessage};
use zebu::names::{Source, protocol};
use zebu::qcow2::SnapshotName;
use zebu::storage::{CacheMode, Queue, QueueOptions};

use crate::arguments::{SourceOptions, untrusted};
use crate::images::same_file;
use crate::output::printable;
use crate::program::{Context, Failure};

/// A queue on this thread, with the engine that the kernel offers.
pub fn queue() -> Result<Queue, Failure> {
    Queue::new(QueueOptions::default())
        .map_err(|e| Failure::new(format!("Could not start I/O: {}", zebu::strerror(&e))))
}

/// The line for an image that cannot be opened.
pub fn failure(name: &OsStr, error: &impl Display) -> Failure {
    let error = error.to_string();
    let next = next_step(name, &error);
    let name = printable(name.as_bytes());
    Failure::new(format!("Could not open '{name}': {error}")).with_next(next)
}

/// What to do about an image that cannot be opened.
fn next_step(name: &OsStr, error: &str) -> &'static str {
    if error.contains("Image is incomplete") {
        return "if nothing is at work on it any more, it was interrupted: remove it and make it again";
    }
    // Without credentials, the libraries ask the metadata service of a cloud, or say what is missing.
    const WITHOUT_CREDENTIALS: [&str; 4] = [
        "169.254.169.254",
        "metadata",
        "credential",
        "must be specified",
    ];
    if !WITHOUT_CREDENTIALS.iter().any(|sign| error.contains(sign)) {
        return "";
    }
    match protocol(name).as_deref() {
        Some("s3") => {
            "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
             AWS_SKIP_SIGNATURE=true for a public object"
        }
        Some("gs") => "no credentials were found: set GOOGLE_APPLICATION_CREDENTIALS",
        Some("az") => {
            "no credentials were found: set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
        }
        _ => "",
    }
}

/// The options of opening, as the common options define them.
pub fn options(
    context: &Context,
    name: &OsStr,
    source: &SourceOptions,
    cache: CacheMode,
) -> Result<OpenOptions, Failure> {
    source.validate(context)?;
    let format = source.name.format.as_deref().map(format).transpose();
    let format = format.map_err(|e| failure(name, &e))?.flatten();
    Ok(untrusted::defaults(context)
        .format(format)
        .cache(cache)
        .force_share(source.force_share))
}

/// The image that `name` and the options mean.
pub fn source(name: &OsStr, options: &SourceOptions) -> Source {
    named(
        name,
        options.name.image_opts,
        options.name.format.as_deref(),
    )
}

/// The format of `-f`. None: it is a driver over a file, which goes with the name ([`named`]).
pub fn format(name: &str) -> zebu::Result<Option<Format>> {
    match name.parse() {
        Err(_) if is_other_driver(name) => Ok(None),
        format => format.map(Some),
    }
}

/// Whether it is no format but a kind of file, or a filter over a file.
fn is_other_driver(name: &str) -> bool {
    FileDriver::names().any(|driver| driver == name)
}

/// The image of this name, which are options with `image_opts`. A format that is QEMU's name of a kind of
/// file, or of a filter, goes with the name: the file is no image in a file then, and must be of that kind.
pub fn named(name: &OsStr, image_opts: bool, format: Option<&str>) -> Source {
    match format {
        _ if image_opts => Source::Options(name.to_owned()),
        Some(driver) if is_other_driver(driver) => {
            Source::NameWithOptions(name.to_owned(), format!("driver={driver}").into())
        }
        _ => Source::Name(name.to_owned()),
    }
}

/// Bytes of L2 tables that are kept of an image that is read once, from front to back:
/// each is needed for a while and never again, by as many requests as are in flight.
pub const ONCE_THROUGH: u64 = 1 << 20;

/// Opens an image to read it once.
pub fn device(
    context: &Context,
    queue: &Queue,
    name: &OsStr,
    source_options: &SourceOptions,
    cache: CacheMode,
) -> Result<Device, Failure> {
    let options = options(context, name, source_options, cache)?.l2_cache_size(Some(ONCE_THROUGH));
    device_with(context, queue, name, source_options, &options)
}

/// Opens an image, or one of its snapshots, with options of the caller's own.
pub fn device_with(
    context: &Context,
    queue: &Queue,
    name: &OsStr,
    source_options: &SourceOptions,
    options: &OpenOptions,
) -> Result<Device, Failure> {
    let source = source(name, source_options);
    let plain = options.clone().snapshot(None);
    let device = repaired(context, queue, &source, &plain).map_err(|e| failure(name, &e))?;
    showing(queue, device, options.snapshot.as_ref())
}

/// The device, with the snapshot that is asked for instead of the active disk. Its own errors are worded
/// differently from those of opening.
pub fn showing(
    queue: &Queue,
    mut device: Device,
    snapshot: Option<&SnapshotName>,
) -> Result<Device, Failure> {
    if let Some(name) = snapshot {
        queue
            .block_on(device.show_snapshot(queue, name))
            .map_err(|e| Failure::new(format!("Failed to load snapshot: {e}")))?;
    }
    Ok(device)
}

/// Opens an image. If it is opened for writing and its last writer did not close it, it is repaired
/// first, as in QEMU, which prints what is found.
pub fn repaired(
    context: &Context,
    queue: &Queue,
    source: &Source,
    options: &OpenOptions,
) -> zebu::Result<Device> {
    let device = jobs::open(
        queue,
        source,
        options,
        &mut messages(context, std::io::stderr()),
    )?;
    check_output(&device)?;
    warn_if_guessed(&device);
    Ok(device)
}

/// Refuses an image that is read from the file which reports or messages go to: they would replace parts
/// of it.
pub fn check_output(device: &Device) -> zebu::Result<()> {
    let mut files = device.all_layers().flat_map(|layer| layer.storages());
    let found = files.find(|file| same_file::is_printed_to(file.path()));
    found.map_or(Ok(()), |file| {
        let name = printable(file.path().as_os_str().as_bytes());
        Err(zebu::Error::Refused(format!(
            "{}: '{name}'",
            same_file::PRINTED_TO
        )))
    })
}

/// Writes what a check or a repair says, with the program's name where QEMU prints that.
pub fn messages(context: &Context, out: impl Write) -> impl FnMut(CheckMessage) {
    let program = context.name.clone();
    let mut few = Few::new(context, out);
    move |message| {
        let kind = std::mem::discriminant(&message);
        few.say(kind, || match message.names_program() {
            true => format!("{program}: {message}"),
            false => message.to_string(),
        });
    }
}

/// Messages of one kind that are printed at most. An image can be made so that there are more bytes
/// of them than it has itself.
const MOST: u64 = 1000;

/// Prints the first messages of each kind, and in the end how many more there were. Under QEMU's
/// names all of them, unless the image is not trusted.
pub struct Few<K, W: Write> {
    out: W,
    most: u64,
    /// How many of each kind, and the first that was not printed.
    kinds: HashMap<K, (u64, String)>,
}

impl<K: Eq + Hash, W: Write> Few<K, W> {
    /// No messages yet.
    pub fn new(context: &Context, out: W) -> Self {
        Few {
            out,
            most: match context.is_as_qemu() && !context.is_untrusted() {
                true => u64::MAX,
                false => MOST,
            },
            kinds: HashMap::new(),
        }
    }

    /// Prints a message, unless there were many of its kind.
    pub fn say(&mut self, kind: K, text: impl FnOnce() -> String) {
        let (said, next) = self.kinds.entry(kind).or_default();
        *said += 1;
        if *said <= self.most {
            // An error of standard error cannot be reported.
            let _ = writeln!(self.out, "{}", text());
        } else if *said == self.most + 1 {
            *next = text();
        }
    }
}

impl<K, W: Write> Drop for Few<K, W> {
    fn drop(&mut self) {
        let mut more: Vec<_> = self.kinds.values().filter(|k| k.0 > self.most).collect();
        more.sort();
        for (said, next) in more {
            let more = said - self.most;
            let _ = writeln!(self.out, "{next}\n... and {} more like this one", more - 1);
        }
    }
}

/// Says that writes to the start of an image are restricted, if they are, and what images look like that
/// are taken for raw disks because QEMU does so.
pub fn warn_if_guessed(device: &Device) {
    for spec in device.layers().iter().map(|layer| &layer.spec) {
        if let Some(what) = spec.looks_like() {
            // An error of standard error cannot be reported.
            let _ = writeln!(
                std::io::stderr(),
                "WARNING: '{}' is {what}, but taken for a raw disk, as QEMU does.\n         \
                 Specify the format explicitly if that is what you want.",
                printable(spec.display_name().as_bytes())
            );
        }
    }
    if let Some(raw) = device.top().as_raw()
        && raw.is_guessed()
    {
        // An error of standard error cannot be reported.
        let _ = writeln!(
            std::io::stderr(),
            "WARNING: Image format was not specified for '{}' and probing guessed raw.\n         \
             Automatically detecting the format is dangerous for raw images, write operations on \
             block 0 will be restricted.\n         \
             Specify the 'raw' format explicitly to remove the restrictions.",
            printable(device.top().spec.display_name().as_bytes())
        );
    }
}
