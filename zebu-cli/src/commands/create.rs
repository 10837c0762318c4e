//! `create`: a new image.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use clap::Parser;
use zebu::block::{Device, Format, OpenOptions, Source};
use zebu::format::Compression;
use zebu::jobs::{self, CreateQcow2, NewBacking, NewDataFile, Preallocation};
use zebu::storage::{CacheMode, File, LockRequest, OpenFile, Queue, Storage};

use crate::create_options::{self, CreateOptions};
use crate::failure::{Failure, Outcome};
use crate::program::Invocation;
use crate::{open, output, size};

/// Create and format new image file
#[derive(Parser)]
struct Arguments {
    /// Format of the new image: raw (if not given) or qcow2
    #[arg(short = 'f', long, value_name = "FMT")]
    format: Option<String>,
    /// Options of the format; help lists them
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    options: Vec<String>,
    /// Put the new image on top of this one
    #[arg(short = 'b', long = "backing", value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long = "backing-format", value_name = "FMT")]
    backing_format: Option<String>,
    /// Do not look at the backing file
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// Objects of QEMU, such as keys: refused
    #[arg(long, value_name = "OBJDEF")]
    object: Vec<String>,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The new image, then its size if there is no backing file to take it from
    names: Vec<String>,
}

/// Formats that qemu-img knows and zebu does not write.
pub(super) const OTHER_FORMATS: [&str; 9] = [
    "vdi",
    "vmdk",
    "vpc",
    "vhdx",
    "qcow",
    "qed",
    "parallels",
    "luks",
    "file",
];
/// Formats that nobody writes.
pub(super) const READ_ONLY_FORMATS: [&str; 3] = ["bochs", "cloop", "dmg"];

/// What a value of an option is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Size,
    Number,
    Switch,
}

/// An option, its kind, its value if it is not given, and where it is shown.
struct Known {
    name: &'static str,
    kind: Kind,
    default: Option<&'static str>,
    help: &'static str,
}

const fn known(name: &'static str, kind: Kind, help: &'static str) -> Known {
    Known {
        name,
        kind,
        default: None,
        help,
    }
}

const fn with_default(mut option: Known, default: &'static str) -> Known {
    option.default = Some(default);
    option
}

const SIZE: Known = known("size", Kind::Size, "Virtual disk size");
const NOCOW: Known = known(
    "nocow",
    Kind::Switch,
    "Turn off copy-on-write (valid only on btrfs)",
);
const EXTENT_SIZE_HINT: Known = known(
    "extent_size_hint",
    Kind::Size,
    "Extent size hint for the image file, 0 to disable",
);

/// The options of raw images, in the order in which they are shown.
const RAW: [Known; 4] = [
    SIZE,
    known(
        "preallocation",
        Kind::Text,
        "Preallocation mode (allowed values: off, falloc, full)",
    ),
    NOCOW,
    EXTENT_SIZE_HINT,
];

/// The options of qcow2 images, alike.
const QCOW2: [Known; 23] = [
    known(
        "encryption",
        Kind::Switch,
        "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)",
    ),
    known(
        "encrypt.format",
        Kind::Text,
        "Encrypt the image, format choices: 'aes', 'luks'",
    ),
    known(
        "encrypt.key-secret",
        Kind::Text,
        "ID of secret providing qcow AES key or LUKS passphrase",
    ),
    known(
        "encrypt.cipher-alg",
        Kind::Text,
        "Name of encryption cipher algorithm",
    ),
    known(
        "encrypt.cipher-mode",
        Kind::Text,
        "Name of encryption cipher mode",
    ),
    known(
        "encrypt.ivgen-alg",
        Kind::Text,
        "Name of IV generator algorithm",
    ),
    known(
        "encrypt.ivgen-hash-alg",
        Kind::Text,
        "Name of IV generator hash algorithm",
    ),
    known(
        "encrypt.hash-alg",
        Kind::Text,
        "Name of encryption hash algorithm",
    ),
    known(
        "encrypt.iter-time",
        Kind::Number,
        "Time to spend in PBKDF in milliseconds",
    ),
    with_default(
        known("cluster_size", Kind::Size, "qcow2 cluster size"),
        "65536",
    ),
    with_default(
        known("extended_l2", Kind::Switch, "Extended L2 tables"),
        "off",
    ),
    known(
        "preallocation",
        Kind::Text,
        "Preallocation mode (allowed values: off, metadata, falloc, full)",
    ),
    with_default(
        known(
            "compression_type",
            Kind::Text,
            "Compression method used for image cluster compression",
        ),
        "zlib",
    ),
    SIZE,
    known(
        "compat",
        Kind::Text,
        "Compatibility level (v2 [0.10] or v3 [1.1])",
    ),
    known("backing_file", Kind::Text, "File name of a base image"),
    known("backing_fmt", Kind::Text, "Image format of the base image"),
    known(
        "data_file",
        Kind::Text,
        "File name of an external data file",
    ),
    known(
        "data_file_raw",
        Kind::Switch,
        "The external data file must stay valid as a raw image",
    ),
    with_default(
        known("lazy_refcounts", Kind::Switch, "Postpone refcount updates"),
        "off",
    ),
    with_default(
        known(
            "refcount_bits",
            Kind::Number,
            "Width of a reference count entry in bits",
        ),
        "16",
    ),
    NOCOW,
    EXTENT_SIZE_HINT,
];

