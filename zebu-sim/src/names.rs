//! Names of files, links, and QEMU's image locks, as a kernel has them. A name that changes is durable
//! once names were synced; a power cut keeps the oldest changes since.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, TryLockError};

use zebu::internal::names::{LockBytes, NamedFile, Names};
use zebu::storage::{LockRequest, OpenFile, Permissions, Storage};

use crate::disk::{Disk, File};
use crate::programs;
use zebu_testkit::Rng;

/// The byte that a program locks to write.
const HELD_WRITE: i64 = 101;
/// Links that are followed.
const LINKS: usize = 40;

/// What a name leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The file of this number.
    File(usize),
    /// A symbolic link.
    Link(PathBuf),
}

type Entries = BTreeMap<PathBuf, Entry>;

/// Names that change at once: what each leads to then.
type Change = Vec<(PathBuf, Option<Entry>)>;

/// A file of a name that is open.
#[derive(Clone, Debug)]
struct Open {
    file: usize,
    program: usize,
    locked: Arc<Mutex<LockRequest>>,
}

/// The only folder of a disk.
#[derive(Clone, Debug, Default)]
pub struct Folder {
    entries: Entries,
    durable: Entries,
    pending: Vec<Change>,
    /// Bytes that are locked: file, byte and the number of the open file.
    locks: BTreeSet<(usize, i64, u64)>,
    opens: BTreeMap<u64, Open>,
    next: u64,
}

fn apply(entries: &mut Entries, change: &Change) {
    for (name, entry) in change {
        match entry {
            Some(entry) => entries.insert(name.clone(), entry.clone()),
            None => entries.remove(name),
        };
    }
}

/// A path without its folder.
fn plain(path: &Path) -> PathBuf {
    path.strip_prefix(".").unwrap_or(path).to_owned()
}

impl Folder {
    fn change(&mut self, change: Change) {
        apply(&mut self.entries, &change);
        self.pending.push(change);
    }

    /// Makes all names durable.
    fn sync(&mut self) {
        self.durable = self.entries.clone();
        self.pending.clear();
    }

    /// The name of a file that a name leads to in the end, which may be missing.
    fn follow(&self, path: &Path) -> io::Result<PathBuf> {
        let mut path = plain(path);
        for _ in 0..LINKS {
            match self.entries.get(&path) {
                Some(Entry::Link(to)) => path = plain(to),
                _ => return Ok(path),
            }
        }
        Err(io::Error::from_raw_os_error(libc::ELOOP))
    }

