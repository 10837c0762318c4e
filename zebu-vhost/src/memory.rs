//! The guest's memory as the front end shares it.
//!
//! The server's only `unsafe` code: memory of the guest becomes an [`Iov`].
//!
//! The guest may change its memory at any time, also while a request uses it.
//! Descriptors and headers are therefore read once (`chain.rs`). Data are only copied, by the
//! kernel or here, and no reference to them is made ([`Iov::shared`]). A guest that changes them
//! meanwhile damages its own data only.
#![allow(unsafe_code)]

use std::fs::File;
use std::sync::Arc;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
};
use zebu::storage::Iov;

/// A range of guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub address: GuestAddress,
    pub length: u32,
}

/// A range is not in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memory that the guest does not have")]
pub struct OutsideMemory;

/// Mapped memory, by the guest's addresses.
pub type Guest = GuestMemoryMmap<()>;

/// Regions at a time: one message may carry descriptors of this many.
pub const MAX_REGIONS: u64 = 32;

/// The guest's memory, and the front end's addresses of it.
#[derive(Clone, Default)]
pub struct Memory {
    guest: Arc<Guest>,
    places: Vec<Place>,
}

/// The addresses of a region. The front end gives its own for the rings.
#[derive(Clone, Copy)]
struct Place {
    user: u64,
    guest: u64,
    length: u64,
}

/// Why memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("a region of memory is longer than its file")]
    OutsideFile,
    #[error("a region of memory is behind the end of the address space")]
    Address,
    #[error("more than {MAX_REGIONS} regions of memory")]
    TooMany,
    #[error("a region of memory cannot be mapped: {0}")]
    Map(vm_memory::mmap::MmapRegionError),
    #[error("regions of memory: {0}")]
    Regions(vm_memory::GuestRegionCollectionError),
}

impl Memory {
    /// The memory, which stays mapped as long as the `Arc` exists.
    pub fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    /// This memory with one region more.
    ///
    /// # Errors
    ///
    /// There are too many regions, they overlap, or this one cannot be mapped.
    pub fn with(&self, region: &VhostUserMemoryRegion, file: File) -> Result<Self, MemoryError> {
        if self.places.len() as u64 >= MAX_REGIONS {
            return Err(MemoryError::TooMany);
        }
        let length = region.memory_size;
        let metadata = file.metadata().map_err(|_| MemoryError::OutsideFile)?;
        let end = region.mmap_offset.checked_add(length);
        // Access behind the end of a file raises SIGBUS.
        if metadata.is_file() && end.is_none_or(|end| end > metadata.len()) {
            return Err(MemoryError::OutsideFile);
        }
        let size = usize::try_from(length).map_err(|_| MemoryError::Address)?;
        let offset = FileOffset::new(file, region.mmap_offset);
        let mapping = MmapRegion::from_file(offset, size).map_err(MemoryError::Map)?;
        let mapped = GuestRegionMmap::new(mapping, GuestAddress(region.guest_phys_addr))
            .ok_or(MemoryError::Address)?;
        let guest = self.guest.insert_region(Arc::new(mapped));
        let mut places = self.places.clone();
        places.push(Place {
            user: region.user_addr,
            guest: region.guest_phys_addr,
            length,
        });
        Ok(Memory {
            guest: Arc::new(guest.map_err(MemoryError::Regions)?),
            places,
        })
    }

    /// This memory without a region.
    ///
    /// # Errors
    ///
    /// There is no such region.
    pub fn without(&self, guest: u64, user: u64, length: u64) -> Result<Self, MemoryError> {
        let (left, _) = self
            .guest
            .remove_region(GuestAddress(guest), length)
            .map_err(MemoryError::Regions)?;
        let same = |place: &Place| place.guest == guest && place.user == user;
        let mut places = self.places.clone();
        places.retain(|place| !same(place));
        Ok(Memory {
            guest: Arc::new(left),
            places,
        })
    }

    /// The guest's address for an address of the front end.
    pub fn translate(&self, user: u64) -> Option<GuestAddress> {
        self.places.iter().find_map(|place| {
            let at = user.checked_sub(place.user)?;
            (at < place.length).then(|| GuestAddress(place.guest + at))
        })
    }
}

/// The memory of `segments` from the byte `skip` on, `length` bytes.
///
/// The caller must keep `guest` until the `Iov` is dropped.
///
/// # Errors
///
/// A segment is not in the memory of `guest`.
pub fn iov(
    guest: &Guest,
    segments: &[Segment],
    skip: usize,
    length: usize,
) -> Result<Iov, OutsideMemory> {
    let (mut skip, mut left) = (skip, length);
    let mut pieces: Vec<(*mut u8, usize)> = Vec::with_capacity(segments.len());
    for segment in segments {
        for slice in guest.get_slices(segment.address, segment.length as usize) {
            let slice = slice.map_err(|_| OutsideMemory)?;
            let passed = skip.min(slice.len());
            skip -= passed;
            let used = (slice.len() - passed).min(left);
            left -= used;
            if used > 0 {
                let start = slice.ptr_guard_mut().as_ptr();
                // Within the slice: `passed` is less than its length.
                pieces.push((start.wrapping_add(passed), used));
            }
        }
    }
    debug_assert_eq!(left, 0);
    // SAFETY: each piece is in a mapping of `guest`, readable and writable. It stays mapped as long
    // as `guest` exists, which callers keep. The guest may write there, so it is marked.
    Ok(unsafe { Iov::from_segments(&pieces) }.shared())
}
