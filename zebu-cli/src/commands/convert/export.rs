//! Targets that are streams: standard output, pipes, sockets.

use std::fs::File;
use std::io::IsTerminal;
use std::path::Path;

use zebu::block::{Device, Format};
use zebu::jobs::{self, ConvertOptions, ExportFormat};
use zebu::storage::Queue;

use super::{Arguments, ended, events};
use crate::create_options::CreateOptions;
use crate::failure::{Failure, Outcome};
use crate::invocation::Invocation;
use crate::new_image::{NewImage, parse_format};
use crate::progress::Progress;
use crate::{open, streams};

/// The stream that the target is, if it is one.
pub fn open(arguments: &Arguments) -> Result<Option<File>, Failure> {
    let name = match arguments.names.last() {
        Some(name) if !arguments.target_image_opts => name,
        _ => return Ok(None),
    };
    let output = streams::output(name).map_err(|e| open::failure(name, &e.into()))?;
    let Some(output) = output else {
        return Ok(None);
    };
    if output.is_terminal() {
        return Err(Failure::new("An image is not written to a terminal"));
    }
    let refused = [
        (arguments.no_create, "-n"),
        (arguments.backing.is_some(), "-B"),
        (arguments.backing_format.is_some(), "-F"),
        (arguments.bitmaps, "--bitmaps"),
        (arguments.copy_range, "-C"),
    ];
    if let Some((_, option)) = refused.iter().find(|(given, _)| *given) {
        let why = format!("{option} makes no sense for a target that is a stream");
        return Err(Failure::new(why));
    }
    // Before anything is read.
    format(arguments)?;
    streams::widen(&output);
    Ok(Some(output))
}

/// What is written.
fn format(arguments: &Arguments) -> Result<ExportFormat, Failure> {
    let name = arguments.target_format();
    let format = parse_format(name).map_err(Failure::new)?;
    let create = CreateOptions::parse(format, &arguments.options).map_err(Failure::new)?;
    let subformat = create.get("subformat");
    if format.name() == "vmdk" {
        return match subformat {
            Some("streamOptimized") => Ok(ExportFormat::Vmdk(create.values(format))),
            _ => Err(Failure::new(
                "A VMDK that is written to a stream needs -o subformat=streamOptimized",
            )),
        };
    }
    if ![Format::RAW, Format::QCOW2].contains(&format) {
        return Err(Failure::new(format!(
            "An image of format '{name}' cannot be written to a stream"
        )));
    }
    // The size is set later.
    let image = NewImage::new(format, Path::new(""), 0, &create, None);
    match image.map_err(|e| Failure::new(e.to_string()))? {
        NewImage::Qcow2(image) => Ok(ExportFormat::Qcow2 {
            image,
            scan: arguments.sparse.is_some(),
        }),
        _ => Ok(ExportFormat::Raw),
    }
}

/// Converts images to a stream.
pub fn convert(
    invocation: &Invocation,
    queue: &Queue,
    arguments: &Arguments,
    sources: Vec<Device>,
    output: File,
    options: &ConvertOptions,
    progress: &mut Progress,
) -> Outcome {
    let format = format(arguments)?;
    let events = events(invocation, arguments, progress);
    let result = jobs::convert_to_stream(sources, Box::new(output), &format, options, events);
    ended(queue, arguments, None, result.map(drop))
}
