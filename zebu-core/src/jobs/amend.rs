//! Amend: changes the options with which an image was created.

use crate::Result;
use crate::block::Device;
use crate::progress::{IntoControlFlow, Progress, Report, Reporter};
use crate::storage::Queue;

pub use crate::drivers::qcow2::amend::AmendOptions;

/// Changes `device`, open for writing, and closes it. Blocks.
///
/// `on_progress` is called between the steps; see [`jobs`](super).
///
/// # Errors
/// If the image cannot have these options, if I/O fails, or if the job is cancelled. What was
/// changed before stays so, and the image is consistent.
pub fn amend<G: IntoControlFlow>(
    queue: &Queue,
    device: Device,
    options: &AmendOptions,
    on_progress: impl FnMut(Progress) -> G,
) -> Result<()> {
    let steps = Reporter::new(on_progress);
    steps.plan(4);
    steps.add(0)?;
    queue.block_on(device.amend(queue, options, &steps))?;
    steps.finish();
    Ok(())
}
