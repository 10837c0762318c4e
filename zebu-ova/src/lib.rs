//! Virtual appliances: OVF descriptors (DMTF DSP0243), alone or in a tar archive (OVA).
//!
//! [`Appliance::open`] finds the disks of an appliance and where each is stored. In an archive that
//! is a range of the archive's file, so a disk is read in place. [`NewAppliance`] makes an archive
//! whose disks are written in place, too. Disk images are not looked into: that is for the caller.
//!
//! Appliances may be malicious. Descriptors and manifests of more than 16 MiB are refused, members
//! are inside the archive, and no other file is opened for an archive. A descriptor that is a file
//! of its own opens only files of its directory.
#![forbid(unsafe_code)]

mod appliance;
mod archive;
mod checksum;
mod descriptor;
mod href;
mod manifest;
mod new;
mod text;

use std::io;
use std::path::{Path, PathBuf};

pub use appliance::{Appliance, Disk, Stored};
pub use checksum::{Algorithm, Checksum};
pub use new::{NewAppliance, NewDisk};

/// Why an appliance cannot be read or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{}: {source}", printable(&file.to_string_lossy()))]
    Io {
        /// The path of the file.
        file: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// It is no appliance, a damaged one, or it needs what is not supported.
    #[error("{0}")]
    Refused(String),
    /// The caller's callback ended the work.
    #[error("Interrupted")]
    Stopped,
}

impl Error {
    /// Adds the path of a file to an error of it.
    fn io(file: &Path) -> impl Fn(io::Error) -> Error + '_ {
        |source| Error::Io {
            file: file.to_owned(),
            source,
        }
    }
}

/// The result of an operation on an appliance.
pub type Result<T> = std::result::Result<T, Error>;

fn refused<T>(why: impl AsRef<str>) -> Result<T> {
    Err(Error::Refused(printable(why.as_ref())))
}

/// A message, which may have names of the appliance in it, on one line. A very long one is cut off.
fn printable(text: &str) -> String {
    const MAX: usize = 4096;
    let end = text
        .char_indices()
        .nth(MAX)
        .map_or(text.len(), |(at, _)| at);
    zebu_core::parts::printable(&text.as_bytes()[..end])
}
