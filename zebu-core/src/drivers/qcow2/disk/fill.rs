//! Filling clusters that are to be mapped: copy-on-write.

use std::ops::Range;

use super::Disk;
use crate::Result;
use crate::drivers::Mapping;
use crate::drivers::qcow2::writer::change::NewClusters;
use crate::offset::HostOffset;
use crate::storage::{self, Iov, PoolBuffer, Queue, Step};

/// Zeroes beside the data of a write are written with them up to so many bytes. More are left to
/// the file system.
const ZEROES_WRITTEN: u64 = 64 << 10;
/// Up to so many bytes, a write between old content on both sides is copied into it: one read and
/// one write, instead of two and one.
const COPIED: usize = 64 << 10;

impl Disk<'_> {
    /// Writes `iov`, and what is kept of the old content around it, to the host clusters that are
    /// to be mapped.
    pub(super) async fn fill(&self, filling: &NewClusters<'_>, iov: &Iov) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let (fill, host) = (&filling.fill, filling.host);
        let new = filling.allocation.as_ref();
        let end = fill.guest + fill.length;
        let at = |guest: u64| host.0 + (guest - fill.cluster);
        if fill.host.is_some() {
            let length = fill.tail - fill.head;
            image
                .prepare_data_write(queue, HostOffset(at(fill.head)), length)
                .await?;
        }
        let data = &**image.data();
        let fresh = new.is_some_and(|allocation| allocation.fresh);
        let (head, tail) = (fill.head..fill.guest, end..fill.tail);
        let head_is_zero = self.reads_as_zero(head.clone()).await?;
        let tail_is_zero = self.reads_as_zero(tail.clone()).await?;
        // Not written: new clusters read as zeroes, and many zeroes are left to the file system.
        let left_out = |margin: &Range<u64>, is_zero: bool| {
            is_zero && (fresh || margin.end - margin.start > ZEROES_WRITTEN)
        };
        let first = match left_out(&head, head_is_zero) {
            true => fill.guest,
            false => fill.head,
        };
        let last = match left_out(&tail, tail_is_zero) {
            true => end,
            false => fill.tail,
        };
        let written = at(first)..at(last);
        let is_copied = |margin: &Range<u64>, is_zero: bool| !margin.is_empty() && !is_zero;
        let (head_is_copied, tail_is_copied) = (
            is_copied(&head, head_is_zero),
            is_copied(&tail, tail_is_zero),
        );
        let is_whole = !head_is_zero && !tail_is_zero && iov.len() <= COPIED;
        // What waits for guest clusters that this request holds has no memory of this step.
        let _memory = match head_is_copied || tail_is_copied {
            true => {
                let margin = |range: &Range<u64>| Queue::pooled((range.end - range.start) as usize);
                let bytes = match is_whole {
                    true => Queue::pooled((fill.tail - fill.head) as usize),
                    false => margin(&head) + margin(&tail),
                };
                queue.reserve(Step::Margins, bytes).await
            }
            false => None,
        };
        if let Some(allocation) = new {
            image.make_way(queue, allocation, &written).await?;
        }
        let file = &**image.file();
        if head_is_copied || tail_is_copied {
            storage::event(file, storage::Event::CowRead);
        }
        if is_whole {
            let mut all = self.old_content(fill.head..fill.tail).await?;
            storage::event(file, storage::Event::WriteAio);
            let start = (fill.guest - fill.head) as usize;
            iov.copy_to(&mut all[start..start + iov.len()]);
            // SAFETY: `all` lives until the write, awaited here, has ended.
            #[allow(unsafe_code)]
            let whole = unsafe { all.iov() }.slice(0, (fill.tail - fill.head) as usize);
            storage::write(data, queue, written.start, &whole).await?;
        } else {
            let margin = |range: Range<u64>, is_zero: bool| async move {
                if range.is_empty() || (is_zero && fresh) {
                    return Ok(None);
                }
                let length = range.end - range.start;
                if !is_zero {
                    return self.old_content(range).await.map(|b| Some(Margin::Old(b)));
                }
                if left_out(&range, is_zero) {
                    storage::event(file, storage::Event::CowWrite);
                    storage::zero_range(data, queue, at(range.start), length).await?;
                    return Ok(None);
                }
                Ok(Some(Margin::Zeroes))
            };
            let (before, after) = storage::join(
                margin(head.clone(), head_is_zero),
                margin(tail.clone(), tail_is_zero),
            )
            .await;
            let (mut before, mut after) = (before?, after?);
            let whole = surround(
                before.as_mut().map(|b| (b, head.end - head.start)),
                iov,
                after.as_mut().map(|b| (b, tail.end - tail.start)),
            );
            storage::event(file, storage::Event::WriteAio);
            storage::write(data, queue, written.start, &whole).await?;
        }
        if new.is_some() {
            image.arrived(&written);
        }
        Ok(())
    }

    /// The current content of a range, in a buffer that may be longer.
    async fn old_content(&self, range: Range<u64>) -> Result<PoolBuffer> {
        let length = (range.end - range.start) as usize;
        let mut buffer = self.queue.buffer(length);
        // SAFETY: the buffer lives until the read, awaited here, has ended.
        #[allow(unsafe_code)]
        let iov = unsafe { buffer.iov() }.slice(0, length);
        self.read(range.start, &iov).await?;
        Ok(buffer)
    }

    /// Fills `iov` with the current content from `start` on, also behind the end of the disk.
    async fn read(&self, start: u64, iov: &Iov) -> Result<()> {
        let (image, queue) = (self.image, self.queue);
        let mut at = 0;
        while at < iov.len() {
            let guest = start + at as u64;
            let extent = image.extent(queue, guest, (iov.len() - at) as u64).await?;
            let length = extent.length;
            let part = iov.slice(at, length as usize);
            match extent.mapping {
                Mapping::Zero { .. } => part.fill(0),
                Mapping::Unallocated { .. } => self.read_below(guest, &part).await?,
                Mapping::Data { host } => {
                    image.check_data(guest, host.0, length)?;
                    storage::event(&**image.file(), storage::Event::ReadAio);
                    storage::read(&**image.data(), queue, host.0, &part).await?;
                }
                Mapping::Compressed { data, skip } => {
                    let guest = guest - skip;
                    let data = image.check_compressed(guest, data)?;
                    let bytes = image.inflated(queue, guest, data).await?;
                    let skip = skip as usize;
                    part.copy_from(&bytes[skip..skip + part.len()]);
                }
            }
            at += length as usize;
        }
        Ok(())
    }

    /// Fills `iov` with what shows where the image maps nothing.
    async fn read_below(&self, offset: u64, iov: &Iov) -> Result<()> {
        let inside = match self.shown(offset, iov.len() as u64) {
            None => 0,
            Some((below, length)) => {
                storage::event(&**self.image.file(), storage::Event::ReadBackingAio);
                let part = iov.slice(0, length as usize);
                below.read(self.queue, offset, &part).await?;
                part.len()
            }
        };
        iov.slice(inside, iov.len() - inside).fill(0);
        Ok(())
    }
}

/// What is written beside the data of a request.
enum Margin {
    /// At most [`ZEROES_WRITTEN`] of them.
    Zeroes,
    Old(PoolBuffer),
}

/// The bytes of two margins around those of `iov`.
fn surround(
    before: Option<(&mut Margin, u64)>,
    iov: &Iov,
    after: Option<(&mut Margin, u64)>,
) -> Iov {
    let part = |(margin, length): (&mut Margin, u64)| match margin {
        Margin::Zeroes => storage::zeroes(length as usize),
        // SAFETY: the caller keeps the buffers until its use of the result has
        // ended.
        #[allow(unsafe_code)]
        Margin::Old(buffer) => unsafe { buffer.iov() }.slice(0, length as usize),
    };
    match (before.map(part), after.map(part)) {
        (None, None) => iov.clone(),
        (before, after) => {
            let parts = [before.as_ref(), Some(iov), after.as_ref()];
            Iov::concat(parts.into_iter().flatten())
        }
    }
}