fn known_options(format: Format) -> &'static [Known] {
    match format {
        Format::Raw => &RAW,
        Format::Qcow2 => &QCOW2,
    }
}

/// Runs the command.
pub fn run(invocation: &Invocation, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(invocation, arguments)?;
    if let Some(text) = arguments
        .options
        .iter()
        .find(|o| !create_options::is_list(o))
    {
        return Err(Failure::new(format!("Invalid option list: {text}")));
    }
    let format = arguments.format.as_deref().unwrap_or("raw");
    let name = arguments.names.first().map(String::as_str);
    if create_options::asks_for_help(&arguments.options) {
        return output::print(&option_help(
            parse_format(format).map_err(Failure::new)?,
            name,
        ));
    }
    let Some(name) = name else {
        return Err(Failure::new("Expecting image file name").with_hint());
    };
    if let Some(extra) = arguments.names.get(2) {
        return Err(Failure::new(format!("Unexpected argument: {extra}")).with_hint());
    }
    let size = match arguments.names.get(1) {
        Some(text) => Some(size::parse_option("image size", text).map_err(Failure::new)?),
        None => None,
    };
    if let Some(object) = arguments.object.first() {
        return Err(Failure::new(format!(
            "--object {object}: objects are not part of this version"
        )));
    }
    create(&arguments, format, name, size)
        .map_err(|why| Failure::new(format!("{name}: {why}")))??;
    Ok(0)
}

/// Makes an image of `size` bytes with default options, as a target that is
/// written to then.
pub(super) fn make(queue: &Queue, format: Format, name: &str, size: u64) -> Result<(), String> {
    let (path, options) = (path_of(name)?, CreateOptions::default());
    match format {
        Format::Raw => create_raw(queue, path, size, &options),
        Format::Qcow2 => create_qcow2(queue, path, size, &options),
    }
}

/// Makes the image. The inner failure is one of standard output.
fn create(
    arguments: &Arguments,
    format: &str,
    name: &str,
    size: Option<u64>,
) -> Result<Outcome, String> {
    let format = parse_format(format)?;
    let path = path_of(name)?;
    let mut options = CreateOptions::parse(format, &arguments.options)?;
    check_values(format, &options)?;
    if let Some(size) = size {
        if options.get("size").is_some() {
            return Err("The image size must be specified only once".into());
        }
        options.set("size", size.to_string());
    }
    for (value, key, what) in [
        (&arguments.backing, "backing_file", "file"),
        (&arguments.backing_format, "backing_fmt", "file format"),
    ] {
        let Some(value) = value else { continue };
        if format == Format::Raw {
            return Err(format!(
                "Backing {what} not supported for file format 'raw'"
            ));
        }
        options.set(key, value.as_str());
    }
    let queue = open::queue().map_err(|_| "Could not start I/O".to_string())?;
    look_at_backing(&queue, arguments, name, &mut options)?;
    let Some(size) = size_of(&options, "size") else {
        return Err("Image creation needs a size parameter".into());
    };
    if !arguments.quiet {
        let line = formatting(format, name, &options);
        if let failed @ Err(_) = output::print(&line) {
            return Ok(failed);
        }
    }
    match format {
        Format::Raw => create_raw(&queue, path, size, &options)?,
        Format::Qcow2 => create_qcow2(&queue, path, size, &options)?,
    }
    Ok(Ok(0))
}

