//! New image files.

use std::ffi::OsString;
use std::str::FromStr;

use pyo3::prelude::*;
use zebu::block::{FileSpec, Objects};
use zebu::internal::new_image::{
    CreateOptions, NewFiles, NewImage, file_of, parse_format, refuse_object,
};
use zebu::jobs::{self, Target};
use zebu::{CacheMode, Device, Format, OpenOptions, Queue, QueueOptions, Source};

use crate::error::{Failure, Result, refused};

/// A file that is to become an image: the dictionary that `zebu._names.new_image` makes.
#[derive(Clone, Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub struct NewFile {
    name: OsString,
    format: String,
    /// `key=value` each, with commas doubled.
    options: Vec<OsString>,
}

/// An image that is to be made.
pub struct Planned {
    format: Format,
    file: FileSpec,
    options: CreateOptions,
}

/// A new image that is to be filled.
pub struct Begun {
    /// Where the content goes.
    pub target: Target,
    /// It reads as zeroes from the start.
    pub is_zero: bool,
}

impl Planned {
    /// Decodes what the caller wants.
    pub fn new(new: &NewFile) -> Result<Planned> {
        let format = parse_format(&new.format).map_err(refused)?;
        let file = file_of(&new.name).map_err(refused)?;
        refuse_object(&file).map_err(refused)?;
        let options = CreateOptions::parse(format, &new.options).map_err(refused)?;
        Ok(Planned {
            format,
            file,
            options,
        })
    }

    /// Why the content cannot be written compressed, or to it at all.
    pub fn check_target(&self, compress: bool) -> Result<()> {
        let is_given = |key| self.options.value(key).is_some();
        let preallocation = self.options.get("preallocation");
        if is_given("backing_file") {
            return Err(refused(
                "The target of a conversion cannot have a backing file",
            ));
        }
        if compress && !self.format.can_compress() {
            return Err(refused("Compression not supported for this file format"));
        }
        if compress && (is_given("data_file") || preallocation.is_some_and(|mode| mode != "off")) {
            return Err(refused(
                "Compression is not possible with preallocation or an external data file",
            ));
        }
        Ok(())
    }

    fn failed(&self, why: impl Into<String>) -> Failure {
        let name = self.file.name().display();
        refused(why).during(&format!("Could not create '{name}'"))
    }

    /// The backing file, read-only.
    fn open_backing(&self, queue: &Queue) -> Result<Option<Device>> {
        let Some(name) = self.options.value("backing_file") else {
            return Ok(None);
        };
        let format = self.options.get("backing_fmt").map(Format::from_str);
        let format = format.transpose()?;
        let format = format.ok_or_else(|| self.failed("A backing file needs its format"))?;
        let spec = Source::Name(name.to_owned()).resolve(Some(self.file.name()), Some(format))?;
        Ok(Some(Device::open_spec(
            queue,
            spec,
            &OpenOptions::default(),
        )?))
    }

    fn files(&self, image: &NewImage, caches: &[CacheMode]) -> Result<NewFiles> {
        let files = NewFiles::open(&self.file, image, caches, &Objects::default());
        files.map_err(|why| self.failed(why))
    }

    /// Makes the image. Without a size it has that of its backing file.
    fn create(mut self, queue: &Queue, size: Option<u64>) -> Result<()> {
        // It stays open, so that its locks refuse a target that is the backing file.
        let backing = self.open_backing(queue)?;
        let size = size.or(backing.as_ref().map(Device::size));
        let size = size.ok_or_else(|| self.failed("A new image needs a size or a backing file"))?;
        self.options.set("size", size.to_string());
        let path = &self.file.path;
        let image = NewImage::new(self.format, path, size, &self.options, backing.as_ref())?;
        let files = self.files(&image, &[CacheMode::WriteBack])?;
        files.make(queue, &image).map_err(|why| self.failed(why))
    }

    /// Makes the image, and opens it as the target of a job. `is_direct`: whole blocks are written.
    pub fn begin(&self, queue: &Queue, size: u64, is_direct: bool) -> Result<Begun> {
        let image = NewImage::new(self.format, &self.file.path, size, &self.options, None)?;
        let caches: &[CacheMode] = match is_direct {
            true => &[CacheMode::None, CacheMode::WriteBack],
            false => &[CacheMode::WriteBack],
        };
        let files = self.files(&image, caches)?;
        if let NewImage::Planned(plan) = &image {
            let new = files
                .begin(queue, &**plan)
                .map_err(|why| self.failed(why))?;
            return Ok(Begun {
                target: Target::New(new),
                is_zero: true,
            });
        }
        files.make(queue, &image).map_err(|why| self.failed(why))?;
        // Without clusters, no former content of a device is visible.
        let is_zero = files.are_zero() || !image.is_mapped();
        let target = match self.format == Format::RAW {
            true => Target::Raw(files.into_storage()),
            false => {
                let cache = files.cache_mode();
                drop(files);
                let options = OpenOptions::default()
                    .format(Some(self.format))
                    .write(true)
                    .cache(cache)
                    .discard(Some(true));
                let source = Source::Name(self.file.name().to_owned());
                Target::Image(jobs::open(queue, &source, &options, &mut |_| {})?)
            }
        };
        Ok(Begun { target, is_zero })
    }
}

/// Makes a new image of `size` bytes.
#[pyfunction]
pub fn create(py: Python<'_>, new: NewFile, size: Option<u64>) -> PyResult<()> {
    let created = py.detach(|| {
        let queue = Queue::new(QueueOptions::default())?;
        Planned::new(&new)?.create(&queue, size)
    });
    created.map_err(|failure| failure.raise(py))
}
