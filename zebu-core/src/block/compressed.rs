//! Compressed writes.

use std::ops::Range;

use super::device::Device;
use crate::Result;
use crate::drivers::Below;
use crate::storage::{Iov, Queue};

impl Device {
    /// Writes whole clusters compressed. `offset` is at a cluster boundary. `iov` consists of whole
    /// clusters, but for the last one of the disk. Data that do not shrink are written as they are.
    ///
    /// # Errors
    ///
    /// As in QEMU, if a cluster is allocated already. `ENOTSUP` if the image cannot have compressed
    /// clusters. Those of [`Device::write`].
    pub async fn write_compressed(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        self.top_for_writing(offset, iov.len() as u64)?;
        let range = offset..offset + iov.len() as u64;
        let _hooked = self.hooked(queue, range).await?;
        let filtered = match iov.is_empty() {
            // Filters have no empty requests.
            true => self.filtered().image(),
            false => self.filtered(),
        };
        filtered.write_compressed(queue, offset, iov).await
    }

    /// Stores clusters whose data the caller has compressed with the image's compression type.
    /// `clusters` has the guest offset of each and the range of its data in `data`, less than a
    /// cluster. Guest offsets ascend. Data that follow each other are written together.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write_compressed`].
    pub async fn write_packed(
        &self,
        queue: &Queue,
        clusters: &[(u64, Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        self.top_for_writing(0, 0)?;
        for (guest, _) in clusters {
            self.check_range(*guest, 1)?;
        }
        let size = self.top().cluster_size().unwrap_or(1);
        let range = match (clusters.first(), clusters.last()) {
            (Some(first), Some(last)) => first.0..(last.0 + size).min(self.size()),
            _ => 0..0,
        };
        let _hooked = self.hooked(queue, range).await?;
        self.filtered().write_packed(queue, clusters, data).await
    }
}
