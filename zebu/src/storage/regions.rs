//! Where the memory of buffers that are not small comes from.
//!
//! The kernel gives a device the memory of a request as a list of pieces that lie together
//! physically, and each piece costs the kernel and the device. Memory in ordinary pages is a piece a
//! page, 256 for 1 MiB. So buffers are cut out of regions that the kernel is asked to back with one
//! huge page each (`MADV_HUGEPAGE`; madvise(2), the kernel's admin-guide/mm/transhuge): the list has
//! one piece then. Where there are no huge pages a region is ordinary memory.
//!
//! This file is one of the few that hold `unsafe`: it maps memory and gives it out.
#![allow(unsafe_code)]

use std::alloc::{Layout, handle_alloc_error};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Mutex;

use crate::lock;

/// Bytes of a region, and what it starts at a multiple of: a huge page of x86-64 and, with pages of
/// 4 KiB, of aarch64.
const REGION: usize = 2 << 20;
/// Regions are cut at multiples of this many bytes.
const UNIT: usize = 4 << 10;
const UNITS: usize = REGION / UNIT;
/// Shorter buffers are not for here. Those of one page are: the buffers of requests that follow each
/// other lie together then, and are one piece.
pub(super) const SMALLEST: usize = UNIT;
/// Buffers of at most so many bytes are small.
const SMALL: usize = 32 << 10;
/// Regions that are kept though nothing is in use of them.
const IDLE: usize = 4;

static REGIONS: Mutex<Regions> = Mutex::new(Regions {
    all: BTreeMap::new(),
    idle: 0,
});

/// All regions of the process, by address. What is longer than a region has memory of its own.
struct Regions {
    all: BTreeMap<usize, Region>,
    /// Those of which nothing is in use.
    idle: usize,
}

struct Region {
    memory: NonNull<u8>,
    /// Whether small buffers are cut out of it, or large ones: small ones are kept for reuse, and
    /// would keep from the kernel what large ones had.
    small: bool,
    in_use: Units,
    /// What was in use before, so that it may be other than zero.
    touched: Units,
}

// SAFETY: a region's memory is used by nobody but the owners of what was cut out of it.
unsafe impl Send for Region {}

/// A set of a region's units.
#[derive(Default)]
struct Units([u64; UNITS / 64]);

impl Units {
    fn has(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    fn has_any(&self, mut range: Range<usize>) -> bool {
        range.any(|i| self.has(i))
    }

    fn add(&mut self, range: Range<usize>) {
        range.for_each(|i| self.0[i / 64] |= 1 << (i % 64));
    }

    fn remove(&mut self, range: Range<usize>) {
        range.for_each(|i| self.0[i / 64] &= !(1 << (i % 64)));
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; UNITS / 64]
    }

    /// The first `count` units in a row that are not in the set.
    fn gap(&self, count: usize) -> Option<Range<usize>> {
        let mut start = 0;
        let mut i = 0;
        while i < UNITS {
            if i.is_multiple_of(64) && self.0[i / 64] == u64::MAX {
                i += 64;
                start = i;
                continue;
            }
            i += 1;
            if self.has(i - 1) {
                start = i;
            } else if i - start == count {
                return Some(start..i);
            }
        }
        None
    }
}

/// Memory of `length` bytes, [`SMALLEST`] at least, that starts at a multiple of 4 KiB, and whether
/// all of it is zero; if not, it has old content. It is for the caller alone until [`give`].
pub(super) fn take(length: usize) -> (NonNull<u8>, bool) {
    if length > REGION {
        return (map(length), true);
    }
    let count = length.div_ceil(UNIT);
    let small = length <= SMALL;
    let mut regions = lock(&REGIONS);
    let cut = regions
        .all
        .values_mut()
        .filter(|region| region.small == small)
        .find_map(|region| Some((region.in_use.gap(count)?, region)));
    let was_idle = cut.as_ref().is_some_and(|(_, r)| r.in_use.is_empty());
    let (units, region) = match cut {
        Some(cut) => cut,
        None => {
            let memory = map(REGION);
            let region = regions.all.entry(memory.as_ptr() as usize);
            let region = region.or_insert(Region {
                memory,
                small,
                in_use: Units::default(),
                touched: Units::default(),
            });
            (0..count, region)
        }
    };
    let zero = !region.touched.has_any(units.clone());
    region.in_use.add(units.clone());
    region.touched.add(units.clone());
    // SAFETY: the units are inside the region.
    let memory = unsafe { region.memory.add(units.start * UNIT) };
    regions.idle -= usize::from(was_idle);
    (memory, zero)
}

