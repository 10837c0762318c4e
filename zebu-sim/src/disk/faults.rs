//! Operations that fail, and what stops a disk.

use zebu::storage::OpKind;

use super::State;

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

pub(super) fn class_of(kind: OpKind) -> Class {
    match kind {
        OpKind::Read => Class::Read,
        OpKind::Flush => Class::Flush,
        OpKind::PunchHole | OpKind::Discard => Class::Punch,
        _ => Class::Write,
    }
}

impl State {
    /// How an operation of this class fails, if it is to.
    pub(super) fn failure(&mut self, class: Class) -> Option<Failure> {
        let fault = (self.faults.iter_mut()).find(|f| f.class == class && f.count > 0)?;
        if fault.skip > 0 {
            fault.skip -= 1;
            return None;
        }
        fault.count -= 1;
        Some(fault.how)
    }

    /// Counts a failed operation.
    pub(super) fn hit(&mut self, class: Class) {
        match class {
            Class::Read => self.hits.reads += 1,
            Class::Write | Class::Punch => self.hits.writes += 1,
            Class::Flush => self.hits.flushes += 1,
        }
    }
}
