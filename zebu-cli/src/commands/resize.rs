//! `resize`: another size of the disk.

use std::ffi::OsString;

use clap::{CommandFactory, Parser};
use zebu::block::{Length, Preallocation};

use super::command::{Command, ValueOf, Values};
use crate::arguments::{NameOptions, SourceOptions, size, target_cache};
use crate::images::open;
use crate::output;
use crate::program::{Context, Failure, Outcome, signals};

pub const COMMAND: Command = Command {
    name: "resize",
    operands: "<FILENAME> [+-]<SIZE>",
    summary: "Resize an image",
    options: Arguments::command,
    run,
    examples: "
        # Larger
        zebu resize disk.qcow2 +10G
        # Smaller: what is behind the new end is lost
        zebu resize --shrink disk.qcow2 8M",
    values: &[(ValueOf::Operand(1), Values::Nothing)],
    ..Command::PLAIN
};

/// Said of a size that is 0, or that QEMU would take for a negative one.
const NOT_A_SIZE: &str = "New image size must be positive";

/// Said of what is no size.
const NO_NUMBER: &str = "Parameter 'size' expects a non-negative number below 2^64\n\
                         Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
                         and exabytes, respectively.";

/// Resize an image
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    name: NameOptions,
    /// Preallocation of the new part: off, metadata, falloc or full
    #[arg(long, value_name = "PREALLOC")]
    preallocation: Option<String>,
    /// Allow to shrink the image
    #[arg(long)]
    shrink: bool,
    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
    /// The image, and its new size; after + or -, the difference
    #[arg(value_name = "FILENAME")]
    names: Vec<OsString>,
}

/// What a size argument says.
#[derive(Clone, Copy)]
enum Change {
    To(u64),
    By(u64),
    Less(u64),
}

impl Change {
    fn parse(text: &str) -> Result<Self, Failure> {
        let (change, digits): (fn(u64) -> Self, _) = match text.as_bytes().first() {
            Some(b'+') => (Change::By, &text[1..]),
            Some(b'-') => (Change::Less, &text[1..]),
            _ => (Change::To, text),
        };
        if digits.trim_start().starts_with('-') {
            return Err(Failure::new(NO_NUMBER));
        }
        match size::parse(digits) {
            Ok(size) => Ok(change(size)),
            // Refused as size 0, after the image is opened.
            Err(size::SizeError::Range) => Ok(Change::To(0)),
            Err(size::SizeError::Syntax) => Err(Failure::new(NO_NUMBER)),
        }
    }

    /// The new size of a disk of `old` bytes, if there is one.
    fn apply(self, old: u64) -> Option<u64> {
        let new = match self {
            Change::To(size) => Some(size),
            Change::By(more) => old.checked_add(more),
            Change::Less(less) => old.checked_sub(less),
        };
        new.filter(|size| *size > 0 && *size <= i64::MAX as u64)
    }
}

/// Takes a negative size (`-8M`) out of the arguments: no option begins with a digit.
fn take_negative(mut arguments: Vec<OsString>) -> (Vec<OsString>, Option<OsString>) {
    let is_negative = |a: &OsString| match a.as_encoded_bytes() {
        [b'-', next, ..] => next.is_ascii_digit() || *next == b'.',
        _ => false,
    };
    let end = arguments.iter().position(|a| a == "--");
    let options = &arguments[..end.unwrap_or(arguments.len())];
    let found = options.iter().rposition(is_negative);
    let less = found.map(|at| arguments.remove(at));
    (arguments, less)
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let (arguments, less) = take_negative(arguments);
    let arguments: Arguments = super::parse(context, arguments)?;
    let names = arguments.names.iter().chain(&less).collect::<Vec<_>>();
    let (name, change) = match names[..] {
        [name, change] => (name, Change::parse(&change.to_string_lossy())?),
        [] | [_] => {
            return Err(Failure::new("Expecting image file name and size").with_hint());
        }
        _ => return Err(Failure::new("Extra argument(s) in command line").with_hint()),
    };
    let source = SourceOptions::from(arguments.name.clone());
    let mode = arguments.preallocation.as_deref().unwrap_or("off");
    let preallocation = Preallocation::from_name(mode)
        .ok_or_else(|| Failure::new(format!("Invalid preallocation mode '{mode}'")))?;
    let queue = open::queue()?;
    let options = open::options(context, name, &source, target_cache(None)?)?
        .write(true)
        .length(Length::Changing);
    let mut device = open::device_with(context, &queue, name, &source, &options)?;
    let old = device.size();
    let new = change.apply(old).ok_or_else(|| Failure::new(NOT_A_SIZE))?;
    if new <= old && preallocation != Preallocation::Off {
        return Err(Failure::new(
            "Preallocation can only be used for growing images",
        ));
    }
    if new < old && !arguments.shrink {
        context.say("Use the --shrink option to perform a shrink operation.");
        return Err(Failure::new(
            "warning: Shrinking an image will delete all data beyond the shrunken image's end. \
             Before performing such an operation, make sure there is no important data there.",
        ));
    }
    context.end_on_stop(signals::WHOLE);
    let resized = queue.block_on(async {
        let resized = device.resize(&queue, new, preallocation).await;
        // Also after a failure: closing frees what was allocated for the new size.
        let closed = device.close(&queue).await;
        resized.and(closed)
    });
    resized.map_err(|e| Failure::new(e.to_string()))?;
    if !arguments.quiet {
        output::say("Image resized.\n");
    }
    Ok(0)
}
