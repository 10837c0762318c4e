//! `copy-on-read`: what is read from behind an image is written into it.

use std::ops::Range;
use std::sync::Arc;

use super::{Content, Filter, FilterDriver, Over};
use crate::Result;
use crate::drivers::{Changing, Clear, Ranges};
use crate::storage::{Buffer, Iov, OwnedBuffer, Step};

/// Bytes copied at once.
const PIECE: u64 = 1 << 20;

pub(super) const DRIVER: FilterDriver = FilterDriver {
    name: "copy-on-read",
    shown: &[],
    open: |open| {
        if !open.write {
            return Err("Block node is read-only".into());
        }
        match open.options.take_string("bottom") {
            Some(bottom) => Err(format!("Bottom node '{bottom}' not found")),
            None => Ok(Arc::new(CopyOnRead::default())),
        }
    },
};

/// A copy holds its units alone, from before it looks whether they are the image's own until it has
/// written them; changes share theirs. So a copy never reads old content, waits, and writes it over
/// what the guest has written meanwhile: that write is either complete before the copy looks, and
/// there is nothing to copy, or it begins after the copy and writes over it. A copy that is dropped
/// half way has written what the image reads as anyway.
///
/// So a read is a change here, which may wait for others: as of all changes, each must be polled until
/// it ends, or be dropped.
#[derive(Debug, Default)]
pub(crate) struct CopyOnRead(Ranges);

impl CopyOnRead {
    /// The units of a range.
    fn units(over: Over<'_>, range: Range<u64>) -> Range<u64> {
        let unit = over.below.unit();
        range.start - range.start % unit..range.end.next_multiple_of(unit)
    }

    /// Writes into the image what it lacks of a range.
    async fn copy(&self, over: Over<'_>, range: Range<u64>) -> Result<()> {
        let units = Self::units(over, range);
        let end = units.end.min(over.below.size());
        // As in QEMU, a read comes after the changes of its units that are in flight.
        drop(self.0.hold(units.clone()).await);
        let mut at = units.start;
        while at < end {
            let (is_own, length) = over.below.is_own(over.queue, at..end).await?;
            if is_own {
                at += length;
                continue;
            }
            let length = length.min(PIECE);
            let piece = Self::units(over, at..at + length);
            let held = self.0.hold(piece.clone()).await;
            self.copy_held(over, piece.start..piece.end.min(end)).await?;
            drop(held);
            at = piece.end;
        }
        Ok(())
    }

    /// Copies what is still lacking of units that are held.
    async fn copy_held(&self, over: Over<'_>, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let (is_own, length) = over.below.is_own(over.queue, at..range.end).await?;
            if !is_own {
                self.copy_piece(over, at, length as usize).await?;
            }
            at += length;
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    async fn copy_piece(&self, over: Over<'_>, at: u64, length: usize) -> Result<()> {
        let range = at..at + length as u64;
        if over.below.is_zero(over.queue, range.clone()).await? {
            return over.below.clear(over.queue, range, Clear::Zero).await;
        }
        let _memory = over.queue.reserve(Step::Margins, length).await;
        // What is below reserves memory of its own.
        let queue = &over.queue.for_image_below();
        let mut buffer = Buffer::new(length);
        // SAFETY: the buffer lives in this future until the requests, awaited here, have ended.
        let iov = unsafe { buffer.first(length) }?;
        over.below.read(queue, at, &iov).await?;
        match iov.is_zero() {
            true => over.below.clear(queue, range, Clear::Zero).await,
            false => over.below.write(queue, at, &iov).await,
        }
    }
}

impl Filter for CopyOnRead {
    fn content(&self) -> Content<'_> {
        Content::Kept
    }

    fn needs_writing(&self) -> bool {
        true
    }

    fn read<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            self.copy(over, offset..offset + iov.len() as u64).await?;
            over.below.read(over.queue, offset, iov).await
        })
    }

    fn write<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            let range = offset..offset + iov.len() as u64;
            let _held = self.0.share(Self::units(over, range)).await;
            over.below.write(over.queue, offset, iov).await
        })
    }

    fn write_compressed<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            let range = offset..offset + iov.len() as u64;
            let _held = self.0.share(Self::units(over, range)).await;
            let below = over.below;
            below.write_compressed(over.queue, offset, iov).await
        })
    }

    fn write_packed<'a>(
        &'a self,
        over: Over<'a>,
        clusters: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> Changing<'a> {
        Box::pin(async move {
            let size = over.below.cluster_size().unwrap_or(1);
            let first = clusters.first().map_or(0, |(guest, _)| *guest);
            let last = clusters.last().map_or(0, |(guest, _)| guest + size);
            let _held = match first < last {
                true => Some(self.0.share(Self::units(over, first..last)).await),
                false => None,
            };
            let below = over.below;
            below.write_packed(over.queue, clusters, data).await
        })
    }

    fn clear<'a>(&'a self, over: Over<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(async move {
            let _held = self.0.share(Self::units(over, range.clone())).await;
            over.below.clear(over.queue, range, how).await
        })
    }
}
