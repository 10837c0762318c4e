//! What is opened: a tree of images and of the files that they are in, and the protocols by which these
//! files are reached.
//!
//! | file | subject |
//! |---|---|
//! | `spec.rs` `options.rs` `objects.rs` | images and files as they are described |
//! | `parse.rs` | from options and names to a description |
//! | `shown.rs` | from a description to the name that QEMU shows |
//! | `opened.rs` | a file that is open: its storage, identity, locks |
//! | `file.rs` `null.rs` | a protocol each; those of other machines are in the crate zebu-net |
//! | `blkdebug/` `filter.rs` `image.rs` | drivers over another file |
//!
//! A protocol is a file and a line: its description implements [`Protocol`], and its `static DRIVER` says
//! by which names it is found. Those here are variants of [`FileDriver`]; those that are registered
//! (`registered.rs`) are what [`FileDriver::Other`] holds. What is `pub` here is public in [`crate::block`].

mod blkdebug;
mod file;
mod filter;
mod image;
mod null;
mod objects;
pub(crate) mod opened;
pub(crate) mod options;
pub(crate) mod other;
pub(crate) mod parse;
pub(crate) mod shown;
mod spec;

use std::ffi::{OsStr, OsString};

use crate::Result;
use crate::drivers::is_format;
use crate::registered::linked;
use crate::spelling::OptionSet;
use crate::storage::OpenFile;
pub use crate::storage::secret::Secret;
use file::Local;
pub use objects::{Objects, Passphrases, Secrets, TlsObjects};
pub(crate) use opened::{ATTEMPTS, Identity, Opened, REPLACED};
pub use opened::{OpenedFile, in_first};
pub use options::{
    CommonOptions, DetectZeroes, EncryptionOptions, FileOptions, ImageOptions, Locking,
    NATIVE_NEEDS_DIRECT, OverlapChecks, Qcow2Options, RawOptions, VhdSize, VpcOptions,
};
pub use other::OtherDriver;
pub use spec::{BackingOptions, BackingSpec, FileSpec, ImageSpec};

/// How a protocol is found by the names of drivers and files.
pub struct Driver {
    /// The names of its drivers, which names of files begin with, too: `driver=NAME`, `NAME:…`.
    pub names: &'static [&'static str],
    /// What else names of its files begin with.
    pub schemes: &'static [&'static str],
    /// Whether its files are on other machines.
    pub is_remote: bool,
    /// Describes a file. Options that it does not take out are refused, except those of all files.
    pub parse: fn(&mut Given<'_>) -> Result<FileSpec, String>,
    /// Refuses a name that a user may give and an image may not.
    pub check_in_image: fn(&OsStr) -> Result<(), String>,
}

impl Driver {
    #[doc(hidden)]
    pub const DEFAULT: Driver = Driver {
        names: &[],
        schemes: &[],
        is_remote: false,
        parse: |_| Err(String::new()),
        check_in_image: |_| Ok(()),
    };
}

/// What describes a file: its name, if there is one, and options.
pub struct Given<'a> {
    /// Under which of the names the driver was found.
    pub driver: &'static str,
    /// The name, if it has one.
    pub name: Option<&'a OsStr>,
    /// Its options.
    pub options: OptionSet,
    /// How deep it is in other images and files.
    pub depth: usize,
}

/// What is done with a file that is described.
#[doc(hidden)]
pub trait Protocol {
    /// QEMU's name of the driver.
    fn name(&self) -> &'static str;

    /// The name that QEMU shows, if a plain name describes it.
    fn plain_name(&self, file: &FileSpec) -> Option<OsString> {
        Some(file.name().to_owned())
    }

    /// The description as JSON.
    fn json(&self, file: &FileSpec) -> String;

    /// Its name on its server: a path, or that of an image in Ceph.
    fn name_there<'a>(&'a self, file: &'a FileSpec) -> &'a OsStr {
        file.name()
    }

    /// Whether it is a file or a device of this machine.
    fn is_local(&self) -> bool {
        false
    }

    /// Whether it is an object, which is only read.
    fn is_object(&self) -> bool {
        false
    }

    /// Whether a new image can be made there.
    fn takes_new_images(&self) -> bool {
        !self.is_object() && self.below().is_none()
    }

    /// Whether its content is all that is known of it: an object, an export, a file on an SSH server. An
    /// image in Ceph tells what is allocated.
    fn is_remote(&self) -> bool {
        self.is_object()
    }

    /// Whether it cannot be created.
    fn must_exist(&self) -> bool {
        false
    }

    /// Whether both are one file on another machine, as far as their names tell.
    fn is_same(&self, _other: &FileDriver) -> bool {
        false
    }

