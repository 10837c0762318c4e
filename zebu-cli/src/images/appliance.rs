//! Disks of virtual appliances (OVA and OVF).

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use zebu::block::{Device, OpenOptions, Policy};
use zebu::names::{Source, protocol};
use zebu::storage::Queue;
use zebu_ova::{Appliance, Disk, Stored};

use crate::arguments::file_name::as_value;
use crate::arguments::{NameOptions, OutputFormat, size};
use crate::images::{open, same_file};
use crate::output::json::{self, Map, Value};
use crate::output::printed::Shown;
use crate::output::{self, printable};
use crate::program::{Context, Failure, Outcome};

/// Whether a name is the path of an appliance, if its format is not given.
pub fn is_named_so(name: &OsStr, options: &NameOptions) -> bool {
    let ending = Path::new(name).extension().unwrap_or_default();
    let is_ending = |other| ending.eq_ignore_ascii_case(other);
    let is_path = options.format.is_none() && !options.image_opts && protocol(name).is_none();
    is_path && ["ova", "ovf"].into_iter().any(is_ending)
}

fn read(context: &Context, name: &OsStr) -> Result<Appliance, Failure> {
    if protocol(name).is_some() && !name.as_bytes().starts_with(b"file:") {
        let text = format!("'{}': an appliance is read from a file", name.shown());
        return Err(Failure::new(text).with_next("download it, and name the file"));
    }
    // In strict mode a descriptor opens no files.
    let appliance = Appliance::open(Path::new(name), !context.is_untrusted());
    let appliance = appliance.map_err(|e| failure(name, &e))?;
    for warning in &appliance.warnings {
        // An error of standard error cannot be reported.
        let name = printable(name.as_bytes());
        let _ = writeln!(
            std::io::stderr(),
            "WARNING: '{name}': {}",
            printable(warning.as_bytes())
        );
    }
    Ok(appliance)
}

/// Whether a file is the descriptor or the manifest of an appliance, or the archive that it is.
pub fn has_file(name: &OsStr, path: &Path) -> bool {
    own_files(name).any(|own| same_file::is_same(&own, path))
}

/// The names of these files, as far as there are such. Each manifest of the directory may be its own.
pub fn own_files(name: &OsStr) -> impl Iterator<Item = PathBuf> {
    let name = Path::new(name);
    let folder = name
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let beside = fs::read_dir(folder.unwrap_or(Path::new(".")))
        .into_iter()
        .flatten();
    let beside = beside.flatten().map(|entry| entry.path());
    let manifests = beside.filter(|path| {
        let ending = path.extension();
        ending.is_some_and(|ending| ending.eq_ignore_ascii_case("mf"))
    });
    [
        name.into(),
        name.with_extension("mf"),
        name.with_extension("MF"),
    ]
    .into_iter()
    .chain(manifests)
}

fn failure(name: &OsStr, error: &zebu_ova::Error) -> Failure {
    Failure::new(format!(
        "Could not open '{}': {error}",
        printable(name.as_bytes())
    ))
}

/// Opens the disk with this number, from 1, after its checksum was verified. It opens no other
/// files.
pub fn open_disk(
    context: &Context,
    queue: &Queue,
    name: &OsStr,
    number: usize,
    mut options: OpenOptions,
) -> Result<Device, Failure> {
    let appliance = read(context, name)?;
    let wrong = |why: String| {
        Failure::new(format!(
            "Could not open '{}': {why}",
            printable(name.as_bytes())
        ))
    };
    let disk = number
        .checked_sub(1)
        .and_then(|nth| appliance.disks.get(nth));
    let disk = disk.ok_or_else(|| {
        let count = appliance.disks.len();
        wrong(format!(
            "There is no disk {number}; the appliance has {count}"
        ))
    })?;
    if let Some(why) = &disk.missing {
        return Err(wrong(format!("Disk {number} cannot be read: {why}")));
    }
    let stored = disk.stored.as_ref();
    let stored = stored.ok_or_else(|| wrong(format!("Disk {number} is empty: it has no file")))?;
    if let Some(why) = stored.packed {
        return Err(wrong(format!("Disk {number} cannot be read: {why}")));
    }
    let format = options.format.take().map(|format| format.name());
    let format = format.or(disk.format).ok_or_else(|| {
        wrong(format!(
            "The format of disk {number} is not known; -f gives it"
        ))
    })?;
    let verified = stored.verify(&mut |_| ControlFlow::Continue(()));
    verified.map_err(|e| failure(name, &e))?;
    if options.policy == Policy::Follow {
        options.policy = Policy::Nothing;
    }
    let device = open::repaired(context, queue, &source(stored, format), &options);
    device.map_err(|e| open::failure(name, &e))
}

