//! Images that are made of options in text, in files of the host: what the program's `create` and
//! `convert` do, and the libraries for other languages.

mod creation;
mod device;
mod file;
mod options;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

pub use creation::{Begun, Creation};
pub use file::{NewFile, check_names};
pub use options::{CreateOptions, number, parse_file_size};

use super::{CreateQcow2, NewBacking, NewDataFile, Preallocation};
use crate::block::{Device, FileDriver, FileSpec, Format, Objects, OpenOptions};
use crate::drivers::{ImagePlan, PlanRequest};
use crate::error::WithErrno;
use crate::names::{Source, protocol};
use crate::printable;
pub use crate::protocols::is_remote;
use crate::qcow2::Compression;
use crate::storage::{self, CacheMode, LockRequest, Queue, Storage};
use crate::{Error, Result, codec, drivers};

/// Formats of QEMU that zebu does not create.
const OTHER_FORMATS: [&str; 4] = ["qcow", "qed", "parallels", "luks"];
/// Formats that cannot be created.
const READ_ONLY_FORMATS: [&str; 3] = ["bochs", "cloop", "dmg"];

/// The format of a new image, by its name.
pub fn parse_format(name: &str) -> Result<Format, String> {
    match name.parse::<Format>() {
        Ok(format) if format.is_creatable() => Ok(format),
        _ => Err(not_creatable(name)),
    }
}

/// Why no image of this format can be created.
fn not_creatable(name: &str) -> String {
    if READ_ONLY_FORMATS.contains(&name) {
        format!("Format driver '{name}' does not support image creation")
    } else if is_format(name) {
        format!("Creating images of format '{name}' is not part of this version")
    } else {
        format!("Unknown file format '{}'", printable(name.as_bytes()))
    }
}

/// Whether QEMU has a format of this name.
pub fn is_format(name: &str) -> bool {
    name.parse::<Format>().is_ok()
        || OTHER_FORMATS.contains(&name)
        || READ_ONLY_FORMATS.contains(&name)
}

/// An image that can be made.
pub enum NewImage {
    /// A raw one.
    Raw {
        /// In bytes.
        size: u64,
        /// What is allocated at once.
        preallocation: Preallocation,
    },
    /// A qcow2 one.
    Qcow2(Box<CreateQcow2>),
    /// One of another format.
    Planned(Box<dyn ImagePlan>),
}

/// Decodes the size and the options of a new image.
type Creator = fn(u64, &CreateOptions) -> Result<NewImage, String>;

/// The formats that are not planned by the library.
const CREATORS: [(Format, Creator); 2] = [(Format::RAW, raw), (Format::QCOW2, qcow2)];

impl NewImage {
    /// The image that the options mean, whose values were looked at. `path` is that of its file, and
    /// `backing` its backing file, if it was opened.
    ///
    /// # Errors
    ///
    /// In QEMU's words why it cannot be.
    pub fn new(
        format: Format,
        path: &Path,
        size: u64,
        options: &CreateOptions,
        backing: Option<&Device>,
    ) -> Result<Self> {
        if let Some((_, create)) = CREATORS.iter().find(|creator| creator.0 == format) {
            return create(size, options).map_err(Error::Refused);
        }
        if !format.is_creatable() {
            return Err(Error::Refused(not_creatable(format.name())));
        }
        // The file is empty when it is made, so there is nothing to allocate.
        file_preallocation(options).map_err(Error::Refused)?;
        let plan = format.plan(&PlanRequest {
            path,
            size,
            options: &options.values(format),
            backing_id: backing.and_then(|backing| backing.top().content_id()),
        })?;
        Ok(NewImage::Planned(plan))
    }

    /// As [`NewImage::new`], for an image that is filled: it must be one that can be opened.
    ///
    /// # Errors
    ///
    /// As for [`NewImage::new`], or if it could not be opened.
    pub fn to_fill(
        format: Format,
        path: &Path,
        size: u64,
        options: &CreateOptions,
    ) -> Result<Self> {
        let image = NewImage::new(format, path, size, options, None)?;
        if let NewImage::Planned(plan) = &image {
            plan.check_opens()?;
        }
        Ok(image)
    }

