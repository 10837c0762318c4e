//! A disk in virtual time. Operations take time, are reordered, fail, and are torn or lost in a power
//! cut.
//!
//! When nothing else can run, the scheduler calls [`Disk::advance`], which ends the operation that
//! is due next. An operation takes effect when it ends, with the memory as it is then. Delays are
//! drawn from a generator that is seeded at each step, so that they are reproducible.
//!
//! Ended writes are in `bytes`, which reads see. A flush makes those durable that had ended before
//! it began; the rest is `pending`, and a power cut keeps any part of it.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use zebu::internal::names::NamedFile;
use zebu::storage::{
    Alignment, Blocks, CacheMode, Iov, LockRequest, OpKind, Properties, Queue, Started, Storage,
    StorageExtent,
};

use crate::names::{Folder, Opened};
use crate::programs::{self, Turns};
use zebu_testkit::Rng;

/// The atomic unit of writes, in bytes.
pub const SECTOR: u64 = 512;
/// The unit of holes in files, in bytes.
const BLOCK: u64 = 4096;
/// The largest length of a file, in bytes. Only damaged images need more.
const MOST: u64 = 256 << 20;

/// Operations that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Reads.
    Read,
    /// Writes, zeroes, allocations and changes of a file's length.
    Write,
    /// Flushes.
    Flush,
    /// Punched holes.
    Punch,
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// With this error. A write may have been done in part.
    Error(i32),
    /// It transfers a part of its bytes. Operations without data fail with `EIO`.
    Short,
}

/// Operations that will fail: `count` of a class, after `skip` others of it.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The class of operations.
    pub class: Class,
    /// The number that succeed first.
    pub skip: u32,
    /// The number that fail.
    pub count: u32,
    /// How they fail.
    pub how: Failure,
}

/// How a session stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The process is killed: ended writes are kept, also without a flush.
    Kill,
    /// A power cut: any sector that is not durable may be lost.
    Power,
}

/// The number of operations that failed since the device was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hits {
    /// Reads.
    pub reads: u32,
    /// Everything that changes a file.
    pub writes: u32,
    /// Flushes.
    pub flushes: u32,
}

impl Hits {
    /// Whether nothing failed.
    pub fn is_none(&self) -> bool {
        self.reads + self.writes + self.flushes == 0
    }
}

#[derive(Clone, Debug)]
enum Change {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    SetLen(u64),
    Reach(u64),
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        self.apply_sectors(bytes, || true);
    }

    /// Applies it to the sectors for which `keeps` is true.
    fn apply_sectors(&self, bytes: &mut Vec<u8>, mut keeps: impl FnMut() -> bool) {
        let mut sectors = |bytes: &mut Vec<u8>, at: u64, length: u64, source: Option<&[u8]>| {
            let mut done = 0;
            while done < length {
                let from = at + done;
                let count = (SECTOR - from % SECTOR).min(length - done);
                if keeps() {
                    let (start, end) = (from as usize, (from + count) as usize);
                    if bytes.len() < end {
                        bytes.resize(end, 0);
                    }
                    match source {
                        Some(source) => bytes[start..end]
                            .copy_from_slice(&source[done as usize..(done + count) as usize]),
                        None => bytes[start..end].fill(0),
                    }
                }
                done += count;
            }
        };
        match self {
            Change::Write(at, data) => sectors(bytes, *at, data.len() as u64, Some(data)),
            Change::Zero(at, length) => {
                let inside = (bytes.len() as u64).saturating_sub(*at).min(*length);
                sectors(bytes, *at, inside, None);
            }
            Change::SetLen(length) if keeps() => bytes.resize(*length as usize, 0),
            Change::Reach(length) if keeps() && bytes.len() < *length as usize => {
                bytes.resize(*length as usize, 0);
            }
            Change::SetLen(_) | Change::Reach(_) => {}
        }
    }
}

/// A change that is not durable.
#[derive(Debug)]
struct Pending {
    change: Change,
    ended: u64,
    /// A flush that covered it has failed, so no later flush makes it durable.
    lost: bool,
}

