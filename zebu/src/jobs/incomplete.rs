//! Marks of a new image that was not finished, so that no program takes it for a complete one.

use std::sync::Arc;

use super::convert::{ConvertError, ConvertOptions};
use super::target::Target;
use super::workers;
use crate::format::{INCOMPLETE_VERSION, MAGIC};
use crate::storage::{self, EngineKind, Queue, Storage};
use crate::{Error, Result};

/// Marks the qcow2 image in `file`, which is closed, as incomplete: its header gets a version
/// that no program opens, and that zebu reports as incomplete. Format probing still finds
/// qcow2, not a raw disk. A file of another format is not changed. Waits for the I/O.
///
/// # Errors
/// If the file cannot be read or written.
pub fn mark_incomplete(queue: &Queue, file: &dyn Storage) -> Result<()> {
    queue.block_on(async {
        let magic = MAGIC.to_be_bytes();
        if storage::read_vec(file, queue, 0, magic.len()).await? == magic {
            write_version(queue, file, INCOMPLETE_VERSION).await?;
        }
        Ok(())
    })
}

async fn write_version(queue: &Queue, file: &dyn Storage, version: u32) -> Result<()> {
    storage::write_slice(
        file,
        queue,
        size_of_val(&MAGIC) as u64,
        &version.to_be_bytes(),
    )
    .await?;
    Ok(storage::flush(file, queue).await?)
}

/// A new qcow2 image that has the mark of [`mark_incomplete`] while it is filled: what is left of a
/// process that was killed, or after a power cut, does not open.
pub(super) struct Unfinished {
    file: Arc<dyn Storage>,
    version: u32,
    engine: EngineKind,
}

impl Unfinished {
    /// Sets the mark, durably, if the target is a new qcow2 image. The device keeps it when it writes
    /// the header.
    pub(super) fn begin(
        target: &mut Target,
        options: &ConvertOptions,
    ) -> Result<Option<Self>, ConvertError> {
        let (Target::Image(device), true) = (target, options.new_image) else {
            return Ok(None);
        };
        let engine = options.engine;
        let Ok(image) = device.top_qcow2() else {
            return Ok(None);
        };
        let (file, version) = (image.file().clone(), image.version());
        let queue = workers::queue(engine).map_err(ConvertError::Engine)?;
        let set = queue.block_on(device.change_header(&queue, |header| header.unfinished = true));
        let unfinished = Unfinished {
            file,
            version,
            engine,
        };
        match set {
            Ok(()) => Ok(Some(unfinished)),
            Err(error) => Err(unfinished.failed(&queue, error)),
        }
    }

    /// Takes the mark away, durably, when the image is closed.
    pub(super) fn end(self) -> Result<(), ConvertError> {
        let queue = workers::queue(self.engine).map_err(ConvertError::Engine)?;
        let ended = queue.block_on(write_version(&queue, &*self.file, self.version));
        ended.map_err(|error| self.failed(&queue, error))
    }

    /// Sets the mark after an error, with which the header is one or the other.
    fn failed(&self, queue: &Queue, error: Error) -> ConvertError {
        let _ = queue.block_on(write_version(queue, &*self.file, INCOMPLETE_VERSION));
        ConvertError::Write {
            offset: 0,
            source: error.during("Could not write the header"),
        }
    }
}
