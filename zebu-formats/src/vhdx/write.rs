//! Changes of ranges of the disk. What a block of the file has is written in place, or zeroed in place:
//! the block stays where it is, and holes of the file give the space back. So no request that found a
//! block has to fear that its place gets another use, and entries change in one way only: a block that
//! was not there is there.
//!
//! A request that allocates a block holds it from before it looks at the entry until it has set it. So of
//! two writes to one block one allocates, and the other finds it there.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Vhdx;
use super::map::{Block, PRESENT};
use super::tables::PIECE;
use super::writer::Writer;
use crate::Clearing;
use crate::broken::{Rule, is_broken};
use crate::drivers::{Clear, Commits, FormatImage, Mapping, StorageId};
use crate::offset::HostOffset;
use crate::storage::{self, Iov, Queue};
use crate::{Error, Result};

impl Vhdx {
    /// The state of an image that is open for writing.
    pub(super) fn writer(&self) -> Result<&Arc<Writer>> {
        self.writer.as_ref().ok_or_else(|| Error::os(libc::EPERM))
    }

    /// Where the bytes of a write go, if all of them are in blocks that follow each other in the file.
    pub(super) fn write_place(&self, guest: u64, length: u64) -> Option<(StorageId, HostOffset)> {
        let writer = self.writer.as_ref()?;
        let is_through = writer.file.cache_mode().is_write_through();
        if !writer.has_begun() || writer.commits.check().is_err() || is_through {
            return None;
        }
        let extent = self.extent(guest, length)?.ok()?;
        match extent.mapping {
            Mapping::Data { host } if extent.length == length => {
                let is_there = self.before_end(host.0, length) == length;
                is_there.then_some((StorageId::FILE, host))
            }
            _ => None,
        }
    }

    /// Writes a range.
    pub(super) async fn write_range(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let mut at = 0;
        while at < iov.len() {
            self.writer()?.begin(queue).await?;
            let (guest, left) = (offset + at as u64, (iov.len() - at) as u64);
            let extent = self.load_extent(queue, guest, left).await?;
            let length = match extent.mapping {
                Mapping::Data { host } => {
                    let length = extent.length as usize;
                    self.write_at(queue, guest, host.0, &iov.slice(at, length))
                        .await?;
                    length
                }
                _ => {
                    let block_size = self.geometry.block_size();
                    let length = left.min(block_size - guest % block_size) as usize;
                    self.write_block(queue, guest, &iov.slice(at, length))
                        .await?;
                    length
                }
            };
            at += length;
        }
        self.changed(queue).await
    }

    /// Writes to a place that the image has.
    async fn write_at(&self, queue: &Queue, guest: u64, host: u64, iov: &Iov) -> Result<()> {
        self.check_place_of_data(guest, host, iov.len() as u64)?;
        Ok(storage::write(&*self.file, queue, host, iov).await?)
    }

    /// Writes to a part of a block that was not there.
    async fn write_block(&self, queue: &Queue, guest: u64, iov: &Iov) -> Result<()> {
        let writer = self.writer()?;
        let (block, block_size) = (
            guest >> self.geometry.block_bits,
            self.geometry.block_size(),
        );
        let within = guest % block_size;
        let offset = self.offset_of_entry(block);
        let _held = writer.blocks.hold(block..block + 1).await;
        let piece = self.tables.load(queue, offset / PIECE).await?;
        let entry = piece[(offset % PIECE / 8) as usize].load(Ordering::Acquire);
        match Block::decode(entry) {
            Ok(Block::NotPresent | Block::Zero) => {}
            Ok(Block::Present(host)) => {
                return self.write_at(queue, guest, host + within, iov).await;
            }
            Ok(Block::PartiallyPresent(_)) | Err(_) => {
                let what = format!("Invalid state of block {block}");
                return Err(Error::Corrupt { guest, what });
            }
        }
        let place = writer.places.take(queue, 1).await?;
        let entry = place.offset() | PRESENT;
        if is_broken(Rule::DataBeforeEntry) {
            writer.set_entry(&piece, offset, entry);
        }
        place.write(queue, &*self.file, within, iov).await?;
        writer.set_entry(&piece, offset, entry);
        place.keep();
        Ok(())
    }

    /// Takes the content of a range away. What is not there reads as zeroes already.
    pub(super) async fn clear_range(
        &self,
        queue: &Queue,
        range: Range<u64>,
        how: Clear,
    ) -> Result<()> {
        self.writer()?.commits.check()?;
        let mut clearing = Clearing::new(&*self.file, queue, how);
        let mut guest = range.start;
        while guest < range.end {
            let extent = self.load_extent(queue, guest, range.end - guest).await?;
            if let Mapping::Data { host } = extent.mapping {
                let (at, length) = (host.0, extent.length);
                self.check_place_of_data(guest, at, length)?;
                self.writer()?.begin(queue).await?;
                clearing.part(at, length).await?;
            }
            guest += extent.length;
        }
        clearing.end().await?;
        self.changed(queue).await
    }

    /// After a change: it is made durable in a write-through mode.
    async fn changed(&self, queue: &Queue) -> Result<()> {
        let writer = self.writer()?;
        match writer.file.cache_mode().is_write_through() {
            true => Commits::flush(writer, queue).await,
            false => Ok(()),
        }
    }

    fn check_place_of_data(&self, guest: u64, host: u64, length: u64) -> Result<()> {
        FormatImage::check_data(self, guest, StorageId::FILE, host, length)
    }
}
