//! The errors of backups.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use zebu::internal::printable;

/// A result with an [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a backup failed. `Display` is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the set.
    #[error("{}: {}", shown(.path), zebu::strerror(.source))]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A disk or an image of the set.
    #[error("{}: {source}", printable(.name.as_bytes()))]
    Image {
        /// The disk or the file.
        name: String,
        /// Why.
        source: zebu::Error,
    },
    /// The set is not as its manifest says, or the request makes no sense.
    #[error("{}", printable(.0.as_bytes()))]
    Refused(String),
    /// A backup that was verified is not what the disk has: its bitmap has missed a change.
    #[error("{}: the backup differs from the disk at byte {offset}", printable(.disk.as_bytes()))]
    Differs {
        /// The disk.
        disk: String,
        /// The first byte that differs.
        offset: u64,
    },
    /// Another program wrote to a disk while it was read, so what was read may be a mixture of two
    /// states of it.
    #[error("{}: {what}: back it up again when no program writes to it", printable(.disk.as_bytes()))]
    Changed {
        /// The disk.
        disk: String,
        /// What was changed.
        what: String,
    },
    /// The progress callback has stopped it.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Adds the path of a file to an error of it.
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Error + '_ {
        |source| Error::File {
            path: path.to_owned(),
            source,
        }
    }

    /// Adds the name of a disk or a file to an error of an image.
    pub(crate) fn image(name: impl Into<String>) -> impl FnOnce(zebu::Error) -> Error {
        let name = name.into();
        |source| Error::Image { name, source }
    }
}

/// An error that is a message.
pub(crate) fn refuse<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::Refused(text.into()))
}

/// A path in a message.
pub(crate) fn shown(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
}
