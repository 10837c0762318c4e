//! From options to the tree of images and files that they describe.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::options::check_preallocation;
use super::{
    BackingOptions, BackingSpec, CommonOptions, EncryptionOptions, FileDriver, FileOptions,
    FileSpec, Given, ImageSpec, Qcow2Options, RawOptions, VpcOptions, check_in_image,
    file as local, find,
};
use crate::drivers::Format;
use crate::spelling::path::{beside, protocol};
use crate::spelling::{OptionSet, OptionValue, json};
use crate::{Error, Result, printable};

/// How deep images and files nest in options.
pub const MAX_DEPTH: usize = 64;

/// How an image or a file is named besides its options.
#[derive(Clone, Copy, Debug, Default)]
pub struct Naming<'a> {
    pub name: Option<&'a OsStr>,
    /// The file name of the image that names it.
    pub relative_to: Option<&'a OsStr>,
}

impl<'a> From<Option<&'a OsStr>> for Naming<'a> {
    fn from(name: Option<&'a OsStr>) -> Self {
        Naming {
            name,
            relative_to: None,
        }
    }
}

impl Naming<'_> {
    /// Moves the members of a `json:` name to the options, where these do not have them. There
    /// is no name then.
    pub(crate) fn merge(self, options: &mut OptionSet) -> Result<Self, String> {
        let name = self.name.map(OsStr::as_bytes);
        let Some(text) = name.and_then(|name| name.strip_prefix(b"json:")) else {
            return Ok(self);
        };
        options.add_defaults(json::parse(text)?);
        Ok(Naming { name: None, ..self })
    }
}

fn check_depth(depth: usize) -> Result<(), String> {
    match depth > MAX_DEPTH {
        true => Err(format!(
            "More than {MAX_DEPTH} images are nested in the options"
        )),
        false => Ok(()),
    }
}

impl FileSpec {
    /// The file that a header names as its external data file.
    pub(crate) fn of_data(name: &OsStr) -> Result<FileSpec> {
        check_in_image(name).map_err(refused)?;
        // As in QEMU, relative to the current directory and not to the image's.
        FileSpec::resolve(name, None)
    }

    /// The file of this name, as an image names its data file. `relative_to` is as for
    /// [`Source::resolve`](crate::Source::resolve).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the name is not understood.
    pub fn resolve(name: &OsStr, relative_to: Option<&OsStr>) -> Result<FileSpec> {
        let naming = Naming {
            name: Some(name),
            relative_to,
        };
        file(OptionSet::default(), naming, 0).map_err(refused)
    }
}

impl ImageSpec {
    /// Reads the options that waited for the format.
    pub(crate) fn read_pending(&mut self, format: Format) -> Result<()> {
        format_options(self, format).map_err(refused)
    }

    /// Sets the format, found by the content, and reads the options that waited for it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the format does not have one of the options.
    pub fn set_format(&mut self, format: Format) -> Result<()> {
        self.format = Some(format);
        self.is_guessed = true;
        self.read_pending(format)
    }
}

impl ImageSpec {
    /// The image that a header names as the backing file of the image in the file `of`, with the name of
    /// its driver. `options` win over the header, and describe the image alone if that names none.
    pub(crate) fn behind(
        name: Option<&OsStr>,
        of: &OsStr,
        driver: Option<&str>,
        options: Option<&BackingOptions>,
    ) -> Result<ImageSpec> {
        name.map_or(Ok(()), check_in_image).map_err(refused)?;
        let naming = Naming {
            name,
            relative_to: Some(of),
        };
        let (mut options, depth) = match options {
            None => (OptionSet::default(), 0),
            Some(given) => (given.options.clone(), given.depth),
        };
        if let Some(driver) = driver {
            let driver = driver_name(driver)?;
            if options.get("driver").is_none() {
                options.set("driver".into(), OptionValue::Text(driver.into()));
            }
        }
        image(options, None, naming, depth).map_err(refused)
    }
}

/// The driver of this name, as a header names it: a format, or what is not over a format's disk (a kind of
/// file, a filter, an export).
pub fn driver_name(name: &str) -> Result<&'static str> {
    match find(name, false) {
        Some((_, driver)) => Ok(driver),
        None => name.parse::<Format>().map(Format::name),
    }
}