    /// The file that a name leads to.
    pub fn find(&self, path: &Path) -> io::Result<usize> {
        match self.entries.get(&self.follow(path)?) {
            Some(Entry::File(file)) => Ok(*file),
            _ => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }

    /// The power was cut.
    pub fn cut(&mut self, rng: &mut Rng) {
        let kept = rng.below(self.pending.len() as u64 + 1) as usize;
        for change in &self.pending[..kept] {
            apply(&mut self.durable, change);
        }
        self.entries = self.durable.clone();
        self.pending.clear();
        self.kill_all();
    }

    /// All programs have ended.
    pub fn kill_all(&mut self) {
        self.locks.clear();
        self.opens.clear();
    }

    /// A program has ended.
    pub fn kill(&mut self, program: usize) {
        self.opens.retain(|_, open| open.program != program);
        let opens = &self.opens;
        self.locks.retain(|(.., open)| opens.contains_key(open));
    }

    /// The files that have names.
    pub fn files(&self) -> BTreeSet<usize> {
        let all = self.entries.values().chain(self.durable.values());
        let files = all.filter_map(|entry| match entry {
            Entry::File(file) => Some(*file),
            Entry::Link(_) => None,
        });
        files.collect()
    }

    /// The same names, which no program has open.
    pub fn copy(&self) -> Folder {
        Folder {
            entries: self.entries.clone(),
            durable: self.entries.clone(),
            ..Folder::default()
        }
    }

    /// Refuses a change of a file by a program that has not locked it for writing, or while another one
    /// has it locked against that. `number` is that of the open file.
    pub fn check_write(&self, number: u64) -> Result<(), String> {
        let Some(own) = self.opens.get(&number) else {
            return Ok(());
        };
        let refuses = |other: LockRequest| !other.shared.contain(Permissions::WRITE);
        self.check(own, "changes", own.file, refuses)
    }

    /// Refuses the removal of a file's name by a program that has not locked the file for writing, or
    /// while another one writes to it.
    fn check_removal(&self, number: u64, file: usize) -> Result<(), String> {
        let Some(own) = self.opens.get(&number) else {
            return Ok(());
        };
        let writes = |other: LockRequest| other.held.contain(Permissions::WRITE);
        self.check(own, "removes", file, writes)
    }

    fn check(
        &self,
        own: &Open,
        does: &str,
        file: usize,
        is_against: impl Fn(LockRequest) -> bool,
    ) -> Result<(), String> {
        let names = self.entries.iter();
        let names = names.filter(|(_, entry)| **entry == Entry::File(file));
        let names: Vec<_> = names.map(|(name, _)| name.display().to_string()).collect();
        let what = format!("program {} {does} file {file} {names:?}", own.program);
        if own.file != file
            || own
                .request()
                .is_some_and(|own| !own.held.contain(Permissions::WRITE))
        {
            return Err(format!("lock: {what}, which it has not locked"));
        }
        let others = self.opens.values().filter(|open| open.file == file);
        let mut others = others.filter(|open| !Arc::ptr_eq(&open.locked, &own.locked));
        match others.find(|open| open.request().is_some_and(&is_against)) {
            Some(other) => Err(format!(
                "lock: {what}, which program {} has locked",
                other.program
            )),
            None => Ok(()),
        }
    }
}

impl Open {
    /// Its locks; None: they are about to change.
    fn request(&self) -> Option<LockRequest> {
        match self.locked.try_lock() {
            Ok(request) => Some(*request),
            Err(TryLockError::Poisoned(request)) => Some(*request.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The names of a disk, for the library.
pub struct DiskNames(pub Arc<Disk>);

impl Names for DiskNames {
    fn open(&self, path: &Path, how: OpenFile) -> io::Result<Arc<dyn Storage>> {
        self.0.pause();
        let found = self.0.folder(|folder| folder.find(path))?;
        let number = match found {
            Err(e) if how.create && e.raw_os_error() == Some(libc::ENOENT) => {
                let path = self.0.folder(|folder| folder.follow(path))??;
                self.0.add_named(path)
            }
            found => found?,
        };
        Ok(self.0.open_named(number, path, how.cache))
    }

    fn make(&self, path: &Path) -> io::Result<(u64, u64)> {
        self.0.pause();
        let path = plain(path);
        match self.0.folder(|folder| folder.entries.contains_key(&path))? {
            true => Err(io::Error::from_raw_os_error(libc::EEXIST)),
            false => Ok((1, self.0.add_named(path) as u64)),
        }
    }

    fn identity(&self, path: &Path) -> io::Result<(u64, u64)> {
        self.0.pause();
        Ok((1, self.0.folder(|folder| folder.find(path))?? as u64))
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        self.0.pause();
        let entry = self
            .0
            .folder(|folder| folder.entries.get(&plain(path)).cloned())?;
        match entry {
            Some(Entry::Link(to)) => Ok(to),
            Some(Entry::File(_)) => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            None => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }
}

/// What programs do with names that know no locks.
impl Disk {
    /// Adds an empty file of a new name. Returns its number.
    pub fn add_named(&self, name: impl Into<PathBuf>) -> usize {
        let (name, number) = (name.into(), self.add(Vec::new()));
        self.any_folder(|folder| folder.change(vec![(name, Some(Entry::File(number)))]));
        number
    }

    /// Makes a symbolic link.
    pub fn link(&self, name: &str, to: &str) {
        let entry = Some(Entry::Link(to.into()));
        self.any_folder(|folder| folder.change(vec![(name.into(), entry)]));
    }

    /// Removes a name.
    ///
    /// # Errors
    /// Those of unlink(2).
    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.pause();
        self.folder(
            |folder| match folder.entries.contains_key(Path::new(name)) {
                true => {
                    folder.change(vec![(name.into(), None)]);
                    Ok(())
                }
                false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
            },
        )?
    }

    /// Gives a file another name, in the place of what may have it.
    ///
    /// # Errors
    /// Those of rename(2).
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.pause();
        self.folder(|folder| {
            let entry = folder.entries.get(Path::new(from)).cloned();
            let entry = entry.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
            folder.change(vec![(from.into(), None), (to.into(), Some(entry))]);
            Ok(())
        })?
    }

    /// Makes all names durable.
    pub fn sync_names(&self) {
        self.any_folder(Folder::sync);
    }

    /// The file that a name leads to.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.any_folder(|folder| folder.find(Path::new(name)).ok())
    }
}

impl LockBytes for File {
    fn set(&self, byte: i64, locked: bool) -> io::Result<()> {
        self.disk().pause();
        let (file, open) = (self.number(), self.open_number());
        let done = self.disk().folder(|folder| match locked {
            true => _ = folder.locks.insert((file, byte, open)),
            false => _ = folder.locks.remove(&(file, byte, open)),
        });
        match locked {
            true => done,
            false => Ok(()),
        }
    }

    fn is_locked_by_others(&self, byte: i64) -> io::Result<bool> {
        self.disk().pause();
        let (file, own) = (self.number(), self.open_number());
        let (locks, is_locked) = self.disk().folder(|folder| {
            let all = folder.locks.range((file, byte, 0)..=(file, byte, u64::MAX));
            let is_locked = all.into_iter().any(|(.., open)| *open != own);
            (folder.locks.contains(&(file, HELD_WRITE, own)), is_locked)
        })?;
        // The bytes are set first, and what others hold is looked at then.
        if locks {
            self.disk().note_lock();
        }
        Ok(is_locked)
    }
}

impl NamedFile for File {
    fn lock_bytes(&self) -> &dyn LockBytes {
        self
    }

    fn locked(&self) -> &Mutex<LockRequest> {
        self.locks()
    }

    fn path(&self) -> &Path {
        Storage::path(self)
    }

    fn is_device(&self) -> bool {
        false
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        Ok((1, self.number() as u64))
    }

    fn identity_at_path(&self) -> io::Result<(u64, u64)> {
        DiskNames(self.disk().clone()).identity(Storage::path(self))
    }

    /// At once after the look at what has the name: no program can do both in one call.
    fn unlink(&self) -> io::Result<()> {
        let removed = self.disk().folder(|folder| {
            let name = folder.follow(Storage::path(self))?;
            let file = folder.find(&name)?;
            let checked = folder.check_removal(self.open_number(), file);
            folder.change(vec![(name, None)]);
            Ok::<_, io::Error>(checked)
        })?;
        self.disk().note_violation(removed?);
        Ok(())
    }

    fn sync_path(&self) -> io::Result<()> {
        self.disk().pause();
        self.disk().folder(Folder::sync)
    }
}

/// A file that a program has open by a name.
#[derive(Debug)]
pub struct Opened {
    /// The number of the open file.
    pub number: u64,
    /// Its locks.
    pub locked: Arc<Mutex<LockRequest>>,
}

impl Folder {
    /// A file is opened by the program that runs.
    pub fn open(&mut self, file: usize) -> Opened {
        self.next += 1;
        let locked = Arc::new(Mutex::new(LockRequest::NOTHING));
        let open = Open {
            file,
            program: programs::running(),
            locked: locked.clone(),
        };
        self.opens.insert(self.next, open);
        Opened {
            number: self.next,
            locked,
        }
    }

    /// A file is closed.
    pub fn close(&mut self, number: u64) {
        self.opens.remove(&number);
        self.locks.retain(|(.., open)| *open != number);
    }
}
