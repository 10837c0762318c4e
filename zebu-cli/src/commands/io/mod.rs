//! `io`: qemu-io's command language, from arguments and standard input.

mod breakpoint;
mod change;
mod command;
mod content;
mod control;
mod getopt;
mod image;
mod input;
mod look;
mod number;
pub(super) mod opening;
mod output;
pub(super) mod overlay;
mod read;
mod reopen;
mod report;
mod request;
mod session;
mod table;
mod words;
mod write;
mod zone;

use std::ffi::{OsStr, OsString};

use clap::ArgAction;
use zebu::block::Device;
use zebu::storage::Queue;

use super::command::Command;
use crate::arguments::{
    block_cache, objects, untrusted, with_command_options, with_examples, with_usage,
};
use crate::output::wrapped;
use crate::program::{Context, Failure, Outcome, trace, version};
use getopt::{Getopt, Long, Takes};
use opening::Opening;
use session::Session;

pub const COMMAND: Command = Command {
    name: "io",
    operands: "[FILENAME]",
    summary: "Run commands on an image, in qemu-io's language",
    options: definition,
    run,
    examples: "
        # Write, and see where it is
        zebu io -c 'write -P 0xff 1M 64k' -c map disk.qcow2
        # The first sector
        zebu io -r -c 'read -v 0 512' disk.qcow2",
    ..Command::PLAIN
};

const LONG: &[Long] = &[
    ("aio", Takes::Value, 'i'),
    ("cache", Takes::Value, 't'),
    (block_cache::DIR, Takes::Value, 'D'),
    (block_cache::SIZE, Takes::Value, 'S'),
    ("cmd", Takes::Value, 'c'),
    ("copy-on-read", Takes::Nothing, 'C'),
    ("discard", Takes::Value, 'd'),
    ("force-share", Takes::Nothing, 'U'),
    ("format", Takes::Value, 'f'),
    ("help", Takes::Nothing, 'h'),
    ("image-opts", Takes::Nothing, 'I'),
    ("misalign", Takes::Nothing, 'm'),
    ("native-aio", Takes::Nothing, 'k'),
    ("nocache", Takes::Nothing, 'n'),
    ("object", Takes::Value, 'O'),
    ("read-only", Takes::Nothing, 'r'),
    ("snapshot", Takes::Nothing, 's'),
    ("trace", Takes::Value, 'T'),
    (untrusted::NAME, Takes::ValueOrNothing, 'Y'),
    ("version", Takes::Nothing, 'V'),
];

/// The options, for the help: letter, name, value and what it does.
const SHOWN: &[(char, &str, Option<&str>, &str)] = &[
    (
        'c',
        "cmd",
        Some("COMMAND"),
        "Run this command; may be repeated. Without it, commands are read from standard input",
    ),
    (
        'f',
        "format",
        Some("FMT"),
        "Format of the image (default: detected)",
    ),
    ('I', "image-opts", None, "Interpret the name as options"),
    (
        'O',
        "object",
        Some("OBJDEF"),
        "TLS credentials and secrets of images on servers",
    ),
    ('r', "read-only", None, "Open the image read-only"),
    ('s', "snapshot", None, "Write to a temporary overlay"),
    ('n', "nocache", None, "Same as -t none"),
    (
        't',
        "cache",
        Some("MODE"),
        "Cache mode: none, writeback, writethrough (the default), directsync or unsafe",
    ),
    (
        'i',
        "aio",
        Some("MODE"),
        "AIO mode: threads, native or io_uring",
    ),
    ('k', "native-aio", None, "Same as -i native"),
    (
        'd',
        "discard",
        Some("MODE"),
        "Discard mode: ignore or unmap",
    ),
    ('C', "copy-on-read", None, "Copy on read"),
    (
        'm',
        "misalign",
        None,
        "Without effect: requests need no alignment",
    ),
    (
        'U',
        "force-share",
        None,
        "Open the image although another process may write to it",
    ),
    ('V', "version", None, "Print the version"),
];

/// What the command line says.
#[derive(Default)]
struct Arguments {
    commands: Vec<OsString>,
    opening: Opening,
    image_opts: bool,
    /// Print this and do nothing else.
    text: Option<String>,
}

