//! An image file that is made, and filled: what the libraries for other languages do.

use std::ffi::{OsStr, OsString};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::{
    CreateOptions, NewFiles, check_level, file_as, parse_format, plan, plan_to_fill, refuse_object,
};
use crate::block::{Device, FileSpec, Format, Layer, Objects, OpenOptions};
use crate::drivers::ImagePlan;
use crate::jobs::{
    self, CompressOptions, ConvertError, ConvertEvent, ConvertOptions, Progress, Target,
};
use crate::names::Source;
use crate::storage::named::named_file;
use crate::storage::same::is_same;
use crate::storage::{CacheMode, Queue, Storage};
use crate::{Error, Result};

/// An image file that is to be made.
#[derive(Debug)]
pub struct Creation {
    format: Format,
    file: FileSpec,
    options: CreateOptions,
}

/// A new image that is to be filled.
pub struct Begun {
    target: Target,
    /// Its files, locked until it is filled.
    files: NewFiles,
    compress: Option<CompressOptions>,
}

impl Creation {
    /// An image of this format in the file `name`. `options` are those of `-o`.
    ///
    /// # Errors
    /// If the format, the name or an option is not one of a new image.
    pub fn new(name: &OsStr, format: &str, options: &[OsString]) -> Result<Creation> {
        let parse = || {
            let file = file_as(name, format)?;
            let format = parse_format(format)?;
            refuse_object(&file)?;
            let options = CreateOptions::parse(format, options)?;
            Ok(Creation {
                format,
                file,
                options,
            })
        };
        parse().map_err(Error::Refused)
    }

    /// Whether it is to have a backing file.
    pub fn has_backing(&self) -> bool {
        self.options.value("backing_file").is_some()
    }

    /// Refuses an image that is not filled by a conversion, before anything is opened.
    ///
    /// # Errors
    /// Why not.
    pub fn check_target(&self, compress: bool) -> Result<()> {
        let preallocation = self.options.get("preallocation");
        let is_allocated = preallocation.is_some_and(|mode| mode != "off");
        let why = if self.has_backing() {
            "The target of a conversion cannot have a backing file"
        } else if compress && !self.format.can_compress() {
            "Compression not supported for this file format"
        } else if compress && (is_allocated || self.options.value("data_file").is_some()) {
            "Compression is not possible with preallocation or an external data file"
        } else {
            return Ok(());
        };
        Err(Error::Refused(why.into()))
    }

    fn failed(&self, error: Error) -> Error {
        error.during(format!("Could not create '{}'", self.file.name().display()))
    }

    /// The backing file, read-only.
    fn open_backing(&self, queue: &Queue) -> Result<Option<Device>> {
        let Some(name) = self.options.value("backing_file") else {
            return Ok(None);
        };
        let format = self.options.get("backing_fmt");
        let format = format
            .ok_or_else(|| self.failed(Error::Refused("A backing file needs its format".into())))?;
        let spec =
            Source::with_driver(name, Some(format))?.resolve(Some(self.file.name()), None)?;
        let options = OpenOptions::default();
        Ok(Some(Device::open_spec(queue, spec, &options)?))
    }

    fn files(&self, plan: Box<dyn ImagePlan>, caches: &[CacheMode]) -> Result<NewFiles> {
        NewFiles::open(&self.file, plan, caches, &Objects::default())
    }

    /// Makes the image. Without a size it has that of its backing file.
    ///
    /// # Errors
    /// If it cannot be made: of a file, of the backing file, or of options that do not fit together.
    pub fn create(mut self, queue: &Queue, size: Option<u64>) -> Result<()> {
        // It stays open, so that its locks refuse a target that is the backing file.
        let backing = self.open_backing(queue)?;
        let size = size.or(backing.as_ref().map(Device::size));
        let no_size = "A new image needs a size or a backing file";
        let size = size.ok_or_else(|| self.failed(Error::Refused(no_size.into())))?;
        self.options.set("size", size.to_string());
        let path = &self.file.path;
        let plan = plan(self.format, path, size, &self.options, backing.as_ref())?;
        let mut files = self.files(plan, &[CacheMode::WriteBack])?;
        files.create(queue).map_err(|e| self.failed(e))
    }

    /// Makes the image in a file that is not there yet, and opens it for writing. The file stays locked
    /// meanwhile.
    ///
    /// # Errors
    /// `EEXIST` if there is such a file. Those of [`Creation::create`] and of opening it.
    pub fn create_new(mut self, queue: &Queue, size: u64) -> Result<Device> {
        self.options.set("size", size.to_string());
        let plan = plan(self.format, &self.file.path, size, &self.options, None)?;
        let mut files = self.files(plan, &[CacheMode::WriteBack])?;
        if !files.are_new() {
            return Err(self.failed(Error::os(libc::EEXIST)));
        }
        files.create(queue).map_err(|e| self.failed(e))?;
        let source = Source::Name(self.file.name().to_owned());
        let options = OpenOptions::default().format(Some(self.format)).write(true);
        let opened = files.open_image(queue, &source, &options, None);
        opened.inspect_err(|_| {
            // The error is that of the image.
            let _ = files.discard(queue);
        })
    }

