//! `ova`: an appliance of disks, each as a streamOptimized VMDK.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use clap::{CommandFactory, Parser};
use zebu::block::{Device, FileSpec, Format};
use zebu::internal::new_image::NewFile;
use zebu::jobs::{
    self, CompressOptions, ConvertEvent, ConvertOptions, CreateValue, CreateValues, ImagePlan,
    PlanRequest, Unchanged,
};
use zebu::storage::{CacheMode, LockRequest, Queue, Storage, Window};
use zebu_ova::{NewAppliance, NewDisk};

use super::command::Command;
use crate::arguments::file_name::file_of;
use crate::arguments::{SourceOptions, objects};
use crate::images::named::Named;
use crate::images::same_file::{self, Fate};
use crate::images::{open, streams};
use crate::output::progress::interrupted;
use crate::output::{Progress, Shown};
use crate::program::{Context, Failure, Outcome};

pub const COMMAND: Command = Command {
    name: "ova",
    operands: "<DISK>... --output <FILE>",
    summary: "Make an appliance (OVA) of disks",
    options: Arguments::command,
    run,
    examples: "
        # For a hypervisor that imports appliances
        zebu ova --output machine.ova disk.qcow2
        # Convert it back
        zebu convert machine.ova --disk 1 -O qcow2 again.qcow2",
    ..Command::PLAIN
};

/// Make an appliance (OVA) of disks
#[derive(Parser)]
pub struct Arguments {
    #[command(flatten)]
    source: SourceOptions,
    /// The new appliance
    #[arg(long, value_name = "FILE")]
    output: Option<OsString>,
    /// Name of the virtual machine (default: that of the file without its ending)
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Virtual CPUs of the virtual machine
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..))]
    cpus: u32,
    /// Memory of the virtual machine in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u64).range(1..))]
    memory: u64,
    /// Compression level of zlib, 1 to 9
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(i32).range(1..=9))]
    level: Option<i32>,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// The disks
    #[arg(value_name = "DISK")]
    disks: Vec<OsString>,
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let Some(output) = &arguments.output else {
        return Err(Failure::new("Expecting the new appliance (--output)").with_hint());
    };
    if arguments.disks.is_empty() {
        return Err(Failure::new("Expecting at least one disk").with_hint());
    }
    let stem = Path::new(output).file_stem().and_then(OsStr::to_str);
    let Some(name) = arguments.name.as_deref().or(stem) else {
        return Err(Failure::new("The appliance needs a name (--name)"));
    };
    let queue = open::queue()?;
    let sources = arguments.disks.iter().map(|disk| {
        open::device(
            context,
            &queue,
            disk,
            &arguments.source,
            CacheMode::WriteBack,
        )
    });
    let sources = sources.collect::<Result<Vec<_>, _>>()?;
    let unchanged = Unchanged::of(&sources);
    let disks: Vec<_> = sources
        .iter()
        .map(|source| NewDisk {
            capacity: source.size(),
        })
        .collect();
    let failure = |why: String| Failure::new(format!("{}: {why}", output.shown()));
    for (source, disk) in sources.iter().zip(&arguments.disks) {
        let planned = plan("disk".as_ref(), source.size());
        planned.map_err(|e| failure(format!("'{}': {e}", disk.shown())))?;
    }
    let file = OutputFile::open(context, output, &sources)?;
    let new = NewAppliance::begin(
        file.new.storage().path(),
        file.bytes,
        name,
        &disks,
        arguments.cpus,
        arguments.memory,
    );
    let new = new.map_err(|e| {
        file.new.remove_if_new();
        failure(e.to_string())
    })?;
    let mut job = Job {
        queue: &queue,
        storage: file.new.storage().clone(),
        level: arguments.level,
        progress: Progress::new(arguments.progress, sources.iter().map(Device::size).sum()),
        done: 0,
    };
    let named = Named::from(vec![file.new.storage().clone()]);
    let disks: Vec<[&Device; 1]> = sources.iter().map(|device| [device]).collect();
    let disks: Vec<&[&Device]> = disks.iter().map(|disk| &disk[..]).collect();
    job.progress.weigh(context, &queue, &disks);
    let result = job
        .fill(new, sources)
        .and_then(|()| unchanged.check().map_err(|why| why.to_string()));
    job.progress.finish(result.is_ok());
    let state = format!("'{}' is incomplete", output.shown());
    match result {
        Ok(()) => named.check().map(|()| 0),
        Err(why) => Err(interrupted(&state).unwrap_or_else(|| failure(format!("{why}; {state}")))),
    }
}

