//! Zeroes that are not written as data, or an error.

use super::write::Top;
use super::{Device, Zeroing};
use crate::drivers::qcow2::Image;
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Device {
    /// Makes a range read as zeroes if that needs no data, which is fast whatever its length.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP`, and nothing has changed, if data would have to be written. Those of
    /// [`Device::write_zeroes`].
    pub async fn write_zeroes_quickly(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        zeroing: Zeroing,
    ) -> Result<()> {
        match self.top_for_writing(offset, length)? {
            Top::Raw(raw) => {
                let _pass = raw.zero_start(queue, offset, length).await?;
                let host = raw.offset() + offset;
                storage::zero_quickly(&**raw.storage(), queue, host, length).await?;
            }
            Top::Qcow2(image) => {
                self.check_quick(queue, image, offset, length).await?;
            }
        }
        self.write_zeroes(queue, offset, length, zeroing).await
    }

    /// Refuses what needs data: in version 2 all zeroes, otherwise a part of a cluster (or of a
    /// subcluster) that is not zero all over already.
    async fn check_quick(
        &self,
        queue: &Queue,
        image: &Image,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        let geometry = image.geometry();
        let (unit, end) = (geometry.subcluster_size(), offset + length);
        if geometry.version() < 3 {
            return Err(Error::os(libc::EOPNOTSUPP));
        }
        for at in [offset, end] {
            let start = at - at % unit;
            let is_whole = at == start || at == self.size();
            if !is_whole && !self.status_is_zero(queue, start, start + unit).await? {
                return Err(Error::os(libc::EOPNOTSUPP));
            }
        }
        Ok(())
    }

    async fn status_is_zero(&self, queue: &Queue, start: u64, end: u64) -> Result<bool> {
        let mut at = start;
        let end = end.min(self.size());
        while at < end {
            let status = self.status(queue, at, end - at).await?;
            if !status.zero {
                return Ok(false);
            }
            at += status.length;
        }
        Ok(true)
    }
}
