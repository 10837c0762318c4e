//! An open file, as a storage of the library.
#![allow(unsafe_code)]

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use zebu::internal::names::NamedFile;
use zebu::storage::{
    Blocks, Iov, LockRequest, OpKind, Properties, Queue, Started, Storage, StorageExtent,
};

use super::faults::{Class, class_of};
use super::folder::Opened;
use super::operations::{Operation, Place};
use super::{BLOCK, Disk, MOST, SECTOR};

/// A file of a disk, open.
#[derive(Debug)]
pub struct File {
    pub(super) disk: Arc<Disk>,
    pub(super) number: usize,
    pub(super) properties: Properties,
    pub(super) blocks: Option<Blocks>,
    /// The program that opened it.
    pub(super) program: usize,
    /// Set if it was opened by a name.
    pub(super) opened: Option<Opened>,
}

impl Drop for File {
    fn drop(&mut self) {
        if let Some(opened) = &self.opened {
            self.disk.state().folder.close(opened.number);
        }
    }
}

pub(super) fn error(errno: i32) -> io::Error {
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
