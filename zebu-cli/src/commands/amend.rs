//! `amend`: change options of an image that were given when it was created.

use std::ffi::{OsStr, OsString};

use clap::{CommandFactory, Parser};
use zebu::block::{CreateOption, Device, Format, OptionKind};
use zebu::jobs::{self, AmendOptions};
use zebu::storage::Queue;

use super::command::{Command, ValueOf, Values};
use crate::arguments::create_options::{self, CreateOptions};
use crate::arguments::file_name::file_of;
use crate::arguments::known_options::{help_line, number};
use crate::arguments::{NameOptions, Reporting, SourceOptions, target_cache};
use crate::images::new_image::{log2, parse_format};
use crate::images::{open, same_file};
use crate::output::{self, Progress, Shown};
use crate::program::{Context, Failure, Outcome, signals};

pub const COMMAND: Command = Command {
    name: "amend",
    operands: "<FILENAME>",
    summary: "Update format-specific options of the image",
    options: Arguments::command,
    run,
    examples: "
        # For programs that only know old images
        zebu amend -o compat=0.10 disk.qcow2
        # What can be changed
        zebu amend -f qcow2 -o help",
    values: &[(
        ValueOf::Option("options"),
        Values::OptionsOf("qcow2", amendable),
    )],
    ..Command::PLAIN
};

/// Update format-specific options of the image
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    name: NameOptions,
    /// Cache mode of the image: none, writeback, writethrough, directsync or
    /// unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// Options to change; help lists them
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// Allow unsafe changes; there are none
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: Reporting,
    /// The image
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// The options of new images that can be amended.
const OF_NEW_IMAGES: [&str; 9] = [
    "backing_file",
    "backing_fmt",
    "compat",
    "data_file",
    "data_file_raw",
    "encrypt.iter-time",
    "lazy_refcounts",
    "refcount_bits",
    "size",
];

/// The options that new images do not have.
const OWN: [CreateOption; 4] = [
    CreateOption::new(
        "encrypt.keyslot",
        OptionKind::Number,
        "Select a single keyslot to modify explicitly",
    ),
    CreateOption::new(
        "encrypt.new-secret",
        OptionKind::Text,
        "New secret to set in the matching keyslots. Empty string to erase",
    ),
    CreateOption::new(
        "encrypt.old-secret",
        OptionKind::Text,
        "Select all keyslots that match this password",
    ),
    CreateOption::new(
        "encrypt.state",
        OptionKind::Text,
        "Select new state of affected keyslots (active/inactive)",
    ),
];

/// The options that can be amended, in the order in which they are shown.
pub fn amendable() -> Vec<CreateOption> {
    let of_new = Format::QCOW2.create_options().iter();
    let of_new = of_new.filter(|option| OF_NEW_IMAGES.contains(&option.name));
    let mut all: Vec<CreateOption> = of_new.chain(&OWN).copied().collect();
    all.sort_by_key(|option| option.name);
    all
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    if arguments.options.is_empty() {
        return Err(Failure::new("Must specify options (-o)").with_hint());
    }
    for list in &arguments.options {
        create_options::check_list(list)?;
    }
    let helps = create_options::asks_for_help(&arguments.options);
    if let Some(format) = arguments.name.format.as_deref().filter(|_| helps) {
        let format = parse_format(format).map_err(Failure::new)?;
        return help(format);
    }
    let [name] = arguments.names.as_slice() else {
        return Err(Failure::new("Expecting one image file name"));
    };
    let source = SourceOptions::from(arguments.name.clone());
    let cache = target_cache(arguments.cache.as_deref())?;
    let options = open::options(context, name, &source, cache)?.write(true);
    let queue = open::queue()?;
    let device = open::device_with(context, &queue, name, &source, &options)?;
    let format = device.top().format();
    if helps {
        return help(format);
    }
    // `-f file` is a raw image, and is named as it was given.
    let given = arguments.name.format.as_deref();
    refuse_format(format, given.unwrap_or(format.name()))?;
    let changes = changes(&arguments.options).map_err(Failure::new)?;
    refuse_loop(&device, &changes)?;
    context.end_on_stop(signals::WHOLE);
    amend(&queue, &arguments, device, &changes)
}

fn amend(queue: &Queue, arguments: &Arguments, device: Device, changes: &AmendOptions) -> Outcome {
    let total = device.size();
    let mut progress = Progress::only_shown(arguments.report.has_progress(), total);
    let result = jobs::amend(queue, device, changes, |now| {
        let _ = progress.set(total / now.total * now.done);
    });
    progress.finish(result.is_ok());
    result.map_err(|e| Failure::new(e.to_string()))?;
    Ok(0)
}

/// Only options of qcow2 images can be amended.
fn refuse_format(format: Format, name: &str) -> Result<(), Failure> {
    if format == Format::QCOW2 {
        return Ok(());
    }
    Err(Failure::new(format!(
        "Format driver '{name}' does not support option amendment"
    )))
}

/// Refuses a data file that is the image itself, or that a backing file reads.
fn refuse_loop(device: &Device, changes: &AmendOptions) -> Result<(), Failure> {
    let Some(name) = &changes.data_file else {
        return Ok(());
    };
    match file_of(name) {
        Ok(file) if same_file::is_in_chain(device, &file.path) => Err(Failure::new(format!(
            "'{}' is in the image's own backing chain, and cannot be its data file",
            name.shown()
        ))),
        _ => Ok(()),
    }
}

fn help(format: Format) -> Outcome {
    refuse_format(format, format.name())?;
    let mut text = "Amend options for 'qcow2':\n".to_string();
    for option in &amendable() {
        text += &help_line(option);
    }
    output::report(&text)
}

/// The changes that the options request.
fn changes(texts: &[OsString]) -> Result<AmendOptions, String> {
    let known = amendable();
    let options = CreateOptions::parse_known(&known, texts).map_err(|why| {
        let mut others = Format::QCOW2.create_options().iter();
        let for_creation = others
            .any(|option| !option.of_file && why == format!("Invalid parameter '{}'", option.name));
        match for_creation {
            true => format!("{why}\nThis option is only supported for image creation"),
            false => why,
        }
    })?;
    let version = match options.get("compat") {
        None => None,
        Some("0.10" | "v2") => Some(2),
        Some("1.1" | "v3") => Some(3),
        Some(other) => return Err(format!("Unknown compatibility level {other}")),
    };
    if ["backing_file", "backing_fmt"]
        .iter()
        .any(|name| options.value(name).is_some())
    {
        return Err("Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.".into());
    }
    // An encrypted image is not opened for writing.
    if known
        .iter()
        .any(|option| option.name.starts_with("encrypt.") && options.value(option.name).is_some())
    {
        return Err("Can't amend encryption options - encryption not present".into());
    }
    let switch = |name| options.get(name).map(|_| options.is_on(name));
    Ok(AmendOptions::default()
        .version(version)
        .refcount_order(options.get("refcount_bits").and_then(number).map(log2))
        .lazy_refcounts(switch("lazy_refcounts"))
        // As in qemu-img, 0 is no size.
        .size(options.size("size").filter(|size| *size != 0))
        .data_file(options.value("data_file").map(OsStr::to_owned))
        .data_file_raw(switch("data_file_raw")))
}
