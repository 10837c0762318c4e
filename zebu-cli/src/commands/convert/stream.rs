//! Sources that are streams: standard input, pipes, sockets.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::str::FromStr;

use zebu::block::{Device, Format};
use zebu::jobs::{self, ConvertEvent, ConvertOptions, ImageStream, Spill, StreamOptions, Target};
use zebu::storage::{CacheMode, Queue, Storage};

use super::export::{self, Begun, Output};
use super::{Arguments, ended, target};
use crate::arguments::create_options::CreateOptions;
use crate::arguments::file_name::file_of;
use crate::arguments::{size, untrusted};
use crate::images::named::Named;
use crate::images::streams::{self, Input};
use crate::images::{open, same_file};
use crate::output::progress::incomplete;
use crate::output::{Progress, Shown};
use crate::program::{Context, Failure, Outcome};

/// Bytes that are kept of a stream by default, with `--spill`.
const SPILL: u64 = 64 << 30;

/// What the sources are.
pub enum Opened {
    /// Files; of a stream that is kept, its file.
    Files(Option<File>),
    /// A stream that is converted as it comes.
    Stream(Box<Source>),
}

/// A stream and its backing file.
pub struct Source {
    stream: ImageStream,
    /// None or one.
    backing: Vec<Device>,
}

/// Opens the only source if it is a stream. `names` are those of the files that are read otherwise.
pub fn open(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    names: &mut [OsString],
    output: Option<&Output>,
) -> Result<Opened, Failure> {
    if arguments.source.name.image_opts {
        return Ok(Opened::Files(None));
    }
    let is_alone = names.len() == 1;
    let mut stream = None;
    for name in names.iter_mut() {
        let input = streams::input(name).map_err(|e| open::failure(name, &e))?;
        match input {
            Input::File(file) => *name = file,
            Input::Stream(file) if is_alone => stream = Some(file),
            Input::Stream(_) => {
                let name = name.shown();
                let why = format!("'{name}' is a stream, which must be the only source");
                return Err(Failure::new(why));
            }
        }
    }
    let Some(file) = stream else {
        return Ok(Opened::Files(None));
    };
    // What precedes in a file was read already.
    let target = match output {
        Some(output) => output.file().map(streams::name_of),
        None => file_of(arguments.target()).ok().map(|file| file.path),
    };
    if target.is_some_and(|target| same_file::is_same(&streams::name_of(&file), &target)) {
        return Err(export::read_from(arguments.target()));
    }
    streams::widen(&file);
    let name = &mut names[0];
    let options = open::options(context, name, &arguments.source, CacheMode::WriteBack)?;
    let failure = |e| open::failure(name, &e);
    let bytes = Box::new(file);
    let stream = ImageStream::open(queue, bytes, options.format, &untrusted::policy(context));
    let stream = stream.map_err(failure)?;
    let Some(why) = needs_file(arguments, &stream, output.is_some()) else {
        let backing = stream.open_backing(queue, &options.clone().format(None));
        return Ok(Opened::Stream(Box::new(Source {
            backing: backing.map_err(failure)?.into_iter().collect(),
            stream,
        })));
    };
    let Some(kept) = spill_file(arguments)? else {
        return Err(Failure::new(format!(
            "{why}; --spill DIR keeps the stream in a temporary file there"
        )));
    };
    let most = spill_size(arguments)?;
    stream.keep(&kept, most).map_err(|e| failure(e.into()))?;
    *name = format!("/proc/self/fd/{}", kept.as_raw_fd()).into();
    Ok(Opened::Files(Some(kept)))
}

/// The temporary file of `--spill`, which has no name; None: it was not given.
pub fn spill_file(arguments: &Arguments) -> Result<Option<File>, Failure> {
    let Some(folder) = &arguments.spill else {
        return Ok(None);
    };
    tempfile::tempfile_in(folder).map(Some).map_err(|e| {
        let (folder, why) = (folder.shown(), zebu::strerror(&e));
        Failure::new(format!("Could not create a file in '{folder}': {why}"))
    })
}

/// Bytes of that file at most.
pub fn spill_size(arguments: &Arguments) -> Result<u64, Failure> {
    match &arguments.spill_size {
        None => Ok(SPILL),
        Some(text) => size::parse_option("spill size", text),
    }
}

