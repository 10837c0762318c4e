//! Zeroes and discards.

use super::device::Device;
use super::read::over;
use super::write::Zeroing;
use crate::storage::Queue;
use crate::{Error, Result};

impl Device {
    /// Makes a range read as zeroes. They are written as data only where the format has no other
    /// way.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    pub async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        zeroing: Zeroing,
    ) -> Result<()> {
        self.top_for_writing(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let _hooked = self.hooked(queue, offset..offset + length).await?;
        self.zero_range(queue, offset, length, zeroing).await
    }

    /// [`Device::write_zeroes`] of a range that is inside the disk and not empty. Hooks were told.
    pub(super) async fn zero_range(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        zeroing: Zeroing,
    ) -> Result<()> {
        let image = &self.top().image;
        let unmap = zeroing == Zeroing::Unmap && self.discards();
        let below = self.below();
        let range = offset..offset + length;
        image.write_zeroes(over(queue, &below), range, unmap).await
    }

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
        let image = self.top_for_writing(offset, length)?;
        let (below, range) = (self.below(), offset..offset + length);
        let _hooked = self.hooked(queue, range.clone()).await?;
        image.zero_quickly(over(queue, &below), range).await?;
        // A part of a unit that is not zero all over already needs data.
        let (unit, end) = (image.zero_unit(), offset + length);
        for at in [offset, end] {
            let start = at - at % unit;
            let is_whole = at == start || at == self.size();
            if !is_whole && !self.status_is_zero(queue, start, start + unit).await? {
                return Err(Error::os(libc::EOPNOTSUPP));
            }
        }
        match length {
            0 => Ok(()),
            _ => self.zero_range(queue, offset, length, zeroing).await,
        }
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

    /// Frees the whole clusters inside a range, whose content is not needed any more. They read as
    /// zeroes from now on (a raw image on a server: as the server defines it). The rest of the
    /// range stays. Does nothing unless the device was opened with
    /// [`OpenOptions::discard`](super::OpenOptions::discard).
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    pub async fn discard(&self, queue: &Queue, offset: u64, length: u64) -> Result<()> {
        let image = self.top_for_writing(offset, length)?;
        if length == 0 || !self.discards() {
            return Ok(());
        }
        let _hooked = self.hooked(queue, offset..offset + length).await?;
        let below = self.below();
        image
            .discard(over(queue, &below), offset..offset + length)
            .await
    }
}
