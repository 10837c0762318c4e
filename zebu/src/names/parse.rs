//! From options to the tree of images and files that they describe.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::drivers::{is_protocol, unknown_driver};
use super::image_options::check_preallocation;
#[cfg(feature = "nbd")]
use super::nbd;
use super::path::{beside, check_path, protocol, without_prefix};
use super::{blkdebug, json, null};
#[cfg(feature = "http")]
use crate::block::HttpSpec;
#[cfg(feature = "nbd")]
use crate::block::NbdSpec;
#[cfg(feature = "rbd")]
use crate::block::RbdSpec;
#[cfg(feature = "ssh")]
use crate::block::SshSpec;
use crate::block::{
    BackingOptions, BackingSpec, BlkdebugSpec, CommonOptions, FileDriver, FileOptions, FileSpec,
    Format, ImageSpec, Locking, OptionSet, OptionValue, Qcow2Options, RawOptions, VpcOptions,
};
#[cfg(feature = "object-store")]
use crate::block::{StoreKind, StoreSpec};
use crate::printable;
use crate::storage::EngineKind;

/// How deep images and files nest in options.
pub(super) const MAX_DEPTH: usize = 64;

/// How an image or a file is named besides its options.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Naming<'a> {
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
    pub(super) fn merge(self, options: &mut OptionSet) -> Result<Self, String> {
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

/// The image that options describe.
pub(super) fn image(
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
            protocol if is_protocol(protocol) => {
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
pub(super) fn format_options(spec: &mut ImageSpec, format: Format) -> Result<(), String> {
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
fn child(
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
pub(super) fn file(
    mut options: OptionSet,
    naming: Naming<'_>,
    depth: usize,
) -> Result<FileSpec, String> {
    check_depth(depth)?;
    let naming = naming.merge(&mut options)?;
    let name = match naming.name {
        Some(name) if protocol(name).is_none() => Some(beside(name, naming.relative_to)?),
        name => name.map(Cow::Borrowed),
    };
    let name = name.as_deref();
    let prefix = name.and_then(protocol);
    let driver = options.take_string("driver");
    match driver.as_deref().or(prefix.as_deref()) {
        None => local(FileDriver::Any, options, name),
        Some("file") => local(FileDriver::File, options, name),
        Some("host_device") => local(FileDriver::HostDevice, options, name),
        Some("host_cdrom") => local(FileDriver::HostCdrom, options, name),
        Some("null-co") => null_file("null-co", options, name),
        Some("null-aio") => null_file("null-aio", options, name),
        Some("blkdebug") => blkdebug_file(options, name, depth),
        #[cfg(feature = "nbd")]
        Some("nbd") => export(options, name),
        #[cfg(feature = "nbd")]
        Some(scheme) if driver.is_none() && nbd::is_scheme(scheme) => export(options, name),
        #[cfg(feature = "http")]
        Some("http") => web_object("http", options, name),
        #[cfg(feature = "http")]
        Some("https") => web_object("https", options, name),
        #[cfg(feature = "object-store")]
        Some("s3") => stored_object(StoreKind::S3, options, name),
        #[cfg(feature = "object-store")]
        Some("gs") => stored_object(StoreKind::Google, options, name),
        #[cfg(feature = "object-store")]
        Some("az") => stored_object(StoreKind::Azure, options, name),
        #[cfg(feature = "rbd")]
        Some("rbd") => rbd_image(options, name),
        #[cfg(feature = "ssh")]
        Some("ssh") => ssh_file(options, name),
        Some(protocol) if driver.is_none() => Err(format!(
            "Unknown protocol '{}'",
            printable(protocol.as_bytes())
        )),
        Some(driver) => match driver.parse() {
            Ok(format) => image_file(format, options, name, depth),
            Err(_) => Err(unknown_driver(driver)),
        },
    }
}

/// A file or a device of this machine.
fn local(
    driver: FileDriver,
    mut options: OptionSet,
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
    };
    // Checked, without effect.
    options.take_bool("drop-cache")?;
    options.take_number("aio-max-batch")?;
    options.take_bool("x-check-cache-dropped")?;
    refuse_protocol_rest(&options, driver.name())?;
    Ok(FileSpec {
        path: path.into(),
        driver,
        options: file,
    })
}

/// A file whose driver has read its own options.
fn other(
    path: impl Into<PathBuf>,
    driver: FileDriver,
    mut options: OptionSet,
) -> Result<FileSpec, String> {
    let mut spec = FileSpec::new(path);
    spec.options.common = CommonOptions::take(&mut options)?;
    refuse_protocol_rest(&options, driver.name())?;
    spec.driver = driver;
    Ok(spec)
}

#[cfg(feature = "nbd")]
fn export(mut options: OptionSet, name: Option<&OsStr>) -> Result<FileSpec, String> {
    let nbd = Box::new(NbdSpec::take(&mut options, name)?);
    other(nbd.name().to_owned(), FileDriver::Nbd(nbd), options)
}

#[cfg(feature = "http")]
fn web_object(
    driver: &'static str,
    mut options: OptionSet,
    name: Option<&OsStr>,
) -> Result<FileSpec, String> {
    let spec = Box::new(HttpSpec::take(&mut options, driver, name)?);
    other(spec.name().to_owned(), FileDriver::Http(spec), options)
}

#[cfg(feature = "object-store")]
fn stored_object(
    kind: StoreKind,
    mut options: OptionSet,
    name: Option<&OsStr>,
) -> Result<FileSpec, String> {
    let spec = Box::new(StoreSpec::take(&mut options, kind, name)?);
    other(spec.name().to_owned(), FileDriver::Store(spec), options)
}

#[cfg(feature = "rbd")]
fn rbd_image(mut options: OptionSet, name: Option<&OsStr>) -> Result<FileSpec, String> {
    let spec = Box::new(RbdSpec::take(&mut options, name)?);
    other(spec.name().to_owned(), FileDriver::Rbd(spec), options)
}

#[cfg(feature = "ssh")]
fn ssh_file(mut options: OptionSet, name: Option<&OsStr>) -> Result<FileSpec, String> {
    let spec = Box::new(SshSpec::take(&mut options, name)?);
    other(spec.name(), FileDriver::Ssh(spec), options)
}

fn null_file(
    driver: &'static str,
    mut options: OptionSet,
    name: Option<&OsStr>,
) -> Result<FileSpec, String> {
    let spec = null::take(&mut options, driver, name)?;
    other(null::name(driver), FileDriver::Null(spec), options)
}

fn blkdebug_file(
    mut options: OptionSet,
    name: Option<&OsStr>,
    depth: usize,
) -> Result<FileSpec, String> {
    let own = blkdebug::take(&mut options, name)?;
    let naming = Naming::from(own.image.as_deref());
    let image = child(&mut options, "image", naming, depth + 1)?;
    let path = image.path.clone();
    let debug = BlkdebugSpec {
        image: Box::new(image),
        limits: own.limits,
        config: own.config,
        rules: own.rules,
        shown: own.shown,
    };
    other(path, FileDriver::Blkdebug(Box::new(debug)), options)
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

fn refuse_protocol_rest(options: &OptionSet, driver: &str) -> Result<(), String> {
    let prefix = format!("Block protocol '{driver}' doesn't support the option");
    refuse_rest(options, &prefix)
}

fn refuse_rest(options: &OptionSet, prefix: &str) -> Result<(), String> {
    match options.first_key() {
        None => Ok(()),
        Some(key) => Err(format!("{prefix} '{key}'")),
    }
}
