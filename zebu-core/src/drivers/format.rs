//! What an image format is.

use std::fmt;
use std::hash::{Hash, Hasher};

use super::stream::StreamFormat;
use super::{ImagePlan, OpenFormat, PlanImage, PlanRequest};
use crate::drivers::signature::Foreign;
use crate::storage::LockRequest;
use crate::{Error, Result};

/// What an image format is.
#[derive(Debug)]
pub struct Driver {
    /// The name that `-f` takes.
    pub name: &'static str,
    /// Whether a file is of this format, by its first [`PROBED_BYTES`](crate::drivers::signature::PROBED_BYTES)
    /// (zeroes beyond its end). None: this driver takes what no other one recognizes.
    pub probe: Option<fn(&[u8]) -> bool>,
    /// How else files of this format begin, in a form that QEMU takes for a raw disk.
    pub other_form: Option<OtherForm>,
    /// Whether images can be opened for writing.
    pub is_writable: bool,
    /// Whether images can name a backing file.
    pub has_backing: bool,
    /// Whether images can name an external data file.
    pub has_data_file: bool,
    /// Whether images can store compressed data.
    pub can_compress: bool,
    /// Whether [`FormatImage::check_data`](super::FormatImage::check_data) may refuse.
    pub checks_data: bool,
    /// The options of new images, in the order in which they are shown. None:
    /// images are not created.
    pub create_options: Option<&'static [CreateOption]>,
    /// Plans a new image. None: images are not created, or by a job of their own.
    pub plan: Option<PlanImage>,
    /// How images are read and written as streams. None: a stream must be kept as a file.
    pub stream: Option<&'static StreamFormat>,
    /// The keys of the options that an image is opened with (`--image-opts`), besides those of
    /// every image.
    pub open_options: &'static [&'static str],
    /// The locks of a file that is opened for reading, and for writing.
    pub locks: [LockRequest; 2],
    /// Opens an image.
    pub open: OpenFormat,
}

impl Driver {
    /// The driver of a format whose images are not opened for writing, with none of the abilities
    /// that a format may have.
    #[doc(hidden)]
    pub const fn read_only(name: &'static str, probe: fn(&[u8]) -> bool, open: OpenFormat) -> Self {
        Driver {
            name,
            probe: Some(probe),
            other_form: None,
            is_writable: false,
            has_backing: false,
            has_data_file: false,
            can_compress: false,
            checks_data: false,
            create_options: None,
            plan: None,
            stream: None,
            open_options: &[],
            // Those of any format but raw.
            locks: [LockRequest::QCOW2_READ, LockRequest::QCOW2_WRITE],
            open,
        }
    }
}

/// A form of a format that QEMU does not know.
#[derive(Debug)]
pub struct OtherForm {
    /// Whether a file is one, by its first bytes, as for [`Driver::probe`].
    pub is_one: fn(&[u8]) -> bool,
    /// What it looks like to QEMU's users.
    pub looks_like: Foreign,
}

/// An option of a new image.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CreateOption {
    /// Its name.
    pub name: &'static str,
    /// The kind of its values.
    pub kind: OptionKind,
    /// The default, if it is shown.
    pub default: Option<&'static str>,
    /// The help text.
    pub help: &'static str,
    /// It belongs to the file and not to the format.
    pub of_file: bool,
}

/// The kind of an option's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// A text, or one of a few words.
    Text,
    /// Bytes, perhaps with a suffix.
    Size,
    /// A number.
    Number,
    /// `on` or `off`.
    Switch,
}

impl CreateOption {
    /// `size`
    pub const SIZE: Self = Self::new("size", OptionKind::Size, "Virtual disk size");
    /// `preallocation` of the file. It has an effect only on raw images: files of other formats
    /// are empty when they are created.
    pub const FILE_PREALLOCATION: Self = Self::new(
        "preallocation",
        OptionKind::Text,
        "Preallocation mode (allowed values: off, falloc, full)",
    )
    .as_of_file();
    /// `nocow`
    pub const NOCOW: Self = Self::new(
        "nocow",
        OptionKind::Switch,
        "Turn off copy-on-write (valid only on btrfs)",
    )
    .as_of_file();
    /// `extent_size_hint`
    pub const EXTENT_SIZE_HINT: Self = Self::new(
        "extent_size_hint",
        OptionKind::Size,
        "Extent size hint for the image file, 0 to disable",
    )
    .as_of_file();

    /// An option without a default that is shown.
    pub const fn new(name: &'static str, kind: OptionKind, help: &'static str) -> Self {
        CreateOption {
            name,
            kind,
            default: None,
            help,
            of_file: false,
        }
    }

    /// The same with a default.
    pub const fn or(self, default: &'static str) -> Self {
        CreateOption {
            default: Some(default),
            ..self
        }
    }

    /// The same as an option of the file.
    pub const fn as_of_file(self) -> Self {
        CreateOption {
            of_file: true,
            ..self
        }
    }
}

/// A registered format.
#[derive(Clone, Copy)]
pub struct Format(&'static Driver);

impl Format {
    /// A driver's format.
    #[doc(hidden)]
    pub const fn of(driver: &'static Driver) -> Format {
        Format(driver)
    }

    /// The registered driver.
    pub(crate) const fn driver(self) -> &'static Driver {
        self.0
    }

    /// The name that `-f` takes.
    pub const fn name(self) -> &'static str {
        self.0.name
    }

    /// Whether images of it can be created.
    pub const fn is_creatable(self) -> bool {
        self.0.create_options.is_some()
    }

    /// The options of new images, in the order in which they are shown.
    pub fn create_options(self) -> &'static [CreateOption] {
        self.0.create_options.unwrap_or_default()
    }

    /// A new image of it, to be made by [`jobs::create_image`](crate::jobs::create_image), or to
    /// be filled.
    ///
    /// # Errors
    /// If the size or the options are not those of an image of this format. Or if the format has a
    /// job of its own ([`jobs::create_raw`](crate::jobs::create_raw),
    /// [`jobs::create_qcow2`](crate::jobs::create_qcow2)) or images of it are not created.
    pub fn plan(self, request: &PlanRequest<'_>) -> Result<Box<dyn ImagePlan>> {
        match self.0.plan {
            Some(plan) => plan(request),
            None => Err(Error::Refused(format!(
                "New images of format '{}' cannot be planned",
                self.name()
            ))),
        }
    }

    /// Whether images of it can name a backing file.
    pub const fn has_backing(self) -> bool {
        self.0.has_backing
    }

    /// Whether new images of it can name a backing file.
    pub fn is_created_over_backing(self) -> bool {
        let mut options = self.create_options().iter();
        options.any(|option| option.name == "backing_file")
    }

    /// Whether images of it can name an external data file.
    pub const fn has_data_file(self) -> bool {
        self.0.has_data_file
    }

    /// Whether images of it can store compressed data.
    pub const fn can_compress(self) -> bool {
        self.0.can_compress
    }

    /// The keys of the options that an image of it is opened with (`--image-opts`), besides those
    /// of every image.
    pub const fn open_options(self) -> &'static [&'static str] {
        self.0.open_options
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Format {}

impl Hash for Format {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
