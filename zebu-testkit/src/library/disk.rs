//! A disk that records all operations: the files of a workload with a common log and clock.
//!
//! An operation begins, and ends some polls later, in any order. So requests are in flight together
//! as on a real disk, and a flush covers the operations that had ended before it began.
//!
//! One operation can be made to fail ([`Fault`]).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use zebu::storage::{Iov, OpKind, Queue, Started, Storage};

use super::faulty::libc_eio;
use crate::Rng;

/// A reading of the disk's clock. Each begin and each end has its own.
pub type Time = u64;

/// An operation of a file.
#[derive(Clone, Debug)]
pub struct Entry {
    pub file: usize,
    pub began: Time,
    /// `Time::MAX` while it is in flight.
    pub ended: Time,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    Write(u64, Vec<u8>),
    /// Offset and length. It does not change the length of the file.
    Zero(u64, u64),
    SetLen(u64),
    /// The file gets at least this length.
    Reach(u64),
    /// When it has ended, all operations that had ended before it began are durable.
    Flush,
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// With this error and without any effect.
    Error(i32),
    /// It transfers a part of its bytes. Operations without data fail with `EIO`.
    Short,
}

/// Which operation is to fail.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The number of the operation; the first is 1.
    pub nth: u64,
    pub how: Failure,
}

/// The common state of the files.
#[derive(Debug)]
pub struct Disk {
    log: Mutex<Vec<Entry>>,
    clock: AtomicU64,
    /// The generator of delays; None: operations end at once.
    delays: Option<Mutex<Rng>>,
    fault: Option<Fault>,
    /// The number of operations.
    operations: AtomicU64,
    /// The operation that failed, its offset and its file.
    failed: Mutex<Option<(OpKind, u64, usize)>>,
    /// When it failed.
    failed_at: AtomicU64,
    flush_failed: AtomicBool,
}

/// Bytes of the image's header, which has no data.
const HEADER: u64 = 512;

impl Disk {
    pub fn new(delays: Option<Rng>, fault: Option<Fault>) -> Arc<Disk> {
        Arc::new(Disk {
            log: Mutex::default(),
            clock: AtomicU64::new(1),
            delays: delays.map(Mutex::new),
            fault,
            operations: AtomicU64::new(0),
            failed: Mutex::default(),
            failed_at: AtomicU64::new(Time::MAX),
            flush_failed: AtomicBool::new(false),
        })
    }

    /// The number of operations that have begun.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::SeqCst)
    }

    /// Whether an operation failed.
    pub fn failed(&self) -> bool {
        self.failure_of().is_some()
    }

    /// When an operation failed; `Time::MAX`: none did.
    pub fn failed_at(&self) -> Time {
        self.failed_at.load(Ordering::SeqCst)
    }

    fn failure_of(&self) -> Option<(OpKind, u64, usize)> {
        *self.failed.lock().unwrap()
    }

    /// Whether an operation failed that must not make a flush fail: a read, or one that frees space.
    pub fn free_failed(&self) -> bool {
        matches!(
            self.failure_of(),
            Some((OpKind::Read | OpKind::PunchHole, ..))
        )
    }

    /// Whether the image may refuse every write after the failure: after a failed flush, or a failed
    /// write of the header, the content of the disk is unknown.
    pub fn is_final(&self) -> bool {
        match self.failure_of() {
            Some((OpKind::Flush, ..)) => true,
            Some((OpKind::Write, offset, _)) => offset < 4 * HEADER,
            _ => false,
        }
    }

    /// The image is opened again: changes need not fail any more.
    pub fn opened_again(&self) {
        self.flush_failed.store(false, Ordering::SeqCst);
    }

    /// Whether a flush failed, since the image was opened.
    pub fn flush_failed(&self) -> bool {
        self.flush_failed.load(Ordering::SeqCst)
    }

    /// Counts an operation. Returns how it fails, if it does.
    fn failure(&self, kind: OpKind, offset: u64, file: usize) -> Option<Failure> {
        let nth = self.operations.fetch_add(1, Ordering::SeqCst) + 1;
        let how = self.fault.filter(|fault| fault.nth == nth)?.how;
        let moves = matches!(kind, OpKind::Read | OpKind::Write);
        if how == Failure::Short && moves {
            return Some(how);
        }
        *self.failed.lock().unwrap() = Some((kind, offset, file));
        self.failed_at.store(self.now(), Ordering::SeqCst);
        if kind == OpKind::Flush {
            self.flush_failed.store(true, Ordering::SeqCst);
        }
        Some(match how {
            Failure::Short => Failure::Error(libc_eio()),
            error => error,
        })
    }

    /// Makes files with these contents, which are durable.
    pub fn files(self: &Arc<Self>, contents: Vec<Vec<u8>>) -> Vec<Arc<File>> {
        let files = contents.into_iter().enumerate();
        files
            .map(|(number, bytes)| {
                Arc::new(File {
                    number,
                    before: bytes.clone(),
                    bytes: Arc::new(Mutex::new(bytes)),
                    disk: self.clone(),
                })
            })
            .collect()
    }

    /// The time. Each call advances the clock.
    pub fn now(&self) -> Time {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// All operations, in the order in which they began.
    pub fn log(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.log.lock().unwrap()
    }

    fn begin(&self, file: usize, what: What) -> usize {
        let mut log = self.log();
        let began = self.now();
        log.push(Entry {
            file,
            began,
            ended: Time::MAX,
            what,
        });
        log.len() - 1
    }

    fn end(&self, entry: usize) {
        let mut log = self.log();
        log[entry].ended = self.now();
    }
}

