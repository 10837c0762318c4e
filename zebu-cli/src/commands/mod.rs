//! The commands, one file each.

mod amend;
mod backup;
mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
mod convert;
mod create;
mod dd;
mod import;
mod info;
pub mod io;
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

use crate::failure::Outcome;
use crate::invocation::{Invocation, parse_lossy as parse};

/// Name, operands, what it does, and how it is run.
type Command = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Invocation, Vec<OsString>) -> Outcome,
);

/// All commands, by name.
const COMMANDS: [Command; 22] = [
    (
        "amend",
        "<FILENAME>",
        "Update format-specific options of the image",
        amend::run,
    ),
    (
        "backup",
        "<SOURCE>... --to <DIR>",
        "Back up disks incrementally, and restore them",
        backup::run,
    ),
    (
        "bench",
        "<FILENAME>",
        "Run a simple benchmark on an image",
        bench::run,
    ),
    (
        "bitmap",
        "<FILENAME> <BITMAP>",
        "Modify persistent dirty bitmaps of an image",
        bitmap::run,
    ),
    (
        "check",
        "<FILENAME>",
        "Check basic image integrity",
        check::run,
    ),
    (
        "commit",
        "<FILENAME>",
        "Commit image to its backing file",
        commit::run,
    ),
    (
        "compare",
        "<FILENAME1> <FILENAME2>",
        "Check if two images have the same contents",
        compare::run,
    ),
    (
        "convert",
        "<SOURCE>... <TARGET>",
        "Copy images to another, with format conversion",
        convert::run,
    ),
    (
        "create",
        "<FILENAME> [SIZE]",
        "Create and format new image file",
        create::run,
    ),
    (
        "dd",
        "if=<INPUT> of=<OUTPUT> [OPERANDS]",
        "Copy a part of an image to another, with format conversion",
        dd::run,
    ),
    (
        "import",
        "<SOURCE> <TARGET>",
        "Fetch, verify, unpack and convert an untrusted image",
        import::run,
    ),
    (
        "info",
        "<FILENAME>",
        "Display information about image",
        info::run,
    ),
    (
        "io",
        "[FILENAME]",
        "Run commands on an image, in qemu-io's language",
        io::run,
    ),
    ("map", "<FILENAME>", "Dump image metadata", map::run),
    (
        "measure",
        "(--size <SIZE> | <FILENAME>)",
        "Calculate file size required for a new image",
        measure::run,
    ),
    ("nbd", "[FILENAME]", "Serve images over NBD", nbd::run),
    (
        "ova",
        "<DISK>... --output <FILE>",
        "Make an appliance (OVA) of disks",
        ova::run,
    ),
    (
        "rebase",
        "<FILENAME>",
        "Change backing file of the image",
        rebase::run,
    ),
    (
        "resize",
        "<FILENAME> [+-]<SIZE>",
        "Resize an image",
        resize::run,
    ),
    (
        "snapshot",
        "<FILENAME>",
        "List or manipulate snapshots within image",
        snapshot::run,
    ),
    (
        "top",
        "<SOCKET>",
        "Show rates and latencies of a server, live",
        top::run,
    ),
    (
        "vhost-user-blk",
        "<FILENAME>",
        "Serve images to virtual machines over vhost-user",
        vhost::run,
    ),
];

/// Runs a command; `None` if there is none of this name.
pub fn run(invocation: &Invocation, name: &str, arguments: Vec<OsString>) -> Option<Outcome> {
    let (_, operands, _, run) = COMMANDS.iter().find(|command| command.0 == name)?;
    let invocation = Invocation {
        operands: Some(operands),
        ..invocation.clone()
    };
    Some(run(&invocation, arguments))
}

/// What `--help` prints.
pub fn help(invocation: &Invocation) -> String {
    let name = &invocation.name;
    let mut text = format!(
        "zebu: disk image utility, compatible with qemu-img, qemu-io and qemu-nbd\n\n\
         Usage: {name} [--untrusted] COMMAND [OPTIONS]\n       {name} --help | --version\n\nCommands:\n"
    );
    for (command, _, what, _) in &COMMANDS {
        text.push_str(&format!("  {command:<14} {what}\n"));
    }
    text.push_str(&format!("\nRun '{name} COMMAND --help' for its options.\n"));
    text
}
