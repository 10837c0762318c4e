//! A chain of descriptors: the memory that one request consists of.
//!
//! A chain is read once and checked here. The iterator of `virtio-queue` reports a malformed
//! chain as one that has ended, and cannot begin at a given head, as recovery after a crash must.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use crate::memory::{Guest, OutsideMemory, Segment};

/// Descriptors of one request at most.
pub const MAX_DESCRIPTORS: usize = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR: u32 = 16;

/// What is wrong with a chain of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("a descriptor is outside of its table")]
    OutsideTable,
    #[error(transparent)]
    OutsideMemory(#[from] OutsideMemory),
    #[error("more than {MAX_DESCRIPTORS} descriptors, or a loop")]
    TooLong,
    #[error("more than 4 GiB in one request")]
    TooLarge,
    #[error("a nested indirect table, or one of incomplete descriptors")]
    Indirect,
    #[error("a readable descriptor behind a writable one")]
    Order,
    #[error("no writable byte for the status")]
    NoStatus,
}

/// The memory of one request.
#[derive(Debug, Default)]
pub struct Chain {
    /// The device reads these.
    pub readable: Vec<Segment>,
    /// The device writes these.
    pub writable: Vec<Segment>,
}

impl Chain {
    /// Reads the chain that begins with the descriptor `head` of a table of `size` descriptors.
    ///
    /// # Errors
    ///
    /// The chain is malformed, or not all of its memory exists.
    pub fn read(
        &mut self,
        guest: &Guest,
        table: GuestAddress,
        size: u16,
        head: u16,
    ) -> Result<(), Malformed> {
        self.readable.clear();
        self.writable.clear();
        let (mut table, mut size) = (table, u32::from(size));
        let mut at = u32::from(head);
        let mut indirect = false;
        let mut bytes = 0u32;
        for _ in 0..MAX_DESCRIPTORS {
            if at >= size {
                return Err(Malformed::OutsideTable);
            }
            let place = table.0.checked_add(u64::from(at) * u64::from(DESCRIPTOR));
            let place = GuestAddress(place.ok_or(OutsideMemory)?);
            let descriptor: Descriptor = guest.read_obj(place).map_err(|_| OutsideMemory)?;
            let length = descriptor.len();
            if descriptor.refers_to_indirect_table() {
                if indirect
                    || length == 0
                    || !length.is_multiple_of(DESCRIPTOR)
                    || descriptor.has_next()
                {
                    return Err(Malformed::Indirect);
                }
                indirect = true;
                (table, size, at) = (descriptor.addr(), length / DESCRIPTOR, 0);
                continue;
            }
            bytes = bytes.checked_add(length).ok_or(Malformed::TooLarge)?;
            self.add(guest, &descriptor)?;
            if !descriptor.has_next() {
                return Ok(());
            }
            at = descriptor.next().into();
        }
        Err(Malformed::TooLong)
    }

    /// The address of the request's status: the last writable byte.
    pub fn status(&self) -> Option<GuestAddress> {
        let last = self.writable.last()?;
        Some(GuestAddress(last.address.0 + u64::from(last.length - 1)))
    }

    fn add(&mut self, guest: &Guest, descriptor: &Descriptor) -> Result<(), Malformed> {
        let segment = Segment {
            address: descriptor.addr(),
            length: descriptor.len(),
        };
        if segment.length == 0 {
            return Ok(());
        }
        let length = segment.length as usize;
        if !guest.check_range(segment.address, length, Permissions::ReadWrite) {
            return Err(OutsideMemory.into());
        }
        match descriptor.is_write_only() {
            true => self.writable.push(segment),
            false if self.writable.is_empty() => self.readable.push(segment),
            false => return Err(Malformed::Order),
        }
        Ok(())
    }
}

/// Bytes of all `segments` of one chain: less than 4 GiB.
pub fn length(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.length as usize).sum()
}
