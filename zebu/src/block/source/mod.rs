//! What names an image: a file name, a `json:{…}` name, options.
//!
//! [`Source::resolve`] turns any of them into an [`ImageSpec`], a tree that
//! says which files are opened and how, without opening anything. Whatever is
//! not understood is refused, in QEMU's words where it has some: an option
//! that were ignored might be the one that keeps the data safe.

mod json;
mod nbd;
mod options;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::Format;
pub use crate::image::OverlapChecks;
use crate::storage::EngineKind;
use crate::{Error, Result};
pub use nbd::{NbdSpec, NbdTls};
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
        let spec = match self {
            Source::Name(name) => match name.strip_prefix("json:") {
                Some(text) => json::parse(text).and_then(|o| ImageSpec::parse(o, format, 0)),
                None => FileSpec::named(name, relative_to).map(|file| ImageSpec::new(format, file)),
            },
            Source::Options(text) => ImageSpec::parse(Options::parse(text), format, 0),
        };
        spec.map_err(refused)
    }

    /// Refuses a name that is not just a path. Options, which nobody takes for
    /// a file's name, are not looked at.
    pub(super) fn check_is_path(&self) -> Result<()> {
        let Source::Name(name) = self else {
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
    /// Its path; of an export, the URI that QEMU shows.
    pub path: PathBuf,
    /// What it may be.
    pub driver: FileDriver,
    /// How to open it.
    pub options: FileOptions,
    /// The export that it is instead of a file.
    pub nbd: Option<NbdSpec>,
}

/// What a file may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum FileDriver {
    /// A regular file or a device: it was named without a driver.
    #[default]
    Any,
    /// A regular file (`file`).
    File,
    /// A device (`host_device`).
    HostDevice,
    /// An NBD server's export (`nbd`): [`FileSpec::nbd`].
    Nbd,
}

