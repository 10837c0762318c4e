//! Changing a device: write, flush, close.
//!
//! What is mapped to a cluster of its own is written in place, in parts like a read. The rest is
//! filled: host clusters are allocated, the old content around the write is read through the chain,
//! both are written, and then the clusters are mapped. `drivers/qcow2/change.rs` orders such
//! requests.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use super::DetectZeroes;
use super::device::Device;
use crate::drivers::qcow2::{Allocation, Announced, Change, Fill, Image, NextWrite, Target};
use crate::drivers::{Mapping, Raw};
use crate::format::HostOffset;
use crate::storage::{self, Iov, OwnedBuffer, PoolBuffer, Queue, Step};
use crate::{Error, Result};

/// Zeroes beside the data of a write are written with them up to so many bytes. More are left to
/// the file system.
const ZEROES_WRITTEN: u64 = 64 << 10;
/// Up to so many bytes, a write between old content on both sides is copied into it: one read and
/// one write, instead of two and one.
const COPIED: usize = 64 << 10;

/// What becomes of the space of a range that is written with zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Zeroing {
    /// It stays allocated.
    #[default]
    Keep,
    /// It may be freed, if the device was opened with
    /// [`OpenOptions::discard`](super::OpenOptions::discard).
    Unmap,
}

/// What a write goes to.
pub(super) enum Top<'a> {
    Raw(&'a Raw),
    Qcow2(&'a Image),
}

impl Device {
    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.write.is_some()
    }

    /// The top image, for a change of a range.
    pub(super) fn top_for_writing(&self, offset: u64, length: u64) -> Result<Top<'_>> {
        if self.write.is_none() {
            // The error number of a file that is open for reading.
            return Err(Error::os(libc::EPERM));
        }
        self.check_range(offset, length)?;
        let image = &self.top().image;
        match image.as_qcow2() {
            Some(image) => Ok(Top::Qcow2(image)),
            // Formats that are only read are not opened for writing.
            None => (image.as_raw().map(Top::Raw)).ok_or_else(|| Error::os(libc::ENOTSUP)),
        }
    }

    /// Writes `iov` to the disk from `offset` on. Reads that begin after it has returned see it. It
    /// is durable after the next [`Device::flush`], or at once with a write-through
    /// [`CacheMode`](crate::CacheMode).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the range is not inside the disk. `EPERM` if the device is not open
    /// for writing. [`Error::Corrupt`] if metadata are damaged, after which the image is not
    /// written any more. [`Error::Io`] of a file, for example `ENOSPC`. The write may be repeated
    /// then; until it succeeds, the content of the range is old, new or mixed.
    pub async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let length = iov.len() as u64;
        let top = self.top_for_writing(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        match self.detect_zeroes() {
            DetectZeroes::Off => {}
            _ if !iov.is_zero() => {}
            detect => {
                let zeroing = match detect {
                    DetectZeroes::Unmap => Zeroing::Unmap,
                    _ => Zeroing::Keep,
                };
                return Box::pin(self.write_zeroes(queue, offset, length, zeroing)).await;
            }
        }
        match top {
            Top::Raw(raw) if raw.is_guarded(offset) => {
                Box::pin(raw.write_start(queue, offset, iov)).await
            }
            Top::Raw(raw) => {
                raw.event(storage::Event::WriteAio);
                Ok(storage::write(&**raw.storage(), queue, raw.offset() + offset, iov).await?)
            }
            Top::Qcow2(image) => {
                let result = self.write_image(queue, image, offset, iov).await;
                self.changed(queue, image, result).await
            }
        }
    }

    /// Writes what is mapped already, and fills the rest.
    pub(super) async fn write_image(
        &self,
        queue: &Queue,
        image: &Image,
        offset: u64,
        iov: &Iov,
    ) -> Result<()> {
        let range = offset..offset + iov.len() as u64;
        let announced = image.announce(queue, range).await?;
        let _stay = image.enter();
        let total = iov.len() as u64;
        // Most writes go to one place, and need no plan.
        let first = image.target(queue, offset, total).await?;
        if let Target::InPlace { host, length } = first
            && length == total
        {
            image.prepare_data_write(queue, host, length).await?;
            storage::event(&**image.file(), storage::Event::WriteAio);
            return Ok(storage::write(&**image.data(), queue, host.0, iov).await?);
        }
        // Boxed: this future is ten times as large as the rest, and futures are moved as a whole.
        Box::pin(self.write_by_parts(queue, image, announced, offset, iov)).await
    }

    /// [`Device::write_image`] for any range. The caller has entered the epoch.
    async fn write_by_parts(
        &self,
        queue: &Queue,
        image: &Image,
        announced: Announced<'_>,
        offset: u64,
        iov: &Iov,
    ) -> Result<()> {
        let total = iov.len() as u64;
        let mut parts: Vec<(u64, usize, usize)> = Vec::new();
        let mut changes: Vec<(u64, usize, usize)> = Vec::new();
        let mut at = 0;
        while at < iov.len() {
            let guest = offset + at as u64;
            let length = match image.target(queue, guest, total - at as u64).await? {
                Target::InPlace { host, length } => {
                    image.prepare_data_write(queue, host, length).await?;
                    parts.push((host.0, at, length as usize));
                    length
                }
                Target::Change { length } => {
                    // Neighbours become one change, since its range is held as a whole.
                    match changes.last_mut() {
                        Some((_, start, before)) if *start + *before == at => {
                            *before += length as usize;
                        }
                        _ => changes.push((guest, at, length as usize)),
                    }
                    length
                }
            };
            at += length as usize;
        }
        let in_place = write_parts(queue, image, parts, iov);
        if changes.is_empty() {
            return in_place.await;
        }
        let change = async {
            for (guest, at, length) in changes {
                let change = announced.change(queue, guest, length as u64).await?;
                self.change(queue, image, change, guest, iov.slice(at, length))
                    .await?;
            }
            Ok(())
        };
        let (in_place, change) = storage::join(in_place, change).await;
        in_place.and(change)
    }

    /// Writes a range of which a part has no cluster of its own yet.
    async fn change(
        &self,
        queue: &Queue,
        image: &Image,
        change: Change<'_>,
        guest: u64,
        iov: Iov,
    ) -> Result<()> {
        let mut at = 0;
        while at < iov.len() {
            let (from, left) = (guest + at as u64, iov.len() - at);
            let done = match change.next_write(queue, from, left as u64).await? {
                NextWrite::InPlace { host, length } => {
                    image.prepare_data_write(queue, host, length).await?;
                    let part = iov.slice(at, length as usize);
                    storage::event(&**image.file(), storage::Event::WriteAio);
                    storage::write(&**image.data(), queue, host.0, &part).await?;
                    length
                }
                NextWrite::Fill(filling) => {
                    let write = async |fill: &Fill, host, new: Option<&Allocation<'_>>| {
                        let part = iov.slice(at, fill.length as usize);
                        self.fill(queue, image, fill, host, new, &part).await
                    };
                    filling.fill(write).await?
                }
            };
            at += done as usize;
        }
        Ok(())
    }

    /// Writes `iov`, and what is kept of the old content around it, to host clusters from `host`
    /// on, which may be `new`.
    async fn fill(
        &self,
        queue: &Queue,
        image: &Image,
        fill: &Fill,
        host: HostOffset,
        new: Option<&Allocation<'_>>,
        iov: &Iov,
    ) -> Result<()> {
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
        let head_is_zero = self.reads_as_zero(queue, head.clone()).await?;
        let tail_is_zero = self.reads_as_zero(queue, tail.clone()).await?;
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
            let mut all = self.old_content(queue, fill.head..fill.tail).await?;
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
                    return self
                        .old_content(queue, range)
                        .await
                        .map(|b| Some(Margin::Old(b)));
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
    async fn old_content(&self, queue: &Queue, range: Range<u64>) -> Result<PoolBuffer> {
        let length = (range.end - range.start) as usize;
        let mut buffer = queue.buffer(length);
        // SAFETY: the buffer lives until the read, awaited here, has ended.
        #[allow(unsafe_code)]
        let iov = unsafe { buffer.iov() }.slice(0, length);
        self.read_mapped(queue, range.start, &iov).await?;
        Ok(buffer)
    }

    /// Whether a range reads as zeroes by the metadata alone. It may reach past the end of the
    /// disk.
    pub(super) async fn reads_as_zero(&self, queue: &Queue, range: Range<u64>) -> Result<bool> {
        let mut at = range.start;
        while at < range.end {
            let (_, extent) = self.resolve(queue, at, range.end - at).await?;
            match extent.mapping {
                Mapping::Zero { .. } | Mapping::Unallocated { .. } => at += extent.length,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Makes every change durable that had ended before the call.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a file cannot be flushed. Data may be lost then: from now on a qcow2 image
    /// refuses writes, and every flush of a raw image fails unless its I/O is direct.
    pub async fn flush(&self, queue: &Queue) -> Result<()> {
        if self.write.is_none() {
            return Ok(());
        }
        match self.top_for_writing(0, 0)? {
            Top::Raw(raw) => raw.flush(queue).await,
            Top::Qcow2(image) => image.flush(queue).await,
        }
    }

    /// Makes everything durable and ends the use of the device. A device that is dropped instead
    /// leaves a consistent image, but changes since the last flush may be lost, and clusters may
    /// leak. Does nothing for a device that is not open for writing.
    ///
    /// # Errors
    ///
    /// Those of [`Device::flush`]: the first one. All images are closed nevertheless.
    pub async fn close(mut self, queue: &Queue) -> Result<()> {
        let mut result = self.close_top(queue).await;
        let nested = std::mem::take(&mut self.nested);
        drop(self);
        for device in nested {
            let closed = match Arc::try_unwrap(device) {
                Ok(device) => Box::pin(device.close(queue)).await,
                // A forgotten request, or a file that is kept for its lock, still refers to it.
                Err(device) => device.flush(queue).await,
            };
            result = result.and(closed);
        }
        result
    }

    async fn close_top(&mut self, queue: &Queue) -> Result<()> {
        self.flush(queue).await?;
        self.wait_for_tasks().await;
        match self.top().as_qcow2() {
            Some(_) => self.own_image()?.close(queue).await,
            None => Ok(()),
        }
    }

    /// After a change: the image is marked if it was found to be corrupt, and the mapping is made
    /// durable in a write-through mode.
    pub(super) async fn changed(
        &self,
        queue: &Queue,
        image: &Image,
        result: Result<()>,
    ) -> Result<()> {
        if result.as_ref().is_err_and(Error::shows_corruption) {
            image.mark_corrupt(queue).await?;
        }
        result?;
        match image.file().cache_mode().is_write_through() {
            true => image.flush(queue).await,
            false => Ok(()),
        }
    }

    /// Writes the first `length` bytes of a buffer, which comes back with the result.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`]. [`Error::Refused`] if `length` exceeds the buffer.
    pub async fn write_buffer<B: OwnedBuffer>(
        &self,
        queue: &Queue,
        offset: u64,
        mut buffer: B,
        length: usize,
    ) -> (B, Result<()>) {
        // SAFETY: the buffer lives in this future until the write has ended;
        // a dropped future waits for that before it drops the buffer.
        #[allow(unsafe_code)]
        let iov = unsafe { buffer.first(length) };
        let result = match iov {
            Ok(iov) => self.write(queue, offset, &iov).await,
            Err(e) => Err(e),
        };
        (buffer, result)
    }

    /// Writes `buffers`, one after the other, to the disk from `offset` on. Blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn write_vectored_blocking(
        &self,
        queue: &Queue,
        offset: u64,
        buffers: &[IoSlice<'_>],
    ) -> Result<()> {
        let segment = |b: &IoSlice<'_>| (b.as_ptr().cast_mut(), b.len());
        let segments: Vec<_> = buffers.iter().map(segment).collect();
        // SAFETY: `buffers` are borrowed until the write, waited for here, has ended; a write
        // only reads the memory.
        #[allow(unsafe_code)]
        let iov = unsafe { Iov::from_segments(&segments) };
        queue.block_on(self.write(queue, offset, &iov))
    }

    /// Writes `bytes` to the disk from `offset` on. Blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Device::write`].
    ///
    /// # Panics
    ///
    /// Within a future of the same queue: see [`Queue::block_on`].
    pub fn write_blocking(&self, queue: &Queue, offset: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: `bytes` is borrowed until the write, waited for here, has
        // ended; a write only reads the memory.
        #[allow(unsafe_code)]
        let iov = unsafe { Iov::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) };
        queue.block_on(self.write(queue, offset, &iov))
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

/// Writes parts of `iov` (host offset, place, length) where they belong, by
/// host offset, neighbours together, several at once.
async fn write_parts(
    queue: &Queue,
    image: &Image,
    mut parts: Vec<(u64, usize, usize)>,
    iov: &Iov,
) -> Result<()> {
    parts.sort_unstable();
    let parts_at_once = queue.options().parts;
    let mut flight = storage::Writings::new(&**image.data(), queue, parts_at_once);
    let mut rest = &parts[..];
    while let Some(&(host, _, first)) = rest.first() {
        let mut end = host + first as u64;
        let count = 1 + rest[1..]
            .iter()
            .take_while(|(next, _, length)| {
                let follows = *next == end;
                end = next + *length as u64;
                follows
            })
            .count();
        let (run, left) = rest.split_at(count);
        rest = left;
        storage::event(&**image.file(), storage::Event::WriteAio);
        let part = iov.gather(run.iter().map(|(_, at, length)| (*at, *length)));
        flight.write(host, part).await.map_err(|(_, e)| e)?;
    }
    flight.finish().await.map_err(|(_, e)| e)?;
    Ok(())
}
