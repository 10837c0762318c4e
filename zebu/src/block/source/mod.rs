//! What names an image: a file name, a `json:{…}` name, options.
//!
//! [`Source::resolve`] turns any of them into an [`ImageSpec`], a tree that
//! says which files are opened and how, without opening anything. Whatever is
//! not understood is refused, in QEMU's words where it has some: an option
//! that were ignored might be the one that keeps the data safe.

mod blkdebug;
mod json;
mod nbd;
mod null;
mod options;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::Format;
pub use crate::image::OverlapChecks;
use crate::storage::EngineKind;
use crate::{Error, Result};
pub use blkdebug::BlkdebugSpec;
pub use nbd::{NbdSpec, NbdTls};
pub use null::NullSpec;
use options::{Options, Scalar};

/// How many images an image described by options may be backed by.
const MAX_DEPTH: usize = 64;

/// Which image to open, as the user or another image named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A name: a path, `file:PATH`, an NBD server's export (`nbd://HOST/EXPORT`
    /// and its like), or `json:{…}`.
    Name(String),
    /// The text of `--image-opts`: `driver=qcow2,file.filename=PATH`.
    Options(String),
    /// A name, and such options, which win over what the name says.
    NameWithOptions(String, String),
}

/// How an image or a file is named besides its options.
#[derive(Clone, Copy, Debug, Default)]
struct Naming<'a> {
    name: Option<&'a str>,
    /// The file name of the image that names it.
    relative_to: Option<&'a str>,
}

impl<'a> From<Option<&'a str>> for Naming<'a> {
    fn from(name: Option<&'a str>) -> Self {
        Naming {
            name,
            relative_to: None,
        }
    }
}

impl Naming<'_> {
    /// Puts what a `json:` name says among the options, unless these say it
    /// themselves; there is no name then.
    fn merge(self, options: &mut Options) -> Result<Self, String> {
        let Some(text) = self.name.and_then(|name| name.strip_prefix("json:")) else {
            return Ok(self);
        };
        options.add_defaults(json::parse(text)?);
        Ok(Naming { name: None, ..self })
    }
}

impl Source {
    /// Describes the image that this names. Opens nothing.
    ///
    /// `relative_to` is the file name of the image that names this one
    /// ([`FileSpec::name`] of its `file`): relative paths are of its
    /// directory. None: of the current directory. As with QEMU, only plain
    /// paths are relative to another image; what follows `file:` or is inside
    /// `json:` is relative to the current directory.
    ///
    /// `format` is what `-f`, or the header that holds the name, says; it
    /// wins over the `driver` of a `json:` name, as with QEMU.
    ///
    /// The error is one line, which fits after `Could not open 'NAME': `.
    pub fn resolve(&self, relative_to: Option<&str>, format: Option<Format>) -> Result<ImageSpec> {
        let (name, options) = match self {
            Source::Name(name) => (Some(name), Options::default()),
            Source::Options(text) => (None, Options::parse(text)),
            Source::NameWithOptions(name, text) => (Some(name), Options::parse(text)),
        };
        let naming = Naming {
            name: name.map(String::as_str),
            relative_to,
        };
        let spec = ImageSpec::parse(options, format, naming, 0);
        spec.map_err(refused)
    }

    /// The value of an option (`driver`, `file.filename`, …) as it was given, in the
    /// options or in a `json:` name.
    pub fn option(&self, key: &str) -> Option<String> {
        let (name, mut options) = match self {
            Source::Name(name) => (Some(name), Options::default()),
            Source::Options(text) => (None, Options::parse(text)),
            Source::NameWithOptions(name, text) => (Some(name), Options::parse(text)),
        };
        let naming = Naming::from(name.map(String::as_str));
        naming.merge(&mut options).ok()?;
        options.take_text(key)
    }

    /// Refuses a name that is not just a path. Options, which nobody takes for
    /// a file's name, are not looked at.
    pub(super) fn check_is_path(&self) -> Result<()> {
        let (Source::Name(name) | Source::NameWithOptions(name, _)) = self else {
            return Ok(());
        };
        match protocol(name) {
            None => Ok(()),
            Some(protocol) => Err(refused(format!(
                "The name of an untrusted image must be a path, and does not begin with \
                 '{protocol}:'"
            ))),
        }
    }
}