    /// Makes the image, as large as `source`, and opens it to be filled. `compress`: its data are
    /// stored compressed.
    ///
    /// # Errors
    /// As [`Creation::create`].
    pub fn begin(
        &self,
        queue: &Queue,
        source: &Device,
        compress: Option<CompressOptions>,
    ) -> Result<Begun> {
        let size = source.size();
        let plan = plan_to_fill(self.format, &self.file.path, size, &self.options)?;
        check_level(&*plan, compress.and_then(|compress| compress.level))?;
        // Whole blocks are written.
        let is_direct = compress.is_none() && size.is_multiple_of(4096) && plan.alignment() >= 4096;
        let caches: &[CacheMode] = match is_direct {
            true => &[CacheMode::None, CacheMode::WriteBack],
            false => &[CacheMode::WriteBack],
        };
        let mut files = self.files(plan, caches)?;
        refuse_what_is_read(&files, source)?;
        let options = OpenOptions::default()
            .format(Some(self.format))
            .write(true)
            .cache(files.cache_mode())
            .discard(Some(true));
        let source = Source::Name(self.file.name().to_owned());
        let begun = files.begin(queue, &source, &options);
        Ok(Begun {
            target: begun.map_err(|e| self.failed(e))?,
            files,
            compress,
        })
    }
}

/// Refuses new files that `source` or what is behind it reads, or that share bytes with one: they
/// would be emptied. The locks of raw disks that are read do not tell.
fn refuse_what_is_read(files: &NewFiles, source: &Device) -> Result<()> {
    let identity = |file: &Arc<dyn Storage>| named_file(&**file)?.identity().ok();
    let read: Vec<_> = source.all_layers().flat_map(Layer::storages).collect();
    let is_read = |new: &Arc<dyn Storage>| {
        read.iter().any(|read| {
            let is_one = identity(new).is_some_and(|new| identity(read) == Some(new));
            is_one || is_same(new.path(), read.path())
        })
    };
    match files.storages().iter().any(is_read) {
        true => Err(Error::Refused("The input is read from this file".into())),
        false => Ok(()),
    }
}

impl Begun {
    /// Writes the content of `source`. A new qcow2 image does not open before this has ended well.
    ///
    /// # Errors
    /// Those of [`jobs::convert`]. If the files were removed or replaced meanwhile.
    pub fn fill(
        self,
        source: Device,
        options: ConvertOptions,
        mut on_progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        let options = options
            .compress(self.compress)
            .zero_from(self.files.reads_as_zeroes().then_some(0));
        let on_event = |event| match event {
            ConvertEvent::Progress(now) => on_progress(now),
            // Only with `salvage`, which is not set.
            ConvertEvent::Unreadable { .. } => ControlFlow::Continue(()),
        };
        jobs::convert(vec![source], self.target, &options, on_event).map_err(failure)?;
        self.files.check_names()
    }
}

fn failure(error: ConvertError) -> Error {
    let during =
        |what, offset, source: Error| source.during(format!("Error while {what} at byte {offset}"));
    match error {
        ConvertError::Engine(error) => error.into(),
        ConvertError::Read { offset, source } => during("reading", offset, source),
        ConvertError::Write { offset, source } => during("writing", offset, source),
        other => Error::Refused(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a raw disk that is emptied because it is the target of its own conversion.
    use super::*;
    use crate::storage::QueueOptions;

    #[test]
    fn a_raw_disk_is_not_converted_onto_itself() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, link) = (folder.path().join("disk"), folder.path().join("link"));
        std::fs::write(&disk, [7; 4096]).unwrap();
        std::fs::hard_link(&disk, &link).unwrap();
        let queue = Queue::new(QueueOptions::default()).unwrap();
        // The disk, and a part of it.
        let part = format!("driver=raw,offset=512,file.filename={}", disk.display());
        let sources = [
            (Source::Name(disk.clone().into()), Some(Format::RAW)),
            (Source::Options(part.into()), None),
        ];
        for (source, format) in sources {
            let options = OpenOptions::default().format(format);
            let device = Device::open(&queue, &source, &options).unwrap();
            for name in [&disk, &link] {
                for format in ["raw", "qcow2", "qcow2"] {
                    let creation = Creation::new(name.as_os_str(), format, &[]).unwrap();
                    let begun = creation.begin(&queue, &device, None);
                    assert!(matches!(begun, Err(Error::Refused(_))), "{format}");
                    assert_eq!(std::fs::read(&disk).unwrap(), [7; 4096], "{format}");
                }
            }
        }
    }
}
