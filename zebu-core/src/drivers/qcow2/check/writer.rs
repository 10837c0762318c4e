//! Writes to the file of one repair.

use std::sync::Arc;

use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::storage::{self, Queue, Storage};

/// Writes metadata, one write after the other.
#[derive(Clone)]
pub(super) struct RepairWriter {
    queue: Queue,
    file: Arc<dyn Storage>,
    /// The events, for tests that interrupt a repair.
    #[cfg(test)]
    pub(super) log: std::rc::Rc<std::cell::RefCell<Vec<Event>>>,
}

/// One step of a repair.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(super) enum Event {
    Write(u64, Vec<u8>),
    Barrier,
}

impl RepairWriter {
    pub(super) fn new(queue: &Queue, file: &Arc<dyn Storage>) -> Self {
        RepairWriter {
            queue: queue.clone(),
            file: file.clone(),
            #[cfg(test)]
            log: Default::default(),
        }
    }

    /// Writes `bytes` at `offset`; the file becomes longer if need be.
    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        #[cfg(test)]
        (self.log.borrow_mut()).push(Event::Write(offset, bytes.to_vec()));
        Ok(storage::write_slice(&*self.file, &self.queue, offset, bytes).await?)
    }

    /// Makes all writes so far durable, before any later write.
    pub(super) async fn barrier(&self) -> Result<()> {
        #[cfg(test)]
        self.log.borrow_mut().push(Event::Barrier);
        if is_broken(Rule::RepairBarriers) {
            return Ok(());
        }
        Ok(storage::flush(&*self.file, &self.queue).await?)
    }
}
