//! Where the bytes of an image are: a file of this machine, an export, or
//! another image.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::path::PathBuf;

use super::drivers::unknown_driver;
use super::name::{beside, check_path, protocol, without_prefix};
use super::options::{Options, Scalar};
use super::{
    BlkdebugSpec, CommonOptions, FileDriver, ImageSpec, MAX_DEPTH, Naming, NullSpec, no_such_node,
    refuse_rest, refused,
};
#[cfg(feature = "nbd")]
use super::{NbdSpec, nbd};
use crate::Result;
use crate::storage::EngineKind;

/// A file to open.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSpec {
    /// Its path; of an export, the URI that QEMU shows; of what has a file below,
    /// that file's.
    pub path: PathBuf,
    /// What it is.
    pub driver: FileDriver,
    /// How to open it.
    pub options: FileOptions,
}

/// Options of a file. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FileOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// `aio`: the engine. [`EngineKind::Native`] needs `cache.direct=on`,
    /// which is checked when the file is opened: the cache mode may come from elsewhere.
    pub aio: Option<EngineKind>,
    /// `locking`
    pub locking: Locking,
    /// `drop-cache`: let the host forget what it caches of the file, as
    /// migration needs it.
    pub drop_cache: Option<bool>,
    /// `aio-max-batch`: how many requests are submitted together at most.
    pub aio_max_batch: Option<u64>,
}

/// Whether a file is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Locking {
    /// Where the system can (`auto`).
    #[default]
    Auto,
    /// Always (`on`).
    On,
    /// Never (`off`).
    Off,
}

/// What [`FileOptions::aio`] of [`EngineKind::Native`] without direct I/O is
/// refused with, in QEMU's words.
pub const NATIVE_NEEDS_DIRECT: &str =
    "aio=native was specified, but it requires cache.direct=on, which was not specified.";

impl FileSpec {
    /// The file of this path, with default options.
    pub fn new(path: impl Into<PathBuf>) -> FileSpec {
        FileSpec {
            path: path.into(),
            driver: FileDriver::Any,
            options: FileOptions::default(),
        }
    }

    /// The file that an image names as its data file. `relative_to` is as for
    /// [`Source::resolve`](super::Source::resolve).
    pub fn resolve(name: &OsStr, relative_to: Option<&OsStr>) -> Result<FileSpec> {
        let naming = Naming {
            name: Some(name),
            relative_to,
        };
        FileSpec::parse(Options::default(), naming, 0).map_err(refused)
    }

    /// The export that it is, if it is one.
    #[cfg(feature = "nbd")]
    pub fn nbd(&self) -> Option<&NbdSpec> {
        match &self.driver {
            FileDriver::Nbd(nbd) => Some(nbd),
            _ => None,
        }
    }

    /// The file of this machine or the export whose bytes these are in the end, below
    /// everything else.
    pub fn bottom(&self) -> &FileSpec {
        match &self.driver {
            FileDriver::Blkdebug(debug) => debug.image.bottom(),
            FileDriver::Image(image) => image.file.bottom(),
            _ => self,
        }
    }

    /// The path as a name.
    pub fn name(&self) -> &OsStr {
        self.path.as_os_str()
    }

    /// The file that `options` have under `key`, perhaps with a name.
    pub(super) fn child(
        options: &mut Options,
        key: &str,
        naming: Naming<'_>,
        depth: usize,
    ) -> Result<FileSpec, String> {
        let under = options.take_under(key);
        match options.take(key) {
            Some(Scalar::Text(_)) if !under.is_empty() || options.get("filename").is_some() => {
                return Err(
                    "Cannot reference an existing block device with additional options \
                     or a new filename"
                        .into(),
                );
            }
            Some(Scalar::Text(name)) => {
                return Err(no_such_node(&name));
            }
            _ if under.is_empty() && naming.name.is_none() => {
                return Err(format!("A block device must be specified for \"{key}\""));
            }
            _ => {}
        }
        FileSpec::parse(under, naming, depth)
    }

