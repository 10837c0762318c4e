//! Commit: writes the content of the upper images of a chain into the image below them.
//!
//! The content of the upper images is durable in the lower one before anything is removed from
//! them.

use super::snapshots::refuse_change_behind;
use super::target::Target;
use super::transfer::{Omit, Plan, TransferError, transfer};
use crate::block::{Device, Preallocation};
use crate::broken::{Rule, is_broken};
use crate::drivers::AfterClose;
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::{EngineKind, Queue};
use crate::{Error, Result};

options! {
    /// How to commit.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct CommitOptions {
        /// Empty the top image when its content is in the base.
        pub empty: bool,
        /// Go on although internal snapshots of the upper images show the base where they have
        /// nothing of their own, and so change with it.
        pub change_snapshots: bool,
        /// Bytes of data a second at most.
        pub rate: Option<u64>,
        /// How I/O is done.
        pub engine: EngineKind,
    }
}

/// The step at which a commit failed. No image has lost anything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// An internal snapshot of an upper image would change, or cannot be read.
    #[error(transparent)]
    Snapshot(Error),
    /// Making the base as large as the top.
    #[error(transparent)]
    Enlarge(Error),
    /// Writing to the base.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// Making the base durable.
    #[error(transparent)]
    Flush(Error),
    /// Emptying the top; the base has everything.
    #[error("Could not empty: {0}")]
    Empty(Error),
}

/// Writes the content of `top` into `base`: the images of `top` are those above the base, without
/// it. Both are open for writing. Blocks; uses all cores.
///
/// `on_progress` is called on this thread with the bytes done; if it breaks, the job ends
/// with the error `ECANCELED`, and no image has lost anything.
///
/// # Errors
/// If an internal snapshot of one of the images of `top` shows the base, unless
/// [`CommitOptions::change_snapshots`] is set. If `top` cannot be read, or `base` cannot be enlarged, written or made durable. Then `top` is
/// unchanged. Or if it cannot be emptied.
pub fn commit<G: IntoControlFlow>(
    queue: &Queue,
    mut top: Device,
    mut base: Device,
    options: &CommitOptions,
    on_progress: impl FnMut(Progress) -> G,
) -> Result<(), CommitError> {
    // What it reads as does not change if the base has what the image had.
    top.leave_out_changes();
    if !options.change_snapshots {
        queue
            .block_on(refuse_change_behind(queue, top.layers(), top.size()))
            .map_err(CommitError::Snapshot)?;
    }
    if base.size() < top.size() {
        queue
            .block_on(base.resize(queue, top.size(), Preallocation::Off))
            .map_err(CommitError::Enlarge)?;
    }
    let plan = Plan {
        start: 0,
        length: top.size(),
        omit: Omit::Unallocated,
        rate: options.rate,
        engine: options.engine,
    };
    let (top, base, result) = transfer(top, Target::Image(base), plan, on_progress);
    let closed = match is_broken(Rule::BaseBeforeEmpty) {
        true => Ok(()),
        false => queue.block_on(base.close(queue, true)),
    };
    result?;
    closed.map_err(CommitError::Flush)?;
    queue
        .block_on(async {
            match options.empty {
                true => empty(queue, top).await,
                false => top.close(queue).await,
            }
        })
        .map_err(CommitError::Empty)
}

/// Empties the top image, and truncates the unused end of its file.
async fn empty(queue: &Queue, mut top: Device) -> Result<()> {
    top.make_empty(queue).await?;
    top.close_then(queue, Some(AfterClose::CutEnd)).await
}
