//! Memory of buffers in huge pages.
//!
//! The kernel gives a device the memory of a request as a list of physically contiguous pieces, and
//! each piece costs time: in ordinary pages 256 for 1 MiB. So the buffers of a queue are cut out of
//! regions of one huge page each (`MADV_HUGEPAGE`, madvise(2)), which are one piece. Without huge
//! pages a region is ordinary memory.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a huge page of x86-64 and, with pages of 4 KiB, of aarch64.
pub const HUGE: usize = 2 << 20;

/// A mapping of huge pages, zero at first.
#[derive(Debug)]
pub struct Region {
    memory: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is used only by the owners of its parts.
unsafe impl Send for Region {}
// SAFETY: a region itself is not used to read or write.
unsafe impl Sync for Region {}

impl Region {
    /// At least `length` bytes, from a multiple of [`HUGE`] on.
    ///
    /// # Errors
    /// There is no memory, or the length cannot be rounded up.
    pub(super) fn new(length: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(length, HUGE).map_err(|_| no_memory())?;
        let layout = layout.pad_to_align();
        Ok(Region {
            memory: map(layout)?,
            length: layout.size(),
        })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.memory
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: all that was cut out of it is gone.
        unsafe { unmap(self.memory, self.length) };
    }
}

/// Cuts regions into pieces.
#[derive(Debug, Default)]
pub struct Slab {
    /// The region that pieces are cut out of, and how much of it was.
    current: Option<(Arc<Region>, usize)>,
}

impl Slab {
    /// A zeroed piece of `length` bytes, at most [`HUGE`], and the region that it is part of.
    /// Pieces do not overlap.
    ///
    /// # Errors
    /// There is no memory.
    pub(super) fn cut(&mut self, length: usize) -> io::Result<(NonNull<u8>, Arc<Region>)> {
        assert!(length <= HUGE, "a piece of a huge page");
        let fits = |(_, used): &(Arc<Region>, usize)| HUGE - used >= length;
        let (region, used) = match self.current.take().filter(fits) {
            Some(current) => current,
            None => (Arc::new(Region::new(HUGE)?), 0),
        };
        // SAFETY: it is inside the region.
        let piece = unsafe { region.start().add(used) };
        self.current = Some((region.clone(), used + length));
        Ok((piece, region))
    }
}

/// New memory, zero, that starts at a multiple of [`HUGE`], which its length is one of, too.
#[cfg(not(miri))]
fn map(layout: Layout) -> io::Result<NonNull<u8>> {
    let length = layout.size();
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // Mapped with a margin for the alignment, which is unmapped again.
    // SAFETY: a new mapping has no other user.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length + HUGE, access, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(no_memory());
    }
    let before = start.cast::<u8>().align_offset(HUGE);
    // SAFETY: `length` bytes from `before` on are inside the mapping; the rest of it is
    // unused.
    unsafe {
        let memory = start.byte_add(before);
        if before > 0 {
            libc::munmap(start, before);
        }
        libc::munmap(memory.byte_add(length), HUGE - before);
        // Without huge pages it is ordinary memory.
        libc::madvise(memory, length, libc::MADV_HUGEPAGE);
        Ok(NonNull::new_unchecked(memory.cast()))
    }
}

/// # Safety
/// What [`map`] returned for that length, used no more.
#[cfg(not(miri))]
unsafe fn unmap(memory: NonNull<u8>, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(memory.as_ptr().cast(), length) };
}

// Miri has no madvise and unmaps only what was mapped at once.
#[cfg(miri)]
fn map(layout: Layout) -> io::Result<NonNull<u8>> {
    // SAFETY: the length is not zero.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    NonNull::new(memory).ok_or_else(no_memory)
}

#[cfg(miri)]
unsafe fn unmap(memory: NonNull<u8>, length: usize) {
    let layout = Layout::from_size_align(length, HUGE).expect("as it was mapped");
    // SAFETY: the caller's promise.
    unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
}

/// There is no memory.
pub fn no_memory() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

#[cfg(test)]
mod tests {
    //! Guards against pieces that share memory, and against pieces whose region was freed.
    use super::*;

    #[test]
    fn pieces_are_disjoint_and_keep_their_regions() {
        let mut slab = Slab::default();
        let mut pieces = Vec::new();
        for i in 0..if cfg!(miri) { 6 } else { 60 } {
            let length = 4096 << (i % 10);
            let (piece, region) = slab.cut(length).unwrap();
            assert_eq!(piece.as_ptr() as usize % 4096, 0);
            pieces.push((piece, length, i as u8 + 1, region));
            // SAFETY: the piece is ours, and has that length.
            let bytes = unsafe { std::slice::from_raw_parts_mut(piece.as_ptr(), length) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(i as u8 + 1);
        }
        drop(slab);
        while let Some((piece, length, mark, region)) = pieces.pop() {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(piece.as_ptr(), length) };
            assert!(bytes.iter().all(|byte| *byte == mark));
            drop(region);
        }
    }
}
