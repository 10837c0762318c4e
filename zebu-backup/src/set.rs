//! A set of backups in a directory.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use zebu::block::{FileDriver, NbdSpec};
use zebu::internal::printable;
use zebu::storage::Queue;
use zebu::{Device, Format, OpenOptions, Source};

use crate::error::{Error, Result, refuse, shown};
use crate::files;
use crate::manifest::{Entry, Kind, Manifest, Merge, part};
use crate::progress::{OnProgress, Step};

const MANIFEST: &str = "manifest.json";
/// [`files::replace`] writes the manifest to it first.
const NEW_MANIFEST: &str = "manifest.new";
const LOCK: &str = "lock";

/// A directory with backups. One program changes it at a time.
#[derive(Debug)]
pub struct Set {
    directory: PathBuf,
    manifest: Manifest,
    /// Locked as long as the set is open for changes.
    lock: Option<File>,
    notes: Mutex<Vec<String>>,
    /// If there was no set: the directories that were made for it. They go again unless it gets a point.
    pub(crate) made: Option<Vec<PathBuf>>,
}

impl Drop for Set {
    fn drop(&mut self) {
        let made = self.made.take();
        // The lock is held until the last name is gone: no other program has begun a set there.
        if let Some(made) = made.filter(|_| self.lock.is_some() && self.manifest.points.is_empty())
        {
            // What cannot be removed is removed by the next backup.
            let _ = self.remove_new(&made);
        }
    }
}