    pub(super) fn parse(
        mut options: Options,
        naming: Naming<'_>,
        depth: usize,
    ) -> Result<FileSpec, String> {
        if depth > MAX_DEPTH {
            return Err(format!(
                "More than {MAX_DEPTH} images are nested in the options"
            ));
        }
        let naming = naming.merge(&mut options)?;
        let prefix = naming.name.and_then(protocol);
        let name = match naming.name {
            Some(name) if prefix.is_none() => Some(beside(name, naming.relative_to)?),
            name => name.map(Cow::Borrowed),
        };
        let name = name.as_deref();
        match (options.take_string("driver").as_deref(), prefix.as_deref()) {
            (Some("file"), _) => FileSpec::local(FileDriver::File, options, name),
            (Some("host_device"), _) => FileSpec::local(FileDriver::HostDevice, options, name),
            (Some("host_cdrom"), _) => FileSpec::local(FileDriver::HostCdrom, options, name),
            #[cfg(feature = "nbd")]
            (Some("nbd"), _) => FileSpec::export(options, name),
            (Some("null-co"), _) | (None, Some("null-co")) => {
                FileSpec::null("null-co", options, name)
            }
            (Some("null-aio"), _) | (None, Some("null-aio")) => {
                FileSpec::null("null-aio", options, name)
            }
            (Some("blkdebug"), _) | (None, Some("blkdebug")) => {
                FileSpec::blkdebug(options, name, depth)
            }
            (Some(format @ ("raw" | "qcow2")), _) => {
                options.set("driver".into(), Scalar::Text(format.into()));
                let image = ImageSpec::parse(options, None, Naming::from(name), depth)?;
                Ok(FileSpec {
                    path: image.file.path.clone(),
                    options: FileOptions {
                        common: image.options.common.clone(),
                        ..FileOptions::default()
                    },
                    driver: FileDriver::Image(Box::new(image)),
                })
            }
            (Some(other), _) => Err(unknown_driver(other)),
            (None, None) => FileSpec::local(FileDriver::Any, options, name),
            (None, Some("file")) => FileSpec::local(FileDriver::File, options, name),
            (None, Some("host_device")) => FileSpec::local(FileDriver::HostDevice, options, name),
            (None, Some("host_cdrom")) => FileSpec::local(FileDriver::HostCdrom, options, name),
            #[cfg(feature = "nbd")]
            (None, Some(other)) if nbd::is_protocol(other) => FileSpec::export(options, name),
            (None, Some(other)) => Err(format!("Unknown protocol '{other}'")),
        }
    }

    /// A file or a device of this machine.
    fn local(
        driver: FileDriver,
        mut options: Options,
        name: Option<&OsStr>,
    ) -> Result<FileSpec, String> {
        let path = match (options.take_name("filename"), name) {
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
        let aio = match options.take_text("aio") {
            None => None,
            Some(name) => match name.as_str() {
                "threads" => Some(EngineKind::Threads),
                "native" => Some(EngineKind::Native),
                "io_uring" => Some(EngineKind::IoUring),
                _ => return Err(format!("invalid parameter value: {name}")),
            },
        };
        let locking = match options.take_text("locking").as_deref() {
            None | Some("auto") => Locking::Auto,
            Some("on") => Locking::On,
            Some("off") => Locking::Off,
            Some(other) => return Err(format!("invalid parameter value: {other}")),
        };
        if let Some(id) = options.take_text("pr-manager") {
            return Err(format!("No persistent reservation manager with id '{id}'"));
        }
        let file = FileOptions {
            common: CommonOptions::take(&mut options)?,
            aio,
            locking,
            drop_cache: options.take_bool("drop-cache")?,
            aio_max_batch: options.take_number("aio-max-batch")?,
        };
        // A help in finding faults of QEMU's own.
        options.take_bool("x-check-cache-dropped")?;
        refuse_protocol_rest(&options, driver.name())?;
        Ok(FileSpec {
            path: path.into(),
            driver,
            options: file,
        })
    }

    /// What is no file of this machine: its own options are taken.
    fn other(
        path: impl Into<PathBuf>,
        driver: FileDriver,
        mut options: Options,
    ) -> Result<FileSpec, String> {
        let mut spec = FileSpec::new(path);
        spec.options.common = CommonOptions::take(&mut options)?;
        refuse_protocol_rest(&options, driver.name())?;
        spec.driver = driver;
        Ok(spec)
    }

    #[cfg(feature = "nbd")]
    fn export(mut options: Options, name: Option<&OsStr>) -> Result<FileSpec, String> {
        let nbd = Box::new(NbdSpec::take(&mut options, name)?);
        FileSpec::other(nbd.name().to_owned(), FileDriver::Nbd(nbd), options)
    }

    fn null(
        driver: &'static str,
        mut options: Options,
        name: Option<&OsStr>,
    ) -> Result<FileSpec, String> {
        let null = NullSpec::take(&mut options, driver, name)?;
        FileSpec::other(null.name(), FileDriver::Null(null), options)
    }

    fn blkdebug(
        mut options: Options,
        name: Option<&OsStr>,
        depth: usize,
    ) -> Result<FileSpec, String> {
        let debug = Box::new(BlkdebugSpec::take(&mut options, name, depth + 1)?);
        let path = debug.image.path.clone();
        FileSpec::other(path, FileDriver::Blkdebug(debug), options)
    }
}

fn refuse_protocol_rest(options: &Options, driver: &str) -> Result<(), String> {
    let prefix = format!("Block protocol '{driver}' doesn't support the option");
    refuse_rest(options, &prefix)
}