/// Gives memory back.
///
/// # Safety
/// It is what [`take`] returned for that length, and is used no more.
pub(super) unsafe fn give(memory: NonNull<u8>, length: usize) {
    if length > REGION {
        // SAFETY: it was mapped with that length.
        unsafe { unmap(memory, length) };
        return;
    }
    let address = memory.as_ptr() as usize;
    let base = address & !(REGION - 1);
    let first = (address - base) / UNIT;
    let mut regions = lock(&REGIONS);
    let region = regions.all.get_mut(&base).expect("memory of a region");
    region.in_use.remove(first..first + length.div_ceil(UNIT));
    if !region.in_use.is_empty() {
        return;
    }
    if regions.idle < IDLE {
        regions.idle += 1;
    } else if let Some(region) = regions.all.remove(&base) {
        drop(regions);
        // SAFETY: nothing of it is in use, and nobody else finds it.
        unsafe { unmap(region.memory, REGION) };
    }
}

/// New memory, zero, that starts at a multiple of [`REGION`].
#[cfg(not(miri))]
fn map(length: usize) -> NonNull<u8> {
    // Refuses what is too long to be added to.
    let layout = layout(length);
    // More than is needed, of which what lies before and behind goes back.
    let needed = length.next_multiple_of(PAGE);
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping is nobody else's.
    let start = unsafe { libc::mmap(ptr::null_mut(), needed + REGION, access, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        handle_alloc_error(layout);
    }
    let before = start.cast::<u8>().align_offset(REGION);
    // SAFETY: `needed` bytes from `before` on are inside the mapping, since it is longer by a
    // region; the rest of it is used by nobody.
    unsafe {
        let memory = start.byte_add(before);
        if before > 0 {
            libc::munmap(start, before);
        }
        libc::munmap(memory.byte_add(needed), REGION - before);
        // Where the kernel has no huge pages the memory is as good as any.
        libc::madvise(memory, needed, libc::MADV_HUGEPAGE);
        NonNull::new_unchecked(memory.cast())
    }
}

/// # Safety
/// What [`map`] returned for that length, used no more.
#[cfg(not(miri))]
unsafe fn unmap(memory: NonNull<u8>, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(memory.as_ptr().cast(), length.next_multiple_of(PAGE)) };
}

/// Mappings are cut at multiples of this: no machine that zebu is for has larger pages.
#[cfg(not(miri))]
const PAGE: usize = 64 << 10;

fn layout(length: usize) -> Layout {
    Layout::from_size_align(length, REGION).expect("a length below isize::MAX")
}

// Miri has no madvise and unmaps only what was mapped at once.
#[cfg(miri)]
fn map(length: usize) -> NonNull<u8> {
    let layout = layout(length);
    // SAFETY: the length is not zero.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(layout))
}

#[cfg(miri)]
unsafe fn unmap(memory: NonNull<u8>, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::alloc::dealloc(memory.as_ptr(), layout(length)) };
}

#[cfg(test)]
mod tests {
    //! Guards against two buffers that share memory, and against new ones with old content.
    use super::*;
    use crate::storage::Buffer;

    #[test]
    fn gaps_are_found_and_only_where_they_are() {
        let mut units = Units::default();
        assert_eq!(units.gap(UNITS), Some(0..UNITS));
        units.add(0..3);
        units.add(60..70);
        assert_eq!(units.gap(57), Some(3..60));
        assert_eq!(units.gap(58), Some(70..128));
        assert_eq!(units.gap(UNITS - 69), None);
        units.remove(60..70);
        assert_eq!(units.gap(UNITS - 3), Some(3..UNITS));
    }

    #[test]
    fn lengths_at_the_bounds() {
        for length in [SMALLEST - 1, SMALLEST, SMALL, SMALL + 1, REGION, REGION + 1] {
            let mut one = Buffer::new(length);
            one.fill(1);
            let other = Buffer::scratch(length);
            drop(one);
            assert!(Buffer::new(length).iter().all(|b| *b == 0));
            assert_eq!(other.len(), length);
        }
    }

    #[test]
    fn what_is_too_long_is_refused() {
        for length in [usize::MAX, usize::MAX - REGION, isize::MAX as usize] {
            assert!(std::panic::catch_unwind(|| Buffer::scratch(length)).is_err());
        }
    }

    #[test]
    fn buffers_of_many_threads_are_zero_and_apart() {
        let work = |seed: usize| {
            let mut mine: Vec<(u8, Buffer)> = Vec::new();
            let mut state = seed;
            for step in 0..if cfg!(miri) { 20 } else { 200 } {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                if mine.len() > 20 || state >> 60 < 5 && !mine.is_empty() {
                    let (mark, buffer) = mine.swap_remove((state >> 40) % mine.len());
                    assert!(buffer.iter().all(|b| *b == mark));
                    continue;
                }
                let longest = match state >> 59 & 1 {
                    0 => 40_000,
                    _ if cfg!(miri) => 100_000,
                    _ => 3 << 20,
                };
                let mut buffer = Buffer::new(1 + (state >> 30) % longest);
                assert!(buffer.iter().all(|b| *b == 0));
                assert_eq!(buffer.as_ptr() as usize % crate::storage::BUFFER_ALIGN, 0);
                let mark = (seed * 64 + step % 64) as u8 | 1;
                buffer.fill(mark);
                mine.push((mark, buffer));
            }
        };
        std::thread::scope(|scope| {
            (1..4).for_each(|seed| drop(scope.spawn(move || work(seed))));
        });
    }
}
