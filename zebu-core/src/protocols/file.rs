//! Files and devices of this machine: `file`, `host_device`, `host_cdrom`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::{
    Driver, FileDriver, FileSpec, Given, Identity, Locking, Objects, Opened, OpenedFile, Protocol,
};
use crate::spelling::path::{after_protocol, in_folder_of, joined, protocol};
use crate::spelling::quote::json_string;
use crate::storage::named::NamedFile;
use crate::storage::{EngineKind, LockRequest, OpenFile, Storage, open_file};
use crate::{Error, Result, printable};

pub static DRIVER: Driver = Driver {
    names: &["file", "host_device", "host_cdrom"],
    parse,
    ..Driver::DEFAULT
};

/// The driver's name is empty where none is given.
fn parse(given: &mut Given<'_>) -> Result<FileSpec, String> {
    let driver = match given.driver {
        "file" => FileDriver::File,
        "host_device" => FileDriver::HostDevice,
        "host_cdrom" => FileDriver::HostCdrom,
        _ => FileDriver::Any,
    };
    let options = &mut given.options;
    let path = match (options.take_name("filename"), given.name) {
        (Some(_), Some(_)) => {
            return Err("Can't specify 'file' and 'filename' options at the same time".into());
        }
        (Some(path), None) => path,
        (None, Some(name)) => without_prefix(name, driver.name()),
        (None, None) if driver == FileDriver::Any => {
            return Err("Must specify either driver or file".into());
        }
        (None, None) => {
            let name = driver.name();
            return Err(format!("The '{name}' block driver requires a file name"));
        }
    };
    check_path(&path)?;
    let mut file = FileSpec::of(path, driver);
    file.options.aio = match options.take_text("aio") {
        None => None,
        Some(name) => match name.as_str() {
            "threads" => Some(EngineKind::Threads),
            "native" => Some(EngineKind::Native),
            "io_uring" => Some(EngineKind::IoUring),
            _ => return Err(format!("invalid parameter value: {name}")),
        },
    };
    file.options.locking = match options.take_text("locking").as_deref() {
        None | Some("auto") => Locking::Auto,
        Some("on") => Locking::On,
        Some("off") => Locking::Off,
        Some(other) => return Err(format!("invalid parameter value: {other}")),
    };
    if let Some(id) = options.take_text("pr-manager") {
        return Err(format!("No persistent reservation manager with id '{id}'"));
    }
    // Checked, without effect.
    options.take_bool("drop-cache")?;
    options.take_number("aio-max-batch")?;
    options.take_bool("x-check-cache-dropped")?;
    Ok(file)
}

/// Refuses an empty path, and one with a zero byte.
fn check_path(path: &OsStr) -> Result<(), String> {
    if path.is_empty() {
        return Err("The 'file' block driver requires a file name".into());
    }
    if path.as_bytes().contains(&0) {
        return Err("The file name has a zero byte in it".into());
    }
    Ok(())
}

/// A file's name without the driver that it may begin with.
fn without_prefix(name: &OsStr, driver: &str) -> OsString {
    let Some(path) = after_protocol(name, driver) else {
        return name.into();
    };
    match protocol(path) {
        // So that the shown name does not begin with a protocol.
        Some(_) if driver == "file" => joined(OsStr::new("./"), path),
        _ => path.into(),
    }
}

/// A file or a device, by the name of its driver.
pub struct Local(pub &'static str);

impl Local {
    /// Whether only a device is meant.
    fn needs_device(&self) -> bool {
        self.0 != "file"
    }
}

impl Protocol for Local {
    fn name(&self) -> &'static str {
        self.0
    }

    fn json(&self, file: &FileSpec) -> String {
        let driver = match file.driver {
            // Devices named without a driver show as such.
            FileDriver::Any if is_device(&file.path) => "host_device",
            _ => self.0,
        };
        let name = json_string(file.name().as_bytes());
        format!("{{\"driver\": \"{driver}\", \"filename\": {name}}}")
    }

    fn is_local(&self) -> bool {
        true
    }

    fn must_exist(&self) -> bool {
        self.needs_device()
    }

    fn beside(&self, own: &FileSpec, path: &OsStr) -> Option<Result<FileSpec>> {
        Some(Ok(FileSpec::new(in_folder_of(own.name(), path))))
    }

    fn open(&self, spec: &FileSpec, how: OpenFile, _objects: &Objects) -> Result<OpenedFile> {
        // No device is made where there is none.
        let how = how.create(how.create && !self.needs_device());
        let file = open_file(&spec.path, how).map_err(|e| could_not_open(e, spec))?;
        if self.needs_device() && !file.is_device() {
            return Err(Error::Refused(format!(
                "'{}' driver requires '{}' to be either a character or block device",
                self.0,
                printable(spec.name().as_bytes())
            )));
        }
        let identity = file.named_file().map(NamedFile::identity).transpose()?;
        Ok(OpenedFile {
            own: Arc::new(LocalFile(file.clone())),
            identity: identity.map(|(device, inode)| Identity::Local(device, inode)),
            ..OpenedFile::new(file)
        })
    }
}

fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path)
        .is_ok_and(|m| m.file_type().is_block_device() || m.file_type().is_char_device())
}

/// The error of the operating system, with the name of the file.
fn could_not_open(error: io::Error, spec: &FileSpec) -> Error {
    match error.raw_os_error() {
        Some(_) => Error::Open {
            file: spec.name().into(),
            source: Box::new(Error::Io(error)),
        },
        None => Error::Io(error),
    }
}

/// An open file of this machine, or of a simulated one.
#[derive(Debug)]
struct LocalFile(Arc<dyn Storage>);

impl Opened for LocalFile {
    fn is_at_its_path(&self) -> bool {
        self.0.named_file().is_none_or(NamedFile::is_at_its_path)
    }

    fn is_emptied(&self) -> bool {
        !self.0.is_device()
    }

    fn remove(&self) -> io::Result<()> {
        self.0.named_file().map_or(Ok(()), NamedFile::remove)
    }

    fn lock(&self, request: LockRequest) -> Result<()> {
        self.0
            .named_file()
            .map_or(Ok(()), |file| file.lock(request))
    }
}