    /// Whether its disk is what its file or its data file holds, also where that is a device with any content.
    /// Others read as zeroes at first.
    pub fn shows_file(&self) -> bool {
        match self {
            // Preallocation makes zeroes.
            NewImage::Raw { preallocation, .. } => *preallocation == Preallocation::Off,
            NewImage::Qcow2(_) => self.keeps_others(),
            NewImage::Planned(_) => false,
        }
    }

    /// Whether all of its data are written in blocks of 4096 bytes, if the disk consists of such.
    pub fn is_in_blocks(&self) -> bool {
        match self {
            NewImage::Raw { .. } => true,
            NewImage::Qcow2(image) => image.cluster_bits >= 12,
            NewImage::Planned(plan) => plan.alignment() >= 4096,
        }
    }

    /// Refuses a level that the codec of its compressed data does not have.
    ///
    /// # Errors
    /// [`Error::Refused`].
    pub fn check_level(&self, level: Option<i32>) -> Result<()> {
        let kind = match self {
            NewImage::Raw { .. } => return Ok(()),
            NewImage::Qcow2(image) if image.compression == Compression::Zstd => {
                codec::Compression::Zstd
            }
            NewImage::Qcow2(_) | NewImage::Planned(_) => codec::Compression::Zlib,
        };
        if level.is_none() {
            return Ok(());
        }
        let compressed = codec::Compressor::new().compress(kind, level, &[0; 512], &mut [0; 512]);
        compressed
            .map(drop)
            .map_err(|e| Error::Refused(e.to_string()))
    }

    /// Whether the files that it has besides its own keep what they hold.
    fn keeps_others(&self) -> bool {
        match self {
            NewImage::Qcow2(image) => image.data_file.as_ref().is_some_and(|file| file.keep),
            NewImage::Raw { .. } | NewImage::Planned(_) => false,
        }
    }

    /// The files that it has besides its own.
    pub fn other_files(&self) -> Result<Vec<FileSpec>, String> {
        match self {
            NewImage::Raw { .. } => Ok(Vec::new()),
            NewImage::Qcow2(image) => {
                let data_file = image.data_file.as_ref();
                data_file
                    .map(|data| file_of(&data.name))
                    .into_iter()
                    .collect()
            }
            NewImage::Planned(plan) => {
                let paths = plan.other_files().into_iter();
                Ok(paths.map(FileSpec::new).collect())
            }
        }
    }
}

/// The preallocation of a file that is made.
fn file_preallocation(options: &CreateOptions) -> Result<Preallocation, String> {
    match options.get("preallocation") {
        None => Ok(Preallocation::Off),
        Some(name) => match Preallocation::from_name(name) {
            None => Err(format!("invalid parameter value: {name}")),
            Some(Preallocation::Metadata) => Err("Unsupported preallocation mode: metadata".into()),
            Some(mode) => Ok(mode),
        },
    }
}

fn raw(size: u64, options: &CreateOptions) -> Result<NewImage, String> {
    let preallocation = file_preallocation(options)?;
    let size = size.checked_next_multiple_of(512);
    let size = size.filter(|size| *size <= i64::MAX as u64);
    let size = size.ok_or("Could not resize file: Invalid argument")?;
    Ok(NewImage::Raw {
        size,
        preallocation,
    })
}