impl Set {
    /// Opens a set for reading: what changes it is refused.
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
            lock: None,
            notes: Mutex::default(),
            made: None,
        })
    }

    /// Opens a set to change it, and creates it if the directory is empty or does not exist.
    ///
    /// # Errors
    ///
    /// If another program changes it, if its manifest is not valid, or if the directory has files
    /// but no manifest.
    ///
    /// A new set that is dropped before it has a point leaves nothing.
    pub fn open_or_create(directory: impl Into<PathBuf>) -> Result<Self> {
        let directory = directory.into();
        let path = directory.join(MANIFEST);
        if directory.is_dir() && !path.exists() {
            // Before anything is added to it.
            refuse_files(&directory)?;
        }
        let mut made = Vec::new();
        let lock = lock(&directory, &mut made)?;
        let (manifest, made) = match fs::read(&path) {
            Ok(bytes) => (decode(&path, &bytes)?, None),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                refuse_files(&directory)?;
                (Manifest::new(files::new_id()?), Some(made))
            }
            Err(error) => return Err(Error::file(&path)(error)),
        };
        Ok(Set {
            directory,
            manifest,
            lock: Some(lock),
            notes: Mutex::default(),
            made,
        })
    }

    /// Removes what a set without points consists of, and these directories, if nothing else is in them.
    fn remove_new(&self, made: &[PathBuf]) -> Result<()> {
        for file in &self.manifest.removing {
            files::remove(&self.path(file))?;
            files::remove(&self.path(&part(file)))?;
        }
        for file in [MANIFEST, NEW_MANIFEST, LOCK] {
            files::remove(&self.path(file))?;
        }
        for directory in made.iter().rev() {
            fs::remove_dir(directory).map_err(Error::file(directory))?;
        }
        Ok(())
    }

    /// Notes what a caller may want to know of a disk.
    pub(crate) fn note(&self, disk: &str, text: &str) {
        tracing::warn!("{disk}: {text}");
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.push(format!("{disk}: {text}"));
    }

    /// What was done otherwise than may be expected since this was asked for the last time, a line
    /// each: a format was guessed, a disk was compared though it has a bitmap.
    pub fn take_notes(&self) -> Vec<String> {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut notes)
    }

    /// The list of its points and files.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether another program changes the set, or has changed it since it was opened for reading.
    pub(crate) fn is_changing(&self) -> Result<bool> {
        if self.lock.is_some() {
            return Ok(false);
        }
        if let Ok(lock) = File::open(self.directory.join(LOCK))
            && let Err(TryLockError::WouldBlock) = lock.try_lock_shared()
        {
            return Ok(true);
        }
        let path = self.directory.join(MANIFEST);
        let bytes = fs::read(&path).map_err(Error::file(&path))?;
        Ok(bytes != self.manifest.encode() && decode(&path, &bytes)? != self.manifest)
    }

    /// Replaces the manifest, durably.
    pub(crate) fn save(&mut self, manifest: Manifest) -> Result<()> {
        files::replace(&self.directory.join(MANIFEST), &manifest.encode())?;
        self.manifest = manifest;
        Ok(())
    }

    /// Refuses an image that is a file in the directory of the set, or would be a new one there.
    ///
    /// # Errors
    ///
    /// If it is one, or the directory cannot be read.
    pub fn refuse_own(&self, image: &Source) -> Result<()> {
        match path_of(image) {
            Some(path) if files::is_inside(&path, &self.directory)? => refuse(format!(
                "{}: is in the directory of the backups",
                shown(&path)
            )),
            _ => Ok(()),
        }
    }

    /// Begins a change: removes what an interrupted one has left. Without the lock, another program
    /// may be writing these files.
    ///
    /// # Errors
    ///
    /// If the set is open for reading, or a file cannot be removed.
    pub(crate) fn begin_change(&mut self) -> Result<()> {
        match self.lock {
            Some(_) => self.remove_unused(),
            None => refuse(format!(
                "{}: the set is open for reading",
                shown(&self.directory)
            )),
        }
    }

    /// Removes the files that the manifest names as needed by no point.
    pub(crate) fn remove_unused(&mut self) -> Result<()> {
        if self.manifest.removing.is_empty() {
            return Ok(());
        }
        for file in &self.manifest.removing {
            files::remove(&self.path(file))?;
            files::remove(&self.path(&part(file)))?;
        }
        let mut manifest = self.manifest.clone();
        manifest.removing.clear();
        self.save(manifest)
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    /// The file of a disk at a point: a qcow2 image from which the disk can be restored.
    ///
    /// # Errors
    ///
    /// Those of [`Set::verify_chain`].
    pub fn image(&self, queue: &Queue, disk: &str, number: u64) -> Result<PathBuf> {
        self.verify_chain(queue, disk, number)?;
        Ok(self.path(&self.manifest.chain(disk, number)?[0].file))
    }

    /// Compares the files that a disk consists of at a point with the manifest: each is there, has
    /// its length and size, and names exactly the one before as its backing file. Blocks.
    ///
    /// # Errors
    ///
    /// If there is no such point or disk, if a file cannot be opened, or if one is not as in the
    /// manifest.
    pub fn verify_chain(&self, queue: &Queue, disk: &str, number: u64) -> Result<()> {
        let chain = self.manifest.chain(disk, number)?;
        (0..chain.len()).try_for_each(|nth| self.verify_link(queue, &chain[nth..]))
    }

    /// As [`Set::verify_chain`], of the point's own file.
    pub(crate) fn verify_file(&self, queue: &Queue, disk: &str, number: u64) -> Result<()> {
        self.verify_link(queue, &self.manifest.chain(disk, number)?)
    }

    /// Compares the first file of a chain with the manifest, and the base that is being merged with
    /// it.
    fn verify_link(&self, queue: &Queue, chain: &[&Entry]) -> Result<()> {
        let Some((entry, rest)) = chain.split_first() else {
            return Ok(());
        };
        match (entry.kind, rest.first(), self.merge_into(entry)) {
            (Kind::Full, ..) => self.expect(queue, &entry.file, Some(entry), None),
            (_, Some(before), _) => {
                self.expect(queue, &entry.file, Some(entry), Some(&before.file))
            }
            (_, None, Some(merge)) if self.has_base(merge)? => {
                self.expect(queue, &merge.base, None, None)?;
                self.expect(queue, &merge.top, Some(entry), Some(&merge.base))
            }
            (_, None, Some(merge)) => self.verify_merged(queue, merge),
            (_, None, None) => refuse(format!("{}: it has no full backup", entry.file)),
        }
    }

    /// The merge that this file is part of, which is to take its name.
    pub(crate) fn merge_into(&self, entry: &Entry) -> Option<&Merge> {
        let mut merging = self.manifest.merging.iter();
        merging.find(|merge| merge.top == entry.file)
    }

    /// Whether the merged file does not have its name yet.
    pub(crate) fn has_base(&self, merge: &Merge) -> Result<bool> {
        let base = self.path(&merge.base);
        fs::exists(&base).map_err(Error::file(&base))
    }

    /// Refuses a file that has the name of a merged one but needs another file.
    pub(crate) fn verify_merged(&self, queue: &Queue, merge: &Merge) -> Result<()> {
        self.expect(queue, &merge.top, None, None)
    }

    /// Refuses a file that has not the length and the size of its entry, if that is known, that
    /// names another backing file than this one, or any data file.
    fn expect(
        &self,
        queue: &Queue,
        file: &str,
        entry: Option<&Entry>,
        backing: Option<&str>,
    ) -> Result<()> {
        if let Some(entry) = entry {
            self.check_length(entry)?;
        }
        let path = self.path(file);
        let source = Source::Name(path.clone().into());
        let options = OpenOptions::default()
            .format(Some(Format::QCOW2))
            .inspect(true);
        let device = Device::open(queue, &source, &options).map_err(Error::image(file))?;
        let top = device.top();
        let show = |name: Option<&[u8]>| match name {
            Some(name) => format!("the backing file '{}'", printable(name)),
            None => "no backing file".to_owned(),
        };
        let differs = |what: String, wanted: String| {
            let path = shown(&path);
            refuse(format!(
                "{path}: has {what}, not {wanted} as in the manifest"
            ))
        };
        let found = top.backing();
        let name = found.as_ref().map(|found| found.name);
        if name != backing.map(str::as_bytes) {
            return differs(show(name), show(backing.map(str::as_bytes)));
        }
        if found.is_some_and(|found| found.format != Some(Format::QCOW2.name().as_bytes())) {
            return differs("a backing file of another format".into(), "qcow2".into());
        }
        if top.data_file().is_some() {
            return differs("an external data file".into(), "none".into());
        }
        match entry.filter(|entry| entry.size != top.size()) {
            Some(entry) => differs(
                format!("a disk of {} bytes", top.size()),
                entry.size.to_string(),
            ),
            None => Ok(()),
        }
    }

    /// Refuses a file that is missing or was cut off.
    fn check_length(&self, entry: &Entry) -> Result<()> {
        let path = self.path(&entry.file);
        let found = fs::metadata(&path).map_err(Error::file(&path))?.len();
        match found == entry.length {
            true => Ok(()),
            false => refuse(format!(
                "{}: has {found} bytes, not {} as in the manifest",
                shown(&path),
                entry.length
            )),
        }
    }

    /// Refuses a file whose content is not that which the manifest has a hash of.
    pub(crate) fn verify_hash(&self, entry: &Entry, on_progress: OnProgress<'_>) -> Result<()> {
        self.check_length(entry)?;
        match self.hash(&entry.file, on_progress)?.1 == entry.sha256 {
            true => Ok(()),
            false => refuse(format!(
                "{}: its SHA-256 differs from the manifest",
                shown(&self.path(&entry.file))
            )),
        }
    }

    /// Length and SHA-256 of a file.
    pub(crate) fn hash(&self, file: &str, on_progress: OnProgress<'_>) -> Result<(u64, String)> {
        let path = self.path(file);
        let total = fs::metadata(&path).map_err(Error::file(&path))?.len();
        let mut done = 0;
        files::hash(&path, |count| {
            done += count;
            on_progress(Step::Hash, file, done, total).is_continue()
        })
    }

    /// Opens a file of the set with its chain, for reading.
    pub(crate) fn open_image(&self, queue: &Queue, file: &str) -> Result<Device> {
        let source = Source::Name(self.path(file).into());
        let options = OpenOptions::default().format(Some(Format::QCOW2));
        Device::open(queue, &source, &options).map_err(Error::image(file))
    }
}