impl FileDriver {
    /// QEMU's name: `file`, `host_device` or `nbd`.
    pub fn name(self) -> &'static str {
        match self {
            FileDriver::Any | FileDriver::File => "file",
            FileDriver::HostDevice => "host_device",
            FileDriver::Nbd => "nbd",
        }
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
    "blkdebug",
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
    "host_cdrom",
    "http",
    "https",
    "io_uring",
    "iscsi",
    "iser",
    "luks",
    "nfs",
    "null-aio",
    "null-co",
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
            nbd: None,
        }
    }

    /// An export with default options.
    fn export(nbd: NbdSpec) -> FileSpec {
        let mut spec = FileSpec::new(nbd.name());
        spec.driver = FileDriver::Nbd;
        spec.nbd = Some(nbd);
        spec
    }

    /// The file that an image names as its data file. `relative_to` is as for
    /// [`Source::resolve`].
    pub fn resolve(name: &str, relative_to: Option<&str>) -> Result<FileSpec> {
        match name.strip_prefix("json:") {
            Some(text) => json::parse(text).and_then(|o| FileSpec::parse(o, "data-file")),
            None => FileSpec::named(name, relative_to),
        }
        .map_err(refused)
    }

    /// The path as text.
    pub fn name(&self) -> Cow<'_, str> {
        self.path.to_string_lossy()
    }

    /// A path, `file:PATH` or an export.
    fn named(name: &str, relative_to: Option<&str>) -> Result<FileSpec, String> {
        let spec = |driver, path: Cow<'_, str>| {
            check_path(&path)?;
            let mut spec = FileSpec::new(path.into_owned());
            spec.driver = driver;
            Ok(spec)
        };
        match protocol(name) {
            Some("file") => {
                let path = &name["file:".len()..];
                match protocol(path) {
                    // So that what is shown does not name a protocol.
                    Some(_) => spec(FileDriver::File, format!("./{path}").into()),
                    None => spec(FileDriver::File, path.into()),
                }
            }
            Some("host_device") => {
                spec(FileDriver::HostDevice, name["host_device:".len()..].into())
            }
            Some(other) if nbd::is_protocol(other) => NbdSpec::named(name).map(FileSpec::export),
            Some(other) => Err(format!("Unknown protocol '{other}'")),
            None => spec(FileDriver::Any, beside(name, relative_to)?),
        }
    }

    /// From the options under `key` of an image.
    fn parse(mut options: Options, key: &str) -> Result<FileSpec, String> {
        let driver = match options.take_string("driver") {
            None => FileDriver::Any,
            Some(name) => match name.as_str() {
                "file" => FileDriver::File,
                "host_device" => FileDriver::HostDevice,
                "nbd" => return FileSpec::parse_export(options),
                // A raw image of the whole file is the file.
                "raw" if key == "data-file" => {
                    let file = options.take_under("file");
                    refuse_rest(&options, "Block format 'raw' does not support the option")?;
                    return FileSpec::parse(file, "file");
                }
                "raw" | "qcow2" => {
                    return Err(format!("Driver '{name}' is not supported in '{key}'"));
                }
                _ => return Err(unknown_driver(&name)),
            },
        };
        let path = match options.take_string("filename") {
            Some(path) => path,
            None if driver == FileDriver::Any => {
                return Err("Must specify either driver or file".into());
            }
            None => {
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
        let prefix = format!(
            "Block protocol '{}' doesn't support the option",
            driver.name()
        );
        refuse_rest(&options, &prefix)?;
        Ok(FileSpec {
            path: path.into(),
            driver,
            options: file,
            nbd: None,
        })
    }

    fn parse_export(mut options: Options) -> Result<FileSpec, String> {
        let mut spec = FileSpec::export(NbdSpec::take(&mut options)?);
        spec.options.common = CommonOptions::take(&mut options)?;
        refuse_rest(&options, "Block protocol 'nbd' doesn't support the option")?;
        Ok(spec)
    }

    fn json(&self) -> String {
        if let Some(nbd) = &self.nbd {
            return nbd.json();
        }
        let driver = match self.driver {
            FileDriver::Any if is_device(&self.path) => FileDriver::HostDevice,
            driver => driver,
        };
        format!(
            "{{\"driver\": \"{}\", \"filename\": {}}}",
            driver.name(),
            json::quote(&self.name())
        )
    }
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
        depth: usize,
    ) -> Result<ImageSpec, String> {
        if depth > MAX_DEPTH {
            return Err(format!(
                "More than {MAX_DEPTH} images are nested in the options"
            ));
        }
        let mut format = format;
        // QEMU takes a string only for a driver's name; anything else is
        // refused below, as an option that no format has.
        if let Some(Scalar::Text(driver)) = options.get("driver").cloned() {
            match (format, driver.as_str()) {
                (Some(_), _) => {}
                (None, "raw") => format = Some(Format::Raw),
                (None, "qcow2") => format = Some(Format::Qcow2),
                (None, "file" | "host_device" | "nbd") => {
                    let file = FileSpec::parse(options, "file")?;
                    let mut spec = ImageSpec::new(Some(Format::Raw), file);
                    spec.bare = true;
                    spec.options.common = spec.file.options.common.clone();
                    return Ok(spec);
                }
                (None, other) => return Err(unknown_driver(other)),
            }
            options.take("driver");
        }
        let file = options.take_under("file");
        match options.take("file") {
            Some(Scalar::Text(_)) if !file.is_empty() || options.get("filename").is_some() => {
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
            _ if !file.is_empty() => {}
            None if format.is_none() => {
                return Err("Must specify either driver or file".into());
            }
            _ => return Err("A block device must be specified for \"file\"".into()),
        }
        let file = FileSpec::parse(file, "file")?;
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
                    let image = ImageSpec::parse(backing, None, self.depth + 1)
                        .map_err(|e| format!("Could not open backing file: {e}"))?;
                    self.backing = BackingSpec::Image(Box::new(image));
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
                    self.data_file = Some(FileSpec::parse(data_file, "data-file")?);
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
        match self.is_plain() {
            true => self.file.name().into_owned(),
            false => format!("json:{}", self.json(None)),
        }
    }

    /// The name as QEMU shows it of an image that it opened with its backing
    /// file, as in messages: JSON, too, if the backing file is not what its
    /// header says (`header_backing`, None: it says there is none).
    pub fn display_name_with_backing(&self, header_backing: Option<&str>) -> String {
        let header = header_backing.unwrap_or("");
        let instead = match &self.backing {
            BackingSpec::Default => return self.display_name(),
            BackingSpec::None if header.is_empty() => return self.display_name(),
            BackingSpec::None => "null".to_string(),
            BackingSpec::Image(image) if image.display_name() == header => {
                return self.display_name();
            }
            BackingSpec::Image(image) => image.json(None),
        };
        format!("json:{}", self.json(Some(&instead)))
    }

    /// Whether the path alone says what this is.
    fn is_plain(&self) -> bool {
        let raw = &self.options.raw;
        self.format == Some(Format::Qcow2) || (raw.offset_json.is_none() && raw.size_json.is_none())
    }

    /// As JSON, the keys in QEMU's order.
    fn json(&self, backing: Option<&str>) -> String {
        if self.bare {
            return self.file.json();
        }
        let raw = &self.options.raw;
        let mut parts = Vec::new();
        if let (Some(data_file), Some(Format::Qcow2)) = (&self.data_file, self.format) {
            parts.push(format!("\"data-file\": {}", data_file.json()));
        }
        if let Some(backing) = backing {
            parts.push(format!("\"backing\": {backing}"));
        }
        if let Some(offset) = &raw.offset_json {
            parts.push(format!("\"offset\": {offset}"));
        }
        parts.push(format!("\"driver\": \"{}\"", self.format_name()));
        if let Some(size) = &raw.size_json {
            parts.push(format!("\"size\": {size}"));
        }
        parts.push(format!("\"file\": {}", self.file.json()));
        format!("{{{}}}", parts.join(", "))
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