/// The error, on one line whatever was quoted from the input.
pub fn refused(what: String) -> Error {
    Error::Refused(printable(what.as_bytes()))
}

/// The image that options describe.
pub fn image(
    mut options: OptionSet,
    format: Option<Format>,
    naming: Naming<'_>,
    depth: usize,
) -> Result<ImageSpec, String> {
    check_depth(depth)?;
    if let Some(format) = format
        && options.get("driver").is_none()
    {
        let driver = OptionValue::Text(format.name().into());
        options.set("driver".into(), driver);
    }
    let naming = naming.merge(&mut options)?;
    let mut format = None;
    // QEMU takes only a string for a driver's name. Anything else is refused below, as an option
    // that no format has.
    if let Some(OptionValue::Text(driver)) = options.get("driver").cloned() {
        let driver = driver.to_string_lossy();
        match &*driver {
            protocol if find(protocol, false).is_some() => {
                let file = file(options, naming, depth)?;
                let mut spec = ImageSpec::new(Some(Format::RAW), file);
                spec.bare = true;
                spec.depth = depth;
                spec.options.common = spec.file.options.common.clone();
                return Ok(spec);
            }
            name => format = Some(name.parse().map_err(|_| unknown_driver(name))?),
        }
        options.take("driver");
    }
    if format.is_none()
        && naming.name.is_none()
        && options.get("file").is_none()
        && !options.has_under("file")
    {
        return Err("Must specify either driver or file".into());
    }
    let file = child(&mut options, "file", naming, depth + 1)?;
    let mut spec = ImageSpec::new(format, file);
    spec.depth = depth;
    spec.options.common = CommonOptions::take(&mut options)?;
    spec.pending = options;
    if let Some(format) = format {
        format_options(&mut spec, format)?;
    }
    Ok(spec)
}

/// Reads the pending options of an image, whose format is known now.
pub fn format_options(spec: &mut ImageSpec, format: Format) -> Result<(), String> {
    let mut options = std::mem::take(&mut spec.pending);
    if format.has_backing() {
        spec.backing = backing(&mut options, spec.depth + 1)?;
    }
    if format.has_data_file() {
        let data_file = options.take_under("data-file");
        match options.get("data-file") {
            Some(OptionValue::Text(name)) => return Err(no_such_node(name)),
            Some(OptionValue::Null) => drop(options.take("data-file")),
            _ => {}
        }
        if !data_file.is_empty() {
            let data_file = file(data_file, Naming::default(), spec.depth + 1)?;
            spec.data_file = Some(data_file);
        }
    }
    let mut own = options.take_all(format.open_options());
    spec.options.raw = RawOptions::take(&mut own)?;
    spec.options.qcow2 = Qcow2Options::take(&mut own)?;
    spec.options.vpc = VpcOptions::take(&mut own)?;
    spec.options.encryption = EncryptionOptions::take(&mut own);
    check_preallocation(&mut own)?;
    options.add_defaults(own);
    let name = format.name();
    refuse_rest(
        &options,
        &format!("Block format '{name}' does not support the option"),
    )
}

/// The options of a backing file.
fn backing(options: &mut OptionSet, depth: usize) -> Result<BackingSpec, String> {
    let under = options.take_under("backing");
    match options.get("backing") {
        Some(OptionValue::Text(name)) if !name.is_empty() => return Err(no_such_node(name)),
        Some(OptionValue::Null | OptionValue::Text(_)) => {
            options.take("backing");
            return match under.is_empty() {
                true => Ok(BackingSpec::None),
                false => Err("Option 'backing' cannot be null and have options".into()),
            };
        }
        _ if under.is_empty() => return Ok(BackingSpec::Default),
        _ => {}
    }
    match under.get("file.filename") {
        // They complete the name that the header has.
        None => Ok(BackingSpec::Options(BackingOptions {
            options: under,
            depth,
        })),
        Some(_) => image(under, None, Naming::default(), depth)
            .map(|image| BackingSpec::Image(Box::new(image)))
            .map_err(|e| format!("Could not open backing file: {e}")),
    }
}

