//! A disk in virtual time. Operations take time, are reordered, fail, and are torn or lost in a power
//! cut.
//!
//! When nothing else can run, the scheduler calls [`Disk::advance`], which ends the operation that
//! is due next. An operation takes effect when it ends, with the memory as it is then. Delays are
//! drawn from a generator that is seeded at each step, so that they are reproducible.
//!
//! Ended writes are in `bytes`, which reads see. A flush makes those durable that had ended before
//! it began; the rest is `pending`, and a power cut keeps any part of it.
//!
//! `bytes` are those of a file, `operations` what is in flight, `faults` what fails, `stops` kills and power cuts;
//! `folder` has the names and locks, and `file` and `names` are what the library sees.

mod bytes;
mod faults;
mod file;
mod folder;
mod names;
mod operations;
mod stops;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use zebu::storage::{Alignment, Blocks, CacheMode, Properties};
use zebu_testkit::Rng;

use crate::turns::{self, Turns};
use bytes::FileState;
pub use faults::{Class, Cut, Failure, Fault, Hits};
pub use file::File;
use file::error;
use folder::{Folder, Opened};
pub use names::DiskNames;
use operations::Operation;

/// The atomic unit of writes, in bytes.
pub const SECTOR: u64 = 512;
/// The unit of holes in files, in bytes.
const BLOCK: u64 = 4096;
/// The largest length of a file, in bytes. Only damaged images need more.
const MOST: u64 = 256 << 20;

#[derive(Debug)]
struct State {
    clock: u64,
    rng: Rng,
    /// Whether operations take time.
    slow: bool,
    files: Vec<FileState>,
    operations: BTreeMap<u64, Operation>,
    /// The times at which operations end.
    due: BTreeSet<(u64, u64)>,
    next: u64,
    faults: Vec<Fault>,
    hits: Hits,
    /// The disk stops after so many more operations.
    cut: Option<(u32, Cut)>,
    off: bool,
    /// The programs that were killed.
    dead: [bool; 2],
    /// The programs that are killed after so many more operations of theirs, with names or files.
    deaths: [Option<u32>; 2],
    folder: Folder,
    /// The alignment of direct I/O of files that are opened by name.
    align: usize,
    /// When each program last locked a file for writing, and when it last began to change a file or to
    /// make it durable.
    locked_at: [u64; 2],
    changed_at: [u64; 2],
    /// What a program did to a file of another one.
    violation: Option<String>,
    trace: u64,
    started: u64,
}

/// A disk with its files.
#[derive(Debug)]
pub struct Disk {
    state: Mutex<State>,
    /// Whose turn it is.
    pub turns: Turns,
}

impl Disk {
    /// A disk without files, whose operations end at once.
    pub fn new() -> Arc<Disk> {
        Disk::of(Vec::new(), Folder::default())
    }

    fn of(files: Vec<FileState>, folder: Folder) -> Arc<Disk> {
        let state = Mutex::new(State {
            clock: 0,
            rng: Rng::new(0),
            slow: false,
            files,
            operations: BTreeMap::new(),
            due: BTreeSet::new(),
            next: 0,
            faults: Vec::new(),
            hits: Hits::default(),
            cut: None,
            off: false,
            dead: [false; 2],
            deaths: [None; 2],
            folder,
            align: SECTOR as usize,
            locked_at: [0; 2],
            changed_at: [0; 2],
            violation: None,
            trace: 0,
            started: 0,
        });
        Arc::new(Disk {
            state,
            turns: Turns::default(),
        })
    }

    /// A disk with the same files and names, whose operations end at once. No file is open there.
    pub fn copy(&self) -> Arc<Disk> {
        let state = self.state();
        let named = state.folder.files();
        let copy = |(number, file): (usize, &FileState)| match named.contains(&number) {
            true => FileState::new(file.bytes.clone()),
            false => FileState::default(),
        };
        let files = state.files.iter().enumerate().map(copy).collect();
        Disk::of(files, state.folder.copy())
    }