/// Locks a directory, which is made if there is none. A set that failed removes its lock with its directory,
/// so what was locked must be what is there.
fn lock(directory: &Path, made: &mut Vec<PathBuf>) -> Result<File> {
    let path = directory.join(LOCK);
    loop {
        files::create_directory(directory, made)?;
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let lock = match options.open(&path) {
            Ok(lock) => lock,
            // Another program has just removed the directory.
            Err(error) if error.kind() == ErrorKind::NotFound && !directory.exists() => continue,
            Err(error) => return Err(Error::file(&path)(error)),
        };
        match lock.try_lock() {
            Ok(()) if files::is_at(&path, &lock) => return Ok(lock),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let directory = shown(directory);
                return refuse(format!("{directory}: another backup is being made there"));
            }
            Err(TryLockError::Error(error)) => return Err(Error::file(&path)(error)),
        }
    }
}

fn decode(path: &Path, bytes: &[u8]) -> Result<Manifest> {
    Manifest::decode(bytes).map_err(|error| Error::Refused(format!("{}: {error}", shown(path))))
}

/// The path of the file or device that an image is in. None of what has no path, or no valid name.
pub(crate) fn path_of(image: &Source) -> Option<PathBuf> {
    let file = image.resolve(None, None).ok()?.file;
    let has_none =
        matches!(file.driver, FileDriver::Null(_)) || file.driver.get::<NbdSpec>().is_some();
    (!has_none).then_some(file.path)
}

/// Refuses a directory that has other files, which might be those of a set without its manifest.
fn refuse_files(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).map_err(Error::file(directory))? {
        let name = entry.map_err(Error::file(directory))?.file_name();
        if name != LOCK && name != NEW_MANIFEST {
            return refuse(format!(
                "{}: there is no manifest, but other files",
                shown(directory)
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use zebu::storage::QueueOptions;

    /// Another program may be writing the files that the manifest names as needless.
    #[test]
    fn a_set_open_for_reading_is_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        let mut own = Set::open_or_create(directory.path()).unwrap();
        let mut manifest = own.manifest().clone();
        manifest.removing = vec!["disk.1.qcow2".into()];
        own.save(manifest).unwrap();
        let file = directory.path().join(part("disk.1.qcow2"));
        fs::write(&file, "half of it").unwrap();

        let queue = Queue::new(QueueOptions::default()).unwrap();
        let mut other = Set::open(directory.path()).unwrap();
        let on_progress: OnProgress<'_> = &mut |_, _, _, _| ControlFlow::Continue(());
        let kept = other.keep(&queue, 1, &|_| true, on_progress);
        assert!(matches!(kept, Err(Error::Refused(_))), "{kept:?}");
        assert!(file.exists());
    }
}
