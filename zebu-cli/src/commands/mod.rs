//! The commands, one file each.

mod amend;
mod backup;
mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
pub mod completions;
mod convert;
mod create;
mod dd;
mod import;
mod info;
pub mod io;
mod manual;
mod map;
mod measure;
pub mod nbd;
mod ova;
mod rebase;
mod resize;
mod serve;
mod snapshot;
mod top;
mod vhost;

use std::ffi::OsString;

pub use amend::amendable;
use clap::CommandFactory;
pub use manual::examples::{examples_of, with_examples};
use zebu::block::{FileDriver, Format};

use crate::arguments::{parse_lossy as parse, with_command_options};
use crate::failure::Outcome;
use crate::invocation::Invocation;
use crate::wrapped;

/// Name, operands, what it does, how it is run, and its options.
type Command = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Invocation, Vec<OsString>) -> Outcome,
    fn() -> clap::Command,
);

/// All commands, by name.
const COMMANDS: &[Command] = &[
    (
        "amend",
        "<FILENAME>",
        "Update format-specific options of the image",
        amend::run,
        amend::Arguments::command,
    ),
    (
        "backup",
        "<SOURCE>... --to <DIR>",
        "Back up disks incrementally, and restore them",
        backup::run,
        backup::Arguments::command,
    ),
    (
        "bench",
        "<FILENAME>",
        "Run a simple benchmark on an image",
        bench::run,
        bench::Arguments::command,
    ),
    (
        "bitmap",
        "<FILENAME> <BITMAP>",
        "Modify persistent dirty bitmaps of an image",
        bitmap::run,
        bitmap::Arguments::command,
    ),
    (
        "check",
        "<FILENAME>",
        "Check basic image integrity",
        check::run,
        check::Arguments::command,
    ),
    (
        "commit",
        "<FILENAME>",
        "Commit image to its backing file",
        commit::run,
        commit::Arguments::command,
    ),
    (
        "compare",
        "<FILENAME1> <FILENAME2>",
        "Check if two images have the same contents",
        compare::run,
        compare::Arguments::command,
    ),
    (
        "completions",
        "<SHELL>",
        "Print the completions of a shell: bash, zsh or fish",
        completions::print,
        completions::Arguments::command,
    ),
    (
        "convert",
        "<SOURCE>... <TARGET>",
        "Copy images to another, with format conversion",
        convert::run,
        convert::Arguments::command,
    ),
    (
        "create",
        "<FILENAME> [SIZE]",
        "Create and format new image file",
        create::run,
        create::Arguments::command,
    ),
    (
        "dd",
        "if=<INPUT> of=<OUTPUT> [OPERANDS]",
        "Copy a part of an image to another, with format conversion",
        dd::run,
        dd::Arguments::command,
    ),
    (
        "import",
        "<SOURCE> <TARGET>",
        "Fetch, verify, unpack and convert an untrusted image",
        import::run,
        import::Arguments::command,
    ),
    (
        "info",
        "<FILENAME>",
        "Display information about image",
        info::run,
        info::Arguments::command,
    ),
    (
        "io",
        "[FILENAME]",
        "Run commands on an image, in qemu-io's language",
        io::run,
        io::definition,
    ),
    (
        "manual",
        "<FOLDER> [DATE]",
        "Write the man pages to a folder",
        manual::run,
        manual::Arguments::command,
    ),
    (
        "map",
        "<FILENAME>",
        "Dump image metadata",
        map::run,
        map::Arguments::command,
    ),
    (
        "measure",
        "(--size <SIZE> | <FILENAME>)",
        "Calculate file size required for a new image",
        measure::run,
        measure::Arguments::command,
    ),
    (
        "nbd",
        "[FILENAME]",
        "Serve images over NBD",
        nbd::run,
        nbd::Arguments::command,
    ),
    (
        "ova",
        "<DISK>... --output <FILE>",
        "Make an appliance (OVA) of disks",
        ova::run,
        ova::Arguments::command,
    ),
    (
        "rebase",
        "<FILENAME>",
        "Change backing file of the image",
        rebase::run,
        rebase::Arguments::command,
    ),
    (
        "resize",
        "<FILENAME> [+-]<SIZE>",
        "Resize an image",
        resize::run,
        resize::Arguments::command,
    ),
    (
        "snapshot",
        "<FILENAME>",
        "List or manipulate snapshots within image",
        snapshot::run,
        snapshot::Arguments::command,
    ),
    (
        "top",
        "<SOCKET>",
        "Show rates and latencies of a server, live",
        top::run,
        top::Arguments::command,
    ),
    (
        "vhost-user-blk",
        "<FILENAME>",
        "Serve images to virtual machines over vhost-user",
        vhost::run,
        vhost::Arguments::command,
    ),
];

