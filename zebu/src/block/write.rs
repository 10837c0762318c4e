//! Changing a device: write, zero, discard, flush.

use super::device::Device;
use crate::storage::{Buffer, Iov, Queue};
use crate::{Error, Result};

/// What becomes of the space of a range that is written with zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Zeroing {
    /// It stays allocated.
    #[default]
    Keep,
    /// It may be freed.
    Unmap,
}

impl Device {
    /// Writes `iov` to the disk from `offset` on. Durable after the next
    /// [`Device::flush`]; when it returns, later reads see it.
    pub async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let _ = (queue, offset, iov);
        Err(Error::Refused("not yet".into()))
    }

    /// Writes whole clusters compressed: `offset` at a cluster boundary, and
    /// the length of `iov` whole clusters unless the range ends with the disk.
    /// What does not shrink is written as it is. A cluster that is allocated
    /// uncompressed already is an error, as in QEMU.
    pub async fn write_compressed(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let _ = (queue, offset, iov);
        Err(Error::Refused("not yet".into()))
    }

    /// Stores clusters that are compressed already: for each, its offset at a
    /// cluster boundary and where its stream is in `data`. A cluster that is
    /// allocated uncompressed already is an error.
    pub async fn write_packed_many(
        &self,
        queue: &Queue,
        clusters: &[(u64, std::ops::Range<usize>)],
        data: &[u8],
    ) -> Result<()> {
        let _ = (queue, clusters, data);
        Err(Error::Refused("not yet".into()))
    }

    /// Makes a range read as zeroes, without writing them where the format can
    /// say so.
    pub async fn write_zeroes(
        &self,
        queue: &Queue,
        offset: u64,
        length: u64,
        zeroing: Zeroing,
    ) -> Result<()> {
        let _ = (queue, offset, length, zeroing);
        Err(Error::Refused("not yet".into()))
    }

    /// Tells that the content of a range is not needed any more. Whole
    /// clusters inside it are freed and read as zeroes from now on; the rest
    /// of the range stays as it is. Does nothing unless the device was opened
    /// with [`OpenOptions::discard`](super::OpenOptions::discard).
    pub async fn discard(&self, queue: &Queue, offset: u64, length: u64) -> Result<()> {
        let _ = (queue, offset, length);
        Err(Error::Refused("not yet".into()))
    }

    /// Makes every change durable that was completed before the call.
    pub async fn flush(&self, queue: &Queue) -> Result<()> {
        let _ = queue;
        Err(Error::Refused("not yet".into()))
    }

    /// Makes everything durable and ends the use of the device. Dropped
    /// without it, changes since the last flush may be lost and clusters leak,
    /// but the image stays consistent. Does nothing for a device that is not
    /// open for writing.
    pub async fn close(self, queue: &Queue) -> Result<()> {
        let _ = queue;
        Ok(())
    }

    /// Writes the first `length` bytes of a buffer that is given back.
    pub async fn write_buffer(
        &self,
        queue: &Queue,
        offset: u64,
        mut buffer: Buffer,
        length: usize,
    ) -> (Buffer, Result<()>) {
        // SAFETY: the buffer lives in this future until the write has ended;
        // a dropped future waits for that before it drops the buffer.
        #[allow(unsafe_code)]
        let iov = unsafe { buffer.iov() }.slice(0, length);
        let result = self.write(queue, offset, &iov).await;
        (buffer, result)
    }

    /// Writes `bytes` to the disk from `offset` on, and waits for it.
    pub fn write_blocking(&self, queue: &Queue, offset: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: `bytes` is borrowed until the write, waited for here, has
        // ended; a write only reads the memory.
        #[allow(unsafe_code)]
        let iov = unsafe { Iov::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) };
        queue.block_on(self.write(queue, offset, &iov))
    }
}
