//! The state of a virtual machine, which qcow2 keeps past the end of the disk.

use super::device::{Device, LayerImage};
use crate::storage::{Buffer, Queue};
use crate::{Error, Result};

impl Device {
    /// Reads the top image's VM state from `position` on into the first
    /// `length` bytes of a buffer that is given back. What was never saved
    /// reads as what the backing file has there, or zeroes.
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
        let iov = unsafe { buffer.iov() }.slice(0, length);
        let _stay = self.enter();
        let result = self.read_mapped(queue, offset, &iov).await;
        (buffer, result)
    }

    /// The guest offset where `position` in the VM state is.
    fn vm_state_at(&self, position: u64, length: u64) -> Result<u64> {
        let LayerImage::Qcow2(image) = &self.top().image else {
            let text = "raw images have no VM state";
            return Err(Error::Refused(text.into()));
        };
        let start = image.vm_state_offset();
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
