//! Names of files, links, and QEMU's image locks, as a kernel has them. A name that changes is durable
//! once names were synced; a power cut keeps the oldest changes since.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, TryLockError};

use zebu::storage::{LockRequest, Permissions};
use zebu_testkit::Rng;

use crate::turns;

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
    pub(super) entries: Entries,
    durable: Entries,
    pending: Vec<Change>,
    /// Bytes that are locked: file, byte and the number of the open file.
    pub(super) locks: BTreeSet<(usize, i64, u64)>,
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
pub(super) fn plain(path: &Path) -> PathBuf {
    path.strip_prefix(".").unwrap_or(path).to_owned()
}

impl Folder {
    pub(super) fn change(&mut self, change: Change) {
        apply(&mut self.entries, &change);
        self.pending.push(change);
    }

    /// Makes all names durable.
    pub(super) fn sync(&mut self) {
        self.durable = self.entries.clone();
        self.pending.clear();
    }

    /// The name of a file that a name leads to in the end, which may be missing.
    pub(super) fn follow(&self, path: &Path) -> io::Result<PathBuf> {
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
    pub(super) fn check_removal(&self, number: u64, file: usize) -> Result<(), String> {
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
            program: turns::running(),
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
