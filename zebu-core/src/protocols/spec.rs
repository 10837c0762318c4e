//! Images and files as they are described.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::{
    ATTEMPTS, FileDriver, FileOptions, ImageOptions, Objects, OpenedFile, Protocol, REPLACED,
    in_first,
};
use crate::drivers::Format;
use crate::spelling::OptionSet;
use crate::spelling::path::is_descriptor;
use crate::storage::{CacheMode, LockRequest, OpenFile, connect};
use crate::{Error, Result, printable};

/// An image to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// The format; None: it is found by the content.
    pub format: Option<Format>,
    /// Only a file driver was named (`driver=file`): a raw image whose format `info` shows as
    /// [`FileDriver::name`].
    pub bare: bool,
    /// Where its bytes are.
    pub file: FileSpec,
    /// What it is backed by.
    pub backing: BackingSpec,
    /// The external data file; None: the one that the header names. Opening the image fills it
    /// in from there.
    pub data_file: Option<FileSpec>,
    /// The files of its extents, besides its own. Opening the image fills it in.
    pub extents: Vec<FileSpec>,
    /// How to treat it.
    pub options: ImageOptions,
    /// Options of the format, which are read when that is known.
    pub(crate) pending: OptionSet,
    /// How many images this one backs, by its options.
    pub(crate) depth: usize,
    /// The format was found by the content.
    pub(crate) is_guessed: bool,
    /// What it looks like, though it was taken for a raw disk.
    pub(crate) looks_like: Option<&'static str>,
}

/// What an image is backed by.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BackingSpec {
    /// What its header names.
    #[default]
    Default,
    /// Nothing, whatever its header names.
    None,
    /// This image, whatever its header names.
    Image(Box<ImageSpec>),
    /// What its header names, with these options.
    Options(BackingOptions),
}

/// Options of a backing file that the image's header names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingOptions {
    pub(crate) options: OptionSet,
    pub(crate) depth: usize,
}

/// A file to open.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSpec {
    /// Its path. Of an export: the URI that QEMU shows. Of a driver over another file: the path
    /// of that file.
    pub path: PathBuf,
    /// What it is.
    pub driver: FileDriver,
    /// How to open it.
    pub options: FileOptions,
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
            extents: Vec::new(),
            options: ImageOptions::default(),
            pending: OptionSet::default(),
            depth: 0,
            is_guessed: false,
            looks_like: None,
        }
    }

    /// Whether the format was not given but found by the content, when the image was opened.
    pub fn is_guessed(&self) -> bool {
        self.is_guessed
    }

    /// What the file looks like, as "a tar archive", if it was taken for a raw disk nevertheless: see
    /// [`OpenOptions::guess_as_qemu`](crate::OpenOptions::guess_as_qemu).
    pub fn looks_like(&self) -> Option<&'static str> {
        self.looks_like
    }

    /// The format's name as `info` shows it.
    pub fn format_name(&self) -> &'static str {
        match (self.bare, self.format) {
            (true, _) => self.file.driver.name(),
            (false, format) => format.unwrap_or(Format::RAW).name(),
        }
    }
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

    /// What the protocol `driver` calls `path`, with default options.
    #[doc(hidden)]
    pub fn of(path: impl Into<PathBuf>, driver: FileDriver) -> FileSpec {
        FileSpec {
            driver,
            ..FileSpec::new(path)
        }
    }

    pub(crate) fn protocol(&self) -> &dyn Protocol {
        self.driver.protocol()
    }

    /// What names it where it is: a path or a URL, or the name of an image in Ceph.
    pub fn name_there(&self) -> &OsStr {
        self.protocol().name_there(self)
    }

    /// Whether it is a file or a device of this machine.
    pub fn is_local(&self) -> bool {
        self.protocol().is_local()
    }

    /// Whether it is an object on a web server or in an object store, which is only read.
    pub fn is_object(&self) -> bool {
        self.protocol().is_object()
    }

    /// Whether its content is all that is known of it: an object, an export, a file on an SSH server. An
    /// image in Ceph tells what is allocated.
    pub fn is_remote(&self) -> bool {
        self.protocol().is_remote()
    }

    /// Whether both are one file on another machine, or one export, as far as their names tell. Blocks,
    /// if a host's address must be found.
    pub fn is_same(&self, other: &FileSpec) -> bool {
        self.protocol().is_same(&other.driver)
    }

    /// The file below a driver over another one, and what QEMU calls it there.
    pub fn below(&self) -> Option<(&'static str, &FileSpec)> {
        self.protocol().below()
    }

    /// The local file or the export that holds these bytes in the end.
    pub fn bottom(&self) -> &FileSpec {
        self.below().map_or(self, |(_, below)| below.bottom())
    }

    /// The file `path`, relative to the folder of this one.
    pub(crate) fn beside(&self, path: &OsStr) -> Result<FileSpec> {
        let own = self.bottom();
        if let Some(found) = own.protocol().beside(own, path) {
            return found;
        }
        if path.as_bytes().starts_with(b"/") || is_descriptor(own.name()) {
            return Ok(FileSpec::new(path));
        }
        Err(Error::Refused(format!(
            "Cannot use relative paths with VMDK descriptor file '{}': Cannot generate a base \
             directory for {} nodes",
            printable(self.name().as_bytes()),
            own.driver.name()
        )))
    }

    /// Opens a file, or connects to a server. Blocks. Missing exports are not created.
    ///
    /// # Errors
    ///
    /// If it cannot be opened. [`Error::Refused`] for drivers over another file.
    pub fn open(&self, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        self.protocol().open(self, how, objects)
    }

    /// As [`FileSpec::open`], without blocking the thread while a server is connected to.
    pub(crate) async fn open_async(&self, how: OpenFile, objects: &Objects) -> Result<OpenedFile> {
        if !self.protocol().connects() {
            return self.open(how, objects);
        }
        let (spec, objects) = (self.clone(), objects.clone());
        let thread = format!("{}-connect", self.driver.name());
        connect::on_thread(&thread, move || spec.open(how, &objects)).await
    }

    /// The path as a name.
    pub fn name(&self) -> &OsStr {
        self.path.as_os_str()
    }
}

impl FileSpec {
    /// Opens a file that is there for writing, in the first of `caches` that works, and locks it. Its
    /// name leads to it then.
    #[doc(hidden)]
    pub fn open_locked(
        &self,
        caches: &[CacheMode],
        request: LockRequest,
        objects: &Objects,
    ) -> Result<OpenedFile> {
        for _ in 0..ATTEMPTS {
            let file = in_first(caches, |cache| {
                let how = OpenFile::default().write(true).cache(cache);
                self.open(how, objects)
            })?;
            file.lock(request)?;
            if file.is_at_its_path() {
                return Ok(file);
            }
        }
        Err(Error::Refused(REPLACED.into()))
    }
}