    /// Drops the content of files without a name. None of them is open.
    pub fn forget_nameless(&self) {
        let mut state = self.state();
        let named = state.folder.files();
        for (number, file) in state.files.iter_mut().enumerate() {
            if !named.contains(&number) {
                *file = FileState::default();
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Adds a file with this content, which is durable. Returns its number.
    pub fn add(&self, bytes: Vec<u8>) -> usize {
        let mut state = self.state();
        state.files.push(FileState::new(bytes));
        state.files.len() - 1
    }

    /// The content of a file.
    pub fn bytes(&self, file: usize) -> Vec<u8> {
        self.state().files[file].bytes.clone()
    }

    /// Gives a file another content, which is durable.
    pub fn set_bytes(&self, file: usize, bytes: Vec<u8>) {
        self.state().files[file] = FileState::new(bytes);
    }

    /// Seeds the generator of delays.
    pub fn seed(&self, seed: u64) {
        self.state().rng = Rng::new(seed);
    }

    /// Sets whether operations take time.
    pub fn set_slow(&self, slow: bool) {
        self.state().slow = slow;
    }

    /// Makes operations fail.
    pub fn arm(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Removes all faults and forgets past failures, for a new session.
    pub fn clear_faults(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.hits = Hits::default();
        state.cut = None;
        (state.locked_at, state.changed_at) = ([0; 2], [0; 2]);
    }

    /// The failures since [`Disk::clear_faults`].
    pub fn hits(&self) -> Hits {
        self.state().hits
    }

    /// Stops the disk after so many more operations have begun.
    pub fn cut_after(&self, operations: u32, cut: Cut) {
        self.state().cut = Some((operations, cut));
    }

    /// Cancels [`Disk::cut_after`].
    pub fn cancel_cut(&self) {
        self.state().cut = None;
    }

    /// Whether the disk has stopped.
    pub fn is_off(&self) -> bool {
        self.state().off
    }

    /// Stops the disk now.
    pub fn cut(&self, cut: Cut) {
        let wakers = self.state().cut_now(cut);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Restarts the disk, without operations in flight.
    pub fn power_on(&self) {
        let mut state = self.state();
        state.off = false;
        state.operations.clear();
        state.due.clear();
    }

    /// Where a program may be stopped, or lose its turn to the other one. Whether it did that.
    pub fn pause(&self) -> bool {
        let wakers = self.state().count_death(turns::running());
        wakers.into_iter().for_each(Waker::wake);
        self.turns.pause()
    }

    /// Kills a program after so many more of its operations, with names or files.
    pub fn kill_after(&self, program: usize, operations: u32) {
        self.state().deaths[program] = Some(operations);
    }

    /// Programs are started in the place of those that were killed.
    pub fn revive(&self) {
        let mut state = self.state();
        (state.dead, state.deaths) = ([false; 2], [None; 2]);
    }

    /// Whether a program was killed.
    pub fn is_dead(&self, program: usize) -> bool {
        self.state().dead[program]
    }

    /// Sets the alignment of direct I/O of files that are opened by name.
    pub fn set_align(&self, align: usize) {
        self.state().align = align.max(SECTOR as usize);
    }

    /// What a program did to a file that another one has locked, or that it has not locked itself.
    pub fn take_violation(&self) -> Option<String> {
        self.state().violation.take()
    }

    /// Notes such a thing.
    pub fn note_violation(&self, checked: Result<(), String>) {
        if let Err(violation) = checked {
            self.state().violation.get_or_insert(violation);
        }
    }

    /// The names, for the program that runs.
    ///
    /// # Errors
    /// `EIO` if it was killed, or the machine has stopped.
    pub fn folder<T>(&self, ask: impl FnOnce(&mut Folder) -> T) -> io::Result<T> {
        let mut state = self.state();
        match state.off || state.dead[turns::running()] {
            true => Err(error(libc::EIO)),
            false => Ok(ask(&mut state.folder)),
        }
    }

    /// The names, for the simulation.
    pub fn any_folder<T>(&self, ask: impl FnOnce(&mut Folder) -> T) -> T {
        ask(&mut self.state().folder)
    }

    /// The time, which goes on by this.
    pub fn tick(&self) -> u64 {
        self.state().tick()
    }

    /// Notes that the running program has locked a file for writing.
    pub fn note_lock(&self) {
        let mut state = self.state();
        state.locked_at[turns::running()] = state.tick();
    }

    /// When each program last locked a file for writing, since [`Disk::clear_faults`].
    pub fn locked_at(&self) -> [u64; 2] {
        self.state().locked_at
    }

    /// When each program last began to change a file or to make it durable, likewise.
    pub fn changed_at(&self) -> [u64; 2] {
        self.state().changed_at
    }

    /// A hash of all operations.
    pub fn trace(&self) -> u64 {
        self.state().trace
    }

    /// The number of operations that have begun.
    pub fn operations(&self) -> u64 {
        self.state().started
    }

    /// Whether an operation is in flight.
    pub fn is_busy(&self) -> bool {
        !self.state().due.is_empty()
    }

    /// Ends the operation that is due next; false if none is in flight.
    pub fn advance(&self) -> bool {
        let mut state = self.state();
        let Some((time, id)) = state.due.pop_first() else {
            return false;
        };
        state.clock = state.clock.max(time);
        let waker = state.end(id);
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Opens a file.
    pub fn open(self: &Arc<Self>, file: usize, cache: CacheMode, align: usize) -> Arc<File> {
        self.open_as(file, Path::new(""), cache, align, None)
    }

    /// Opens a file that `path` leads to.
    pub fn open_named(self: &Arc<Self>, file: usize, path: &Path, cache: CacheMode) -> Arc<File> {
        let mut state = self.state();
        let opened = state.folder.open(file);
        let align = match cache.is_direct() {
            true => state.align,
            false => 1,
        };
        drop(state);
        self.open_as(file, path, cache, align, Some(opened))
    }

    fn open_as(
        self: &Arc<Self>,
        file: usize,
        path: &Path,
        cache: CacheMode,
        align: usize,
        opened: Option<Opened>,
    ) -> Arc<File> {
        Arc::new(File {
            disk: self.clone(),
            number: file,
            properties: Properties::PLAIN
                .path(path.to_owned())
                .cache(cache)
                .alignment(Alignment {
                    memory: align.min(SECTOR as usize),
                    offset: align,
                }),
            blocks: (align > 1).then(|| Blocks::new(BLOCK)),
            program: turns::running(),
            opened,
        })
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn mix(&mut self, numbers: &[u64]) {
        for n in numbers {
            self.trace = Rng::new(self.trace ^ n).next();
        }
    }
}
