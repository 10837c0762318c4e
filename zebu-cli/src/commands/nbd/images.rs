//! The images that are served.

use std::collections::HashSet;
use std::sync::Arc;

use zebu::block::{Device, NATIVE_NEEDS_DIRECT, OpenOptions, Source};
use zebu::image::SnapshotName;
use zebu::storage::{CacheMode, EngineKind, Queue, QueueOptions};
use zebu_nbd::{Export, ExportOptions};

use super::arguments::Arguments;
use crate::commands::io::opening::Opening;
use crate::commands::io::overlay::Overlay;
use crate::failure::Failure;
use crate::{open, size};

/// The queue of each connection.
pub fn queue_options(arguments: &Arguments) -> Result<QueueOptions, Failure> {
    let engine = match &arguments.aio {
        None => EngineKind::best(),
        Some(name) => name
            .parse()
            .map_err(|_| Failure::new(format!("invalid aio mode '{name}'")))?,
    };
    if engine == EngineKind::Native && !cache(arguments)?.is_direct() {
        return Err(Failure::new(NATIVE_NEEDS_DIRECT));
    }
    Ok(QueueOptions {
        engine,
        ..QueueOptions::default()
    })
}

fn cache(arguments: &Arguments) -> Result<CacheMode, Failure> {
    match &arguments.cache {
        _ if arguments.nocache => Ok(CacheMode::None),
        None => Ok(CacheMode::WriteBack),
        Some(name) => name
            .parse()
            .map_err(|()| Failure::new(format!("Invalid cache mode `{name}'"))),
    }
}

fn options(arguments: &Arguments) -> Result<OpenOptions, Failure> {
    let discard = match arguments.discard.as_deref() {
        None => None,
        Some("ignore" | "off") => Some(false),
        Some("unmap" | "on") => Some(true),
        Some(mode) => return Err(Failure::new(format!("Invalid discard mode `{mode}'"))),
    };
    let detect_zeroes = match &arguments.detect_zeroes {
        None => None,
        Some(mode) => Some(detect_zeroes(mode)?),
    };
    if detect_zeroes == Some(zebu::block::DetectZeroes::Unmap) && discard != Some(true) {
        let text = "setting detect-zeroes to unmap is not allowed without setting discard \
                    operation to unmap";
        return Err(Failure::new(text));
    }
    let snapshot = arguments.load_snapshot.as_deref();
    Ok(OpenOptions {
        write: !arguments.read_only && snapshot.is_none(),
        cache: cache(arguments)?,
        discard,
        detect_zeroes,
        snapshot: snapshot.map(SnapshotName::from),
        ..OpenOptions::default()
    })
}

fn detect_zeroes(mode: &str) -> Result<zebu::block::DetectZeroes, Failure> {
    use zebu::block::DetectZeroes;
    match mode {
        "off" => Ok(DetectZeroes::Off),
        "on" => Ok(DetectZeroes::On),
        "unmap" => Ok(DetectZeroes::Unmap),
        _ => {
            let text = format!("Failed to parse detect_zeroes mode: Invalid parameter '{mode}'");
            Err(Failure::new(text))
        }
    }
}

/// Name of the export, and the image.
fn named(arguments: &Arguments) -> Result<Vec<(String, String)>, Failure> {
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
        match text.split_once('=') {
            Some((name, image)) => all.push((name.into(), image.into())),
            None => {
                let text = format!("--export expects NAME=IMAGE, not '{text}'");
                return Err(Failure::new(text));
            }
        }
    }
    let mut seen = HashSet::new();
    for (name, _) in &all {
        if name.len() > zebu::nbd::MAX_STRING {
            return Err(Failure::new(format!("export name '{name}' is too long")));
        }
        if !seen.insert(name) {
            return Err(Failure::new(format!("export name '{name}' is there twice")));
        }
    }
    Ok(all)
}

/// Opens them all. `program` is named in what is said of repairs.
pub fn open(
    queue: &Queue,
    arguments: &Arguments,
    shared: bool,
    program: &str,
) -> Result<Vec<Arc<Export>>, Failure> {
    if arguments.image_opts && arguments.format.is_some() {
        let text = "--image-opts and -f are mutually exclusive";
        return Err(Failure::new(text));
    }
    let long = |text: &&String| text.len() > zebu::nbd::MAX_STRING;
    if arguments.description.as_ref().filter(long).is_some() {
        return Err(Failure::new("export description is too long"));
    }
    let options = options(arguments)?;
    let mut exports = Vec::new();
    for (name, image) in named(arguments)? {
        let device = device(queue, arguments, &image, &options, program)?;
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
            shared,
        };
        exports.push(Export::new(device, options));
    }
    Ok(exports)
}

fn device(
    queue: &Queue,
    arguments: &Arguments,
    name: &str,
    options: &OpenOptions,
    program: &str,
) -> Result<Device, Failure> {
    let failure = |why: String| {
        Failure::new(format!(
            "Failed to blk_new_open '{name}': Could not open '{name}': {why}"
        ))
    };
    let mut options = options.clone();
    if let Some(format) = &arguments.format {
        let format = format.parse();
        options.format = Some(format.map_err(|e: zebu::Error| failure(e.to_string()))?);
    }
    let mut source = match arguments.image_opts {
        true => Source::Options(name.into()),
        false => Source::Name(name.into()),
    };
    if arguments.snapshot {
        let overlay = overlay(arguments, name, &options).map_err(failure)?;
        source = overlay.source();
        options.format = None;
        // The image has no name: its descriptor must stay open as long as the
        // device, which is as long as the process.
        std::mem::forget(overlay);
    }
    if options.snapshot.is_some() {
        return Device::open(queue, &source, &options)
            .map_err(|e| Failure::new(format!("Failed to load snapshot: {e}")));
    }
    open::repaired(queue, &source, &options, program).map_err(|e| failure(e.to_string()))
}

/// A temporary image over `name`.
fn overlay(arguments: &Arguments, name: &str, options: &OpenOptions) -> Result<Overlay, String> {
    let opening = Opening {
        name: (!arguments.image_opts).then(|| name.into()),
        options: arguments.image_opts.then(|| name.into()),
        format: arguments.format.clone(),
        cache: options.cache,
        ..Opening::default()
    };
    Overlay::new(&opening)
}