#[derive(Debug, Default)]
struct FileState {
    bytes: Vec<u8>,
    /// The blocks that are data and not holes.
    data: Vec<bool>,
    durable: Vec<u8>,
    pending: Vec<Pending>,
}

impl FileState {
    fn new(bytes: Vec<u8>) -> Self {
        let mut file = FileState {
            durable: bytes.clone(),
            bytes,
            ..FileState::default()
        };
        file.find_holes();
        file
    }

    /// Makes holes of all blocks of zeroes.
    fn find_holes(&mut self) {
        let is_data = |block: &[u8]| block.iter().any(|b| *b != 0);
        self.data = self.bytes.chunks(BLOCK as usize).map(is_data).collect();
    }

    fn mark(&mut self, at: u64, length: u64, data: bool) {
        let blocks = (self.bytes.len() as u64).div_ceil(BLOCK) as usize;
        self.data.resize(blocks, false);
        let (first, last) = match data {
            true => (at / BLOCK, (at + length).div_ceil(BLOCK)),
            false => (at.div_ceil(BLOCK), (at + length) / BLOCK),
        };
        let last = last.min(blocks as u64);
        (first..last).for_each(|block| self.data[block as usize] = data);
    }

    fn change(&mut self, change: Change, ended: u64) {
        change.apply(&mut self.bytes);
        match &change {
            Change::Write(at, data) => self.mark(*at, data.len() as u64, true),
            Change::Zero(at, length) => self.mark(*at, *length, false),
            Change::SetLen(_) | Change::Reach(_) => self.mark(0, 0, true),
        }
        self.pending.push(Pending {
            change,
            ended,
            lost: false,
        });
    }

    /// A flush that began at `began` has ended.
    fn flushed(&mut self, began: u64) {
        let durable = &mut self.durable;
        self.pending.retain(|pending| {
            if pending.ended < began && !pending.lost {
                pending.change.apply(durable);
            }
            pending.ended >= began
        });
    }

    /// A flush that began at `began` has failed.
    fn flush_failed(&mut self, began: u64) {
        let covered = |p: &&mut Pending| p.ended < began;
        let covered = self.pending.iter_mut().filter(covered);
        covered.for_each(|pending| pending.lost = true);
    }
}

/// The memory of an operation.
#[derive(Debug)]
struct Place(Iov);

// SAFETY: one thread of a simulation runs at a time.
unsafe impl Send for Place {}