/// The image in its file, read in place.
fn source(stored: &Stored, format: &str) -> Source {
    let mut text = OsString::from(format!(
        "driver={format},file.driver=raw,file.offset={},file.size={},file.file.driver=file,\
         file.file.filename=",
        stored.offset, stored.length
    ));
    text.push(as_value(stored.path.as_os_str()));
    Source::Options(text)
}

/// Prints the disks of an appliance.
pub fn report(context: &Context, name: &OsStr, format: OutputFormat) -> Outcome {
    let appliance = read(context, name)?;
    output::report(&match format {
        OutputFormat::Human => text(name, &appliance),
        OutputFormat::Json => json::pretty(&value(name, &appliance)),
    })
}

fn text(name: &OsStr, appliance: &Appliance) -> String {
    let mut text = format!("appliance: {}\n", printable(name.as_bytes()));
    if let Some(name) = &appliance.name {
        text += &format!("name: {}\n", printable(name.as_bytes()));
    }
    let in_bytes = |bytes| format!("{} ({bytes} bytes)", size::human(bytes));
    for (disk, number) in appliance.disks.iter().zip(1..) {
        let Disk {
            capacity, stored, ..
        } = disk;
        let none = match disk.missing {
            Some(_) => "(missing)",
            None => "(empty)",
        };
        let file = stored
            .as_ref()
            .map_or(none.into(), |s| printable(s.name.as_bytes()));
        text += &format!("disk {number}: {file}\n");
        if let Some(capacity) = capacity {
            text += &format!("    virtual size: {}\n", in_bytes(*capacity));
        }
        if let Some(why) = &disk.missing {
            text += &format!("    cannot be read: {}\n", printable(why.as_bytes()));
        }
        let Some(stored) = stored else { continue };
        text += &format!("    file format: {}\n", disk.format.unwrap_or("unknown"));
        text += &format!("    file length: {}\n", in_bytes(stored.length));
        if let Some(why) = stored.packed {
            text += &format!("    cannot be read: {why}\n");
        }
        let checksum = stored
            .algorithm()
            .map_or("none", |algorithm| algorithm.name());
        text += &format!("    checksum: {checksum}\n");
    }
    text
}

fn value(name: &OsStr, appliance: &Appliance) -> Value {
    let mut map = Map::new().with("filename", name);
    if let Some(name) = &appliance.name {
        map.add("name", &**name);
    }
    let disks = appliance.disks.iter().zip(1u64..).map(|(disk, number)| {
        let mut map = Map::new().with("number", number).with("id", &*disk.id);
        if let Some(capacity) = disk.capacity {
            map.add("virtual-size", capacity);
        }
        if let Some(format) = disk.format {
            map.add("format", format);
        }
        if let Some(why) = &disk.missing {
            map.add("missing", &**why);
        }
        if let Some(stored) = &disk.stored {
            map.add("file", &*stored.name);
            map.add("file-offset", stored.offset);
            map.add("file-length", stored.length);
            map.add("can-be-read", stored.packed.is_none());
            if let Some(algorithm) = stored.algorithm() {
                map.add("checksum", algorithm.name());
            }
        }
        map
    });
    map.with("disks", disks.collect::<Vec<_>>()).into()
}
