//! The memory of requests: aligned buffers, and [`Iov`], the list of memory segments that a request
//! reads into or writes from.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use super::slab::{HUGE, Region, Slab, no_memory};
use crate::{Error, Result};

/// The alignment of every [`Buffer`] in bytes, which is enough for `O_DIRECT` on any device.
pub const BUFFER_ALIGN: usize = 4096;

/// Owned, page-aligned memory of a fixed length. Large ones, and those of a queue's pool, are
/// backed by huge pages where the kernel has them.
pub struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
    /// The region that it is part of; None: it is allocated by itself.
    region: Option<Arc<Region>>,
}

// SAFETY: a Buffer owns its memory, as a Box<[u8]> does.
unsafe impl Send for Buffer {}
// SAFETY: shared access to a Buffer only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zeroed bytes, in huge pages if they fill at least half of one.
    ///
    /// # Panics
    /// If `len` is not below `isize::MAX`. Aborts if there is no memory: for lengths that somebody
    /// else chooses there is [`Buffer::try_new`].
    pub fn new(len: usize) -> Self {
        Self::try_new(len).unwrap_or_else(|_| handle_alloc_error(Self::layout(len)))
    }

    /// As [`Buffer::new`].
    ///
    /// # Errors
    /// `ENOMEM` if there is no memory, or no address space, for so many bytes.
    pub fn try_new(len: usize) -> io::Result<Self> {
        if len >= HUGE / 2 {
            let region = Region::new(len)?;
            return Ok(Buffer {
                ptr: region.start(),
                len,
                region: Some(Arc::new(region)),
            });
        }
        let ptr = match len {
            0 => NonNull::<u8>::dangling(),
            _ => {
                // SAFETY: the layout has a size above zero.
                let ptr = unsafe { alloc_zeroed(Self::layout(len)) };
                NonNull::new(ptr).ok_or_else(no_memory)?
            }
        };
        Ok(Buffer {
            ptr,
            len,
            region: None,
        })
    }

    /// `len` bytes of a slab, their content unspecified.
    pub(super) fn cut(slab: &mut Slab, len: usize) -> io::Result<Self> {
        let (ptr, region) = slab.cut(len)?;
        Ok(Buffer {
            ptr,
            len,
            region: Some(region),
        })
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, BUFFER_ALIGN).expect("a length below isize::MAX")
    }

    /// The whole buffer as an [`Iov`].
    ///
    /// # Safety
    /// The buffer must outlive every copy and slice of the result, and must
    /// not be touched by other means while a request uses them.
    pub unsafe fn iov(&mut self) -> Iov {
        Iov {
            kind: Kind::One(self.ptr.as_ptr()),
            len: self.len,
            shared: false,
        }
    }
}

/// Memory that a request can own until its end: a [`Buffer`], one of a queue's pool, or a `Vec`.
/// There are no others, since the memory of a forgotten request must stay valid, which borrowed
/// memory does not.
///
/// The memory of a `Vec` is copied if I/O is direct, which needs aligned memory.
pub trait OwnedBuffer: sealed::Sealed {
    /// The bytes.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// The first `length` bytes as an [`Iov`].
    ///
    /// # Errors
    /// [`Error::Refused`] if there are fewer.
    ///
    /// # Safety
    /// As [`Buffer::iov`].
    #[doc(hidden)]
    unsafe fn first(&mut self, length: usize) -> Result<Iov> {
        let bytes = self.bytes_mut();
        match length <= bytes.len() {
            // SAFETY: passed on.
            true => Ok(unsafe { Iov::from_raw(bytes.as_mut_ptr(), length) }),
            false => Err(Error::Refused(format!(
                "A request of {length} bytes does not fit into a buffer of {}",
                bytes.len()
            ))),
        }
    }
}

pub(super) mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Buffer {}
    impl Sealed for Vec<u8> {}
}