fn qcow2(size: u64, options: &CreateOptions) -> Result<NewImage, String> {
    let wrong = |parameter: &str, value: &str| {
        format!("Parameter '{parameter}' does not accept value '{value}'")
    };
    let version = match options.get("compat") {
        None | Some("1.1" | "v3") => 3,
        Some("0.10" | "v2") => 2,
        Some(other) => return Err(wrong("version", other)),
    };
    let name = |key| options.value(key).map(OsStr::to_owned);
    let backing_format = options.get("backing_fmt").map(str::to_string);
    if let Some(other) = backing_format.as_deref()
        && !is_format(other)
    {
        return Err(wrong("backing-fmt", other));
    }
    let preallocation = match options.get("preallocation") {
        None => Preallocation::Off,
        Some(name) => Preallocation::from_name(name).ok_or_else(|| wrong("preallocation", name))?,
    };
    let compression = match options.get("compression_type") {
        None | Some("zlib") => Compression::Zlib,
        Some("zstd") => Compression::Zstd,
        Some(other) => return Err(wrong("compression-type", other)),
    };
    refuse_encryption(options)?;
    let cluster_size = options.size("cluster_size").unwrap_or(65536);
    let refcount_bits = options.get("refcount_bits").and_then(number).unwrap_or(16);
    let backing =
        name("backing_file").map(|name| NewBacking::new(name).format(backing_format.clone()));
    let data_file = name("data_file").map(|name| {
        let file = NewDataFile::new(name).raw(options.is_on("data_file_raw"));
        file.keep(options.is_on("keep_data_file"))
    });
    let image = CreateQcow2::default()
        .size(size)
        .version(version)
        // What is no power of two is none that exists.
        .cluster_bits(log2(cluster_size))
        .refcount_order(log2(refcount_bits))
        .extended_l2(options.is_on("extended_l2"))
        .lazy_refcounts(options.is_on("lazy_refcounts"))
        .compression(compression)
        .preallocation(preallocation)
        .backing(backing)
        .data_file(data_file);
    if image.backing.is_none() && backing_format.is_some() {
        return Err("Backing format cannot be used without backing file".into());
    }
    if image.data_file.is_none() && options.is_on("data_file_raw") {
        return Err("data-file-raw requires data-file".into());
    }
    if image.data_file.is_none() && options.is_on("keep_data_file") {
        return Err("Must not use 'keep_data_file=on' without 'data_file'".into());
    }
    image.check().map_err(|e| e.to_string())?;
    Ok(NewImage::Qcow2(Box::new(image)))
}

/// The power of two; 64, which is out of every range, if it is none.
pub fn log2(value: u64) -> u32 {
    match value.is_power_of_two() {
        true => value.trailing_zeros(),
        false => 64,
    }
}

fn refuse_encryption(options: &CreateOptions) -> Result<(), String> {
    let given = Format::QCOW2
        .create_options()
        .iter()
        .map(|option| option.name)
        .find(|name| name.starts_with("encrypt.") && options.value(name).is_some())
        .or(options.is_on("encryption").then_some("encryption"));
    match given {
        Some(name) => Err(format!("{name}: encryption is not part of this version")),
        None => Ok(()),
    }
}

/// The files of an image that is being made, locked as long as this is there.
#[derive(Debug)]
pub struct NewFiles {
    file: NewFile,
    /// Those of [`NewImage::other_files`].
    others: Vec<NewFile>,
}

impl NewFiles {
    /// Opens the files of `image`, in the first of `caches` that works. What
    /// they held is there until [`NewFiles::make`].
    pub fn open(
        file: &FileSpec,
        image: &NewImage,
        caches: &[CacheMode],
        objects: &Objects,
    ) -> Result<Self> {
        let lock = match image {
            NewImage::Raw { .. } => LockRequest::CREATE,
            NewImage::Qcow2(_) | NewImage::Planned(_) => LockRequest::QCOW2_WRITE,
        };
        let others = image.other_files().map_err(Error::Refused)?;
        let mut files = NewFiles {
            file: NewFile::open(file, lock, caches, objects)?,
            others: Vec::new(),
        };
        for other in &others {
            // As a file that is made, and only then as one of an image.
            let opened = match image.keeps_others() {
                true => NewFile::open_kept(other, LockRequest::CREATE, caches, objects),
                false => NewFile::open(other, LockRequest::CREATE, caches, objects),
            };
            let locked = opened.and_then(|new| {
                files.others.push(new);
                files.others[files.others.len() - 1].lock(LockRequest::DATA_WRITE)
            });
            if let Err(e) = locked {
                files.give_up();
                return Err(e);
            }
        }
        Ok(files)
    }