pub(super) fn parse_format(name: &str) -> Result<Format, String> {
    if let Ok(format) = name.parse() {
        return Ok(format);
    }
    Err(if READ_ONLY_FORMATS.contains(&name) {
        format!("Format driver '{name}' does not support image creation")
    } else if OTHER_FORMATS.contains(&name) {
        format!("Creating images of format '{name}' is not part of this version")
    } else {
        format!("Unknown file format '{name}'")
    })
}

/// The path that a file name means.
pub(super) fn path_of(name: &str) -> Result<&str, String> {
    if let Some(path) = name.strip_prefix("file:") {
        return Ok(path);
    }
    match protocol(name) {
        Some(protocol) => Err(format!("Unknown protocol '{protocol}'")),
        None => Ok(name),
    }
}

/// What a name starts with, up to a colon, if that is before any slash.
fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    name[end..].starts_with(':').then(|| &name[..end])
}

/// What `-o help` prints.
fn option_help(format: Format, name: Option<&str>) -> String {
    // What is of the file and not of the format is told with a file name.
    let of_file = |option: &Known| match format {
        Format::Raw => option.name != "size",
        Format::Qcow2 => ["nocow", "extent_size_hint"].contains(&option.name),
    };
    let mut list: Vec<&Known> = known_options(format).iter().collect();
    list.retain(|option| name.is_some() || !of_file(option));
    list.sort_by_key(|option| option.name);
    let mut text = match name {
        Some(_) => "Supported options:\n".to_string(),
        None => format!("Supported {} options:\n", format.name()),
    };
    for option in list {
        let kind = match option.kind {
            Kind::Text => "<str>",
            Kind::Size => "<size>",
            Kind::Number => "<num>",
            Kind::Switch => "<bool (on/off)>",
        };
        let left = format!("{}={kind}", option.name);
        text += &format!("  {left:<22} - {}\n", option.help);
    }
    if name.is_none() {
        text += "\nThe protocol level may support further options.\n\
                 Specify the target filename to include those options.\n";
    }
    text
}

/// Refuses values that are not of their option's kind.
pub(super) fn check_values(format: Format, options: &CreateOptions) -> Result<(), String> {
    for Known { name, kind, .. } in known_options(format) {
        let Some(value) = options.get(name) else {
            continue;
        };
        match kind {
            Kind::Text => {}
            Kind::Switch => {
                if !["on", "off", "yes", "no", "true", "false", "y", "n"].contains(&value) {
                    return Err(format!("Parameter '{name}' expects 'on' or 'off'"));
                }
            }
            Kind::Number => {
                number(value).ok_or_else(|| format!("Parameter '{name}' expects a number"))?;
            }
            Kind::Size => match size::parse(value) {
                Ok(_) => {}
                Err(size::SizeError::Range) => {
                    return Err(format!(
                        "Value '{value}' is out of range for parameter '{name}'"
                    ));
                }
                Err(size::SizeError::Syntax) => {
                    return Err(format!(
                        "Parameter '{name}' expects a non-negative number below 2^64\n\
                         Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, \
                         peta-\nand exabytes, respectively."
                    ));
                }
            },
        }
    }
    Ok(())
}

/// A number as C reads it; below zero it wraps around.
pub(super) fn number(text: &str) -> Option<u64> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(match text.starts_with('-') {
        true => value.wrapping_neg(),
        false => value,
    })
}

/// The value of a size that [`check_values`] has seen.
pub(super) fn size_of(options: &CreateOptions, name: &str) -> Option<u64> {
    size::parse(options.get(name)?).ok()
}

pub(super) fn is_on(options: &CreateOptions, name: &str) -> bool {
    matches!(options.get(name), Some("on" | "yes" | "true" | "y"))
}

