//! New image files.

use std::ffi::{OsStr, c_int};
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;

use zebu::block::{FileSpec, Objects};
use zebu::internal::new_image::{
    CreateOptions, NewFiles, NewImage, file_of, parse_format, refuse_object,
};
use zebu::jobs::{self, Target};
use zebu::{CacheMode, Device, EngineKind, Error, Format, OpenOptions, Queue, Source};

use crate::blocking;
use crate::error::{Failure, Out, Result, call_code};
use crate::text::Text;

/// An image that is to be made.
pub struct Planned {
    format: Format,
    file: FileSpec,
    options: CreateOptions,
}

/// A new image that is to be filled.
pub struct Begun {
    pub target: Target,
    /// It reads as zeroes from the start.
    pub is_zero: bool,
}

impl Planned {
    /// Decodes what the caller wants.
    pub fn new(name: &OsStr, format: &str, options: &OsStr) -> Result<Planned> {
        let refused = |why: String| Failure::from(Error::Refused(why));
        let format = parse_format(format).map_err(refused)?;
        let file = file_of(name).map_err(refused)?;
        refuse_object(&file).map_err(refused)?;
        let list = [options.to_owned()];
        let list = if options.is_empty() { &[] } else { &list[..] };
        let options = CreateOptions::parse(format, list).map_err(refused)?;
        Ok(Planned {
            format,
            file,
            options,
        })
    }

    /// Whether it is to have a backing file.
    pub fn has_backing(&self) -> bool {
        self.options.value("backing_file").is_some()
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Whether its options ask for space that compression does not need.
    pub fn cannot_compress(&self) -> bool {
        self.options
            .get("preallocation")
            .is_some_and(|mode| mode != "off")
            || self.options.value("data_file").is_some()
    }

    fn refused(&self, why: impl Into<String>) -> Failure {
        let name = self.file.name().display();
        let context = format!("Could not create '{name}'");
        Failure::from(Error::Refused(why.into())).during(&context)
    }

    /// The backing file, read-only.
    fn open_backing(&self, queue: &Queue) -> Result<Option<Device>> {
        let Some(name) = self.options.value("backing_file") else {
            return Ok(None);
        };
        let format = self.options.get("backing_fmt").map(Format::from_str);
        let format = format.transpose()?;
        let format = format.ok_or_else(|| self.refused("A backing file needs backing_fmt"))?;
        let spec = Source::Name(name.to_owned()).resolve(Some(self.file.name()), Some(format))?;
        let options = OpenOptions::default();
        Ok(Some(Device::open_spec(queue, spec, &options)?))
    }

    /// Makes the image. A size of 0 is that of its backing file.
    fn create(mut self, queue: &Queue, size: u64) -> Result<()> {
        // It stays open, so that its locks refuse a target that is the backing file.
        let backing = self.open_backing(queue)?;
        let size = match &backing {
            Some(backing) if size == 0 => backing.size(),
            _ => size,
        };
        self.options.set("size", size.to_string());
        let path = &self.file.path;
        let image = NewImage::new(self.format, path, size, &self.options, backing.as_ref())?;
        let files = self.files(&image, &[CacheMode::WriteBack])?;
        files.make(queue, &image).map_err(|why| self.refused(why))
    }

    fn files(&self, image: &NewImage, caches: &[CacheMode]) -> Result<NewFiles> {
        let files = NewFiles::open(&self.file, image, caches, &Objects::default());
        files.map_err(|why| self.refused(why))
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
                .map_err(|why| self.refused(why))?;
            return Ok(Begun {
                target: Target::New(new),
                is_zero: true,
            });
        }
        files.make(queue, &image).map_err(|why| self.refused(why))?;
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

#[unsafe(no_mangle)]
extern "C" fn zebu_create(
    name: Text,
    format: Text,
    size: u64,
    options: Text,
    error: Out<'_>,
) -> c_int {
    call_code(error, || {
        let name = name.name("name")?;
        let format = format.word("format")?;
        let format = format.ok_or_else(|| Failure::null("format"))?;
        let options = OsStr::from_bytes(options.bytes().unwrap_or_default());
        let queue = blocking::own_queue(EngineKind::best())?;
        Planned::new(name, format, options)?.create(&queue, size)
    })
}
