//! What a filter does to the bytes that pass, and filters that only change bytes.

use super::Over;
use crate::Result;
use crate::drivers::Changing;
use crate::storage::{Buffer, Iov, OwnedBuffer, Step};

/// Bytes that pass at once.
const PIECE: usize = 1 << 20;

/// What becomes of the bytes that pass a filter.
pub enum Content<'a> {
    /// Nothing: whatever is known of what is below holds above.
    Kept,
    /// A code is between what is above and what is below. The filter need not override anything.
    Coded(&'a dyn Code),
    /// What the filter's `read` and `write` make of them. Nothing that is known of what is below holds above,
    /// and zeroes are written as data.
    Changed,
}

impl Content<'_> {
    /// Whether bytes pass as they are.
    pub fn is_kept(&self) -> bool {
        matches!(self, Content::Kept)
    }

    /// [`Code::unit`], or 1.
    pub(crate) fn unit(&self) -> usize {
        match self {
            Content::Coded(code) => code.unit(),
            _ => 1,
        }
    }
}

/// Changes bytes in place: as many are below as above, at the same offset.
pub trait Code {
    /// The bytes that are changed together: a power of two, at most 1 MiB. More than one is for filters over
    /// files that consist of whole units; what is not aligned is read and written in whole units.
    fn unit(&self) -> usize {
        1
    }

    /// Makes of bytes, whole units from `offset` on, what is written below.
    fn encode(&self, offset: u64, bytes: &mut [u8]);

    /// Makes of what was read below what it is above.
    fn decode(&self, offset: u64, bytes: &mut [u8]);
}

/// What is done below.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Read,
    Write,
    WriteCompressed,
}

/// Passes a request on by way of memory of its own: the caller's may be a guest's, which looks at it, or occur
/// twice in one request.
#[allow(unsafe_code)]
pub(super) fn pass<'a>(
    code: &'a dyn Code,
    over: Over<'a>,
    offset: u64,
    iov: &'a Iov,
    how: How,
) -> Changing<'a> {
    // Compressed clusters are whole.
    let cluster = over.below.cluster_size();
    let cluster = cluster.filter(|_| how == How::WriteCompressed);
    let cluster = cluster.map_or(1, |size| size as usize);
    let piece = (PIECE - PIECE % cluster).max(cluster);
    Box::pin(async move {
        let mut done = 0;
        while done < iov.len() {
            let (at, length) = (offset + done as u64, (iov.len() - done).min(piece));
            let part = iov.slice(done, length);
            let _memory = over.queue.reserve(Step::Margins, length).await;
            // What is below reserves memory of its own.
            let queue = &over.queue.for_image_below();
            let mut buffer = Buffer::try_new(length)?;
            if how != How::Read {
                part.copy_to(&mut buffer);
                code.encode(at, &mut buffer);
            }
            {
                // SAFETY: the buffer lives in this future until the request, awaited here, has ended.
                let own = unsafe { buffer.first(length) }?;
                match how {
                    How::Read => over.below.read(queue, at, &own).await?,
                    How::Write => over.below.write(queue, at, &own).await?,
                    How::WriteCompressed => over.below.write_compressed(queue, at, &own).await?,
                }
            }
            if how == How::Read {
                code.decode(at, &mut buffer);
                part.copy_from(&buffer);
            }
            done += length;
        }
        Ok(())
    })
}

/// Writes zeroes as data through a filter.
pub(crate) async fn write_zeroes(
    filter: &dyn super::Filter,
    over: Over<'_>,
    range: std::ops::Range<u64>,
) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        let length = (range.end - at).min(crate::storage::ZEROES as u64);
        let zeroes = crate::storage::zeroes(length as usize);
        filter.write(over, at, &zeroes).await?;
        at += length;
    }
    Ok(())
}