/// An operation in flight.
#[derive(Debug)]
struct Operation {
    program: usize,
    file: usize,
    kind: OpKind,
    offset: u64,
    length: u64,
    memory: Option<Place>,
    /// Bytes of a block. A short result is a multiple of it.
    block: usize,
    began: u64,
    failure: Option<Failure>,
    waker: Option<Waker>,
    /// Set when it has ended.
    result: Option<Result<usize, i32>>,
}

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
        let wakers = self.state().count_death(programs::running());
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
        match state.off || state.dead[programs::running()] {
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
        state.locked_at[programs::running()] = state.tick();
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
            program: programs::running(),
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

    /// How an operation of this class fails, if it is to.
    fn failure(&mut self, class: Class) -> Option<Failure> {
        let fault = (self.faults.iter_mut()).find(|f| f.class == class && f.count > 0)?;
        if fault.skip > 0 {
            fault.skip -= 1;
            return None;
        }
        fault.count -= 1;
        Some(fault.how)
    }

    /// Counts a failed operation.
    fn hit(&mut self, class: Class) {
        match class {
            Class::Read => self.hits.reads += 1,
            Class::Write | Class::Punch => self.hits.writes += 1,
            Class::Flush => self.hits.flushes += 1,
        }
    }

    /// Counts an operation. If it stops the disk, returns the wakers of all requests.
    fn count_down(&mut self) -> Option<Vec<Waker>> {
        self.started += 1;
        let (left, cut) = self.cut.as_mut()?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let cut = *cut;
        self.cut = None;
        Some(self.cut_now(cut))
    }

    /// Counts an operation of a program. If it is killed by that, returns the wakers of its requests.
    fn count_death(&mut self, program: usize) -> Vec<Waker> {
        match &mut self.deaths[program] {
            None => Vec::new(),
            Some(0) => self.kill(program),
            Some(left) => {
                *left -= 1;
                Vec::new()
            }
        }
    }

    /// A program is killed: operations in flight may be done in part, and its locks end.
    fn kill(&mut self, program: usize) -> Vec<Waker> {
        self.mix(&[78, program as u64]);
        (self.dead[program], self.deaths[program]) = (true, None);
        self.folder.kill(program);
        let mut rng = Rng::new(self.rng.next());
        let is_its = |o: &Operation| o.program == program && o.result.is_none();
        let ids = self.operations.iter().filter(|(_, o)| is_its(o));
        let ids: Vec<_> = ids.map(|(id, _)| *id).collect();
        let mut wakers = Vec::new();
        for id in ids {
            if rng.one_in(2) {
                let operation = &self.operations[&id];
                let (file, change) = (operation.file, State::change_of(operation));
                let now = self.tick();
                if let Some(change) = change {
                    self.files[file].change(change, now);
                }
            }
            let operation = self.operations.get_mut(&id).expect("it is in flight");
            operation.result = Some(Err(libc::EIO));
            operation.memory = None;
            wakers.extend(operation.waker.take());
        }
        wakers
    }

    /// The first bytes of an operation's memory.
    fn written(operation: &Operation, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        if let Some(Place(iov)) = &operation.memory {
            iov.slice(0, count).copy_to(&mut bytes);
        }
        bytes
    }

    /// The change of an operation, if it makes one.
    fn change_of(operation: &Operation) -> Option<Change> {
        let (at, length) = (operation.offset, operation.length);
        match operation.kind {
            OpKind::Read | OpKind::Flush => None,
            OpKind::Write | OpKind::WriteDurable => {
                let count = operation.memory.as_ref().map_or(0, |place| place.0.len());
                Some(Change::Write(at, State::written(operation, count)))
            }
            OpKind::Allocate => Some(Change::Reach(at + length)),
            OpKind::SetLength => Some(Change::SetLen(length)),
            _ => Some(Change::Zero(at, length)),
        }
    }

    /// Executes an operation; returns the bytes transferred.
    fn perform(&mut self, operation: &Operation) -> Result<usize, i32> {
        let now = self.tick();
        let file = operation.file;
        let moved = operation.memory.as_ref().map_or(0, |place| place.0.len());
        let wanted = match operation.failure {
            Some(Failure::Short) => {
                let half = moved.div_ceil(2).next_multiple_of(operation.block);
                half.min(moved)
            }
            _ => moved,
        };
        if let Some(failure) = operation.failure {
            let moves = matches!(
                operation.kind,
                OpKind::Read | OpKind::Write | OpKind::WriteDurable
            );
            let errno = match failure {
                Failure::Short if moves => 0,
                Failure::Short => libc::EIO,
                Failure::Error(errno) => errno,
            };
            if errno != 0 {
                self.hit(class_of(operation.kind));
                if operation.kind == OpKind::Flush {
                    self.files[file].flush_failed(operation.began);
                }
                // A write that fails may have been done in part.
                let part = self.rng.below(4) as usize * wanted / 4;
                let part = part / SECTOR as usize * SECTOR as usize;
                if part > 0 && matches!(operation.kind, OpKind::Write | OpKind::WriteDurable) {
                    let bytes = State::written(operation, part);
                    self.files[file].change(Change::Write(operation.offset, bytes), now);
                }
                return Err(errno);
            }
        }
        match operation.kind {
            OpKind::Read => {
                let bytes = &self.files[file].bytes;
                let from = operation.offset.min(bytes.len() as u64) as usize;
                let count = wanted.min(bytes.len() - from);
                if let Some(Place(iov)) = &operation.memory {
                    iov.slice(0, count).copy_from(&bytes[from..from + count]);
                }
                Ok(count)
            }
            OpKind::Write | OpKind::WriteDurable => {
                let bytes = State::written(operation, wanted);
                self.files[file].change(Change::Write(operation.offset, bytes), now);
                if operation.kind == OpKind::WriteDurable {
                    let after = self.tick();
                    self.files[file].flushed(after);
                }
                Ok(wanted)
            }
            OpKind::Flush => {
                self.files[file].flushed(operation.began);
                Ok(0)
            }
            _ => {
                let change = State::change_of(operation).expect("it changes the file");
                self.files[file].change(change, now);
                Ok(0)
            }
        }
    }

    /// Ends an operation, if it has not ended yet.
    fn end(&mut self, id: u64) -> Option<Waker> {
        let mut operation = self.operations.remove(&id)?;
        if operation.result.is_none() {
            let result = match self.off {
                true => Err(libc::EIO),
                false => self.perform(&operation),
            };
            self.mix(&[id, result.map_or_else(|e| e as u64, |n| n as u64)]);
            operation.result = Some(result);
            // The memory is not used after the end.
            operation.memory = None;
        }
        let waker = operation.waker.take();
        self.operations.insert(id, operation);
        waker
    }

    fn cut_now(&mut self, cut: Cut) -> Vec<Waker> {
        self.mix(&[77, cut as u64]);
        let mut rng = Rng::new(self.rng.next());
        let flights: Vec<_> = (self.operations.values())
            .filter(|o| o.result.is_none())
            .filter_map(|o| State::change_of(o).map(|change| (o.file, change)))
            .collect();
        for (number, file) in self.files.iter_mut().enumerate() {
            let in_flight = flights.iter().filter(|f| f.0 == number).map(|f| &f.1);
            // The chances that a whole operation or a sector survives.
            let (whole, torn) = (rng.below(5), rng.below(5));
            match cut {
                Cut::Kill => {
                    for change in in_flight {
                        let all = rng.one_in(2);
                        change.apply_sectors(&mut file.bytes, || all || rng.below(4) < torn);
                    }
                    // The content of the page cache counts as durable from here on.
                    *file = FileState::new(std::mem::take(&mut file.bytes));
                }
                Cut::Power => {
                    let pending = file.pending.iter().map(|p| &p.change);
                    let mut bytes = std::mem::take(&mut file.durable);
                    for change in pending.chain(in_flight) {
                        let all = rng.below(4) < whole;
                        change.apply_sectors(&mut bytes, || all || rng.below(4) < torn);
                    }
                    *file = FileState::new(bytes);
                }
            }
        }
        match cut {
            Cut::Kill => self.folder.kill_all(),
            Cut::Power => self.folder.cut(&mut rng),
        }
        // The first one is what starts again.
        self.dead[1] = true;
        self.off = true;
        self.cut = None;
        self.due.clear();
        let ids: Vec<_> = self.operations.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.end(id)).collect()
    }
}

