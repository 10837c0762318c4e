//! Check and repair of an image of any format: what the libraries for other languages do.

use crate::block::Device;
use crate::drivers::{CheckReport, RepairMode};
use crate::progress::{IntoControlFlow, Progress, Reporter};
use crate::storage::Queue;
use crate::{Error, Result};

/// Checks the top image of a device that was opened to be checked. With a mode it is repaired
/// first, and what was fixed is in the report. `emit` is called with each message, `on_progress` as
/// by [`check`](super::check).
///
/// # Errors
/// As [`check`](super::check), or if the format has no check or no repair.
pub async fn check_device<G: IntoControlFlow>(
    queue: &Queue,
    device: &Device,
    mode: Option<RepairMode>,
    emit: &mut dyn FnMut(String),
    mut on_progress: impl FnMut(Progress) -> G,
) -> Result<CheckReport> {
    let refused = |why: &str| Error::Refused(why.into());
    let image = &device.top().image;
    let mut fixed = CheckReport::default();
    if let Some(mode) = mode {
        let reporter = Reporter::new(&mut on_progress);
        let repaired = image.repair(queue, mode, emit, &reporter).await?;
        fixed = repaired.ok_or_else(|| refused("Only qcow2 images are repaired"))?;
        if fixed.corruptions_fixed == 0 && fixed.leaks_fixed == 0 {
            return Ok(fixed);
        }
    }
    let report = image
        .check(queue, emit, &Reporter::new(on_progress))
        .await?;
    let report = report.ok_or_else(|| refused("This image format does not support checks"))?;
    Ok(CheckReport {
        corruptions_fixed: fixed.corruptions_fixed,
        leaks_fixed: fixed.leaks_fixed,
        ..report
    })
}
