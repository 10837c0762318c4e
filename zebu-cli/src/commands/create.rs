//! `create`: a new image.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{CommandFactory, Parser};
use zebu::block::{Device, FileSpec, Format, OptionKind};
use zebu::names::Source;
use zebu::storage::{CacheMode, Queue};

use super::command::{Command, ValueOf, Values};
use crate::arguments::create_options::{self, CreateOptions};
use crate::arguments::file_name::{as_value, beside, file_as};
use crate::arguments::known_options::{number, option_help};
use crate::arguments::{objects, size, untrusted};
use crate::images::new_image::{
    NewFiles, new_format_help, other_files, parse_format, plan, refuse_object,
};
use crate::images::open;
use crate::images::same_file::{self, Fate};
use crate::output::{self, Shown, printed};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "create",
    operands: "<FILENAME> [SIZE]",
    summary: "Create and format new image file",
    options: Arguments::command,
    run,
    examples: "
        # An empty disk
        zebu create -f qcow2 new.qcow2 20G
        # The changes of another image
        zebu create -f qcow2 -b base.qcow2 -F qcow2 changes.qcow2
        # With options of the format
        zebu create -f qcow2 -o cluster_size=128k,extended_l2=on fine.qcow2 20G
        # Which options there are
        zebu create -f qcow2 -o help",
    values: &[
        (ValueOf::Option("format"), Values::NewFormats),
        (ValueOf::Operand(1), Values::Nothing),
    ],
    ..Command::PLAIN
};

/// Create and format new image file
#[derive(Parser)]
pub struct Arguments {
    #[arg(short = 'f', long, value_name = "FMT", help = new_format_help("new image"))]
    format: Option<String>,
    /// Options of the format; help lists them
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// Backing file
    #[arg(short = 'b', long = "backing", value_name = "FILE")]
    backing: Option<OsString>,
    /// Format of the backing file
    #[arg(
        short = 'B',
        short_alias = 'F',
        long = "backing-format",
        value_name = "FMT"
    )]
    backing_format: Option<String>,
    /// Do not open the backing file
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// Secrets and credentials of what is named: secret,id=ID,file=FILE, tls-creds-x509 or tls-creds-psk
    #[arg(long, value_name = "OBJDEF")]
    object: Vec<OsString>,
    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
    /// The new image, and its size (default: that of the backing file)
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    for list in &arguments.options {
        create_options::check_list(list)?;
    }
    let format = arguments.format.as_deref().unwrap_or("raw");
    let name = arguments.names.first().map(OsString::as_os_str);
    if create_options::asks_for_help(&arguments.options) {
        return output::report(&option_help(
            parse_format(format).map_err(Failure::new)?,
            name,
        ));
    }
    let Some(name) = name else {
        return Err(Failure::new("Expecting image file name").with_hint());
    };
    let size = match arguments.names.get(1) {
        Some(text) => {
            let text = text.to_string_lossy();
            Some(size::parse_option("image size", &text)?)
        }
        None => None,
    };
    if let Some(extra) = arguments.names.get(2) {
        return Err(Failure::new(format!("Unexpected argument: {}", extra.shown())).with_hint());
    }
    for object in &arguments.object {
        objects::add(context, object)?;
    }
    create(context, &arguments, format, name, size).map_err(|why| {
        let next = next_step(&why);
        Failure::new(format!("{}: {why}", name.shown())).with_next(next)
    })?;
    Ok(0)
}

/// What to do about an error.
fn next_step(why: &str) -> String {
    if !why.starts_with(NO_FORMAT) {
        return String::new();
    }
    let found = why.split("Detected format of ").nth(1);
    let found = found.map(|rest| rest.trim_end_matches('.'));
    match found {
        Some("raw") | None => "say the format of the backing file with -F: -F qcow2, -F raw".into(),
        Some(format) => format!("say the format of the backing file: -F {format}"),
    }
}

