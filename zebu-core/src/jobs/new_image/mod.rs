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

use super::Target;
use crate::block::{Device, FileDriver, FileSpec, Format, JustMade, Objects, OpenOptions};
pub use crate::drivers::qcow2::create::log2;
use crate::drivers::{CreateValues, Filling, ImagePlan, PlanRequest, READ_ONLY_FORMATS, is_format};
use crate::names::{Source, protocol};
use crate::printable;
pub use crate::protocols::{is_driver, is_remote};
use crate::storage::{self, CacheMode, LockRequest, Queue, Storage};
use crate::{Error, Result, codec};

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

/// The image of these options, whose values were looked at. `path` is that of its file, and `backing` its
/// backing file, if it was opened.
///
/// # Errors
/// In QEMU's words why it cannot be.
pub fn plan(
    format: Format,
    path: &Path,
    size: u64,
    options: &CreateOptions,
    backing: Option<&Device>,
) -> Result<Box<dyn ImagePlan>> {
    if !format.is_creatable() {
        return Err(Error::Refused(not_creatable(format.name())));
    }
    backing.map_or(Ok(()), Device::check_overlay)?;
    let options = &options.values(format);
    if format == Format::QCOW2 {
        check_backing_format(options)?;
    } else {
        // In other formats than raw the file is empty when it is made: there is nothing to allocate.
        options.file_preallocation()?;
    }
    format.plan(&PlanRequest {
        path,
        size,
        options,
        backing_id: backing.and_then(|backing| backing.top().content_id()),
    })
}

/// Refuses what is no name of a driver as the format of a backing file.
fn check_backing_format(options: &CreateValues) -> Result<()> {
    match options.word("backing_fmt") {
        Some(name) if !is_driver(name) => Err(Error::Refused(format!(
            "Parameter 'backing-fmt' does not accept value '{}'",
            printable(name.as_bytes())
        ))),
        _ => Ok(()),
    }
}

/// As [`plan`], for an image that is filled: it must be one that can be opened.
///
/// # Errors
/// As for [`plan`], or if it could not be opened.
pub fn plan_to_fill(
    format: Format,
    path: &Path,
    size: u64,
    options: &CreateOptions,
) -> Result<Box<dyn ImagePlan>> {
    let plan = plan(format, path, size, options, None)?;
    plan.check_opens()?;
    Ok(plan)
}

/// Refuses a level that the codec of an image's compressed data does not have.
///
/// # Errors
/// [`Error::Refused`].
pub fn check_level(plan: &dyn ImagePlan, level: Option<i32>) -> Result<()> {
    let Some((kind, _)) = plan.compression().zip(level) else {
        return Ok(());
    };
    let compressed = codec::Compressor::new().compress(kind, level, &[0; 512], &mut [0; 512]);
    compressed
        .map(drop)
        .map_err(|e| Error::Refused(e.to_string()))
}

/// The files that an image has besides its own.
///
/// # Errors
/// If they have no names of files.
pub fn other_files(plan: &dyn ImagePlan) -> Result<Vec<FileSpec>> {
    let names = plan.other_files();
    let files = names
        .iter()
        .map(|name| file_of(name))
        .collect::<Result<_, _>>();
    files.map_err(Error::Refused)
}

/// The files of an image that is being made: the one way to make an image in files. They are locked
/// as long as this is there. What they held is there until the image is begun, and until then those
/// that were made for it are removed when this is dropped.
#[derive(Debug)]
pub struct NewFiles {
    plan: Box<dyn ImagePlan>,
    file: NewFile,
    /// Those of [`ImagePlan::other_files`].
    others: Vec<NewFile>,
    is_begun: bool,
}

impl NewFiles {
    /// Opens the files of an image, in the first of `caches` that works, or makes them.
    ///
    /// # Errors
    /// If one cannot be made, or another program uses it.
    pub fn open(
        file: &FileSpec,
        plan: Box<dyn ImagePlan>,
        caches: &[CacheMode],
        objects: &Objects,
    ) -> Result<Self> {
        let others = other_files(&*plan)?;
        let mut files = NewFiles {
            file: NewFile::open(file, plan.lock(), caches, objects)?,
            plan,
            others: Vec::new(),
            is_begun: false,
        };
        for other in &others {
            // As a file that is made, and only then as one of an image.
            let new = match files.plan.keeps_others() {
                true => NewFile::open_kept(other, LockRequest::CREATE, caches, objects),
                false => NewFile::open(other, LockRequest::CREATE, caches, objects),
            };
            files.others.push(new?);
            files.others[files.others.len() - 1].lock(LockRequest::DATA_WRITE)?;
        }
        Ok(files)
    }