/// An image to open, fully described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// The format; None: it is to be found out from the content, and then
    /// told by [`ImageSpec::set_format`], without which the options of the
    /// format are neither there nor checked.
    pub format: Option<Format>,
    /// It was named by its file driver alone (`driver=file`): a raw image
    /// whose format `info` shows as [`FileDriver::name`].
    pub bare: bool,
    /// Where its bytes are.
    pub file: FileSpec,
    /// What it is backed by.
    pub backing: BackingSpec,
    /// The external data file; None: the one that the header names. Filled in
    /// from there, [`ImageSpec::display_name`] can show it.
    pub data_file: Option<FileSpec>,
    /// How to treat it.
    pub options: ImageOptions,
    /// Options of the format, while it is not known.
    pending: Options,
    /// How many images this one backs, by its options.
    depth: usize,
    /// The format was found out from the content.
    guessed: bool,
}

/// What an image is backed by.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum BackingSpec {
    /// What its header says.
    #[default]
    Default,
    /// Nothing, whatever its header says.
    None,
    /// This image, whatever its header says.
    Image(Box<ImageSpec>),
    /// What its header says, with these options.
    Options(BackingOptions),
}

/// Options of a backing file that the image's header names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingOptions {
    options: Options,
    depth: usize,
}

impl BackingOptions {
    /// Describes the image that a header names so (None: it names none), with these
    /// options, which win over `format`. `relative_to` is as for
    /// [`Source::resolve`].
    pub(super) fn resolve(
        &self,
        name: Option<&str>,
        relative_to: Option<&str>,
        format: Option<Format>,
    ) -> Result<ImageSpec> {
        let naming = Naming { name, relative_to };
        ImageSpec::parse(self.options.clone(), format, naming, self.depth).map_err(refused)
    }
}

/// Options of an image. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ImageOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// Options of raw images.
    pub raw: RawOptions,
    /// Options of qcow2 images.
    pub qcow2: Qcow2Options,
}

/// Options that every image and every file has.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CommonOptions {
    /// `read-only`
    pub read_only: Option<bool>,
    /// `auto-read-only`: open read-only what cannot be written.
    pub auto_read_only: Option<bool>,
    /// `force-share`: open also what another process writes to.
    pub force_share: Option<bool>,
    /// `cache.direct`: with `O_DIRECT`. A file takes it from its image unless
    /// it says otherwise.
    pub direct: Option<bool>,
    /// `cache.no-flush`: ignore flushes. Taken from the image likewise.
    pub no_flush: Option<bool>,
    /// `discard=unmap` (true) or `discard=ignore` (false).
    pub discard: Option<bool>,
    /// `detect-zeroes`
    pub detect_zeroes: Option<DetectZeroes>,
}

/// What is done with writes of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetectZeroes {
    /// They are writes.
    Off,
    /// They are recorded as zeroes.
    On,
    /// They are recorded as zeroes, and what they cover is freed.
    Unmap,
}

/// Options of raw images: the part of the file that is the disk.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RawOptions {
    /// `offset`: where it starts, in bytes.
    pub offset: Option<u64>,
    /// `size` in bytes; None: to the end of the file.
    pub size: Option<u64>,
    /// Both as they were written, in JSON: QEMU shows them so.
    offset_json: Option<String>,
    size_json: Option<String>,
}

/// Options of qcow2 images.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Qcow2Options {
    /// `lazy-refcounts`
    pub lazy_refcounts: Option<bool>,
    /// `pass-discard-request`: tell the file of what the guest discards.
    pub pass_discard_request: Option<bool>,
    /// `pass-discard-snapshot`: tell the file of what deleting a snapshot frees.
    pub pass_discard_snapshot: Option<bool>,
    /// `pass-discard-other`: tell the file of whatever else is freed.
    pub pass_discard_other: Option<bool>,
    /// `discard-no-unref`: a discarded cluster stays allocated.
    pub discard_no_unref: Option<bool>,
    /// `overlap-check` and its like
    pub overlap_check: Option<OverlapChecks>,
    /// `cache-size`: bytes of L2 tables and refcount blocks together.
    pub cache_size: Option<u64>,
    /// `l2-cache-size`: bytes of L2 tables.
    pub l2_cache_size: Option<u64>,
    /// `l2-cache-entry-size`: bytes of one slice of an L2 table.
    pub l2_cache_entry_size: Option<u64>,
    /// `refcount-cache-size`: bytes of refcount blocks.
    pub refcount_cache_size: Option<u64>,
    /// `cache-clean-interval`: seconds after which unused cache is freed.
    pub cache_clean_interval: Option<u64>,
}