/// The file of the appliance, as the library and as the archive need it.
struct OutputFile {
    new: NewFile,
    bytes: File,
}

impl OutputFile {
    /// Opens a regular file, or creates it. What it held is there until the appliance begins.
    fn open(context: &Context, name: &OsStr, sources: &[Device]) -> Result<Self, Failure> {
        let failure = |why: String| Failure::new(format!("{}: {why}", name.shown()));
        const NOT_REGULAR: &str = "An appliance is a regular file";
        if name == streams::STANDARD {
            return Err(failure(format!("{NOT_REGULAR}; './-' is one of that name")));
        }
        let spec: FileSpec = file_of(name).map_err(failure)?;
        if !same_file::is_local(&spec) {
            return Err(failure(NOT_REGULAR.into()));
        }
        if let Some(why) = same_file::refused_new(context, sources, &spec) {
            return Err(failure(why.into()));
        }
        let (lock, caches) = (LockRequest::CREATE, [CacheMode::WriteBack]);
        let new = NewFile::open(&spec, lock, &caches, &objects::all(context));
        let new = new.map_err(|e| failure(e.to_string()))?;
        let storage = new.storage();
        if let Some(why) =
            same_file::refused_open(sources, std::slice::from_ref(storage), Fate::Replaced)
        {
            new.remove_if_new();
            return Err(failure(why.into()));
        }
        let Some(file) = storage.host_file().filter(|_| !storage.is_device()) else {
            return Err(failure(NOT_REGULAR.into()));
        };
        // The same open file: another one may have the name by now.
        let bytes = file.as_fd().try_clone_to_owned();
        let bytes = bytes.map_err(|e| failure(zebu::strerror(&e).to_string()))?;
        Ok(OutputFile {
            new,
            bytes: bytes.into(),
        })
    }
}

/// The image of a disk of `size` bytes.
fn plan(name: &Path, size: u64) -> zebu::Result<Box<dyn ImagePlan>> {
    let text = |value: &str| CreateValue::Text(value.into());
    let values = CreateValues::default()
        .with("subformat", text("streamOptimized"))
        .with("adapter_type", text("lsilogic"));
    let vmdk: Format = "vmdk".parse().expect("a format");
    let plan = vmdk.plan(&PlanRequest {
        path: name,
        size,
        options: &values,
        backing_id: None,
    })?;
    plan.check_opens()?;
    Ok(plan)
}

struct Job<'a> {
    queue: &'a Queue,
    storage: Arc<dyn Storage>,
    level: Option<i32>,
    progress: Progress,
    /// Bytes of the disks that are done.
    done: u64,
}

impl Job<'_> {
    /// Converts the disks into the appliance and finishes it.
    fn fill(&mut self, mut new: NewAppliance<'_>, sources: Vec<Device>) -> Result<(), String> {
        for source in sources {
            let size = source.size();
            self.convert(&new, source)?;
            let done = self.done + size;
            let added = new.add(&mut |_| self.progress.set(done));
            added.map_err(|e| e.to_string())?;
            self.done = done;
        }
        new.finish().map_err(|e| e.to_string())
    }

    fn convert(&mut self, new: &NewAppliance<'_>, source: Device) -> Result<(), String> {
        let plan = plan(new.disk_name().as_ref(), source.size()).map_err(|e| e.to_string())?;
        let place = Window::new(self.storage.clone(), new.offset(), None);
        let target = jobs::begin_image(self.queue, &*plan, vec![Arc::new(place)]);
        let target = target.map_err(|e| e.to_string())?;
        let level = CompressOptions::default().level(self.level);
        let options = ConvertOptions::default().compress(Some(level));
        let (done, progress) = (self.done, &mut self.progress);
        let converted = jobs::convert(vec![source], target, &options, |event| match event {
            ConvertEvent::Progress(now) => progress.set(done + now.done),
            ConvertEvent::Unreadable { .. } => std::ops::ControlFlow::Continue(()),
        });
        converted.map_err(|e| e.to_string())
    }
}
