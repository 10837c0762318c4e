//! `compress`: what is written is stored compressed, in whole clusters.

use std::ops::Range;
use std::sync::Arc;

use super::{Content, Filter, FilterDriver, Over, Under};
use crate::Result;
use crate::drivers::{Changing, Clear, Ranges};
use crate::storage::{Buffer, Iov, OwnedBuffer, Step};

pub(super) const DRIVER: FilterDriver = FilterDriver {
    name: "compress",
    shown: &[],
    open: |_| Ok(Arc::new(Compress::default())),
};

/// Clusters of which a part is written are held, so that what another request writes or clears there
/// meanwhile is not undone with their old content. Other changes share the clusters that they touch.
#[derive(Debug, Default)]
struct Compress(Ranges);

/// What a change does to a part of a range.
#[derive(Clone, Debug)]
enum Piece {
    /// Whole clusters.
    Whole(Range<u64>),
    /// A part of a cluster.
    Part(Range<u64>),
}

/// A range as whole clusters, and parts of those that it begins and ends in.
fn pieces(over: Over<'_>, range: &Range<u64>) -> Vec<Piece> {
    let size = over.below.cluster_size().unwrap_or(1);
    let (disk, end) = (over.below.size(), range.end);
    let mut pieces = Vec::new();
    let mut at = range.start;
    while at < end {
        let start = at - at % size;
        let cluster_end = (start + size).min(disk);
        let is_part = at > start || end < cluster_end;
        let to = match is_part {
            true => end.min(cluster_end),
            false if end == disk => end,
            false => end - end % size,
        };
        pieces.push(match is_part {
            true => Piece::Part(at..to),
            false => Piece::Whole(at..to),
        });
        at = to;
    }
    pieces
}

impl Compress {
    /// As in QEMU, a cluster that is refused keeps no other one from being written.
    async fn write(&self, over: Over<'_>, offset: u64, iov: &Iov) -> Result<()> {
        let mut result = Ok(());
        for piece in pieces(over, &(offset..offset + iov.len() as u64)) {
            let of = |range: &Range<u64>| {
                iov.slice(
                    (range.start - offset) as usize,
                    (range.end - range.start) as usize,
                )
            };
            let written = match piece {
                Piece::Part(range) => {
                    let part = of(&range);
                    self.change_part(over, range, |bytes| part.copy_to(bytes))
                        .await
                }
                Piece::Whole(range) => {
                    let _held = self.0.share(range.clone()).await;
                    let whole = of(&range);
                    over.below
                        .write_compressed(over.queue, range.start, &whole)
                        .await
                }
            };
            result = result.and(written);
        }
        result
    }

    /// Zeroes a range. Clusters of which it has a part are written.
    async fn zero(&self, over: Over<'_>, range: Range<u64>, how: Clear) -> Result<()> {
        let pieces = pieces(over, &range);
        // QEMU writes parts that meet at once, and nothing after another one that fails.
        let has_whole = pieces.iter().any(|p| matches!(p, Piece::Whole(_)));
        let mut result = Ok(());
        for piece in pieces {
            let changed = match piece {
                Piece::Part(range) => self.change_part(over, range, |bytes| bytes.fill(0)).await,
                Piece::Whole(range) => {
                    let _held = self.0.share(range.clone()).await;
                    over.below.clear(over.queue, range, how).await
                }
            };
            result = result.and(changed);
            if has_whole && result.is_err() {
                break;
            }
        }
        result
    }

    /// Changes a part of a cluster, and writes all of it.
    #[allow(unsafe_code)]
    async fn change_part(
        &self,
        over: Over<'_>,
        range: Range<u64>,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let whole = clusters(over, &range);
        let (start, end) = (whole.start, whole.end.min(over.below.size()));
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
        let own = (range.start - start) as usize..(range.end - start) as usize;
        change(&mut buffer[own]);
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
    fn content(&self) -> Content<'_> {
        Content::Kept
    }

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
            if let Clear::Zero | Clear::Unmap = how {
                return self.zero(over, range, how).await;
            }
            let _shared = self.0.share(clusters(over, &range)).await;
            over.below.clear(over.queue, range, how).await
        })
    }

    fn write<'a>(&'a self, over: Over<'a>, offset: u64, iov: &'a Iov) -> Changing<'a> {
        Box::pin(Compress::write(self, over, offset, iov))
    }
}