/// A file of a disk.
#[derive(Debug)]
pub struct File {
    number: usize,
    pub before: Vec<u8>,
    bytes: Arc<Mutex<Vec<u8>>>,
    disk: Arc<Disk>,
}

impl File {
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }
}

impl What {
    /// Applies it. Returns the number of bytes written.
    pub fn apply(&self, file: &mut Vec<u8>) -> usize {
        match self {
            What::Write(offset, bytes) => {
                let (start, end) = (*offset as usize, *offset as usize + bytes.len());
                file.resize(file.len().max(end), 0);
                file[start..end].copy_from_slice(bytes);
                bytes.len()
            }
            What::Zero(offset, length) => {
                let end = (offset + length).min(file.len() as u64) as usize;
                if let Some(range) = file.get_mut(*offset as usize..end) {
                    range.fill(0);
                }
                0
            }
            What::SetLen(length) => {
                file.resize(*length as usize, 0);
                0
            }
            What::Reach(length) => {
                file.resize(file.len().max(*length as usize), 0);
                0
            }
            What::Flush => 0,
        }
    }
}

enum Operation {
    Read(u64, Iov),
    Change(What),
}

impl Operation {
    /// Performs it. Returns the number of bytes transferred.
    fn perform(&self, bytes: &mut Vec<u8>) -> usize {
        match self {
            Operation::Read(offset, iov) => {
                let from = (*offset).min(bytes.len() as u64) as usize;
                let count = iov.len().min(bytes.len() - from);
                iov.copy_from(&bytes[from..from + count]);
                count
            }
            Operation::Change(what) => what.apply(bytes),
        }
    }
}

/// An operation in flight. If it is dropped, it ends at once.
struct InFlight {
    disk: Arc<Disk>,
    bytes: Arc<Mutex<Vec<u8>>>,
    operation: Option<Operation>,
    /// Its index in the log.
    entry: Option<usize>,
    /// Polls until it ends.
    left: u64,
}

impl InFlight {
    fn end(&mut self) -> usize {
        let Some(operation) = self.operation.take() else {
            return 0;
        };
        let count = operation.perform(&mut self.bytes.lock().unwrap());
        if let Some(entry) = self.entry {
            self.disk.end(entry);
        }
        count
    }
}

impl Future for InFlight {
    type Output = io::Result<usize>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.left > 0 {
            self.left -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(self.end()))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.end();
    }
}

// SAFETY: an operation in flight uses its memory until it has ended or was
// dropped, and no longer.
unsafe impl Storage for File {
    unsafe fn start(
        &self,
        _queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if kind == OpKind::Extent {
            return Started::done(Ok(0));
        }
        let failure = self.disk.failure(kind, offset, self.number);
        if let Some(Failure::Error(errno)) = failure {
            return Started::done(Err(io::Error::from_raw_os_error(errno)));
        }
        // At least one byte, since zero bytes mean the end of the file.
        let short = |iov: &Iov| iov.slice(0, iov.len().div_ceil(2));
        let part = memory.filter(|_| failure.is_some()).map(short);
        let memory = part.as_ref().or(memory);
        let operation = match (kind, memory) {
            (OpKind::Read, Some(iov)) => Operation::Read(offset, iov.clone()),
            (OpKind::Write, Some(iov)) => {
                let mut bytes = vec![0; iov.len()];
                iov.copy_to(&mut bytes);
                Operation::Change(What::Write(offset, bytes))
            }
            (OpKind::ZeroRange | OpKind::ZeroQuickly | OpKind::PunchHole | OpKind::Discard, _) => {
                Operation::Change(What::Zero(offset, length))
            }
            (OpKind::Allocate, _) => Operation::Change(What::Reach(offset + length)),
            (OpKind::SetLength, _) => Operation::Change(What::SetLen(length)),
            (OpKind::Flush, _) => Operation::Change(What::Flush),
            (kind, _) => panic!("{kind:?}: the cache mode is not a write-through one"),
        };
        let entry = match &operation {
            Operation::Read(..) => None,
            Operation::Change(what) => Some(self.disk.begin(self.number, what.clone())),
        };
        // Mostly at once, sometimes after many others.
        let left = self.disk.delays.as_ref().map_or(0, |rng| {
            let mut rng = rng.lock().unwrap();
            [0, 0, rng.below(4), rng.below(16)][rng.below(4) as usize]
        });
        let mut in_flight = InFlight {
            disk: self.disk.clone(),
            bytes: self.bytes.clone(),
            operation: Some(operation),
            entry,
            left,
        };
        match left {
            0 => Started::done(Ok(in_flight.end())),
            _ => Started::later(in_flight),
        }
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.len()
    }
}
