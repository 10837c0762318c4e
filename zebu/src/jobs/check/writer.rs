//! Writes to the file of one repair.

use std::sync::Arc;

use crate::Result;
use crate::storage::{self, Queue, Storage};

/// Writes metadata, one write after the other.
#[derive(Clone)]
pub(super) struct Writer {
    queue: Queue,
    file: Arc<dyn Storage>,
}

impl Writer {
    pub(super) fn new(queue: &Queue, file: &Arc<dyn Storage>) -> Self {
        Writer {
            queue: queue.clone(),
            file: file.clone(),
        }
    }

    /// Writes `bytes` at `offset`; the file becomes longer if need be.
    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        Ok(storage::write_slice(&*self.file, &self.queue, offset, bytes).await?)
    }

    /// Makes everything written so far durable: what is written afterwards may
    /// rely on it.
    pub(super) async fn barrier(&self) -> Result<()> {
        Ok(storage::flush(&*self.file, &self.queue).await?)
    }
}
