//! Operations in flight, and what they do when they end.
#![allow(unsafe_code)]

use std::task::Waker;

use zebu::storage::{Iov, OpKind};

use super::bytes::Change;
use super::faults::{Failure, class_of};
use super::{SECTOR, State};

/// The memory of an operation.
#[derive(Debug)]
pub(super) struct Place(pub(super) Iov);

// SAFETY: one thread of a simulation runs at a time.
unsafe impl Send for Place {}

/// An operation in flight.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) program: usize,
    pub(super) file: usize,
    pub(super) kind: OpKind,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) memory: Option<Place>,
    /// Bytes of a block. A short result is a multiple of it.
    pub(super) block: usize,
    pub(super) began: u64,
    pub(super) failure: Option<Failure>,
    pub(super) waker: Option<Waker>,
    /// Set when it has ended.
    pub(super) result: Option<Result<usize, i32>>,
}

impl State {
    /// The first bytes of an operation's memory.
    fn written(operation: &Operation, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        if let Some(Place(iov)) = &operation.memory {
            iov.slice(0, count).copy_to(&mut bytes);
        }
        bytes
    }

    /// The change of an operation, if it makes one.
    pub(super) fn change_of(operation: &Operation) -> Option<Change> {
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
    pub(super) fn end(&mut self, id: u64) -> Option<Waker> {
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
}