    /// Makes them the image.
    pub fn make(&self, queue: &Queue, image: &NewImage) -> Result<()> {
        match image {
            NewImage::Raw {
                size,
                preallocation,
            } => self.make_raw(queue, *size, *preallocation),
            NewImage::Qcow2(image) => {
                let data = self.others.first().map(|data| &**data.storage());
                let file = &**self.file.storage();
                let create = super::create_qcow2(queue, file, data, image, |_| {});
                self.keep(queue, queue.block_on(create))
            }
            NewImage::Planned(plan) => {
                let create = super::create_image(queue, &**plan, self.storages());
                self.keep(queue, queue.block_on(create))
            }
        }
    }

    /// [`NewFiles::make`] of an image that is not filled: it is durable on return, under its name.
    pub fn make_durably(&self, queue: &Queue, image: &NewImage) -> Result<()> {
        self.make(queue, image)?;
        if let NewImage::Raw { .. } = image {
            // The others are flushed in order.
            queue.block_on(storage::flush(&**self.storage(), queue))?;
        }
        check_names(&self.storages())
    }

    /// Opens the image that they were made, which `source` names, for writing. They stay locked
    /// meanwhile.
    pub fn open_image(
        &self,
        queue: &Queue,
        source: &Source,
        options: &OpenOptions,
    ) -> Result<Device> {
        let data = self.others.first().map(|data| data.storage().clone());
        let file = self.file.opened();
        queue.block_on(Device::open_source_over(queue, source, options, file, data))
    }

    /// Whether all of them were made for this.
    pub fn are_new(&self) -> bool {
        self.file.is_new() && self.others.iter().all(NewFile::is_new)
    }

    /// The file of the image.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        self.file.storage()
    }

    /// Begins a planned image in them, which is to be filled. It keeps them locked.
    pub fn begin(&self, queue: &Queue, plan: &dyn ImagePlan) -> Result<Box<dyn drivers::NewImage>> {
        let begun = queue.block_on(super::begin_image(queue, plan, self.storages()));
        self.keep(queue, begun)
    }

    /// The open files, that of the image first.
    pub fn storages(&self) -> Vec<Arc<dyn Storage>> {
        let files = [&self.file].into_iter().chain(&self.others);
        files.map(|file| file.storage().clone()).collect()
    }

    /// Makes a raw image end within its last sector, durably, if its file is a regular one of this machine:
    /// others may have a fixed size.
    ///
    /// # Errors
    /// Those of the file.
    pub fn end_within_sector(&self, queue: &Queue, length: u64) -> std::io::Result<()> {
        let storage = &**self.storage();
        if storage.named_file().is_none_or(|file| file.is_device()) {
            return Ok(());
        }
        queue.block_on(async {
            storage::set_len(storage, queue, length).await?;
            storage::flush(storage, queue).await
        })
    }

    /// Discards them after an error: what they held is lost already.
    fn keep<T>(&self, queue: &Queue, made: Result<T>) -> Result<T> {
        if made.is_err() {
            // Nothing better can be done with them.
            let _ = self.discard(queue);
        }
        made
    }

    /// Discards what was written: files that were made for this are removed, those that were there
    /// are emptied. Devices are left.
    ///
    /// # Errors
    /// The first one of the file system, or of the server.
    pub fn discard(&self, queue: &Queue) -> std::io::Result<()> {
        let files = [&self.file].into_iter().chain(&self.others);
        let discarded: Vec<_> = files.map(|file| file.discard(queue)).collect();
        discarded.into_iter().collect()
    }

    fn make_raw(&self, queue: &Queue, size: u64, preallocation: Preallocation) -> Result<()> {
        let storage = &**self.storage();
        let create = super::create_raw(queue, storage, size, preallocation, |_| {});
        queue.block_on(create).map_err(|e| {
            self.file.remove_if_new();
            match e.errno() {
                libc::EFBIG => too_large(),
                _ if storage.is_device() => e,
                _ => e.during("Could not resize file"),
            }
        })
    }

    /// Removes those that were not there before.
    pub fn give_up(self) {
        self.file.remove_if_new();
        self.others.iter().for_each(NewFile::remove_if_new);
    }

    /// Whether what is new reads as zeroes by itself: not so on a device.
    pub fn are_zero(&self) -> bool {
        let data = self.others.first().unwrap_or(&self.file);
        !data.storage().is_device() && !data.is_kept()
    }

    /// Whether the file of the image is a device of less than `size` bytes.
    pub fn is_shorter_device(&self, size: u64) -> Result<bool> {
        let storage = self.storage();
        Ok(storage.is_device() && storage.len()? < size)
    }

    /// How the file of the image was opened.
    pub fn cache_mode(&self) -> CacheMode {
        self.storage().cache_mode()
    }
}

