//! How large a file an image would need.

use super::{CreateQcow2, Preallocation};
use crate::block::Device;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::{MAX_L1_BYTES, RefcountSpace};
use crate::progress::{IntoControlFlow, Progress, Report, Reporter};
use crate::storage::Queue;
use crate::{Error, Result};

/// The image that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeasureTarget {
    /// raw
    Raw,
    /// qcow2
    Qcow2(Qcow2Target),
}

options! {
    /// The options of a qcow2 image that its size depends on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Qcow2Target {
        /// Version: 2 or 3.
        pub version: u32,
        /// Cluster size as a power of two.
        pub cluster_bits: u32,
        /// Refcount width as a power of two of bits.
        pub refcount_order: u32,
        /// Extended L2 entries.
        pub extended_l2: bool,
        /// Every cluster gets its space at once.
        pub preallocated: bool,
        /// It gets a backing file whose content is not known.
        pub backing: bool,
    }
}

impl From<&CreateQcow2> for Qcow2Target {
    /// The image that would be made.
    fn from(image: &CreateQcow2) -> Self {
        Qcow2Target {
            version: image.version,
            cluster_bits: image.cluster_bits,
            refcount_order: image.refcount_order,
            extended_l2: image.extended_l2,
            preallocated: matches!(
                image.preallocation,
                Preallocation::Falloc | Preallocation::Full
            ),
            backing: image.backing.is_some(),
        }
    }
}

impl Default for Qcow2Target {
    /// QEMU's defaults.
    fn default() -> Self {
        Qcow2Target {
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            preallocated: false,
            backing: false,
        }
    }
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
        MeasureTarget::Raw => measure_raw(size),
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
        MeasureTarget::Raw => measure_raw(device.size())?,
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
    if let Some(image) = device.top().as_qcow2()
        && target.version >= 3
        && image.geometry().version() >= 3
    {
        measured.bitmaps = Some(bitmap_bytes(queue, image, device.size(), target).await?);
    } else if target.version >= 3 && device.top().image.has_no_bitmaps() {
        measured.bitmaps = Some(0);
    }
    Ok(measured)
}

fn measure_raw(size: u64) -> Result<Measure> {
    let size = size.checked_next_multiple_of(512).ok_or_else(too_large)?;
    Ok(Measure {
        required: size,
        fully_allocated: size,
        bitmaps: None,
    })
}

fn measure_qcow2(size: u64, target: &Qcow2Target, data: u64) -> Result<Measure> {
    let cluster_size = 1u64 << target.cluster_bits;
    let whole = size
        .checked_next_multiple_of(cluster_size)
        .ok_or_else(too_large)?;
    let metadata = metadata_bytes(whole, target)?;
    let needs_all = target.preallocated || target.backing;
    Ok(Measure {
        required: metadata + if needs_all { whole } else { data },
        fully_allocated: metadata.checked_add(whole).ok_or_else(too_large)?,
        bitmaps: None,
    })
}

fn too_large() -> Error {
    Error::Refused("The image size is too large (try using a larger cluster size)".into())
}

/// Header, tables and refcounts of a disk of `size` bytes, all allocated.
fn metadata_bytes(size: u64, target: &Qcow2Target) -> Result<u64> {
    let cluster_size = 1u64 << target.cluster_bits;
    let clusters = size >> target.cluster_bits;
    let l2_entry = if target.extended_l2 { 16 } else { 8 };
    let l2_tables = clusters.div_ceil(cluster_size / l2_entry);
    if l2_tables * 8 > MAX_L1_BYTES {
        return Err(too_large());
    }
    let l1_clusters = (l2_tables * 8).div_ceil(cluster_size);
    let others = 1 + l1_clusters + l2_tables;
    let refcounts = refcount_space(others + clusters, target);
    Ok((others + refcounts.clusters()) << target.cluster_bits)
}

/// The refcount blocks and the table for `clusters` other clusters.
pub(super) fn refcount_space(clusters: u64, target: &Qcow2Target) -> RefcountSpace {
    let cluster_size = 1u64 << target.cluster_bits;
    let per_block = (cluster_size * 8) >> target.refcount_order;
    let table = |blocks: u64| blocks.div_ceil(cluster_size / 8);
    RefcountSpace::counting(clusters, per_block, table)
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

/// What the bitmaps of `image` take in the new image.
async fn bitmap_bytes(
    queue: &Queue,
    image: &Image,
    size: u64,
    target: &Qcow2Target,
) -> Result<u64> {
    let cluster_size = 1u64 << target.cluster_bits;
    let list = match image.bitmaps(queue).await {
        // There is nothing to copy: they are those of the active disk.
        _ if image.is_snapshot() => Vec::new(),
        // There is nothing to copy.
        Err(Error::Format(_)) => Vec::new(),
        list => list?,
    };
    let (mut bytes, mut directory) = (0u64, 0u64);
    for bitmap in list.iter().map(|state| &state.entry) {
        let bits = size.div_ceil(1 << bitmap.granularity_bits.min(62));
        let clusters = bits.div_ceil(8).div_ceil(cluster_size);
        bytes += (clusters * cluster_size) + (clusters * 8).next_multiple_of(cluster_size);
        directory += bitmap.encoded_len() as u64;
    }
    Ok(bytes + directory.next_multiple_of(cluster_size))
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
