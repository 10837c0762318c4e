//! Check and repair of an image of any format: what the libraries for other languages do.

use crate::block::Device;
use crate::drivers::CheckReport;
use crate::drivers::qcow2::check::{CheckMessage, RepairMode, check, repair_image};
use crate::progress::{IntoControlFlow, Progress};
use crate::storage::Queue;
use crate::{Error, Result};

/// Checks the top image of a device that was opened to be checked. With a mode it is repaired
/// first, and what was fixed is in the report. `emit` is called with each message, `on_progress` as
/// by [`check`].
///
/// # Errors
/// As [`check`], or if the format has no check or no repair.
pub async fn check_device<G: IntoControlFlow>(
    queue: &Queue,
    device: &Device,
    mode: Option<RepairMode>,
    emit: &mut dyn FnMut(String),
    mut on_progress: impl FnMut(Progress) -> G,
) -> Result<CheckReport> {
    let refused = |why: &str| Error::Refused(why.into());
    let Some(image) = device.top().as_qcow2() else {
        if mode.is_some() {
            return Err(refused("Only qcow2 images are repaired"));
        }
        let report = device.top().check(queue, emit).await?;
        return report.ok_or_else(|| refused("This image format does not support checks"));
    };
    let emit = &mut |message: CheckMessage| emit(message.to_string());
    let mut fixed = CheckReport::default();
    if let Some(mode) = mode {
        fixed = repair_image(queue, image, mode, emit, &mut on_progress).await?;
        if fixed.corruptions_fixed == 0 && fixed.leaks_fixed == 0 {
            return Ok(fixed);
        }
    }
    let mut report = check(queue, image, emit, on_progress).await?;
    report.corruptions_fixed = fixed.corruptions_fixed;
    report.leaks_fixed = fixed.leaks_fixed;
    Ok(report)
}