/// The file that `options` have under `key`, perhaps with a name.
pub fn child(
    options: &mut OptionSet,
    key: &str,
    naming: Naming<'_>,
    depth: usize,
) -> Result<FileSpec, String> {
    let under = options.take_under(key);
    match options.take(key) {
        Some(OptionValue::Text(_)) if !under.is_empty() || options.get("filename").is_some() => {
            return Err(
                "Cannot reference an existing block device with additional options \
                 or a new filename"
                    .into(),
            );
        }
        Some(OptionValue::Text(name)) => return Err(no_such_node(&name)),
        _ if under.is_empty() && naming.name.is_none() => {
            return Err(format!("A block device must be specified for \"{key}\""));
        }
        _ => {}
    }
    file(under, naming, depth)
}

/// The file that options describe.
pub fn file(mut options: OptionSet, naming: Naming<'_>, depth: usize) -> Result<FileSpec, String> {
    check_depth(depth)?;
    let naming = naming.merge(&mut options)?;
    let name = match naming.name {
        Some(name) if protocol(name).is_none() => Some(beside(name, naming.relative_to)?),
        name => name.map(Cow::Borrowed),
    };
    let name = name.as_deref();
    let prefix = name.and_then(protocol);
    let driver = options.take_string("driver");
    let found = match driver.as_deref().or(prefix.as_deref()) {
        None => Some((&local::DRIVER, "")),
        Some(named) => find(named, driver.is_none()),
    };
    if let Some((protocol, driver)) = found {
        let mut given = Given {
            driver,
            name,
            options,
            depth,
        };
        let mut spec = (protocol.parse)(&mut given)?;
        spec.options.common = CommonOptions::take(&mut given.options)?;
        match &mut spec.driver {
            FileDriver::Filter(filter) => filter.options = given.options,
            other => {
                let what = format!(
                    "Block protocol '{}' doesn't support the option",
                    other.name()
                );
                refuse_rest(&given.options, &what)?;
            }
        }
        return Ok(spec);
    }
    match (driver, prefix) {
        (Some(driver), _) => match driver.parse() {
            Ok(format) => image_file(format, options, name, depth),
            Err(_) => Err(unknown_driver(&driver)),
        },
        (None, prefix) => Err(format!(
            "Unknown protocol '{}'",
            printable(prefix.unwrap_or_default().as_bytes())
        )),
    }
}

/// The disk of an image as a file.
fn image_file(
    format: Format,
    mut options: OptionSet,
    name: Option<&OsStr>,
    depth: usize,
) -> Result<FileSpec, String> {
    let driver = OptionValue::Text(format.name().into());
    options.set("driver".into(), driver);
    let image = image(options, None, Naming::from(name), depth)?;
    Ok(FileSpec {
        path: image.file.path.clone(),
        options: FileOptions {
            common: image.options.common.clone(),
            ..FileOptions::default()
        },
        driver: FileDriver::Image(Box::new(image)),
    })
}

/// The error of a name in the place of a file's options: files have no node names here.
fn no_such_node(name: &OsStr) -> String {
    let name = name.display();
    format!("Cannot find device='{name}' nor node-name='{name}'")
}

/// Refuses options that are left.
pub fn refuse_rest(options: &OptionSet, prefix: &str) -> Result<(), String> {
    match options.first_key() {
        None => Ok(()),
        Some(key) => Err(format!("{prefix} '{key}'")),
    }
}

/// Drivers that QEMU has and zebu has not, or not always.
const LACKING: &[&str] = &[
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "copy-before-write",
    "ftp",
    "ftps",
    "gluster",
    "http",
    "https",
    "io_uring",
    "iscsi",
    "iser",
    "luks",
    "nfs",
    "nvme",
    "nvme-io_uring",
    "quorum",
    "rbd",
    "replication",
    "snapshot-access",
    "ssh",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
    "vvfat",
];

/// Why no image or file of this driver is opened.
fn unknown_driver(name: &str) -> String {
    match LACKING.contains(&name) {
        true => format!("Driver '{name}' is not supported by zebu"),
        false => format!("Unknown driver '{name}'"),
    }
}