impl OverlapChecks {
    fn take(options: &mut Options) -> Result<Option<OverlapChecks>, String> {
        const KEY: &str = "overlap-check";
        const TEMPLATE: &str = "overlap-check.template";
        let short = options.take_text(KEY);
        let long = options.take_text(TEMPLATE);
        if let (Some(a), Some(b)) = (&short, &long)
            && a != b
        {
            return Err(format!(
                "Conflicting values for qcow2 options '{KEY}' ('{a}') and '{TEMPLATE}' ('{b}')"
            ));
        }
        let mut checks = match short.as_deref().or(long.as_deref()) {
            None => None,
            Some("none") => Some(Self::NONE),
            Some("constant") => Some(Self::CONSTANT),
            Some("cached") => Some(Self::CACHED),
            Some("all") => Some(Self::ALL),
            Some(other) => {
                return Err(format!(
                    "Unsupported value '{other}' for qcow2 option '{KEY}'. \
                     Allowed are any of the following: none, constant, cached, all"
                ));
            }
        };
        for (bit, name) in Self::NAMES.iter().enumerate() {
            if let Some(on) = options.take_bool(&format!("{KEY}.{name}"))? {
                checks = Some(checks.unwrap_or_default().with(bit, on));
            }
        }
        Ok(checks)
    }
}

/// A file to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpec {
    /// Its path; of an export, the URI that QEMU shows; of what has a file below,
    /// that file's.
    pub path: PathBuf,
    /// What it is.
    pub driver: FileDriver,
    /// How to open it.
    pub options: FileOptions,
}

/// What a file is.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum FileDriver {
    /// A regular file or a device: it was named without a driver.
    #[default]
    Any,
    /// A regular file (`file`).
    File,
    /// A device (`host_device`).
    HostDevice,
    /// A device as well (`host_cdrom`).
    HostCdrom,
    /// An NBD server's export (`nbd`).
    Nbd(Box<NbdSpec>),
    /// Nothing at all (`null-co`, `null-aio`).
    Null(NullSpec),
    /// A file that fails on purpose (`blkdebug`).
    Blkdebug(Box<BlkdebugSpec>),
    /// The disk of an image (`raw`, `qcow2`), whose format is known.
    Image(Box<ImageSpec>),
}

impl FileDriver {
    /// QEMU's name: `file`, `host_device`, `nbd`, …
    pub fn name(&self) -> &'static str {
        match self {
            FileDriver::Any | FileDriver::File => "file",
            FileDriver::HostDevice => "host_device",
            FileDriver::HostCdrom => "host_cdrom",
            FileDriver::Nbd(_) => "nbd",
            FileDriver::Null(null) => null.driver,
            FileDriver::Blkdebug(_) => "blkdebug",
            FileDriver::Image(image) => image.format_name(),
        }
    }

    /// Whether QEMU has a driver of this name that is no image format.
    fn is_protocol(name: &str) -> bool {
        const NAMES: [&str; 7] = [
            "file",
            "host_device",
            "host_cdrom",
            "nbd",
            "null-co",
            "null-aio",
            "blkdebug",
        ];
        NAMES.contains(&name)
    }
}

/// Options of a file. None: not given, the default holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct FileOptions {
    /// Options that every image and every file has.
    pub common: CommonOptions,
    /// `aio`: the engine. [`EngineKind::Native`] needs `cache.direct=on`,
    /// which whoever opens the file checks: it may come from elsewhere.
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

/// Drivers that QEMU has and zebu has not.
const LACKING: &[&str] = &[
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "bochs",
    "cloop",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
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
    "parallels",
    "preallocate",
    "qcow",
    "qed",
    "quorum",
    "rbd",
    "replication",
    "snapshot-access",
    "ssh",
    "throttle",
    "vdi",
    "vhdx",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
    "vmdk",
    "vpc",
    "vvfat",
];

fn unknown_driver(name: &str) -> String {
    match LACKING.contains(&name) {
        true => format!("Driver '{name}' is not supported by zebu"),
        false => format!("Unknown driver '{name}'"),
    }
}

/// The error, on one line whatever was quoted from the input.
fn refused(what: String) -> Error {
    let clean = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    Error::Refused(what.chars().map(clean).collect())
}