    /// Makes them the image, durably, under their names.
    ///
    /// # Errors
    /// Those of the storages. Then they are discarded: what they held is lost already.
    pub fn create(&mut self, queue: &Queue) -> Result<()> {
        self.is_begun = true;
        let made = super::create_image(queue, &*self.plan, self.storages());
        self.keep(queue, queue.block_on(made))?;
        self.check_names()
    }

    /// Begins the image in them, which is to be filled. `source` names it, `options` are how it is
    /// opened if it is one that is.
    ///
    /// # Errors
    /// Those of the storages. Then they are discarded. [`Error::Open`] if it could not be opened: it is
    /// marked as not finished.
    pub fn begin(
        &mut self,
        queue: &Queue,
        source: &Source,
        options: &OpenOptions,
    ) -> Result<Target> {
        self.is_begun = true;
        let begun = queue.block_on(super::create::begin(queue, &*self.plan, self.storages()));
        let new = self.keep(queue, begun)?;
        Ok(match self.plan.filling() {
            Filling::New => Target::New(new),
            Filling::Raw => Target::Raw(self.storage().clone()),
            Filling::Qcow2(version) => {
                let opened = self.open_image(queue, source, options, Some(version));
                Target::Image(opened.map_err(|source| Error::Open {
                    file: self.storage().path().to_owned(),
                    source: Box::new(source),
                })?)
            }
        })
    }

    /// Opens the image for writing. The files stay locked meanwhile.
    fn open_image(
        &self,
        queue: &Queue,
        source: &Source,
        options: &OpenOptions,
        unfinished: Option<u32>,
    ) -> Result<Device> {
        let data = self.others.first().map(|data| data.storage().clone());
        let file = self.file.opened();
        let made = JustMade {
            unfinished,
            key: self.plan.key().cloned(),
        };
        let opened = Device::open_source_over(queue, source, options, file, data, made);
        queue.block_on(opened)
    }

    /// Marks the image again as one that is not finished, if its format can. Errors are ignored: what
    /// made it necessary has failed already.
    pub fn mark(&self, queue: &Queue) {
        let storage = &**self.storage();
        if let Ok(Some(mark)) = self.plan.mark() {
            let first = &mark[..mark.len().min(512)];
            let _ = queue.block_on(async {
                storage::write_slice(storage, queue, 0, first).await?;
                storage::flush(storage, queue).await
            });
        }
    }

    /// Refuses files that were removed, or replaced by others of their names, since they were opened.
    ///
    /// # Errors
    /// [`Error::Refused`], with the name of the file.
    pub fn check_names(&self) -> Result<()> {
        check_names(&self.storages())
    }

    /// What is made.
    pub fn plan(&self) -> &dyn ImagePlan {
        &*self.plan
    }

    /// Whether all of them were made for this.
    pub fn are_new(&self) -> bool {
        self.all().all(NewFile::is_new)
    }

    /// The file of the image.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        self.file.storage()
    }

    fn all(&self) -> impl Iterator<Item = &NewFile> {
        [&self.file].into_iter().chain(&self.others)
    }

    /// The open files, that of the image first.
    pub fn storages(&self) -> Vec<Arc<dyn Storage>> {
        self.all().map(|file| file.storage().clone()).collect()
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
        let discarded: Vec<_> = self.all().map(|file| file.discard(queue)).collect();
        discarded.into_iter().collect()
    }

    /// Whether the image reads as zeroes when it was begun. One that shows its file does not on a
    /// device, or if that is kept. A [`Target::New`] tells itself.
    pub fn reads_as_zeroes(&self) -> bool {
        let data = self.others.first().unwrap_or(&self.file);
        let is_zero = !data.storage().is_device() && !data.is_kept();
        is_zero || !self.plan.shows_file()
    }

    /// Whether the file of the image is a device that is too short for a raw image.
    ///
    /// # Errors
    /// If its length cannot be told.
    pub fn is_shorter_device(&self) -> Result<bool> {
        let storage = self.storage();
        let is_raw = self.plan.filling() == Filling::Raw;
        Ok(is_raw && storage.is_device() && storage.len()? < self.plan.size())
    }

    /// How the file of the image was opened.
    pub fn cache_mode(&self) -> CacheMode {
        self.storage().cache_mode()
    }
}

impl Drop for NewFiles {
    fn drop(&mut self) {
        if !self.is_begun {
            self.all().for_each(NewFile::remove_if_new);
        }
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
    //! Guards against a format that the registry lists as creatable and cannot create.
    use super::*;

    #[test]
    fn images_of_creatable_formats_can_be_made() {
        let options = CreateOptions::default();
        for format in Format::all() {
            let plan = plan(format, Path::new("x"), 1 << 20, &options, None);
            assert_eq!(plan.is_ok(), format.is_creatable(), "{format:?}");
        }
    }
}
