//! `resize`: another size of the disk.

use std::ffi::OsString;

use clap::Parser;
use zebu::block::{OpenOptions, Preallocation};

use crate::failure::{Failure, Outcome};
use crate::options::{SourceOptions, target_cache};
use crate::program::Invocation;
use crate::{open, output, size};

/// Said of a size that is 0, or that QEMU would take for a negative one.
const NOT_A_SIZE: &str = "New image size must be positive";

/// Resize an image
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// What to allocate of the new part: off, metadata, falloc or full
    #[arg(long, value_name = "PREALLOC")]
    preallocation: Option<String>,
    /// Allow the new size to be smaller
    #[arg(long)]
    shrink: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The image, and its new size or, after + or -, by how much to change it
    #[arg(allow_hyphen_values = true)]
    names: Vec<String>,
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
        size::parse(digits).map(change).map_err(|e| {
            Failure::new(match e {
                size::SizeError::Range => NOT_A_SIZE,
                size::SizeError::Syntax => {
                    "Parameter 'size' expects a non-negative number below 2^64\n\
                     Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
                     and exabytes, respectively."
                }
            })
        })
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

/// Runs the command.
pub fn run(invocation: &Invocation, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(invocation, arguments)?;
    // What follows an option's end is a name, also if it looks like an option.
    let names: Vec<&String> = arguments.names.iter().filter(|n| *n != "--").collect();
    let (name, change) = match names[..] {
        [name, change] => (name, Change::parse(change)?),
        [] | [_] => {
            return Err(Failure::new("Expecting image file name and size").with_hint());
        }
        _ => return Err(Failure::new("Extra argument(s) in command line").with_hint()),
    };
    arguments.source.validate()?;
    let mode = arguments.preallocation.as_deref().unwrap_or("off");
    let preallocation = Preallocation::from_name(mode)
        .ok_or_else(|| Failure::new(format!("Invalid preallocation mode '{mode}'")))?;
    let queue = open::queue()?;
    let options = OpenOptions {
        write: true,
        ..open::options(name, &arguments.source, target_cache(None)?)?
    };
    let mut device = open::device_with(&queue, name, &arguments.source, &options)?;
    let old = device.size();
    let new = change.apply(old).ok_or_else(|| Failure::new(NOT_A_SIZE))?;
    if new <= old && preallocation != Preallocation::Off {
        return Err(Failure::new(
            "Preallocation can only be used for growing images",
        ));
    }
    if new < old && !arguments.shrink {
        return Err(Failure::new(format!(
            "Use the --shrink option to perform a shrink operation.\n\
             {}: warning: Shrinking an image will delete all data beyond the shrunken image's end. \
             Before performing such an operation, make sure there is no important data there.",
            invocation.name
        )));
    }
    let resized = queue.block_on(async {
        let resized = device.resize(&queue, new, preallocation).await;
        // Also after a failure: what was taken for the new size is given back.
        let closed = device.close(&queue).await;
        resized.and(closed)
    });
    resized.map_err(|e| Failure::new(e.to_string()))?;
    match arguments.quiet {
        true => Ok(0),
        false => output::print("Image resized.\n"),
    }
}