/// What `name` starts with, up to a colon, if it starts with a protocol.
fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    name[end..].starts_with(':').then(|| &name[..end])
}

/// What QEMU has before the rest of a file name, if anything.
fn check_path(path: &str) -> Result<(), String> {
    if path.is_empty() {
        return Err("The 'file' block driver requires a file name".into());
    }
    if path.contains('\0') {
        return Err("The file name has a zero byte in it".into());
    }
    Ok(())
}

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
    /// [`Source::resolve`].
    pub fn resolve(name: &str, relative_to: Option<&str>) -> Result<FileSpec> {
        let naming = Naming {
            name: Some(name),
            relative_to,
        };
        FileSpec::parse(Options::default(), naming, 0).map_err(refused)
    }

    /// The export that it is, if it is one.
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

    /// The path as text.
    pub fn name(&self) -> Cow<'_, str> {
        self.path.to_string_lossy()
    }

    /// The file that `options` have under `key`, perhaps with a name.
    fn child(
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
                return Err(format!(
                    "Cannot find device='{name}' nor node-name='{name}'"
                ));
            }
            _ if under.is_empty() && naming.name.is_none() => {
                return Err(format!("A block device must be specified for \"{key}\""));
            }
            _ => {}
        }
        FileSpec::parse(under, naming, depth)
    }

    fn parse(mut options: Options, naming: Naming<'_>, depth: usize) -> Result<FileSpec, String> {
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
        match (options.take_string("driver").as_deref(), prefix) {
            (Some("file"), _) => FileSpec::local(FileDriver::File, options, name),
            (Some("host_device"), _) => FileSpec::local(FileDriver::HostDevice, options, name),
            (Some("host_cdrom"), _) => FileSpec::local(FileDriver::HostCdrom, options, name),
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
            (None, Some(other)) if nbd::is_protocol(other) => FileSpec::export(options, name),
            (None, Some(other)) => Err(format!("Unknown protocol '{other}'")),
        }
    }

    /// A file or a device of this machine.
    fn local(
        driver: FileDriver,
        mut options: Options,
        name: Option<&str>,
    ) -> Result<FileSpec, String> {
        let path = match (options.take_string("filename"), name) {
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

    fn export(mut options: Options, name: Option<&str>) -> Result<FileSpec, String> {
        let nbd = Box::new(NbdSpec::take(&mut options, name)?);
        FileSpec::other(nbd.name().to_owned(), FileDriver::Nbd(nbd), options)
    }

    fn null(
        driver: &'static str,
        mut options: Options,
        name: Option<&str>,
    ) -> Result<FileSpec, String> {
        let null = NullSpec::take(&mut options, driver, name)?;
        FileSpec::other(null.name(), FileDriver::Null(null), options)
    }

    fn blkdebug(
        mut options: Options,
        name: Option<&str>,
        depth: usize,
    ) -> Result<FileSpec, String> {
        let debug = Box::new(BlkdebugSpec::take(&mut options, name, depth + 1)?);
        let path = debug.image.path.clone();
        FileSpec::other(path, FileDriver::Blkdebug(debug), options)
    }

    /// The name that QEMU shows, if a name says all.
    fn plain_name(&self) -> Option<String> {
        match &self.driver {
            FileDriver::Null(null) => null.plain_name(),
            FileDriver::Blkdebug(debug) => debug.plain_name(),
            FileDriver::Image(image) => image.plain_name(),
            _ => Some(self.name().into_owned()),
        }
    }

    /// The name as QEMU shows it.
    pub fn display_name(&self) -> String {
        self.plain_name()
            .unwrap_or_else(|| format!("json:{}", self.json()))
    }

    fn json(&self) -> String {
        let driver = match &self.driver {
            FileDriver::Nbd(nbd) => return nbd.json(),
            FileDriver::Null(null) => return object(null.members()),
            FileDriver::Blkdebug(debug) => return object(debug.members()),
            FileDriver::Image(image) => return image.json(None),
            FileDriver::Any if is_device(&self.path) => "host_device",
            driver => driver.name(),
        };
        format!(
            "{{\"driver\": \"{driver}\", \"filename\": {}}}",
            json::quote(&self.name())
        )
    }
}

/// A JSON object of these members, in the order in which QEMU has them as far as
/// that is known.
fn object(mut members: Vec<(String, String)>) -> String {
    const ORDER: [&str; 15] = [
        "data-file",
        "backing",
        "read-zeroes",
        "offset",
        "opt-write-zero",
        "max-write-zero",
        "image",
        "max-transfer",
        "driver",
        "config",
        "size",
        "file",
        "opt-discard",
        "max-discard",
        "align",
    ];
    let place = |key: &str| ORDER.iter().position(|k| *k == key).unwrap_or(ORDER.len());
    members.sort_by_key(|(key, _)| place(key));
    let members: Vec<_> = members
        .iter()
        .map(|(key, value)| format!("{}: {value}", json::quote(key)))
        .collect();
    format!("{{{}}}", members.join(", "))
}

/// A file's name without the driver that it may begin with.
fn without_prefix(name: &str, driver: &str) -> String {
    let Some(path) = name.strip_prefix(driver).and_then(|n| n.strip_prefix(':')) else {
        return name.into();
    };
    match protocol(path) {
        // So that what is shown does not name a protocol.
        Some(_) if driver == "file" => format!("./{path}"),
        _ => path.into(),
    }
}

fn refuse_protocol_rest(options: &Options, driver: &str) -> Result<(), String> {
    let prefix = format!("Block protocol '{driver}' doesn't support the option");
    refuse_rest(options, &prefix)
}

/// Devices named without a driver show as such in JSON.
fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path)
        .is_ok_and(|m| m.file_type().is_block_device() || m.file_type().is_char_device())
}