/// Refuses what no image is created in: objects, which are written in order, and what holds no bytes of
/// its own.
pub fn refuse_object(spec: &FileSpec) -> Result<(), String> {
    if spec.protocol().takes_new_images() {
        return Ok(());
    }
    let driver = spec.driver.name();
    let why = format!("Protocol driver '{driver}' does not support image creation");
    Err(match spec.is_object() && !driver.starts_with("http") {
        true => format!("{why}: only 'zebu convert' writes to it"),
        false => why,
    })
}

/// The file, the export of a server or the object that a name means. What does not exist
/// yet is described by no options, so `json:` is refused.
pub fn file_of(name: &OsStr) -> Result<FileSpec, String> {
    if let Some(path) = after_file(name) {
        return Ok(FileSpec::new(path));
    }
    match protocol(name) {
        Some(protocol) if protocol == "json" => Err(format!("Unknown protocol '{protocol}'")),
        Some(_) => FileSpec::resolve(name, None).map_err(|e| e.to_string()),
        None => Ok(FileSpec::new(name)),
    }
}

/// The same for an image of a format that is named: `host_device` and `host_cdrom`, to which QEMU writes as
/// if they were formats, must be a device.
pub fn file_as(name: &OsStr, format: &str) -> Result<FileSpec, String> {
    let mut file = file_of(name)?;
    if matches!(file.driver, FileDriver::Any) {
        file.driver = match format {
            "file" => FileDriver::File,
            "host_device" => FileDriver::HostDevice,
            "host_cdrom" => FileDriver::HostCdrom,
            _ => FileDriver::Any,
        };
    }
    Ok(file)
}

/// What follows `file:`, if a name begins with it.
pub fn after_file(name: &OsStr) -> Option<&OsStr> {
    name.as_bytes()
        .strip_prefix(b"file:")
        .map(OsStr::from_bytes)
}

/// The error of a file that cannot be as long as its raw image.
fn too_large() -> Error {
    let source = "The image size is too large for file format 'raw'".into();
    let errno = libc::EFBIG;
    Error::Io(std::io::Error::other(WithErrno { errno, source }))
}

/// The error with its context, in QEMU's words.
fn could_not_create(spec: &FileSpec, error: Error) -> Error {
    if let Err(why) = refuse_object(spec) {
        return Error::Refused(why);
    }
    if spec.protocol().must_exist() {
        return error.during(format!(
            "Protocol driver '{}' does not support creating new images, so an existing image \
             must be selected as the target; however, opening the given target as an existing \
             image failed",
            spec.driver.name()
        ));
    }
    let source = match error {
        // Its context says as much.
        Error::Open { source, .. } | Error::While { source, .. } => *source,
        error => error,
    };
    source.during(format!("Could not create '{}'", spec.name().display()))
}

#[cfg(test)]
mod tests {
    //! Guards against a format that the registry lists as creatable and this file cannot create.
    use super::*;

    #[test]
    fn images_of_creatable_formats_can_be_made() {
        let options = CreateOptions::default();
        for format in Format::all() {
            let image = NewImage::new(format, Path::new("x"), 1 << 20, &options, None);
            assert_eq!(image.is_ok(), format.is_creatable(), "{format:?}");
        }
    }
}
