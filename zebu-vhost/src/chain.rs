//! A chain of descriptors: the memory that one request consists of.
//!
//! Read once and checked here. `virtio-queue` walks chains too, but says of a
//! broken one no more than that it has ended, and cannot begin at a head that
//! is taken up again after a crash.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use crate::memory::Guest;

/// Descriptors of one request at most.
pub const MAX_DESCRIPTORS: usize = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR: u32 = 16;

/// What is wrong with a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("a descriptor outside of its table")]
    OutsideTable,
    #[error("memory that the guest does not have")]
    OutsideMemory,
    #[error("more than {MAX_DESCRIPTORS} descriptors, or a chain that loops")]
    TooLong,
    #[error("more than 4 GiB")]
    TooLarge,
    #[error("an indirect table in an indirect table, or one of no whole descriptors")]
    Indirect,
    #[error("memory to read from behind memory to write to")]
    Order,
    #[error("no room for the status")]
    NoStatus,
}

/// A range of guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub address: GuestAddress,
    pub length: u32,
}

/// The memory of one request.
#[derive(Debug, Default)]
pub struct Chain {
    /// What the guest has written for the device.
    pub readable: Vec<Segment>,
    /// What the device writes to.
    pub writable: Vec<Segment>,
}

impl Chain {
    /// Replaces what is here by the chain that begins with the descriptor
    /// `head` of a table of `size` descriptors. All of its memory exists.
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
            let place = GuestAddress(place.ok_or(Malformed::OutsideMemory)?);
            let descriptor: Descriptor = guest
                .read_obj(place)
                .map_err(|_| Malformed::OutsideMemory)?;
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

    /// Where the status of the request goes: the last byte.
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
            return Err(Malformed::OutsideMemory);
        }
        match descriptor.is_write_only() {
            true => self.writable.push(segment),
            false if self.writable.is_empty() => self.readable.push(segment),
            false => return Err(Malformed::Order),
        }
        Ok(())
    }
}

/// Bytes of all `segments`: less than 4 GiB, as was checked.
pub fn length(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.length as usize).sum()
}
