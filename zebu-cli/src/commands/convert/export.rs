//! Targets that are written in order: standard output, pipes, sockets, objects in stores.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use zebu::block::{Device, Format};
#[cfg(feature = "object-store")]
use zebu::block::{FileSpec, StoreSpec};
use zebu::jobs::{self, ConvertError, ConvertOptions, ExportFormat, StreamSink};
#[cfg(feature = "object-store")]
use zebu::storage::{ObjectState, Upload};

use super::{Arguments, Sources, ended, events};
use crate::arguments::create_options::CreateOptions;
#[cfg(feature = "object-store")]
use crate::arguments::file_name;
use crate::arguments::target_cache;
use crate::images::new_image::{export_format, parse_format, plan_to_fill};
use crate::images::{appliance, open, same_file, streams};
use crate::output::{Progress, Shown};
#[cfg(feature = "object-store")]
use crate::program::signals;
use crate::program::{Context, Failure, Outcome};
/// A target that is written in order.
pub enum Output {
    /// Standard output, a pipe, a socket.
    Pipe(File),
    /// An object in a store.
    #[cfg(feature = "object-store")]
    Object(FileSpec, Box<StoreSpec>),
}

/// An output that is being written.
pub enum Begun {
    /// As [`Output::Pipe`].
    Pipe,
    /// As [`Output::Object`].
    #[cfg(feature = "object-store")]
    Object(Upload),
}

/// What is written in order, if the target is.
pub fn open(arguments: &Arguments) -> Result<Option<Output>, Failure> {
    let name = match arguments.names.last() {
        Some(name) if !arguments.target_image_opts => name,
        _ => return Ok(None),
    };
    let Some(output) = Output::open(name)? else {
        return Ok(None);
    };
    let what = output.what();
    let refused = [
        (arguments.no_create, "-n"),
        (arguments.backing.is_some(), "-B"),
        (arguments.backing_format.is_some(), "-F"),
        (arguments.bitmaps, "--bitmaps"),
        (arguments.copy_range, "-C"),
    ];
    if let Some((_, option)) = refused.iter().find(|(given, _)| *given) {
        let why = format!("{option} makes no sense for a target that is {what}");
        return Err(Failure::new(why));
    }
    // Before anything is read.
    format(arguments, what, None)?;
    Ok(Some(output))
}

impl Output {
    fn open(name: &OsStr) -> Result<Option<Output>, Failure> {
        #[cfg(feature = "object-store")]
        if let Ok(file) = file_name::file_of(name)
            && let Some(store) = file.driver.get::<StoreSpec>()
        {
            let store = Box::new(store.clone());
            return Ok(Some(Output::Object(file, store)));
        }
        let output = streams::output(name).map_err(|e| open::failure(name, &e))?;
        let Some(output) = output else {
            return Ok(None);
        };
        if output.is_terminal() {
            return Err(Failure::new("An image is not written to a terminal"));
        }
        streams::widen(&output);
        Ok(Some(Output::Pipe(output)))
    }

    /// What it is, for messages.
    fn what(&self) -> &'static str {
        match self {
            Output::Pipe(_) => "a stream",
            #[cfg(feature = "object-store")]
            Output::Object(..) => "an object in a store",
        }
    }

    /// The open file, if it is one.
    pub fn file(&self) -> Option<&File> {
        match self {
            Output::Pipe(file) => Some(file),
            #[cfg(feature = "object-store")]
            Output::Object(..) => None,
        }
    }

    /// How progress is shown beside it.
    pub fn progress(&self, shows: bool) -> Progress {
        match self {
            Output::Pipe(_) => Progress::beside_data(shows),
            #[cfg(feature = "object-store")]
            Output::Object(..) => Progress::begun(shows),
        }
    }

    /// Begins to write it, unless one of the sources is read from it.
    pub fn begin(
        self,
        arguments: &Arguments,
        sources: &[Device],
    ) -> Result<(Box<dyn StreamSink>, Begun), Failure> {
        match self {
            Output::Pipe(file) => {
                let path = streams::name_of(&file);
                let appliance = arguments.appliance();
                let is_read = same_file::reads_file(sources, &path)
                    || appliance.is_some_and(|name| appliance::has_file(name, &path));
                if is_read {
                    return Err(read_from(arguments.target()));
                }
                if streams::has_content_behind(&file)? {
                    let name = arguments.target().shown();
                    let why = "This is an open file that has content, of which a part would stay behind the image";
                    return Err(Failure::new(format!("{name}: {why}")).with_next(
                        "'>' empties a file, '>>' writes at its end, and its own name replaces it",
                    ));
                }
                let is_durable = match &arguments.target_cache {
                    Some(cache) => !target_cache(Some(cache))?.ignores_flushes(),
                    None => true,
                };
                Ok((Box::new(Sink { file, is_durable }), Begun::Pipe))
            }
            #[cfg(feature = "object-store")]
            Output::Object(file, store) => {
                let name = file.name();
                if same_file::reads(sources, &file) {
                    return Err(read_from(name));
                }
                let upload = store.upload(|| signals::stop_signal().is_some());
                let upload = upload.map_err(|e| {
                    let name = name.shown();
                    crate::output::progress::interrupted(&format!(
                        "nothing was written to '{name}'"
                    ))
                    .unwrap_or_else(|| Failure::new(format!("Could not write '{name}': {e}")))
                })?;
                Ok((Box::new(upload.clone()), Begun::Object(upload)))
            }
        }
    }
}