/// Runs a command; `None` if there is none of this name.
pub fn run(invocation: &Invocation, name: &str, arguments: Vec<OsString>) -> Option<Outcome> {
    let (_, operands, _, run, _) = COMMANDS.iter().find(|command| command.0 == name)?;
    let invocation = Invocation {
        operands: Some(operands),
        ..invocation.clone()
    };
    Some(run(&invocation, arguments))
}

/// All commands, by name: their operands, what they do, and their options.
pub fn definitions() -> impl Iterator<Item = (&'static str, &'static str, clap::Command)> {
    (COMMANDS.iter()).map(|(name, operands, what, _, options)| {
        (*name, *operands, options().name(*name).about(*what))
    })
}

/// All commands with all their options, as clap completes them.
pub fn built() -> impl Iterator<Item = clap::Command> {
    definitions().map(|(name, _, definition)| {
        let mut command = with_command_options(definition, name);
        command.build();
        command
    })
}

/// The names of all commands.
pub fn names() -> impl Iterator<Item = &'static str> {
    COMMANDS.iter().map(|command| command.0)
}

/// What is said to those without a command.
pub const OVERVIEW: &str = "
  zebu info --human disk.qcow2            # what an image is, and how full
  zebu convert -p disk.qcow2 disk.raw     # to another format
  zebu create -f qcow2 disk.qcow2 20G     # a new disk
  zebu check disk.qcow2                   # whether it is sound
  zebu nbd -t -k /run/disk.sock disk.qcow2

'zebu help' lists all commands, 'zebu help COMMAND' has options and examples.";

/// Whether a command has a subcommand of this name.
pub fn has_subcommand(command: &str, name: &str) -> bool {
    let mut found = definitions().filter(|definition| definition.0 == command);
    found.any(|(_, _, definition)| definition.find_subcommand(name).is_some())
}

/// What `--help` prints.
pub fn help(invocation: &Invocation) -> String {
    let name = &invocation.name;
    let mut text = format!(
        "zebu: disk image utility, compatible with qemu-img, qemu-io and qemu-nbd\n\n\
         Usage: {name} [--untrusted] COMMAND [OPTIONS]\n       {name} --help | --version\n\nCommands:\n"
    );
    for (command, _, what, ..) in COMMANDS {
        text.push_str(&format!("  {command:<14} {what}\n"));
    }
    if invocation.role == "qemu-img" {
        text.push_str(&for_scripts());
    }
    text.push_str(&format!("\nRun '{name} COMMAND --help' for its options.\n"));
    text
}

/// What scripts look for in the help of qemu-img: the formats, under the heading of each version, and the
/// option before the command.
fn for_scripts() -> String {
    let mut formats: Vec<&str> = Format::all().map(|format| format.name()).collect();
    // QEMU has no object stores.
    let drivers = FileDriver::names().filter(|name| !["s3", "gs", "az"].contains(name));
    formats.extend(drivers);
    formats.sort_unstable();
    let all = formats.join(" ");
    format!(
        "\nStandard options:\n  -T, --trace TRACE\n     trace events: accepted, there are none\n\n\
         Supported image formats:\n\n{}\nSupported formats: {all}\n",
        wrapped::to_columns(&format!("  {all}\n"), 80)
    )
}
