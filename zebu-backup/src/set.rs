//! A set of backups in a directory.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use zebu::storage::Queue;
use zebu::{Device, Format, OpenOptions, Source};

use crate::error::{Error, Result, refuse};
use crate::files;
use crate::manifest::{Entry, Manifest};

const MANIFEST: &str = "manifest.json";
const LOCK: &str = "lock";

/// A directory with backups. One program changes it at a time.
#[derive(Debug)]
pub struct Set {
    directory: PathBuf,
    manifest: Manifest,
    /// Locked as long as the set is open for changes.
    _lock: Option<File>,
}

impl Set {
    /// Opens a set for reading.
    ///
    /// # Errors
    ///
    /// If there is no valid manifest.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self> {
        let directory = directory.into();
        let path = directory.join(MANIFEST);
        let bytes = fs::read(&path).map_err(Error::file(&path))?;
        Ok(Set {
            manifest: decode(&path, &bytes)?,
            directory,
            _lock: None,
        })
    }

    /// Opens a set to change it, and creates it if the directory is empty or does not exist.
    ///
    /// # Errors
    ///
    /// If another program changes it, if its manifest is not valid, or if the directory has files
    /// but no manifest.
    pub fn open_or_create(directory: impl Into<PathBuf>) -> Result<Self> {
        let directory = directory.into();
        files::create_directory(&directory)?;
        let path = directory.join(LOCK);
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let lock = options.open(&path).map_err(Error::file(&path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let directory = directory.display();
                return refuse(format!("{directory}: another backup is being made there"));
            }
            Err(TryLockError::Error(error)) => return Err(Error::file(&path)(error)),
        }
        let path = directory.join(MANIFEST);
        let manifest = match fs::read(&path) {
            Ok(bytes) => decode(&path, &bytes)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                refuse_files(&directory)?;
                Manifest::new(files::new_id()?)
            }
            Err(error) => return Err(Error::file(&path)(error)),
        };
        Ok(Set {
            directory,
            manifest,
            _lock: Some(lock),
        })
    }

    /// The list of its points and files.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Replaces the manifest, durably.
    pub(crate) fn save(&mut self, manifest: Manifest) -> Result<()> {
        files::replace(&self.directory.join(MANIFEST), &manifest.encode())?;
        self.manifest = manifest;
        Ok(())
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    /// The file of a disk at a point, whose chain is complete: a qcow2 image from which the disk can
    /// be restored.
    ///
    /// # Errors
    ///
    /// If there is no such point or disk, or if a file of the chain is missing or has another length
    /// than in the manifest.
    pub fn image(&self, disk: &str, number: u64) -> Result<PathBuf> {
        if !self.manifest.merging.is_empty() {
            return refuse(
                "an increment is being merged: take a backup, or run 'backup keep', to finish that",
            );
        }
        let chain = self.manifest.chain(disk, number)?;
        for entry in &chain {
            self.check_length(entry)?;
        }
        Ok(self.path(&chain[0].file))
    }

    /// Refuses a file that is missing or was cut off.
    pub(crate) fn check_length(&self, entry: &Entry) -> Result<()> {
        let path = self.path(&entry.file);
        let found = fs::metadata(&path).map_err(Error::file(&path))?.len();
        match found == entry.length {
            true => Ok(()),
            false => refuse(format!(
                "{}: has {found} bytes, not {} as in the manifest",
                path.display(),
                entry.length
            )),
        }
    }

    /// Opens a file of the set with its chain, for reading.
    pub(crate) fn open_image(&self, queue: &Queue, file: &str) -> Result<Device> {
        let source = Source::Name(self.path(file).into());
        let options = OpenOptions::default().format(Some(Format::QCOW2));
        Device::open(queue, &source, &options).map_err(Error::image(file))
    }
}

fn decode(path: &Path, bytes: &[u8]) -> Result<Manifest> {
    Manifest::decode(bytes).map_err(|error| Error::Refused(format!("{}: {error}", path.display())))
}

/// Refuses a directory that has other files, which might be those of a set without its manifest.
fn refuse_files(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).map_err(Error::file(directory))? {
        let name = entry.map_err(Error::file(directory))?.file_name();
        if name != LOCK && name != "manifest.new" {
            return refuse(format!(
                "{}: there is no manifest, but other files",
                directory.display()
            ));
        }
    }
    Ok(())
}
