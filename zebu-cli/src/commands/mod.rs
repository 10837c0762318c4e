//! The commands, one file or folder each, with all that the program knows of one in its
//! [`COMMAND`](command::Command).

mod amend;
mod backup;
mod bench;
mod bitmap;
mod check;
mod command;
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

use zebu::block::{FileDriver, Format};

use crate::arguments::{parse_lossy as parse, with_command_options};
use crate::output::wrapped;
use crate::program::{Context, Outcome};
use command::Command;

/// All commands, by name.
pub const COMMANDS: &[Command] = &[
    amend::COMMAND,
    backup::COMMAND,
    bench::COMMAND,
    bitmap::COMMAND,
    check::COMMAND,
    commit::COMMAND,
    compare::COMMAND,
    completions::COMMAND,
    convert::COMMAND,
    create::COMMAND,
    dd::COMMAND,
    import::COMMAND,
    info::COMMAND,
    io::COMMAND,
    manual::COMMAND,
    map::COMMAND,
    measure::COMMAND,
    nbd::COMMAND,
    ova::COMMAND,
    rebase::COMMAND,
    resize::COMMAND,
    snapshot::COMMAND,
    top::COMMAND,
    vhost::COMMAND,
];

/// The command of this name, if there is one.
pub fn find(name: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.name == name)
}

/// Runs a command; `None` if there is none of this name.
pub fn run(context: &mut Context, name: &str, arguments: Vec<OsString>) -> Option<Outcome> {
    let command = find(name)?;
    context.command = command.name;
    context.operands = Some(command.operands);
    context.examples = command.examples_in_help();
    Some((command.run)(context, arguments))
}

/// All commands with all their options, as clap completes them.
pub fn built() -> impl Iterator<Item = clap::Command> {
    COMMANDS.iter().map(|command| {
        let mut built = with_command_options(command.definition(), command.name);
        built.build();
        built
    })
}

/// The examples of a command: what is done, and the line of a shell that does it.
pub fn examples_of(command: &str) -> Vec<(&'static str, &'static str)> {
    find(command).map_or(Vec::new(), |command| command.examples().collect())
}

/// What is said to those without a command.
pub const OVERVIEW: &str = "
  zebu info --human disk.qcow2            # what an image is, and how full
  zebu convert -p disk.qcow2 disk.raw     # to another format
  zebu create -f qcow2 disk.qcow2 20G     # a new disk
  zebu check disk.qcow2                   # whether it is sound
  zebu nbd -t -k /run/disk.sock disk.qcow2

'zebu help' lists all commands, 'zebu help COMMAND' has options and examples.";

/// The command that has a subcommand of this name.
pub fn with_subcommand(name: &str) -> Option<&'static Command> {
    let has = |command: &&Command| command.definition().find_subcommand(name).is_some();
    COMMANDS.iter().find(has)
}

/// What `--help` prints.
pub fn help(context: &Context) -> String {
    let name = &context.name;
    let mut text = format!(
        "zebu: disk image utility, compatible with qemu-img, qemu-io and qemu-nbd\n\n\
         Usage: {name} [--untrusted] COMMAND [OPTIONS]\n       {name} --help | --version\n\nCommands:\n"
    );
    for command in COMMANDS {
        text.push_str(&format!("  {:<14} {}\n", command.name, command.summary));
    }
    if context.role == "qemu-img" {
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
