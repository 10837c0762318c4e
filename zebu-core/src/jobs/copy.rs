//! Copy: a part of one device to the start of another, as dd does.

use super::target::Target;
use super::transfer::{Omit, Plan, TransferError, transfer};
use crate::Error;
use crate::block::Device;
use crate::drivers::stream::Packing;
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::{EngineKind, Queue};

options! {
    /// What to copy, and how.
    #[derive(Clone, Copy, Debug)]
    pub struct CopyOptions {
        /// Where the part starts in the source, in bytes.
        pub start: u64,
        /// Its length in bytes.
        pub length: u64,
        /// The target reads as zeroes: zeroes need not be written.
        pub target_is_zero: bool,
        /// How I/O is done.
        pub engine: EngineKind,
    }
}

impl CopyOptions {
    /// Copies `length` bytes from offset `start` on to a target with any content.
    pub fn new(start: u64, length: u64) -> Self {
        CopyOptions {
            start,
            length,
            target_is_zero: false,
            engine: EngineKind::default(),
        }
    }
}

/// Copies a part of `source` to the start of `target`, which is long enough.
/// Blocks; uses all cores.
///
/// `on_progress` is called on this thread with the bytes done; if it breaks, the job ends with the
/// error `ECANCELED`.
///
/// On return everything was written and is durable, unless the target's cache
/// mode says otherwise.
///
/// # Errors
/// If `source` cannot be read, `target` cannot be written, or the job is cancelled. The target's
/// content is unspecified then. Or if the target stores only compressed data.
pub fn copy<G: IntoControlFlow>(
    queue: &Queue,
    source: Device,
    target: Target,
    options: &CopyOptions,
    on_progress: impl FnMut(Progress) -> G,
) -> Result<(), TransferError> {
    if let Some(Packing::Zlib) = target.packing() {
        let why = "The target stores only compressed data, which a copy does not make";
        return Err(TransferError::Write {
            offset: 0,
            source: Error::Refused(why.into()),
        });
    }
    let plan = Plan {
        start: options.start,
        length: options.length,
        omit: match target.reads_as_zeroes().unwrap_or(options.target_is_zero) {
            true => Omit::Zeroes,
            false => Omit::Nothing,
        },
        rate: None,
        engine: options.engine,
    };
    let (_, target, result) = transfer(source, target, plan, on_progress);
    let closed = queue.block_on(target.close(queue, result.is_ok()));
    result.and(closed.map_err(|source| TransferError::Write {
        offset: options.length,
        source,
    }))
}