/// Makes the image.
fn create(
    context: &Context,
    arguments: &Arguments,
    format: &str,
    name: &OsStr,
    size: Option<u64>,
) -> Result<(), String> {
    let (format, format_name) = (parse_format(format)?, format);
    let file = file_as(name, format_name)?;
    refuse_object(&file)?;
    let options = CreateOptions::parse(format, &arguments.options)?;
    let mut options = options.with_secrets(objects::all(context).secrets);
    if let Some(size) = size {
        if options.get("size").is_some() {
            return Err("The image size must be specified only once".into());
        }
        options.set("size", size.to_string());
    }
    let backing_format = arguments.backing_format.as_ref().map(OsStr::new);
    for (value, key, what) in [
        (arguments.backing.as_deref(), "backing_file", "file"),
        (backing_format, "backing_fmt", "file format"),
    ] {
        let Some(value) = value else { continue };
        if !format.is_created_over_backing() {
            return Err(format!(
                "Backing {what} not supported for file format '{}'",
                format.name()
            ));
        }
        options.set(key, value);
    }
    let queue = open::queue().map_err(|_| "Could not start I/O".to_string())?;
    let backing = look_at_backing(context, &queue, arguments, name, &mut options)?;
    let Some(size) = options.size("size") else {
        return Err("Image creation needs a size parameter".into());
    };
    if let Some(why) = same_file::refused_new(context, &[], &file) {
        return Err(why.into());
    }
    if !arguments.quiet {
        output::say(&formatting(context, format, format_name, name, &options));
    }
    let plan = plan(format, &file.path, size, &options, backing.as_ref());
    let plan = plan.map_err(|e| match e.errno() {
        libc::EFBIG => format!(
            "The image size is too large for file format '{}'",
            format.name()
        ),
        _ => e.to_string(),
    })?;
    let mut files = other_files(&*plan).map_err(|e| e.to_string())?;
    files.push(file.clone());
    check_not_read(context, &options, name, backing.as_ref(), &files)?;
    // No file was changed before, so signals end the program by default.
    context.end_on_stop(&format!("'{}' is incomplete", name.shown()));
    let files = NewFiles::open(&file, plan, &[CacheMode::WriteBack], &objects::all(context));
    let mut files = files.map_err(|e| e.to_string())?;
    if let Some(why) =
        same_file::refused_open(backing.as_slice(), &files.storages(), Fate::Replaced)
    {
        return Err(why.into());
    }
    files.create(&queue).map_err(|e| e.to_string())
}

/// Refuses files of the new image that its backing file reads, or that messages go to. Of a backing
/// file that is not opened only its own file is known.
fn check_not_read(
    context: &Context,
    options: &CreateOptions,
    name: &OsStr,
    backing: Option<&Device>,
    files: &[FileSpec],
) -> Result<(), String> {
    if let Some(why) = files
        .iter()
        .find_map(|file| same_file::refused_new(context, &[], file))
    {
        return Err(why.into());
    }
    let Some(backing_name) = options.value("backing_file") else {
        return Ok(());
    };
    let path = beside(backing_name, name);
    let is_read = |file: &FileSpec| match backing {
        Some(device) => same_file::reads_any(device, &[Some(file)]),
        None => same_file::is_same(path.as_ref(), &file.path),
    };
    match files.iter().any(is_read) {
        true => Err(format!("'{}' reads this file", backing_name.shown())),
        false => Ok(()),
    }
}

const NO_FORMAT: &str = "Backing file specified without backing format";

/// Opens the backing file, if there is one, unless disabled. Without a given size, its size is used.
fn look_at_backing(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    name: &OsStr,
    options: &mut CreateOptions,
) -> Result<Option<Device>, String> {
    let Some(backing) = options.value("backing_file").map(OsStr::to_owned) else {
        return Ok(None);
    };
    if backing.is_empty() {
        return Err("Expected backing file name, got empty string".into());
    }
    if backing == name {
        return Err(
            "Error: Trying to create an image with the same filename as the backing file".into(),
        );
    }
    let format = options.get("backing_fmt").map(str::to_string);
    if arguments.backing_unsafe {
        return format.map(|_| None).ok_or_else(|| NO_FORMAT.into());
    }
    let opened = || {
        let source = Source::with_driver(beside(&backing, name), format.as_deref())?;
        let options = untrusted::defaults(context).force_share(true);
        Device::open(queue, &source, &options)
    };
    let device = opened().map_err(|e| format!("{e}\nCould not open backing image."))?;
    if format.is_none() {
        let found = device.top().format().name();
        return Err(format!("{NO_FORMAT}\nDetected format of {found}."));
    }
    if options.get("size").is_none() {
        options.set("size", device.size().next_multiple_of(512).to_string());
    }
    Ok(Some(device))
}

/// The line that reports the format and the options. Names may have any bytes.
fn formatting(
    context: &Context,
    format: Format,
    format_name: &str,
    name: &OsStr,
    options: &CreateOptions,
) -> Vec<u8> {
    let mut line = OsString::from("Formatting '");
    line.push(name);
    line.push(format!("', fmt={format_name}"));
    for option in format.create_options() {
        let value = match (options.value(option.name), option.kind) {
            (Some(_), OptionKind::Size) => options
                .size(option.name)
                .map(|n| OsString::from(n.to_string())),
            // As QEMU prints it: signed.
            (Some(_), OptionKind::Number) => (options.get(option.name).and_then(number))
                .map(|n| OsString::from((n as i64).to_string())),
            (Some(text), _) => Some(as_value(text)),
            (None, _) => option.default.map(OsString::from),
        };
        if let Some(value) = value {
            line.push(format!(" {}=", option.name));
            line.push(value);
        }
    }
    let mut line = printed::name(context, line.as_bytes()).into_owned();
    line.push(b'\n');
    line
}
