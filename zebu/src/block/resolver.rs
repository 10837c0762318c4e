//! The meaning of names that are found while an image is opened.
//!
//! Images have names in QEMU's spelling, which a layer above reads: [`crate::names`].

use std::ffi::OsStr;
use std::path::Path;

use super::Format;
use super::spec::{BackingOptions, FileSpec, ImageSpec};
use crate::Result;
use crate::storage::Rule;

/// The meaning of names that are found while an image is opened.
pub(crate) trait NameResolver {
    /// The image that a header names as the backing file of the image in the file `of`.
    /// `options` win over the header. Without a name they describe the image alone.
    fn backing(
        &self,
        name: Option<&OsStr>,
        of: &OsStr,
        format: Option<Format>,
        options: Option<&BackingOptions>,
    ) -> Result<ImageSpec>;

    /// The file that a header names as its external data file.
    fn data_file(&self, name: &OsStr) -> Result<FileSpec>;

    /// Reads the pending options, now that the format is known. Those that it does not have are
    /// an error.
    fn format_options(&self, spec: &mut ImageSpec, format: Format) -> Result<()>;

    /// The rules in a configuration file of blkdebug.
    fn blkdebug_rules(&self, config: &Path) -> Result<Vec<Rule>>;
}

/// Every name is a path, and there are no options.
pub(crate) struct Paths;

impl NameResolver for Paths {
    fn backing(
        &self,
        name: Option<&OsStr>,
        of: &OsStr,
        format: Option<Format>,
        _options: Option<&BackingOptions>,
    ) -> Result<ImageSpec> {
        let folder = Path::new(of).parent().unwrap_or(Path::new(""));
        let path = folder.join(name.unwrap_or_default());
        Ok(ImageSpec::new(format, FileSpec::new(path)))
    }

    fn data_file(&self, name: &OsStr) -> Result<FileSpec> {
        Ok(FileSpec::new(name))
    }

    fn format_options(&self, _spec: &mut ImageSpec, _format: Format) -> Result<()> {
        Ok(())
    }

    fn blkdebug_rules(&self, _config: &Path) -> Result<Vec<Rule>> {
        Ok(Vec::new())
    }
}