/// Why the stream must be kept as a file before it is converted; None: it need not.
pub fn needs_file(arguments: &Arguments, stream: &ImageStream, to_stream: bool) -> Option<String> {
    let options = [
        (arguments.snapshot.is_some(), "-l"),
        (arguments.disk.is_some(), "--disk"),
        (arguments.bitmaps, "--bitmaps"),
        (arguments.backing.is_some(), "-B"),
        (arguments.salvage, "--salvage"),
        (arguments.copy_range, "-C"),
    ];
    if let Some((_, option)) = options.iter().find(|(given, _)| *given) {
        return Some(format!("{option} needs a source that is no stream"));
    }
    let is_raw = stream.format() == Format::RAW && arguments.target_format() == "raw";
    if to_stream && (!is_raw || arguments.compress) {
        return Some(
            "Only a raw image can be converted from a stream to a stream as it comes".into(),
        );
    }
    stream.needs_file().or_else(|| {
        let format = Format::from_str(arguments.target_format()).ok()?;
        let create = CreateOptions::parse(format, &arguments.options).ok()?;
        let is_mapped = ["data_file", "preallocation", "backing_file"]
            .iter()
            .any(|option| create.value(option).is_some_and(|value| value != "off"));
        if stream.size().is_none() {
            let is_open = [Format::RAW, Format::QCOW2].contains(&format) && !is_mapped;
            if !is_open && !arguments.no_create {
                return Some(
                    "The size of the disk, which the target needs first, is known only at the end \
                     of the stream"
                        .into(),
                );
            }
        }
        if create.value("backing_file").is_some() {
            return Some("A target with a backing file needs a source that is no stream".into());
        }
        let is_packed = create.get("subformat") == Some("streamOptimized");
        let cluster = create.size("cluster_size").unwrap_or(65536);
        let (unit, is_packed) = (stream.unit(), is_packed || arguments.compress);
        (is_packed && unit > 1 && !unit.is_multiple_of(cluster)).then(|| {
            format!(
                "Compressed clusters need parts of {cluster} bytes, but the stream may have the \
                 disk in parts of {unit} bytes"
            )
        })
    })
}

/// Converts a stream to a file, or to `output`.
pub fn convert(
    context: &Context,
    queue: &Queue,
    arguments: &Arguments,
    source: Source,
    output: Option<Output>,
    mut options: ConvertOptions,
    progress: &mut Progress,
) -> Outcome {
    let (Source { stream, backing }, name) = (source, arguments.target());
    let size = stream.size();
    progress.job(size.unwrap_or(0));
    let spill = spill(arguments)?;
    let mut new = None;
    let mut named = None;
    let (target, begun) = match output {
        Some(output) => {
            let (sink, begun) = output.begin(arguments, &backing)?;
            (Target::raw_stream(sink), begun)
        }
        None => {
            let content = target::Content::stream(size, &backing);
            let opened = target::open(context, queue, arguments, name, &content, &mut options)?;
            named = Some(Named::of(&opened.target, opened.files.as_ref()));
            new = opened.files;
            (Ok(opened.target), Begun::Pipe)
        }
    };
    let target = target.map_err(|e| Failure::new(e.to_string()))?;
    let stream_options = stream_options(arguments, &target, size)?
        .backing(backing.into_iter().next())
        .spill(spill);
    let result = jobs::convert_stream(
        stream,
        target,
        stream_options,
        &options,
        |event| match event {
            ConvertEvent::Progress(now) => progress.set(now.done),
            ConvertEvent::Unreadable { .. } => std::ops::ControlFlow::Continue(()),
        },
    );
    let outcome = ended(result, || match &new {
        Some(new) => incomplete(queue, name, Some(new)),
        None => begun.give_up(name),
    })?;
    named.map_or(Ok(()), |named| named.check())?;
    Ok(outcome)
}

/// Where a stream is held, with `--spill`.
pub fn spill(arguments: &Arguments) -> Result<Option<Spill>, Failure> {
    Ok(match spill_file(arguments)? {
        Some(file) => Some(Spill::new(file, spill_size(arguments)?)),
        None => None,
    })
}

/// How a stream, whose disk has `size` bytes if that is known, is converted to this target.
pub fn stream_options(
    arguments: &Arguments,
    target: &Target,
    size: Option<u64>,
) -> Result<StreamOptions, Failure> {
    let (most, resize) = match (target, size) {
        (_, Some(_)) => (u64::MAX, false),
        (Target::Raw(storage), None) if arguments.no_create || storage.is_device() => {
            (storage_len(&**storage)?, false)
        }
        (Target::Image(device), None) => (device.size(), !arguments.no_create),
        (_, None) => (u64::MAX, true),
    };
    Ok(StreamOptions::default().most(most).resize(resize))
}

fn storage_len(storage: &dyn Storage) -> Result<u64, Failure> {
    let length = storage.len();
    length.map_err(|e| Failure::new(zebu::strerror(&e).to_string()))
}