/// A file of a disk, open.
#[derive(Debug)]
pub struct File {
    disk: Arc<Disk>,
    number: usize,
    properties: Properties,
    blocks: Option<Blocks>,
    /// The program that opened it.
    program: usize,
    /// Set if it was opened by a name.
    opened: Option<Opened>,
}

impl Drop for File {
    fn drop(&mut self) {
        if let Some(opened) = &self.opened {
            self.disk.state().folder.close(opened.number);
        }
    }
}

fn class_of(kind: OpKind) -> Class {
    match kind {
        OpKind::Read => Class::Read,
        OpKind::Flush => Class::Flush,
        OpKind::PunchHole | OpKind::Discard => Class::Punch,
        _ => Class::Write,
    }
}

fn error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// Waits for the end of an operation. If it is dropped, it ends the operation, as a drop waits for an
/// operation of the kernel.
struct Flight {
    disk: Arc<Disk>,
    id: u64,
}

impl Future for Flight {
    type Output = io::Result<usize>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.disk.state();
        let Some(operation) = state.operations.get_mut(&self.id) else {
            return Poll::Ready(Err(error(libc::EIO)));
        };
        match operation.result {
            Some(result) => Poll::Ready(result.map_err(error)),
            None => {
                operation.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut state = self.disk.state();
        // Operations that are due earlier end, too.
        let mut woken = Vec::new();
        while state
            .operations
            .get(&self.id)
            .is_some_and(|o| o.result.is_none())
        {
            let Some((time, id)) = state.due.pop_first() else {
                break;
            };
            state.clock = state.clock.max(time);
            woken.extend(state.end(id));
        }
        state.operations.remove(&self.id);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }
}

impl File {
    /// Its disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Its number.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The number of the open file.
    pub fn open_number(&self) -> u64 {
        self.opened.as_ref().map_or(0, |opened| opened.number)
    }