impl OwnedBuffer for Buffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl OwnedBuffer for Vec<u8> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl From<&[u8]> for Buffer {
    /// A copy.
    fn from(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::new(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
}

impl From<Vec<u8>> for Buffer {
    /// A copy: a buffer is aligned.
    fn from(bytes: Vec<u8>) -> Buffer {
        Buffer::from(&bytes[..])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.region.is_none() && self.len != 0 {
            // SAFETY: allocated in `new` with the same layout.
            unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.len)) }
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: ptr is valid for len bytes that were initialised: they were zero at first.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in deref, and `&mut self` makes it the only access.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// The memory segments of one request, in order of guest offset.
///
/// Cheap to clone and to slice. It is made of raw pointers: the functions that
/// create one are `unsafe` and their callers promise that the memory stays
/// valid and otherwise untouched until every request that uses the `Iov`, or a
/// slice of it, has completed. On that promise all its methods are safe. Memory that others may
/// change, as a guest does with its own, is marked by [`Iov::shared`].
#[derive(Clone)]
pub struct Iov {
    kind: Kind,
    len: usize,
    /// Others may change the bytes at any time. Then no reference to them is made: they are only
    /// copied, and nothing is concluded from what was read twice.
    shared: bool,
}

#[derive(Clone)]
enum Kind {
    One(*mut u8),
    /// Segments, and how many of their first bytes are left out.
    Many(Rc<[(*mut u8, usize)]>, usize),
}

impl Iov {
    /// One segment.
    ///
    /// # Safety
    /// `ptr` is valid for reads and writes of `len` bytes (reads alone if the
    /// `Iov` is only written from), and nothing else touches them, until all
    /// requests that use this value or a slice of it have completed.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> Self {
        Iov {
            kind: Kind::One(ptr),
            len,
            shared: false,
        }
    }

    /// Several segments.
    ///
    /// # Safety
    /// As [`Iov::from_raw`], for every segment.
    pub unsafe fn from_segments(segments: &[(*mut u8, usize)]) -> Self {
        if let [(ptr, len)] = segments {
            return Iov {
                kind: Kind::One(*ptr),
                len: *len,
                shared: false,
            };
        }
        Iov {
            len: segments.iter().map(|s| s.1).sum(),
            kind: Kind::Many(segments.into(), 0),
            shared: false,
        }
    }

    /// The same memory, which others may change or read at any time: a guest, another process, or
    /// a caller that is not trusted to leave it alone. Requests then make no reference to it, which
    /// costs a copy where data are inflated. What a request does with bytes that change meanwhile
    /// is not specified, but for that: nothing else is read or written.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// The segments of an array as `readv(2)` takes it.
    ///
    /// # Safety
    /// As [`Iov::from_raw`], for every segment.
    pub unsafe fn from_iovecs(iovecs: &[libc::iovec]) -> Self {
        let segments: Vec<_> = iovecs
            .iter()
            .map(|v| (v.iov_base.cast(), v.iov_len))
            .collect();
        // SAFETY: on the caller's promise.
        unsafe { Iov::from_segments(&segments) }
    }

    /// Bytes of all segments together.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part of `len` bytes that starts `start` bytes in.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn slice(&self, start: usize, len: usize) -> Iov {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.len),
            "slice {start}+{len} of an Iov of {} bytes",
            self.len
        );
        let kind = match &self.kind {
            // SAFETY: start lies within the segment, as just checked.
            Kind::One(ptr) => Kind::One(unsafe { ptr.add(start) }),
            Kind::Many(segments, skip) => Kind::Many(segments.clone(), skip + start),
        };
        Iov {
            kind,
            len,
            shared: self.shared,
        }
    }

    /// The bytes of several ranges (start and length), concatenated.
    pub(crate) fn gather(&self, ranges: impl Iterator<Item = (usize, usize)>) -> Iov {
        let mut segments = Vec::new();
        for (start, len) in ranges {
            self.slice(start, len)
                .for_each(|ptr, len| segments.push((ptr, len)));
        }
        // SAFETY: the segments are parts of ours, on the same promise.
        let iov = unsafe { Iov::from_segments(&segments) };
        Iov {
            shared: self.shared,
            ..iov
        }
    }

    /// The bytes of several, concatenated. The promises of all hold for the result.
    #[doc(hidden)]
    pub fn concat<'a>(parts: impl Iterator<Item = &'a Iov>) -> Iov {
        let mut segments = Vec::new();
        let mut shared = false;
        for part in parts {
            part.for_each(|ptr, len| segments.push((ptr, len)));
            shared |= part.shared;
        }
        // SAFETY: on the promises of the parts.
        let iov = unsafe { Iov::from_segments(&segments) };
        Iov { shared, ..iov }
    }

    /// Whether every byte is 0.
    #[doc(hidden)]
    pub fn is_zero(&self) -> bool {
        let mut zero = true;
        self.for_each(|ptr, len| {
            zero = zero
                && match self.shared {
                    // SAFETY: valid for len bytes.
                    true => unsafe { is_zero_by_copies(ptr, len) },
                    // SAFETY: on the promise of the Iov; nothing writes to it here.
                    false => super::is_zero(unsafe { std::slice::from_raw_parts(ptr, len) }),
                };
        });
        zero
    }

    /// The segment, if there is exactly one.
    pub(crate) fn single(&self) -> Option<(*mut u8, usize)> {
        match &self.kind {
            Kind::One(ptr) => Some((*ptr, self.len)),
            Kind::Many(..) => None,
        }
    }

    /// Calls `f` with each segment in order.
    #[doc(hidden)]
    pub fn for_each(&self, mut f: impl FnMut(*mut u8, usize)) {
        match &self.kind {
            Kind::One(ptr) => f(*ptr, self.len),
            Kind::Many(segments, skip) => {
                let (mut skip, mut left) = (*skip, self.len);
                for &(ptr, len) in segments.iter() {
                    if left == 0 {
                        break;
                    }
                    if skip >= len {
                        skip -= len;
                        continue;
                    }
                    let n = (len - skip).min(left);
                    // SAFETY: skip < len, so the pointer stays in its segment.
                    f(unsafe { ptr.add(skip) }, n);
                    left -= n;
                    skip = 0;
                }
            }
        }
    }

    /// Whether every segment starts at a multiple of `memory` and has a length
    /// that is a multiple of `length` (both powers of two).
    pub(crate) fn is_aligned(&self, memory: usize, length: usize) -> bool {
        let mut aligned = true;
        self.for_each(|ptr, len| {
            aligned &= (ptr as usize) & (memory - 1) == 0 && len & (length - 1) == 0;
        });
        aligned
    }

    /// Copies `data` to the start.
    ///
    /// # Panics
    /// If `data` is longer than `self`.
    pub fn copy_from(&self, mut data: &[u8]) {
        assert!(data.len() <= self.len);
        self.slice(0, data.len()).for_each(|ptr, len| {
            // SAFETY: valid for len bytes by the promise of the constructor;
            // `data` is another borrow, so the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), ptr, len) };
            data = &data[len..];
        });
    }

    /// Copies the first bytes into `data`.
    ///
    /// # Panics
    /// If `data` is longer than `self`.
    pub fn copy_to(&self, data: &mut [u8]) {
        assert!(data.len() <= self.len);
        let mut done = 0;
        self.slice(0, data.len()).for_each(|ptr, len| {
            // SAFETY: as in copy_from.
            unsafe { std::ptr::copy_nonoverlapping(ptr, data[done..done + len].as_mut_ptr(), len) };
            done += len;
        });
    }

    /// Sets every byte to `byte`.
    pub fn fill(&self, byte: u8) {
        self.for_each(|ptr, len| {
            // SAFETY: valid for writes of len bytes by the promise of the
            // constructor.
            unsafe { std::ptr::write_bytes(ptr, byte, len) }
        });
    }

    /// Calls `f` with the bytes as one slice if they lie in one segment, and nothing else may change
    /// them.
    ///
    /// The slice exists only inside `f`, when no request uses the memory.
    pub(crate) fn with_single_mut<R>(&self, f: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let (ptr, len) = self.single().filter(|_| !self.shared)?;
        // SAFETY: valid and untouched by others by the promise of the
        // constructor; the slice does not leave `f`.
        Some(f(unsafe { std::slice::from_raw_parts_mut(ptr, len) }))
    }
}