/// Opens the backing file unless told not to, and takes the size from it if
/// none is given.
fn look_at_backing(
    queue: &Queue,
    arguments: &Arguments,
    name: &str,
    options: &mut CreateOptions,
) -> Result<(), String> {
    let Some(backing) = options.get("backing_file").map(str::to_string) else {
        return Ok(());
    };
    if backing.is_empty() {
        return Err("Expected backing file name, got empty string".into());
    }
    if backing == name {
        return Err(
            "Error: Trying to create an image with the same filename as the backing file".into(),
        );
    }
    const NO_FORMAT: &str = "Backing file specified without backing format";
    let format = options.get("backing_fmt").map(str::to_string);
    if arguments.backing_unsafe {
        return match format {
            Some(_) => Ok(()),
            None => Err(NO_FORMAT.into()),
        };
    }
    let opened = || {
        let format = format.as_deref().map(str::parse).transpose()?;
        let options = OpenOptions {
            format,
            force_share: true,
            ..OpenOptions::default()
        };
        Device::open(queue, &Source::Name(beside(&backing, name)), &options)
    };
    let device = opened().map_err(|e| format!("{e}\nCould not open backing image."))?;
    if format.is_none() {
        let found = device.top().format().name();
        return Err(format!("{NO_FORMAT}\nDetected format of {found}."));
    }
    if options.get("size").is_none() {
        options.set("size", device.size().next_multiple_of(512).to_string());
    }
    Ok(())
}

/// A name that an image at `image` stores, as it is from here.
fn beside(name: &str, image: &str) -> String {
    let folder = image.strip_prefix("file:").unwrap_or(image).rfind('/');
    match folder {
        Some(slash) if !name.starts_with('/') && protocol(name).is_none() => {
            let image = image.strip_prefix("file:").unwrap_or(image);
            format!("{}{name}", &image[..=slash])
        }
        _ => name.to_string(),
    }
}

/// The line that tells what is made.
fn formatting(format: Format, name: &str, options: &CreateOptions) -> String {
    let mut line = format!("Formatting '{name}', fmt={}", format.name());
    for option in known_options(format) {
        let value = match (options.get(option.name), option.kind) {
            (Some(_), Kind::Size) => size_of(options, option.name).map(|n| n.to_string()),
            (Some(text), _) => Some(text.replace(',', ",,")),
            (None, _) => option.default.map(str::to_string),
        };
        if let Some(value) = value {
            line += &format!(" {}={value}", option.name);
        }
    }
    line + "\n"
}

fn create_raw(queue: &Queue, path: &str, size: u64, options: &CreateOptions) -> Result<(), String> {
    let preallocation = match options.get("preallocation") {
        None => Preallocation::Off,
        Some(name) => Preallocation::from_name(name)
            .ok_or_else(|| format!("invalid parameter value: {name}"))?,
    };
    if preallocation == Preallocation::Metadata {
        return Err("Unsupported preallocation mode: metadata".into());
    }
    let size = size.next_multiple_of(512);
    if size > i64::MAX as u64 {
        return Err("Could not resize file: Invalid argument".into());
    }
    let file = NewFile::open(path, LockRequest::RAW_WRITE)?;
    let made = jobs::create_raw(queue, &file.file, size, preallocation);
    made.map_err(|e| {
        if !file.existed {
            file.remove();
        }
        match e.errno() {
            libc::EFBIG => "The image size is too large for file format 'raw'".to_string(),
            _ if file.file.is_device() => e.to_string(),
            _ => format!("Could not resize file: {e}"),
        }
    })
}

fn create_qcow2(
    queue: &Queue,
    path: &str,
    size: u64,
    options: &CreateOptions,
) -> Result<(), String> {
    let image = qcow2_options(size, options)?;
    image.check().map_err(|e| e.to_string())?;
    let file = NewFile::open(path, LockRequest::QCOW2_WRITE)?;
    let data = match &image.data_file {
        None => None,
        Some(data_file) => {
            let data = path_of(&data_file.name)
                // As a file that is made, and only then as one of an image.
                .and_then(|path| NewFile::open(path, LockRequest::RAW_WRITE))
                .and_then(|data| match data.file.lock(LockRequest::DATA_WRITE) {
                    Ok(()) => Ok(data),
                    Err(e) => Err(e.to_string()),
                });
            Some(data.inspect_err(|_| {
                if !file.existed {
                    file.remove();
                }
            })?)
        }
    };
    let storage = data.as_ref().map(|data| &data.file as &dyn Storage);
    jobs::create_qcow2(queue, &file.file, storage, &image).map_err(|e| {
        // What they held is lost already.
        file.remove();
        if let Some(data) = &data {
            data.remove();
        }
        e.to_string()
    })
}