    /// Its locks, if it was opened by a name.
    pub fn locks(&self) -> &Mutex<LockRequest> {
        static NONE: Mutex<LockRequest> = Mutex::new(LockRequest::NOTHING);
        self.opened.as_ref().map_or(&NONE, |opened| &opened.locked)
    }

    /// The extent at `offset`, which is inside the file.
    fn extent(&self, offset: u64) -> StorageExtent {
        let state = self.disk.state();
        let file = &state.files[self.number];
        let end = file.bytes.len() as u64;
        let data = |at: u64| file.data.get((at / BLOCK) as usize) == Some(&true);
        let kind = data(offset);
        let mut to = (offset / BLOCK + 1) * BLOCK;
        while to < end && data(to) == kind {
            to += BLOCK;
        }
        let length = to.min(end).saturating_sub(offset);
        match kind {
            true => StorageExtent::data(length),
            false => StorageExtent::hole(length),
        }
    }
}

// SAFETY: an operation uses its memory until it ends; the drop of its `Flight` ends it.
unsafe impl Storage for File {
    unsafe fn start(
        &self,
        _queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if let (OpKind::Extent, Some(iov)) = (kind, memory) {
            return Started::done(Ok(self.extent(offset).put(iov)));
        }
        let align = self.properties.alignment.offset as u64;
        let moves = matches!(kind, OpKind::Read | OpKind::Write | OpKind::WriteDurable);
        assert!(
            !moves || offset.is_multiple_of(align) && length.is_multiple_of(align),
            "{kind:?} of {length:#x} bytes at {offset:#x} is not aligned to {align}"
        );
        self.disk.pause();
        let mut state = self.disk.state();
        let stopped = state.count_down();
        let is_dead = state.dead[self.program];
        if !is_dead && class_of(kind) != Class::Read && kind != OpKind::Flush {
            let checked = state.folder.check_write(self.open_number());
            if let Err(violation) = checked {
                state.violation.get_or_insert(violation);
            }
        }
        if state.off || is_dead {
            drop(state);
            stopped.into_iter().flatten().for_each(Waker::wake);
            return Started::done(Err(error(libc::EIO)));
        }
        if offset.saturating_add(length) > MOST && kind != OpKind::Read {
            return Started::done(Err(error(libc::EFBIG)));
        }
        let failure = state.failure(class_of(kind));
        let began = state.tick();
        if kind != OpKind::Read {
            state.changed_at[self.program] = began;
        }
        let id = state.next;
        state.next += 1;
        state.mix(&[id, self.number as u64, kind as u64, offset, length]);
        state.operations.insert(
            id,
            Operation {
                program: self.program,
                file: self.number,
                kind,
                offset,
                length,
                memory: memory.cloned().map(Place),
                block: (align as usize).max(SECTOR as usize),
                began,
                failure,
                waker: None,
                result: None,
            },
        );
        // Mostly quick and in order, sometimes long after others.
        let delay = match state.slow {
            false => 0,
            true => [0, 3, 10, 40, 400][state.rng.below(5) as usize],
        };
        let flight = Flight {
            disk: self.disk.clone(),
            id,
        };
        if delay == 0 {
            state.end(id);
            let result = state.operations[&id].result;
            drop(state);
            return Started::done(result.unwrap_or(Err(libc::EIO)).map_err(error));
        }
        let time = began + 1 + state.rng.below(delay);
        state.due.insert((time, id));
        drop(state);
        Started::later(flight)
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn named_file(&self) -> Option<&dyn NamedFile> {
        self.opened.is_some().then_some(self as _)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.number].bytes.len() as u64)
    }

    fn allocated(&self) -> io::Result<u64> {
        let data = &self.disk.state().files[self.number].data;
        Ok(data.iter().filter(|data| **data).count() as u64 * BLOCK)
    }

    fn blocks(&self) -> Option<&Blocks> {
        self.blocks.as_ref()
    }
}