/// The path `name` as it is meant in the directory of `relative_to`.
fn beside<'a>(name: &'a str, relative_to: Option<&str>) -> Result<Cow<'a, str>, String> {
    let Some(of) = relative_to else {
        return Ok(name.into());
    };
    if name.is_empty() || name.starts_with('/') {
        return Ok(name.into());
    }
    if of.starts_with("json:") || of.is_empty() {
        return Err(format!("Cannot use relative backing file names for '{of}'"));
    }
    Ok(match of.rfind('/') {
        Some(slash) => format!("{}{name}", &of[..=slash]).into(),
        None => name.into(),
    })
}

fn refuse_rest(options: &Options, prefix: &str) -> Result<(), String> {
    match options.first_key() {
        None => Ok(()),
        Some(key) => Err(format!("{prefix} '{}'", key)),
    }
}

impl CommonOptions {
    fn take(options: &mut Options) -> Result<CommonOptions, String> {
        if let Some(name) = options.take_text("node-name") {
            let inside = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(inside) {
                return Err(format!("Invalid node-name: '{}'", name));
            }
            if name.len() > 31 {
                return Err("Node name too long".into());
            }
        }
        let common = CommonOptions {
            read_only: options.take_bool("read-only")?,
            auto_read_only: options.take_bool("auto-read-only")?,
            force_share: options.take_bool("force-share")?,
            direct: options.take_bool("cache.direct")?,
            no_flush: options.take_bool("cache.no-flush")?,
            discard: match options.take_text("discard").as_deref() {
                None => None,
                Some("ignore" | "off") => Some(false),
                Some("unmap" | "on") => Some(true),
                Some(_) => return Err("Invalid discard option".into()),
            },
            detect_zeroes: match options.take_text("detect-zeroes").as_deref() {
                None => None,
                Some("off") => Some(DetectZeroes::Off),
                Some("on") => Some(DetectZeroes::On),
                Some("unmap") => Some(DetectZeroes::Unmap),
                Some(other) => return Err(format!("invalid parameter value: {other}")),
            },
        };
        if common.force_share == Some(true) && common.read_only == Some(false) {
            return Err("force-share=on can only be used with read-only images".into());
        }
        Ok(common)
    }
}

impl ImageSpec {
    /// The image in this file, with default options.
    pub fn new(format: Option<Format>, file: FileSpec) -> ImageSpec {
        ImageSpec {
            format,
            bare: false,
            file,
            backing: BackingSpec::Default,
            data_file: None,
            options: ImageOptions::default(),
            pending: Options::default(),
            depth: 0,
            guessed: false,
        }
    }

    /// Whether [`ImageSpec::set_format`] has told the format.
    pub(super) fn is_guessed(&self) -> bool {
        self.guessed
    }

    /// Tells the format that the content turned out to have. Options that
    /// this format does not have are refused here.
    pub fn set_format(&mut self, format: Format) -> Result<()> {
        self.format = Some(format);
        self.guessed = true;
        let pending = std::mem::take(&mut self.pending);
        self.take_format_options(pending, format).map_err(refused)
    }