    /// The file of this path, relative to the folder of `own`. None: there are no folders.
    fn beside(&self, _own: &FileSpec, _path: &OsStr) -> Option<Result<FileSpec>> {
        None
    }

    /// Whether opening waits for another machine.
    fn connects(&self) -> bool {
        false
    }

    /// Opens or creates it. Blocks. A driver over another file opens none: it is opened with that.
    fn open(&self, _file: &FileSpec, how: OpenFile, _objects: &Objects) -> Result<OpenedFile> {
        let what = match how.create {
            true => "creating new images",
            false => "opening a file by itself",
        };
        Err(crate::Error::Refused(format!(
            "Driver '{}' does not support {what}",
            self.name()
        )))
    }

    /// Of a driver over another file: that file, and what QEMU calls it there.
    fn below(&self) -> Option<(&'static str, &FileSpec)> {
        None
    }

    /// Of a driver over another file: what it makes of that file, which is open, perhaps for writing.
    fn over(&self, below: OpenedFile, _objects: &Objects, _write: bool) -> Result<OpenedFile> {
        Ok(below)
    }

    /// The image to open for its disk; None: raw, which [`Protocol::over`] makes.
    fn image(&self) -> Option<&ImageSpec> {
        None
    }
}

/// Registers the protocols: a variant of [`FileDriver`] each, and its line in the list of drivers.
macro_rules! protocols {
    ($(
        $(#[doc = $doc:literal])+
        $variant:ident($module:ident::$spec:ident $(, $public:ident)*),
    )+) => {
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
            $($(#[doc = $doc])+ $variant(Box<$spec>),)+
            /// The disk of an image (`raw`, `qcow2`), whose format is known.
            Image(Box<ImageSpec>),
            /// A file by another protocol (`nbd`, `http`, …), as [`FileDriver::get`] tells.
            Other(OtherDriver),
        }

        impl FileDriver {
            /// What is done with it.
            pub(crate) fn protocol(&self) -> &dyn Protocol {
                match self {
                    FileDriver::Any | FileDriver::File => &Local("file"),
                    FileDriver::HostDevice => &Local("host_device"),
                    FileDriver::HostCdrom => &Local("host_cdrom"),
                    $(FileDriver::$variant(spec) => &**spec,)+
                    FileDriver::Image(image) => &**image,
                    FileDriver::Other(other) => other.protocol(),
                }
            }
        }

        static DRIVERS: &[&Driver] =
            &[&file::DRIVER, $(&$module::DRIVER,)+];

        $(pub use $module::{$spec $(, $public)*};)+
    };
}

protocols! {
    /// A file that stores nothing (`null-co`, `null-aio`).
    Null(null::NullSpec),
    /// A file that injects errors (`blkdebug`).
    Blkdebug(blkdebug::BlkdebugSpec),
    /// A filter (`throttle`, `copy-on-read`, …) over another file, or over an image.
    Filter(filter::FilterSpec),
}

impl FileDriver {
    /// QEMU's name: `file`, `host_device`, `nbd`, …
    pub fn name(&self) -> &'static str {
        self.protocol().name()
    }

    /// The names of all drivers that there are, besides those of formats.
    pub fn names() -> impl Iterator<Item = &'static str> {
        drivers().flat_map(|driver| driver.names).copied()
    }
}

linked! {
    /// Protocols of other crates.
    fn registered() -> &'static [&'static Driver] = __zebu_core_0_1_protocols
}

/// All protocols: those here, and those that are registered.
fn drivers() -> impl Iterator<Item = &'static Driver> {
    DRIVERS.iter().chain(registered()).copied()
}

/// The protocol of this name and that name itself; if `is_beginning`, also of what else the name of a file
/// may begin with.
fn find(name: &str, is_beginning: bool) -> Option<(&'static Driver, &'static str)> {
    drivers().find_map(|driver| {
        let schemes = driver.schemes.iter().filter(|_| is_beginning);
        let found = driver.names.iter().chain(schemes).find(|n| **n == name)?;
        Some((driver, *found))
    })
}

/// Whether QEMU has a format of this name, or there is a driver of a file of this name: what a header may
/// have as the format of a backing file.
#[doc(hidden)]
pub fn is_driver(name: &str) -> bool {
    is_format(name) || find(name, false).is_some()
}

/// Whether names of files that begin so are of other machines.
#[doc(hidden)]
pub fn is_remote(beginning: &str) -> bool {
    find(beginning, true).is_some_and(|(driver, _)| driver.is_remote)
}

/// Refuses the name of a file that an image names and a user may name.
pub fn check_in_image(name: &OsStr) -> Result<(), String> {
    drivers().try_for_each(|driver| (driver.check_in_image)(name))
}
