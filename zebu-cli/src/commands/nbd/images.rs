//! The images that are served.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use zebu::block::{Device, DirtyBits, Length};
use zebu::storage::Queue;
use zebu_nbd::{Export, ExportOptions};

use super::arguments::Arguments;
use crate::arguments::size;
use crate::output::Shown;
use crate::program::{Context, Failure};

/// Name of the export, and the image.
fn named(arguments: &Arguments) -> Result<Vec<(String, OsString)>, Failure> {
    let mut all = Vec::new();
    match arguments.files.as_slice() {
        [file] => all.push((
            arguments.export_name.clone().unwrap_or_default(),
            file.clone(),
        )),
        [] if !arguments.export.is_empty() => {}
        _ => return Err(Failure::new("Invalid number of arguments").with_hint()),
    }
    for text in &arguments.export {
        let mut parts = text.as_bytes().splitn(2, |b| *b == b'=');
        match (parts.next().map(str::from_utf8), parts.next()) {
            (Some(Ok(name)), Some(image)) => {
                all.push((name.into(), OsStr::from_bytes(image).into()));
            }
            _ => {
                let text = text.shown();
                let text = format!("--export expects NAME=IMAGE, not '{text}'");
                return Err(Failure::new(text));
            }
        }
    }
    let mut seen = HashSet::new();
    for (name, _) in &all {
        if name.len() > zebu::internal::nbd::MAX_STRING {
            return Err(Failure::new(format!("export name '{name}' is too long")));
        }
        if !seen.insert(name) {
            return Err(Failure::new(format!("export name '{name}' is there twice")));
        }
    }
    Ok(all)
}

/// Opens all images.
pub fn open(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    shared: bool,
) -> Result<Vec<Arc<Export>>, Failure> {
    let long = |text: &&String| text.len() > zebu::internal::nbd::MAX_STRING;
    if arguments.description.as_ref().filter(long).is_some() {
        return Err(Failure::new("export description is too long"));
    }
    if arguments.image.load_snapshot.is_some() && !arguments.bitmap.is_empty() {
        return Err(Failure::new(
            "-B cannot be used with -l: bitmaps tell what changed in the active disk, not in a \
             snapshot; leave out -B",
        ));
    }
    let options = arguments
        .image
        .open_options(context)?
        // The temporary image of --snapshot has a size of its own.
        .length(match arguments.image.snapshot {
            true => Length::Shared,
            false => Length::Fixed,
        });
    let mut exports = Vec::new();
    for (name, image) in named(arguments)? {
        let device = arguments.image.open(context, queue, &image, &options)?;
        let offset = match &arguments.offset {
            None => 0,
            Some(text) => {
                size::parse(text).map_err(|_| Failure::new(format!("Invalid offset '{text}'")))?
            }
        };
        if offset > device.size() {
            let text = format!(
                "Requested offset {offset} is past the end of the image of {} bytes",
                device.size()
            );
            return Err(Failure::new(text));
        }
        let options = ExportOptions {
            name,
            description: arguments.description.clone(),
            offset,
            depth: arguments.allocation_depth,
            bitmaps: bitmaps(queue, &device, &arguments.bitmap)?,
            shared,
        };
        exports.push(Export::new(device, options));
    }
    Ok(exports)
}

/// The bitmaps with these names, once each, of the image or of one of its backing chain.
fn bitmaps(
    queue: &Queue,
    device: &Device,
    names: &[OsString],
) -> Result<Vec<(String, DirtyBits)>, Failure> {
    let mut all: Vec<(String, DirtyBits)> = Vec::new();
    for name in names {
        let bits = queue
            .block_on(device.live_bitmap(queue, name.as_bytes()))
            .map_err(|e| Failure::new(e.to_string().lines().next().unwrap_or_default()))?;
        let Some(name) = name.to_str() else {
            let name = name.shown();
            let text = format!("Bitmap '{name}' has a name that is not UTF-8, as NBD requires");
            return Err(Failure::new(text));
        };
        if all.iter().all(|(other, _)| other != name) {
            all.push((name.into(), bits));
        }
    }
    Ok(all)
}