    fn parse(
        mut options: Options,
        format: Option<Format>,
        naming: Naming<'_>,
        depth: usize,
    ) -> Result<ImageSpec, String> {
        if depth > MAX_DEPTH {
            return Err(format!(
                "More than {MAX_DEPTH} images are nested in the options"
            ));
        }
        if let Some(format) = format
            && options.get("driver").is_none()
        {
            options.set("driver".into(), Scalar::Text(format.name().into()));
        }
        let naming = naming.merge(&mut options)?;
        let mut format = None;
        // QEMU takes a string only for a driver's name; anything else is
        // refused below, as an option that no format has.
        if let Some(Scalar::Text(driver)) = options.get("driver").cloned() {
            match driver.as_str() {
                "raw" => format = Some(Format::Raw),
                "qcow2" => format = Some(Format::Qcow2),
                protocol if FileDriver::is_protocol(protocol) => {
                    let file = FileSpec::parse(options, naming, depth)?;
                    let mut spec = ImageSpec::new(Some(Format::Raw), file);
                    spec.bare = true;
                    spec.depth = depth;
                    spec.options.common = spec.file.options.common.clone();
                    return Ok(spec);
                }
                other => return Err(unknown_driver(other)),
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
        let file = FileSpec::child(&mut options, "file", naming, depth + 1)?;
        let mut spec = ImageSpec::new(format, file);
        spec.depth = depth;
        spec.options.common = CommonOptions::take(&mut options)?;
        match format {
            Some(format) => spec.take_format_options(options, format)?,
            None => spec.pending = options,
        }
        Ok(spec)
    }

    fn take_format_options(&mut self, mut options: Options, format: Format) -> Result<(), String> {
        match format {
            Format::Raw => self.options.raw = RawOptions::take(&mut options)?,
            Format::Qcow2 => {
                let backing = options.take_under("backing");
                self.backing = match options.get("backing") {
                    Some(Scalar::Null) => BackingSpec::None,
                    Some(Scalar::Text(name)) if name.is_empty() => BackingSpec::None,
                    Some(Scalar::Text(name)) => {
                        return Err(format!(
                            "Cannot find device='{name}' nor node-name='{name}'"
                        ));
                    }
                    _ => BackingSpec::Default,
                };
                if self.backing == BackingSpec::None {
                    options.take("backing");
                }
                if !backing.is_empty() {
                    if self.backing == BackingSpec::None {
                        return Err("Option 'backing' cannot be null and have options".into());
                    }
                    let depth = self.depth + 1;
                    self.backing = match backing.get("file.filename") {
                        // The header's name is for those that name no file.
                        None => BackingSpec::Options(BackingOptions {
                            options: backing,
                            depth,
                        }),
                        Some(_) => ImageSpec::parse(backing, None, Naming::default(), depth)
                            .map(|image| BackingSpec::Image(Box::new(image)))
                            .map_err(|e| format!("Could not open backing file: {e}"))?,
                    };
                }
                let data_file = options.take_under("data-file");
                match options.get("data-file") {
                    Some(Scalar::Text(name)) => {
                        return Err(format!(
                            "Cannot find device='{name}' nor node-name='{name}'"
                        ));
                    }
                    Some(Scalar::Null) => {
                        options.take("data-file");
                    }
                    _ => {}
                }
                if !data_file.is_empty() {
                    self.data_file = Some(FileSpec::parse(
                        data_file,
                        Naming::default(),
                        self.depth + 1,
                    )?);
                }
                if !options.take_under("encrypt").is_empty() {
                    return Err("Encrypted images are not supported by zebu".into());
                }
                self.options.qcow2 = Qcow2Options::take(&mut options)?;
            }
        }
        let prefix = format!(
            "Block format '{}' does not support the option",
            format.name()
        );
        refuse_rest(&options, &prefix)
    }

    /// The format's name as `info` shows it.
    pub fn format_name(&self) -> &'static str {
        match (self.bare, self.format) {
            (true, _) => self.file.driver.name(),
            (false, format) => format.unwrap_or(Format::Raw).name(),
        }
    }

    /// The name as `qemu-img info` shows it, which opens no backing file: the
    /// path if that says all, else the options as JSON.
    pub fn display_name(&self) -> String {
        self.plain_name()
            .unwrap_or_else(|| format!("json:{}", self.json(None)))
    }

    /// The name as QEMU shows it of an image that it opened with its backing
    /// file, as in messages: JSON, too, if the backing file is not what its
    /// header says (`header_backing`, None: it says there is none).
    pub fn display_name_with_backing(&self, header_backing: Option<&str>) -> String {
        let header = header_backing.unwrap_or("");
        let instead = match &self.backing {
            BackingSpec::Default | BackingSpec::Options(_) => return self.display_name(),
            BackingSpec::None if header.is_empty() => return self.display_name(),
            BackingSpec::None => "null".to_string(),
            BackingSpec::Image(image) if image.display_name() == header => {
                return self.display_name();
            }
            BackingSpec::Image(image) => image.json(None),
        };
        format!("json:{}", self.json(Some(&instead)))
    }

    /// The name that QEMU shows, if a name says all.
    fn plain_name(&self) -> Option<String> {
        let raw = &self.options.raw;
        let is_window = raw.offset_json.is_some() || raw.size_json.is_some();
        match (&self.file.driver, self.format) {
            _ if self.bare => self.file.plain_name(),
            // A format over another is never found out by itself.
            (FileDriver::Image(_), _) => None,
            (_, Some(Format::Qcow2)) => self.file.plain_name(),
            _ if is_window => None,
            _ => self.file.plain_name(),
        }
    }

    /// As JSON, the keys in QEMU's order.
    fn json(&self, backing: Option<&str>) -> String {
        if self.bare {
            return self.file.json();
        }
        let raw = &self.options.raw;
        let mut members = vec![
            ("driver", format!("\"{}\"", self.format_name())),
            ("file", self.file.json()),
        ];
        if let (Some(data_file), Some(Format::Qcow2)) = (&self.data_file, self.format) {
            members.push(("data-file", data_file.json()));
        }
        let given = [
            ("backing", backing),
            ("offset", raw.offset_json.as_deref()),
            ("size", raw.size_json.as_deref()),
        ];
        members.extend(
            given
                .into_iter()
                .filter_map(|(key, value)| Some((key, value?.to_string()))),
        );
        let owned = members.into_iter().map(|(key, value)| (key.into(), value));
        object(owned.collect())
    }
}

impl RawOptions {
    fn take(options: &mut Options) -> Result<RawOptions, String> {
        let json = |key| options.get(key).map(Scalar::json);
        let (offset_json, size_json) = (json("offset"), json("size"));
        let raw = RawOptions {
            offset_json,
            size_json,
            offset: options.take_size("offset")?,
            size: options.take_size("size")?,
        };
        if raw.size.is_some_and(|size| size % 512 != 0) {
            return Err("Specified size is not multiple of 512".into());
        }
        Ok(raw)
    }
}

impl Qcow2Options {
    fn take(options: &mut Options) -> Result<Qcow2Options, String> {
        let qcow2 = Qcow2Options {
            lazy_refcounts: options.take_bool("lazy-refcounts")?,
            pass_discard_request: options.take_bool("pass-discard-request")?,
            pass_discard_snapshot: options.take_bool("pass-discard-snapshot")?,
            pass_discard_other: options.take_bool("pass-discard-other")?,
            discard_no_unref: options.take_bool("discard-no-unref")?,
            overlap_check: OverlapChecks::take(options)?,
            cache_size: options.take_size("cache-size")?,
            l2_cache_size: options.take_size("l2-cache-size")?,
            l2_cache_entry_size: options.take_size("l2-cache-entry-size")?,
            refcount_cache_size: options.take_size("refcount-cache-size")?,
            cache_clean_interval: options.take_number("cache-clean-interval")?,
        };
        if let Some(total) = qcow2.cache_size {
            let (l2, refcount) = (qcow2.l2_cache_size, qcow2.refcount_cache_size);
            if l2.is_some() && refcount.is_some() {
                return Err(
                    "cache-size, l2-cache-size and refcount-cache-size may not be set \
                            at the same time"
                        .into(),
                );
            }
            if l2.is_some_and(|l2| l2 > total) {
                return Err("l2-cache-size may not exceed cache-size".into());
            }
            if refcount.is_some_and(|refcount| refcount > total) {
                return Err("refcount-cache-size may not exceed cache-size".into());
            }
        }
        Ok(qcow2)
    }
}

#[cfg(test)]
mod tests;