/// What takes the bytes of a stream. A file or a block device has them durably at the end, as it would
/// by its own name.
struct Sink {
    file: File,
    is_durable: bool,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    /// Called once, at the end.
    fn flush(&mut self) -> io::Result<()> {
        match self.is_durable {
            true => streams::make_durable(&self.file),
            false => Ok(()),
        }
    }
}

/// The failure for an output that is also a source.
pub fn read_from(name: &OsStr) -> Failure {
    Failure::new(format!("{}: {}", name.shown(), same_file::READ_FROM))
}

impl Begun {
    /// Ends what has failed. Returns the state that the target of this name is left in.
    pub fn give_up(self, name: &OsStr) -> String {
        let name = name.shown();
        match self {
            Begun::Pipe => format!("'{name}' is incomplete"),
            #[cfg(feature = "object-store")]
            Begun::Object(upload) => match upload.abort() {
                Ok(ObjectState::Unknown) => format!(
                    "it is not known whether the upload of '{name}' was completed: look at the \
                     object in the store"
                ),
                Ok(_) => format!("the upload of '{name}' was aborted"),
                Err(e) => {
                    let why = zebu::strerror(&e);
                    format!("the upload could not be aborted, so that its parts are left: {why}")
                }
            },
        }
    }
}

/// What is written, of a disk of `size` bytes, if that is known.
fn format(arguments: &Arguments, target: &str, size: Option<u64>) -> Result<ExportFormat, Failure> {
    let name = arguments.target_format();
    let format = parse_format(name).map_err(Failure::new)?;
    let create = CreateOptions::parse(format, &arguments.options).map_err(Failure::new)?;
    let subformat = create.get("subformat");
    if format.name() == "vmdk" {
        return match subformat {
            Some("streamOptimized") => {
                if let Some(size) = size {
                    plan_to_fill(format, Path::new(""), size, &create)
                        .map_err(|e| Failure::new(e.to_string()))?;
                }
                Ok(ExportFormat::Vmdk(create.values(format)))
            }
            _ => Err(Failure::new(format!(
                "A VMDK that is written to {target} needs -o subformat=streamOptimized"
            ))),
        };
    }
    if ![Format::RAW, Format::QCOW2].contains(&format) {
        return Err(Failure::new(format!(
            "An image of format '{name}' cannot be written to {target}"
        )));
    }
    let form = export_format(format, &create, arguments.sparse.is_some());
    match form.map_err(|e| Failure::new(e.to_string()))? {
        ExportFormat::Raw if arguments.compress => {
            Err(Failure::new(ConvertError::NotCompressible.to_string()))
        }
        form => Ok(form),
    }
}

/// Converts images to an output.
pub fn convert(
    context: &Context,
    arguments: &Arguments,
    sources: Sources,
    output: Output,
    options: &ConvertOptions,
    progress: &mut Progress,
) -> Outcome {
    let Sources { devices, unchanged } = sources;
    let mut sizes = devices.iter().map(Device::size);
    let size = sizes.try_fold(0, u64::checked_add);
    let format = format(arguments, output.what(), size)?;
    let (sink, begun) = output.begin(arguments, &devices)?;
    let events = events(context, arguments, progress);
    let result = jobs::convert_to_stream(devices, sink, &format, options, events);
    let outcome = ended(result.map(drop), || begun.give_up(arguments.target()))?;
    let mixed = |why: zebu::Error| {
        let name = arguments.target().shown();
        Failure::new(format!("{why}; '{name}' may be a mixture"))
    };
    unchanged.check().map_err(mixed)?;
    Ok(outcome)
}
