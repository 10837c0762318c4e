//! What names an image: a file name, a `json:{…}` name, options.
//!
//! [`Source::resolve`] turns any of them into an [`ImageSpec`], a tree that
//! says which files are opened and how, without opening anything. Whatever is
//! not understood is refused, in QEMU's words where it has some: an option
//! that were ignored might be the one that keeps the data safe.

mod blkdebug;
mod drivers;
mod file;
mod image;
mod image_options;
mod json;
mod name;
#[cfg(feature = "nbd")]
mod nbd;
mod null;
mod options;
mod shown;
mod text;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::Format;
use crate::{Error, Result};
pub use blkdebug::BlkdebugSpec;
pub use drivers::FileDriver;
pub use file::{FileOptions, FileSpec, Locking, NATIVE_NEEDS_DIRECT};
pub use image::{BackingOptions, BackingSpec, ImageSpec};
pub use image_options::{
    CommonOptions, DetectZeroes, ImageOptions, OverlapChecks, Qcow2Options, RawOptions,
};
pub use json::json_text;
pub use name::protocol;
#[cfg(feature = "nbd")]
pub use nbd::{NbdSpec, NbdTls};
pub use null::NullSpec;
use options::Options;
pub use text::{SizeError, first_item, parse_size, split_list};

/// How many images an image described by options may be backed by.
const MAX_DEPTH: usize = 64;

/// Which image to open, as the user or another image named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A name: a path, `file:PATH`, an NBD server's export (`nbd://HOST/EXPORT`
    /// and its like), or `json:{…}`.
    Name(OsString),
    /// The text of `--image-opts`: `driver=qcow2,file.filename=PATH`.
    Options(OsString),
    /// A name, and such options, which win over what the name says.
    NameWithOptions(OsString, OsString),
}

/// How an image or a file is named besides its options.
#[derive(Clone, Copy, Debug, Default)]
struct Naming<'a> {
    name: Option<&'a OsStr>,
    /// The file name of the image that names it.
    relative_to: Option<&'a OsStr>,
}

impl<'a> From<Option<&'a OsStr>> for Naming<'a> {
    fn from(name: Option<&'a OsStr>) -> Self {
        Naming {
            name,
            relative_to: None,
        }
    }
}

impl Naming<'_> {
    /// Puts what a `json:` name says among the options, unless these say it
    /// themselves; there is no name then.
    fn merge(self, options: &mut Options) -> Result<Self, String> {
        let name = self.name.map(OsStr::as_bytes);
        let Some(text) = name.and_then(|name| name.strip_prefix(b"json:")) else {
            return Ok(self);
        };
        options.add_defaults(json::parse(text)?);
        Ok(Naming { name: None, ..self })
    }
}

impl Source {
    /// Describes the image that this names. Opens nothing.
    ///
    /// `relative_to` is the file name of the image that names this one
    /// ([`FileSpec::name`] of its `file`): relative paths are of its
    /// directory. None: of the current directory. As with QEMU, only plain
    /// paths are relative to another image; what follows `file:` or is inside
    /// `json:` is relative to the current directory.
    ///
    /// `format` is what `-f`, or the header that holds the name, says; it
    /// wins over the `driver` of a `json:` name, as with QEMU.
    ///
    /// The error is one line, which fits after `Could not open 'NAME': `.
    pub fn resolve(
        &self,
        relative_to: Option<&OsStr>,
        format: Option<Format>,
    ) -> Result<ImageSpec> {
        let (name, options) = match self {
            Source::Name(name) => (Some(name), Options::default()),
            Source::Options(text) => (None, Options::parse(text)),
            Source::NameWithOptions(name, text) => (Some(name), Options::parse(text)),
        };
        let naming = Naming {
            name: name.map(OsString::as_os_str),
            relative_to,
        };
        let spec = ImageSpec::parse(options, format, naming, 0);
        spec.map_err(refused)
    }

    /// The value of an option (`driver`, `file.filename`, …) as it was given, in the
    /// options or in a `json:` name.
    pub fn option(&self, key: &str) -> Option<OsString> {
        let (name, mut options) = match self {
            Source::Name(name) => (Some(name), Options::default()),
            Source::Options(text) => (None, Options::parse(text)),
            Source::NameWithOptions(name, text) => (Some(name), Options::parse(text)),
        };
        let naming = Naming::from(name.map(OsString::as_os_str));
        naming.merge(&mut options).ok()?;
        options.take_value(key)
    }

    /// Refuses a name that is not just a path. Options, which nobody takes for
    /// a file's name, are not looked at.
    pub(in crate::block) fn check_is_path(&self) -> Result<()> {
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

/// The error, on one line whatever was quoted from the input.
fn refused(what: String) -> Error {
    let clean = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    Error::Refused(what.chars().map(clean).collect())
}

/// What a name in the place of a file's options is refused with: nodes have no names here.
fn no_such_node(name: &OsStr) -> String {
    let name = name.display();
    format!("Cannot find device='{name}' nor node-name='{name}'")
}

fn refuse_rest(options: &Options, prefix: &str) -> Result<(), String> {
    match options.first_key() {
        None => Ok(()),
        Some(key) => Err(format!("{prefix} '{}'", key)),
    }
}

#[cfg(test)]
mod tests;
