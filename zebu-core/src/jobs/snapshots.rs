//! Internal snapshots of an image whose backing file changes.
//!
//! A snapshot shows the backing file where it has nothing of its own, as the disk does. A job keeps
//! the content of the disk; what it would have to copy for a snapshot has no place in the image.

use crate::block::Layer;
use crate::storage::Queue;
use crate::{Error, Result, printable};

/// Refuses a change of the first `end` bytes behind these images if an internal snapshot of one of
/// them shows them.
pub(super) async fn refuse_change_behind(queue: &Queue, layers: &[Layer], end: u64) -> Result<()> {
    for layer in layers {
        for snapshot in layer.snapshots().unwrap_or_default() {
            let shown = layer.image.snapshot_shows_below(queue, snapshot, end);
            if shown.await? {
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
