//! `compress`: what is written is stored compressed, in whole clusters.

use std::ops::Range;
use std::sync::Arc;

use super::{Filter, FilterDriver, Over, Under};
use crate::Result;
use crate::drivers::{Changing, Clear, Ranges};
use crate::storage::{Buffer, Iov, OwnedBuffer, Step};

pub(super) const DRIVER: FilterDriver = FilterDriver {
    name: "compress",
    options: &[],
    shown: &[],
    open: |_| Ok(Arc::new(Compress::default())),
};

/// Clusters of which a part is written are held, so that what another request writes or clears there
/// meanwhile is not undone with their old content. Other changes share the clusters that they touch.
#[derive(Debug, Default)]
struct Compress(Ranges);

impl Compress {
    async fn write(&self, over: Over<'_>, offset: u64, iov: &Iov) -> Result<()> {
        let size = over.below.cluster_size().unwrap_or(1);
        let end = offset + iov.len() as u64;
        let disk = over.below.size();
        let mut at = offset;
        while at < end {
            let start = at - at % size;
            let cluster_end = (start + size).min(disk);
            let skip = (at - offset) as usize;
            if at > start || end < cluster_end {
                let to = end.min(cluster_end);
                let part = iov.slice(skip, (to - at) as usize);
                self.write_part(over, start, cluster_end, at, &part).await?;
                at = to;
                continue;
            }
            let to = match end == disk {
                true => end,
                false => end - end % size,
            };
            let whole = iov.slice(skip, (to - at) as usize);
            let _held = self.0.share(at..to).await;
            over.below.write_compressed(over.queue, at, &whole).await?;
            at = to;
        }
        Ok(())
    }

    /// Writes a part of a cluster, with the rest as it is.
    #[allow(unsafe_code)]
    async fn write_part(
        &self,
        over: Over<'_>,
        start: u64,
        end: u64,
        at: u64,
        part: &Iov,
    ) -> Result<()> {
        let _held = self.0.hold(start..end).await;
        let length = (end - start) as usize;
        let _memory = over.queue.reserve(Step::Margins, length).await;
        // What is below reserves memory of its own.
        let queue = &over.queue.for_image_below();
        let mut buffer = Buffer::new(length);
        {
            // SAFETY: the buffer lives in this future until the request, awaited here, has ended.
            let whole = unsafe { buffer.first(length) }?;
            over.below.read(queue, start, &whole).await?;
        }
        let skip = (at - start) as usize;
        part.copy_to(&mut buffer[skip..skip + part.len()]);
        // SAFETY: as above.
        let whole = unsafe { buffer.first(length) }?;
        over.below.write_compressed(queue, start, &whole).await
    }
}

/// The clusters that a range touches.
fn clusters(over: Over<'_>, range: &Range<u64>) -> Range<u64> {
    let size = over.below.cluster_size().unwrap_or(1);
    range.start - range.start % size..range.end.next_multiple_of(size)
}

impl Filter for Compress {
    fn may_be_over(&self, below: Under<'_>) -> Result<(), String> {
        match below.can_compress {
            true => Ok(()),
            false => Err(format!(
                "Compression is not supported for underlying format: {}",
                below.name
            )),
        }
    }

    fn passes_compressed(&self) -> bool {
        false
    }

    fn write_compressed<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(async move {
            let range = offset..offset + iov.len() as u64;
            let _shared = self.0.share(clusters(over, &range)).await;
            over.below.write_compressed(over.queue, offset, iov).await
        })
    }

    fn write_packed<'a>(
        &'a self,
        over: Over<'a>,
        packed: &'a [(u64, Range<usize>)],
        data: &'a [u8],
    ) -> Changing<'a> {
        Box::pin(async move {
            let first = packed.iter().map(|(at, _)| *at).min().unwrap_or_default();
            let last = packed.iter().map(|(at, _)| *at + 1).max().unwrap_or_default();
            let _shared = self.0.share(clusters(over, &(first..last))).await;
            over.below.write_packed(over.queue, packed, data).await
        })
    }

    fn clear<'a>(&'a self, over: Over<'a>, range: Range<u64>, how: Clear) -> Changing<'a> {
        Box::pin(async move {
            let _shared = self.0.share(clusters(over, &range)).await;
            over.below.clear(over.queue, range, how).await
        })
    }

    fn write<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(Compress::write(self, over, offset, iov))
    }
}
