//! Zeroes and discards.

use std::ops::Range;

use super::device::Device;
use super::filtered::Rest;
use super::read::{Chain, over};
use super::write::Zeroing;
use crate::drivers::{Below, Clear};
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
        let how = self.clearing(zeroing);
        self.clear(queue, offset..offset + length, how).await
    }

    fn clearing(&self, zeroing: Zeroing) -> Clear {
        match zeroing {
            Zeroing::Unmap if self.discards() => Clear::Unmap,
            _ => Clear::Zero,
        }
    }

    /// Takes the content of a range away.
    async fn clear(&self, queue: &Queue, range: Range<u64>, how: Clear) -> Result<()> {
        match range.is_empty() {
            true => Ok(()),
            false => self.filtered().clear(queue, range, how).await,
        }
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
        self.top_for_writing(offset, length)?;
        let range = offset..offset + length;
        let _hooked = self.hooked(queue, range.clone()).await?;
        if self.has_filters && length > 0 {
            return self.filtered().clear(queue, range, Clear::Quickly).await;
        }
        let how = self.clearing(zeroing);
        self.chain().zero_quickly(queue, range, how).await
    }

    /// Frees the whole clusters inside a range, whose content is not needed any more. They read as
    /// zeroes from now on (a raw image on a server: as the server defines it; through a filter that
    /// changes bytes: they stay). The rest of the range stays. Does nothing unless the device was opened with
    /// [`OpenOptions::discard`](super::OpenOptions::discard).
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    pub async fn discard(&self, queue: &Queue, offset: u64, length: u64) -> Result<()> {
        self.top_for_writing(offset, length)?;
        if !self.discards() {
            return Ok(());
        }
        let range = offset..offset + length;
        let _hooked = self.hooked(queue, range.clone()).await?;
        self.clear(queue, range, Clear::Discard).await
    }
}

impl Chain<'_> {
    /// Takes the content of a range away, below the filters of the first image.
    pub(super) async fn clear(self, queue: &Queue, range: Range<u64>, how: Clear) -> Result<()> {
        let below = self.behind();
        self.first()
            .image
            .clear(over(queue, &below), range, how)
            .await
    }

    /// [`Device::write_zeroes_quickly`] below the filters of the first image.
    pub(super) async fn zero_quickly(
        self,
        queue: &Queue,
        range: Range<u64>,
        how: Clear,
    ) -> Result<()> {
        self.clear(queue, range.clone(), Clear::Quickly).await?;
        // A part of a unit that is not zero all over already needs data.
        let (unit, image) = (self.first().image.zero_unit(), Rest::of(self).image());
        for at in [range.start, range.end] {
            let start = at - at % unit;
            let is_whole = at == start || at == self.size();
            let rest = start..(start + unit).min(self.size());
            if !is_whole && !image.is_zero(queue, rest).await? {
                return Err(Error::os(libc::EOPNOTSUPP));
            }
        }
        match range.is_empty() {
            true => Ok(()),
            false => self.clear(queue, range, how).await,
        }
    }
}
