//! The arguments with which a driver opens an image.

use std::sync::Arc;

use super::options::{Qcow2Opening, RawPart, VhdSize};
use super::{AnyImage, BoxFuture, Limits};
use crate::Result;
use crate::storage::{Counted, Queue, Secret, Storage, Work};

/// The function by which a driver opens an image.
pub type OpenFormat = for<'a> fn(OpenRequest<'a>) -> BoxFuture<'a, Result<AnyImage>>;

/// An image that a driver is to open.
pub struct OpenRequest<'a> {
    /// The caller's queue.
    pub queue: &'a Queue,
    /// The image's file.
    pub file: Arc<dyn Storage>,
    /// Open for writing too.
    pub write: bool,
    /// The use of the image.
    pub purpose: Purpose,
    /// The limits of an untrusted image.
    pub limits: Option<&'a Limits>,
    /// Opens the other files that the image names.
    pub others: &'a mut dyn OtherFiles,
    /// Options of raw images.
    pub raw: RawPart,
    /// Options of qcow2 images.
    pub qcow2: Qcow2Opening,
    /// Options of VHD images.
    pub vpc: VhdSize,
    /// Finds the secret that unlocks an encrypted image: None if none was named. For a driver whose image needs it.
    pub key: &'a dyn Fn() -> Result<Option<Secret>>,
}

/// The use of an image that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its data are read, or written.
    Data,
    /// Its metadata are shown. An encrypted image opens too.
    Metadata,
    /// It is checked or repaired. Damage is no error.
    Check {
        /// Whether an encrypted image opens.
        encrypted: bool,
    },
}

impl Purpose {
    /// Whether an encrypted image is of no use for it.
    #[doc(hidden)]
    pub fn needs_data(self) -> bool {
        match self {
            Purpose::Data | Purpose::Check { encrypted: false } => true,
            Purpose::Metadata | Purpose::Check { encrypted: true } => false,
        }
    }
}

/// Opens the files that an image names, as far as the caller's policy allows.
pub trait OtherFiles {
    /// The external data file; None: there is none, or it stays closed. `named` is None if the
    /// image has none, and otherwise holds the name in the image, if there is one.
    fn data_file<'a>(
        &'a mut self,
        named: Option<Option<&'a [u8]>>,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Storage>>>>;

    /// A file with a part of the disk: a path, relative to that of the image, and not empty.
    /// `has_tables` says whether there is more in it than data. None: it stays closed, since only
    /// the image's own metadata are shown.
    fn extent<'a>(
        &'a mut self,
        name: &'a [u8],
        has_tables: bool,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Storage>>>>;
}

/// The path of a file, with the prefix `./` if it would be taken for a name with a protocol.
pub fn as_path(name: &str) -> String {
    let first = name.split('/').next().unwrap_or_default();
    match first.contains(':') {
        true => format!("./{name}"),
        false => name.to_owned(),
    }
}

/// The name of this system for a path of Windows. A path with a drive or a server is reduced to its
/// last part, since the file was moved anyway.
pub fn from_windows(path: &str) -> String {
    let has_drive = path.chars().nth(1) == Some(':');
    let path = path.replace('\\', "/");
    match has_drive || path.starts_with('/') {
        true => relative(path.rsplit(['/', ':']).next().unwrap_or_default()),
        false => relative(&path),
    }
}

/// The path of a file without the prefix `./`, unless it needs one.
pub fn relative(name: &str) -> String {
    as_path(name.strip_prefix("./").unwrap_or(name))
}

impl OpenRequest<'_> {
    /// The limits of an untrusted image, and the counter of its work. Reads of `file` count from
    /// now on.
    #[doc(hidden)]
    pub fn count_work(&mut self) -> Result<(Option<Limits>, Option<Arc<Work>>)> {
        let Some(limits) = self.limits else {
            return Ok((None, None));
        };
        let bytes = self.file.allocated().or_else(|_| self.file.len())?;
        let work = Arc::new(Work::new(limits.work_for(bytes)));
        self.file = Arc::new(Counted::new(self.file.clone(), work.clone()));
        Ok((Some(*limits), Some(work)))
    }
}
