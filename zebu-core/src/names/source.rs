//! How a caller, or an image, names an image.

use std::ffi::{OsStr, OsString};

use crate::Result;
use crate::block::{Format, ImageSpec, Policy};
use crate::protocols::parse::{self, Naming, refused};
use crate::spelling::OptionSet;
use crate::spelling::path::protocol;

/// Which image to open, as the user or another image named it.
///
/// ```
/// use zebu::Source;
/// let source = Source::Name("json:{\"driver\":\"raw\",\"file.filename\":\"disk.raw\"}".into());
/// let spec = source.resolve(None, None)?;
/// assert_eq!(spec.file.path.to_str(), Some("disk.raw"));
/// # Ok::<(), zebu::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A name: a path, `PROTOCOL:…` (`file:PATH`, `nbd://HOST/EXPORT`, `https://HOST/PATH`; those of
    /// [`FileDriver::names`](crate::block::FileDriver::names)), or `json:{…}`.
    Name(OsString),
    /// The text of `--image-opts`: `driver=qcow2,file.filename=PATH`.
    Options(OsString),
    /// A name, and such options, which win over those of the name.
    NameWithOptions(OsString, OsString),
}

impl Source {
    /// The image of this name, with the name of its driver as `-f`, `-F` or the header of an image over it
    /// has it: a format, a kind of file (`file`, which means raw), or a filter over the file
    /// (`preallocate`). It wins over the `driver` of a `json:` name. None: the format is that of the name,
    /// or is found by the content.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused) if there is no such driver.
    pub fn with_driver(name: impl Into<OsString>, driver: Option<&str>) -> Result<Source> {
        let name = name.into();
        Ok(match driver.map(parse::driver_name).transpose()? {
            None => Source::Name(name),
            Some(driver) => Source::NameWithOptions(name, format!("driver={driver}").into()),
        })
    }

    /// The name, if there is one, and the options.
    fn parts(&self) -> (Option<&OsStr>, OptionSet) {
        match self {
            Source::Name(name) => (Some(name), OptionSet::default()),
            Source::Options(text) => (None, OptionSet::parse(text)),
            Source::NameWithOptions(name, text) => (Some(name), OptionSet::parse(text)),
        }
    }

    /// Describes the image. Opens nothing.
    ///
    /// `relative_to` is the file name of the image that names this one ([`FileSpec::name`](crate::block::FileSpec::name) of its
    /// `file`): relative paths are of its directory. None: of the current directory. As with
    /// QEMU, only plain paths are relative to another image; what follows `file:` or is inside
    /// `json:` is relative to the current directory.
    ///
    /// `format` is that of `-f`, or of the header that holds the name. It wins over the `driver`
    /// of a `json:` name, as with QEMU.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused) with one line that fits after `Could not open 'NAME': `, if the name or
    /// an option is not understood.
    pub fn resolve(
        &self,
        relative_to: Option<&OsStr>,
        format: Option<Format>,
    ) -> Result<ImageSpec> {
        let (name, options) = self.parts();
        let naming = Naming { name, relative_to };
        parse::image(options, format, naming, 0).map_err(refused)
    }

    /// The value of an option (`driver`, `file.filename`, …) as it was given, in the options or
    /// in a `json:` name.
    pub fn option(&self, key: &str) -> Option<OsString> {
        let (name, mut options) = self.parts();
        Naming::from(name).merge(&mut options).ok()?;
        options.take_value(key)
    }

    /// Refuses a name that is not just a path. Options, which cannot be taken for a file's name,
    /// are not looked at.
    fn check_is_path(&self) -> Result<()> {
        let (Source::Name(name) | Source::NameWithOptions(name, _)) = self else {
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

impl Policy {
    /// Whether the policy allows a source, for callers that resolve it themselves.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused) if the policy is [`Policy::Untrusted`] and the name is more than a path.
    pub fn check_source(&self, source: &Source) -> Result<()> {
        match self {
            Policy::Untrusted(_) => source.check_is_path(),
            Policy::Follow | Policy::Nothing => Ok(()),
        }
    }
}