/// Runs the program.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let words: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
    let arguments = parse(context, &words)?;
    if let Some(text) = arguments.text {
        return crate::output::report(&text);
    }
    let mut session = Session::new(context, &table::COMMANDS);
    if let Err(failure) = open_first(&mut session, &arguments.opening) {
        session.fail(failure, "", "");
        session.finish();
        return Ok(1);
    }
    if arguments.commands.is_empty() {
        session
            .run_input()
            .map_err(|e| Failure::new(format!("standard input: {e}")))?;
    } else {
        session.run_all(&arguments.commands);
    }
    Ok(u8::from(!session.finish()))
}

/// Opens the image of the command line, if there is one.
fn open_first(session: &mut Session, opening: &Opening) -> command::Outcome {
    match (&opening.name, &opening.options) {
        (None, None) => Ok(()),
        _ => session.open(opening),
    }
}

/// Runs lines of the language on a device that was opened for writing with `queue`, and prints
/// nothing. Returns whether all succeeded. Lines may open files, wait, and end the process.
pub fn run_on(queue: Queue, device: Device, lines: &str) -> bool {
    let mut session = Session::silent(&table::COMMANDS);
    let opening = Opening::default();
    session.image = Some(image::OpenImage::new(queue, device, opening, None));
    for line in lines.lines() {
        session.run(OsStr::new(line));
        if session.quit {
            break;
        }
    }
    session.finish()
}

fn parse(context: &Context, words: &[&OsStr]) -> Result<Arguments, Failure> {
    let mut all = Arguments::default();
    let (mut cache, mut cache_size) = (None, None);
    let mut options = Getopt::new(words, "hVc:d:f:rsnCmki:t:T:U", LONG);
    for option in options.by_ref() {
        match option.map_err(|e| Failure::new(e).with_hint())? {
            ('c', Some(text)) => all.commands.push(text.to_owned()),
            ('f', Some(name)) => all.opening.format = Some(name.to_string_lossy().into_owned()),
            ('I', _) => all.image_opts = true,
            ('Y', value) => untrusted::set(context, &value.unwrap_or_default().to_string_lossy())?,
            ('D', folder) => cache = folder,
            ('S', size) => cache_size = size.map(OsStr::to_string_lossy),
            ('T', value) => trace::warn(context, value.unwrap_or_default()),
            ('h', _) => all.text = Some(help(context)),
            ('V', _) => all.text = Some(version(context)),
            ('O', text) => objects::add(context, text.unwrap_or_default())?,
            (letter, value) => {
                let done = all.opening.set(letter, value).unwrap_or(Ok(()));
                done.map_err(Failure::new)?;
            }
        }
    }
    block_cache::set(context, cache, cache_size.as_deref())?;
    if all.image_opts && all.opening.format.is_some() {
        let text = "--image-opts and -f are mutually exclusive";
        return Err(Failure::new(text));
    }
    match options.into_rest().as_slice() {
        [] => {}
        [text] if all.image_opts => all.opening.options = Some((*text).to_owned()),
        [name] => all.opening.name = Some((*name).to_owned()),
        _ => return Err(Failure::new("Expecting one image file name").with_hint()),
    }
    Ok(all)
}

/// How the user calls this program.
fn called(context: &Context) -> String {
    match context.command {
        "" => context.name.clone(),
        command => format!("{} {command}", context.name),
    }
}

fn help(context: &Context) -> String {
    let called = called(context);
    let command = with_usage(
        with_examples(definition(), context),
        format!("{called} [OPTIONS]... [-c COMMAND]... [FILE]"),
    );
    let text = with_command_options(command, &called).render_help();
    wrapped::to_terminal(&text.to_string())
}

/// The options as clap shows them. They are read by getopt, whose order of options and files is
/// that of qemu-io.
pub fn definition() -> clap::Command {
    let option =
        |(letter, name, value, help): &(char, &'static str, Option<&'static str>, &'static str)| {
            // Letters that only stand for a long name here are none to the user.
            let letter = (!"IO".contains(*letter)).then_some(*letter);
            let option = clap::Arg::new(*name).long(*name).short(letter).help(*help);
            match value {
                Some(value) => option.value_name(*value),
                None => option.action(ArgAction::SetTrue),
            }
        };
    clap::Command::new("io")
        .about("Run commands on an image, in qemu-io's language")
        .args(SHOWN.iter().map(option))
        .arg(clap::Arg::new("names").value_name("FILE").help("The image"))
        .after_help("'-c help' lists the commands.")
}
