//! How large a file an image would need.

use crate::block::Device;
use crate::drivers::qcow2::create::too_large;
use crate::progress::{IntoControlFlow, Progress, Report, Reporter};
use crate::storage::Queue;
use crate::{Error, Result};

pub use crate::drivers::qcow2::create::Qcow2Target;

/// The image that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeasureTarget {
    /// raw
    Raw,
    /// The whole disk, whatever it contains, and so many bytes besides.
    Whole {
        /// Bytes besides the disk.
        overhead: u64,
    },
    /// qcow2
    Qcow2(Qcow2Target),
}

/// Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Measure {
    /// The file when everything that has data now is copied.
    pub required: u64,
    /// The file when the whole disk was written to.
    pub fully_allocated: u64,
    /// What the bitmaps would add, if both images can have them.
    pub bitmaps: Option<u64>,
}

/// The file that a new disk of `size` bytes needs.
///
/// # Errors
/// If the new image would be too large.
pub fn measure_size(size: u64, target: &MeasureTarget) -> Result<Measure> {
    match target {
        MeasureTarget::Raw => measure_whole(size, 0),
        MeasureTarget::Whole { overhead } => measure_whole(size, *overhead),
        // A new disk over a backing file has nothing of its own yet.
        MeasureTarget::Qcow2(target) => {
            let target = Qcow2Target {
                backing: false,
                ..*target
            };
            measure_qcow2(size, &target, 0)
        }
    }
}

/// The file that a copy of `device` needs. `on_progress` is called with the bytes looked at;
/// see [`jobs`](super).
///
/// # Errors
/// If the new image would be too large, if metadata cannot be read, or if the job is cancelled.
pub async fn measure<G: IntoControlFlow>(
    queue: &Queue,
    device: &Device,
    target: &MeasureTarget,
    on_progress: impl FnMut(Progress) -> G,
) -> Result<Measure> {
    let reporter = Reporter::new(on_progress);
    reporter.plan(device.size());
    let measured = match target {
        MeasureTarget::Raw => measure_whole(device.size(), 0)?,
        MeasureTarget::Whole { overhead } => measure_whole(device.size(), *overhead)?,
        MeasureTarget::Qcow2(target) => measure_copy(queue, device, target, &reporter).await?,
    };
    reporter.finish();
    Ok(measured)
}

/// The qcow2 image that a copy of `device` needs.
async fn measure_copy(
    queue: &Queue,
    device: &Device,
    target: &Qcow2Target,
    reporter: &dyn Report,
) -> Result<Measure> {
    let data = match target.backing {
        true => 0,
        false => data_bytes(queue, device, target, reporter).await?,
    };
    let mut measured = measure_qcow2(device.size(), target, data)?;
    if device.is_filtered() {
        // As in QEMU, a filter has no bitmaps.
        return Ok(measured);
    }
    let image = &device.top().image;
    if target.version >= 3 && (image.stores_bitmaps() || image.has_no_bitmaps()) {
        let list = match device.bitmaps(queue).await {
            // There is nothing to copy: they are those of the active disk, or damaged.
            _ if image.shown().is_some() => Vec::new(),
            Err(Error::Format(_)) => Vec::new(),
            list => list?,
        };
        measured.bitmaps = Some(target.bitmap_bytes(device.size(), &list));
    }
    Ok(measured)
}

fn measure_whole(size: u64, overhead: u64) -> Result<Measure> {
    let size = size.checked_next_multiple_of(512);
    let size = size
        .and_then(|size| size.checked_add(overhead))
        .ok_or_else(too_large)?;
    Ok(Measure {
        required: size,
        fully_allocated: size,
        bitmaps: None,
    })
}

fn measure_qcow2(size: u64, target: &Qcow2Target, data: u64) -> Result<Measure> {
    let (metadata, whole) = (target.metadata_bytes(size)?, target.disk_bytes(size)?);
    let needs_all = target.preallocated || target.backing;
    Ok(Measure {
        required: metadata + if needs_all { whole } else { data },
        fully_allocated: metadata.checked_add(whole).ok_or_else(too_large)?,
        bitmaps: None,
    })
}

/// Bytes of the clusters of the new image that would hold data.
async fn data_bytes(
    queue: &Queue,
    device: &Device,
    target: &Qcow2Target,
    reporter: &dyn Report,
) -> Result<u64> {
    let cluster_size = 1u64 << target.cluster_bits;
    let size = device.size();
    let (mut offset, mut bytes) = (0, 0);
    while offset < size {
        let status = device.status(queue, offset, size - offset).await?;
        let mut end = offset.saturating_add(status.length.max(1));
        if status.present && !status.zero {
            // A cluster with data at its end or start is a whole one.
            end = end
                .checked_next_multiple_of(cluster_size)
                .ok_or_else(too_large)?;
            bytes += end - (offset & !(cluster_size - 1));
        }
        reporter.add(end.min(size) - offset)?;
        offset = end;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of qemu-img 10 measure.
    #[test]
    fn sizes_match_qemu() {
        let size = |size, target| measure_size(size, &MeasureTarget::Qcow2(target)).unwrap();
        let plain = Qcow2Target::default();
        assert_eq!(size(1 << 30, plain).required, 393_216);
        assert_eq!(size(1 << 30, plain).fully_allocated, 1_074_135_040);
        let extended = Qcow2Target {
            extended_l2: true,
            ..plain
        };
        assert_eq!(size(1 << 40, extended).required, 302_252_032);
        assert_eq!(size(1 << 40, extended).fully_allocated, 1_099_813_879_808);
        assert!(measure_size(1 << 60, &MeasureTarget::Qcow2(plain)).is_err());
        assert_eq!(
            measure_size(1001, &MeasureTarget::Raw).unwrap().required,
            1024
        );
    }
}