/// Whether bytes that others may change meanwhile are zero: they are copied and then looked at.
///
/// # Safety
/// `ptr` is valid for reads of `len` bytes.
unsafe fn is_zero_by_copies(ptr: *const u8, len: usize) -> bool {
    const PIECE: usize = 4096;
    let mut copy = [0; PIECE];
    let mut done = 0;
    // Most data differ from zero early, so the first piece is short.
    let mut piece = 128;
    while done < len {
        let count = piece.min(len - done);
        // SAFETY: inside the len bytes; `copy` is other memory, and as long.
        unsafe { std::ptr::copy_nonoverlapping(ptr.add(done), copy.as_mut_ptr(), count) };
        if !super::is_zero(&copy[..count]) {
            return false;
        }
        done += count;
        piece = PIECE;
    }
    true
}

impl fmt::Debug for Iov {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Iov({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against bytes that are copied to the wrong segment: vectors are sliced at every position
    //! and compared with plain slices.
    use super::*;

    #[test]
    fn slices_of_segments_match_slices_of_bytes() {
        let mut parts: Vec<Vec<u8>> = vec![vec![0; 3], vec![], vec![0; 5], vec![0; 1], vec![0; 7]];
        let segments: Vec<_> = parts
            .iter_mut()
            .map(|p| (p.as_mut_ptr(), p.len()))
            .collect();
        // SAFETY: `parts` outlives `iov` and is read only through it.
        let iov = unsafe { Iov::from_segments(&segments) };
        let data: Vec<u8> = (1..=16).collect();
        iov.copy_from(&data);
        for start in 0..=16 {
            for len in 0..=16 - start {
                let mut out = vec![0; len];
                iov.slice(start, len).copy_to(&mut out);
                assert_eq!(out, data[start..start + len]);
            }
        }
        iov.slice(2, 9).fill(0xee);
        let mut out = vec![0; 16];
        iov.copy_to(&mut out);
        assert_eq!(&out[..3], [1, 2, 0xee]);
        assert_eq!(&out[10..12], [0xee, 12]);
    }
}
