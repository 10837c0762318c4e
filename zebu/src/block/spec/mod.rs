//! What is opened: a tree of images and of the files that they are in.
//!
//! [`crate::names`] makes such a tree of a name or of options.

#[cfg(feature = "http")]
mod http;
mod nbd;
mod null;
mod option_set;
mod options;
mod rbd;
#[cfg(feature = "http")]
mod remote;
mod ssh;
#[cfg(feature = "object-store")]
mod store;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

#[cfg(feature = "http")]
pub use http::{HttpCookie, HttpSpec};
#[cfg(feature = "nbd")]
pub use nbd::{NbdSpec, NbdTls};
pub use null::NullSpec;
pub(crate) use option_set::{OptionSet, OptionValue};
pub use options::{
    CommonOptions, DetectZeroes, FileOptions, ImageOptions, Locking, NATIVE_NEEDS_DIRECT,
    OverlapChecks, Qcow2Options, RawOptions, VhdSize, VpcOptions,
};
#[cfg(feature = "rbd")]
pub use rbd::RbdSpec;
#[cfg(feature = "http")]
pub use remote::RemoteOptions;
#[cfg(feature = "ssh")]
pub use ssh::SshSpec;
#[cfg(feature = "object-store")]
pub use store::StoreSpec;

use super::Format;
use crate::storage::{BlkdebugLimits, Rule};
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

/// What a file is, by QEMU's drivers.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
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
    /// An object on a web server (`http`, `https`).
    #[cfg(feature = "http")]
    Http(Box<HttpSpec>),
    /// An export of an NBD server (`nbd`).
    #[cfg(feature = "nbd")]
    Nbd(Box<NbdSpec>),
    /// An object in an object store (`s3`, `gs`, `az`).
    #[cfg(feature = "object-store")]
    Store(Box<StoreSpec>),
    /// An image in a Ceph cluster (`rbd`).
    #[cfg(feature = "rbd")]
    Rbd(Box<RbdSpec>),
    /// A file on an SSH server (`ssh`).
    #[cfg(feature = "ssh")]
    Ssh(Box<SshSpec>),
    /// A file that stores nothing (`null-co`, `null-aio`).
    Null(NullSpec),
    /// A file that injects errors (`blkdebug`).
    Blkdebug(Box<BlkdebugSpec>),
    /// The disk of an image (`raw`, `qcow2`), whose format is known.
    Image(Box<ImageSpec>),
}

/// A file that injects errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkdebugSpec {
    /// What is below.
    pub image: Box<FileSpec>,
    /// `align`, `max-transfer` and so on.
    pub(crate) limits: BlkdebugLimits,
    /// A file with more rules.
    pub(crate) config: Option<PathBuf>,
    pub(crate) rules: Vec<Rule>,
    /// What QEMU shows of it but the image, as members of a JSON object.
    pub(crate) shown: Vec<(String, String)>,
}

impl BlkdebugSpec {
    /// The file with more rules, if there is one.
    pub fn config(&self) -> Option<&Path> {
        self.config.as_deref()
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
    /// [`OpenOptions::guess_as_qemu`](super::OpenOptions::guess_as_qemu).
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

    /// The export that it is, if it is one.
    #[cfg(feature = "nbd")]
    pub fn nbd(&self) -> Option<&NbdSpec> {
        match &self.driver {
            FileDriver::Nbd(nbd) => Some(nbd),
            _ => None,
        }
    }

    /// Whether it is an object on a web server or in an object store, which is only read.
    pub fn is_object(&self) -> bool {
        match self.driver {
            #[cfg(feature = "http")]
            FileDriver::Http(_) => true,
            #[cfg(feature = "object-store")]
            FileDriver::Store(_) => true,
            _ => false,
        }
    }

    /// Whether it is on another machine, so that only its content is known of it.
    pub fn is_remote(&self) -> bool {
        match self.driver {
            #[cfg(feature = "nbd")]
            FileDriver::Nbd(_) => true,
            #[cfg(feature = "ssh")]
            FileDriver::Ssh(_) => true,
            _ => self.is_object(),
        }
    }

    /// The local file or the export that holds these bytes in the end.
    pub fn bottom(&self) -> &FileSpec {
        match &self.driver {
            FileDriver::Blkdebug(debug) => debug.image.bottom(),
            FileDriver::Image(image) => image.file.bottom(),
            _ => self,
        }
    }

    /// The file `path`, relative to the folder of this one.
    pub(crate) fn beside(&self, path: &OsStr) -> Result<FileSpec> {
        let own = self.bottom();
        #[cfg(feature = "ssh")]
        if let FileDriver::Ssh(ssh) = &own.driver {
            return ssh.beside(path);
        }
        let is_path = match own.driver {
            FileDriver::Any | FileDriver::File | FileDriver::HostDevice | FileDriver::HostCdrom => {
                true
            }
            #[cfg(feature = "http")]
            FileDriver::Http(_) => true,
            _ => false,
        };
        let own_path = own.name().as_bytes();
        let folder = match own_path.iter().rposition(|b| *b == b'/') {
            _ if path.as_bytes().starts_with(b"/") => 0,
            _ if is_descriptor(own.name()) => 0,
            _ if !is_path => {
                return Err(Error::Refused(format!(
                    "Cannot use relative paths with VMDK descriptor file '{}': Cannot generate a \
                     base directory for {} nodes",
                    printable(self.name().as_bytes()),
                    own.driver.name()
                )));
            }
            slash => slash.map_or(0, |slash| slash + 1),
        };
        let bytes = [&own_path[..folder], path.as_bytes()].concat();
        #[cfg(feature = "http")]
        if let FileDriver::Http(http) = &own.driver
            && folder > 0
        {
            return http.beside(bytes);
        }
        Ok(FileSpec::new(OsString::from_vec(bytes)))
    }

    /// The path as a name.
    pub fn name(&self) -> &OsStr {
        self.path.as_os_str()
    }
}

/// Whether a name is that of an open file of the process, which is in no folder: names that are
/// relative to it belong to the current directory.
pub(crate) fn is_descriptor(name: &OsStr) -> bool {
    let name = Path::new(name);
    let folder = name.parent();
    folder.is_some_and(|folder| {
        ["/proc/self/fd", "/dev/fd"]
            .map(Path::new)
            .contains(&folder)
    })
}

impl FileDriver {
    /// QEMU's name: `file`, `host_device`, `nbd`, …
    pub fn name(&self) -> &'static str {
        match self {
            FileDriver::Any | FileDriver::File => "file",
            FileDriver::HostDevice => "host_device",
            FileDriver::HostCdrom => "host_cdrom",
            #[cfg(feature = "http")]
            FileDriver::Http(http) => http.driver,
            #[cfg(feature = "object-store")]
            FileDriver::Store(store) => store.kind.name(),
            #[cfg(feature = "nbd")]
            FileDriver::Nbd(_) => "nbd",
            #[cfg(feature = "rbd")]
            FileDriver::Rbd(_) => "rbd",
            #[cfg(feature = "ssh")]
            FileDriver::Ssh(_) => "ssh",
            FileDriver::Null(null) => null.driver,
            FileDriver::Blkdebug(_) => "blkdebug",
            FileDriver::Image(image) => image.format_name(),
        }
    }
}