/// The image that the options mean.
fn qcow2_options(size: u64, options: &CreateOptions) -> Result<CreateQcow2, String> {
    let wrong = |parameter: &str, value: &str| {
        format!("Parameter '{parameter}' does not accept value '{value}'")
    };
    let version = match options.get("compat") {
        None | Some("1.1" | "v3") => 3,
        Some("0.10" | "v2") => 2,
        Some(other) => return Err(wrong("version", other)),
    };
    let text = |name| options.get(name).map(str::to_string);
    let backing_format = text("backing_fmt");
    if let Some(other) = backing_format.as_deref()
        && other.parse::<Format>().is_err()
        && !OTHER_FORMATS.contains(&other)
        && !READ_ONLY_FORMATS.contains(&other)
    {
        return Err(wrong("backing-fmt", other));
    }
    let preallocation = match options.get("preallocation") {
        None => Preallocation::Off,
        Some(name) => Preallocation::from_name(name).ok_or_else(|| wrong("preallocation", name))?,
    };
    let compression = match options.get("compression_type") {
        None | Some("zlib") => Compression::Zlib,
        Some("zstd") => Compression::Zstd,
        Some(other) => return Err(wrong("compression-type", other)),
    };
    refuse_encryption(options)?;
    let cluster_size = size_of(options, "cluster_size").unwrap_or(65536);
    let refcount_bits = options.get("refcount_bits").and_then(number).unwrap_or(16);
    let backing = text("backing_file").map(|name| NewBacking {
        name,
        format: backing_format.clone(),
    });
    let data_file = text("data_file").map(|name| NewDataFile {
        name,
        raw: is_on(options, "data_file_raw"),
    });
    let image = CreateQcow2 {
        size,
        version,
        // What is no power of two is none that exists.
        cluster_bits: log2(cluster_size),
        refcount_order: log2(refcount_bits),
        extended_l2: is_on(options, "extended_l2"),
        lazy_refcounts: is_on(options, "lazy_refcounts"),
        compression,
        preallocation,
        backing,
        data_file,
    };
    if image.backing.is_none() && backing_format.is_some() {
        return Err("Backing format cannot be used without backing file".into());
    }
    if image.data_file.is_none() && is_on(options, "data_file_raw") {
        return Err("data-file-raw requires data-file".into());
    }
    Ok(image)
}

/// The power of two; 64, which is out of every range, if it is none.
pub(super) fn log2(value: u64) -> u32 {
    match value.is_power_of_two() {
        true => value.trailing_zeros(),
        false => 64,
    }
}

fn refuse_encryption(options: &CreateOptions) -> Result<(), String> {
    let given = QCOW2
        .iter()
        .map(|option| option.name)
        .find(|name| name.starts_with("encrypt.") && options.get(name).is_some())
        .or(is_on(options, "encryption").then_some("encryption"));
    match given {
        Some(name) => Err(format!("{name}: encryption is not part of this version")),
        None => Ok(()),
    }
}

/// A file that is being made. What it held is there until it is locked.
struct NewFile {
    file: File,
    existed: bool,
}

impl NewFile {
    fn open(path: &str, lock: LockRequest) -> Result<NewFile, String> {
        let existed = Path::new(path).exists();
        let how = OpenFile {
            write: true,
            create: true,
            cache: CacheMode::WriteBack,
        };
        let file = File::open(path, how)
            .map_err(|e| format!("Could not create '{path}': {}", zebu::strerror(&e)))?;
        let new = NewFile { file, existed };
        new.file.lock(lock).map_err(|e| {
            if !existed {
                new.remove();
            }
            e.to_string()
        })?;
        Ok(new)
    }

    /// Removes it, if it is a file at all.
    fn remove(&self) {
        if !self.file.is_device() {
            // Nothing better can be done with it.
            let _ = fs::remove_file(self.file.path());
        }
    }
}
