//! Internal snapshots of an image whose backing file changes.
//!
//! A snapshot shows the backing file where it has nothing of its own, as the disk does. A job keeps
//! the content of the disk; what it would have to copy for a snapshot has no place in the image.

use crate::block::Layer;
use crate::drivers::Mapping;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::Snapshot;
use crate::storage::Queue;
use crate::{Error, Result, printable};

/// Refuses a change of the first `end` bytes behind these images if an internal snapshot of one of
/// them shows them.
pub(super) async fn refuse_change_behind(queue: &Queue, layers: &[Layer], end: u64) -> Result<()> {
    for image in layers.iter().filter_map(Layer::as_qcow2) {
        for snapshot in image.snapshots() {
            if shows_backing(queue, image, snapshot, end).await? {
                return Err(Error::Refused(format!(
                    "Snapshot '{}' (ID {}) shows data of the backing file, which would change",
                    printable(snapshot.name_text()),
                    printable(snapshot.id_text()),
                )));
            }
        }
    }
    Ok(())
}

/// Whether a snapshot has nothing of its own somewhere before `end`.
async fn shows_backing(
    queue: &Queue,
    image: &Image,
    snapshot: &Snapshot,
    end: u64,
) -> Result<bool> {
    let view = image.view_snapshot(queue, snapshot).await?;
    let end = end.min(view.size());
    let mut at = 0;
    while at < end {
        let extent = view.extent(queue, at, end - at).await?;
        if matches!(extent.mapping, Mapping::Unallocated { .. }) {
            return Ok(true);
        }
        at += extent.length;
    }
    Ok(false)
}
