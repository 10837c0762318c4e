//! The state of a virtual machine, which an image keeps past the end of the disk.

use super::device::Device;
use super::read::over;
use crate::storage::{self, Buffer, Iov, OwnedBuffer, Queue};
use crate::{Error, Result};

impl Device {
    /// Reads the top image's VM state from `position` on into the first `length` bytes of a buffer,
    /// which comes back with the result. What was never saved reads as zeroes.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the format has no VM state, or if `length` exceeds the buffer. Those of
    /// [`Device::read`].
    pub async fn read_vm_state(
        &self,
        queue: &Queue,
        position: u64,
        mut buffer: Buffer,
        length: usize,
    ) -> (Buffer, Result<()>) {
        let offset = match self.vm_state_at(position, length as u64) {
            Ok(offset) => offset,
            Err(error) => return (buffer, Err(error)),
        };
        // SAFETY: the buffer lives in this future until the read has ended;
        // a dropped future waits for that before it drops the buffer.
        #[allow(unsafe_code)]
        let iov = match unsafe { buffer.first(length) } {
            Ok(iov) => iov,
            Err(error) => return (buffer, Err(error)),
        };
        storage::event(self.top().file(), storage::Event::VmstateLoad);
        let _stay = self.enter();
        let result = self.chain().read_mapped(queue, offset, &iov).await;
        (buffer, result)
    }

    /// Writes the first `length` bytes of a buffer, which comes back with the result, to the top
    /// image's VM state from `position` on. Only a snapshot that is taken afterwards keeps it. A
    /// change of the disk's size drops it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the format has no VM state, or if `length` exceeds the buffer. Those of
    /// [`Device::write`].
    pub async fn write_vm_state(
        &mut self,
        queue: &Queue,
        position: u64,
        mut buffer: Buffer,
        length: usize,
    ) -> (Buffer, Result<()>) {
        // SAFETY: the buffer lives in this future until the write has ended;
        // a dropped future waits for that before it drops the buffer.
        #[allow(unsafe_code)]
        let result = match unsafe { buffer.first(length) } {
            Ok(iov) => self.save_vm_state(queue, position, &iov).await,
            Err(error) => Err(error),
        };
        (buffer, result)
    }

    async fn save_vm_state(&mut self, queue: &Queue, position: u64, iov: &Iov) -> Result<()> {
        self.top_for_writing(0, 0)?;
        let offset = self.vm_state_at(position, iov.len() as u64)?;
        let (image, below) = self.top_mut();
        image.write_vm_state(over(queue, &below), offset, iov).await
    }

    /// The guest offset where `position` in the VM state is.
    fn vm_state_at(&self, position: u64, length: u64) -> Result<u64> {
        let Some(start) = self.top().vm_state_offset() else {
            let format = self.top().format().name();
            return Err(Error::Refused(format!("{format} images have no VM state")));
        };
        self.check_range(0, 0)?;
        start
            .checked_add(position)
            .filter(|at| at.checked_add(length).is_some_and(|end| end >> 63 == 0))
            .ok_or(Error::OutOfRange {
                offset: position,
                length,
                size: (1 << 63) - start.min(1 << 63),
            })
    }
}
