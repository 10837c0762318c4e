//! A storage of which some ranges are replaced by others in memory: a file with a log that is not
//! replayed into it. Only for reading.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::{Iov, OpKind, Queue, Started, Storage, StorageExtent, extent, read};

/// Replaced ranges, none of which overlap.
#[derive(Debug, Default)]
pub struct Patches(BTreeMap<u64, Patch>);

/// A replaced range, by its start.
#[derive(Clone, Debug)]
struct Patch {
    end: u64,
    /// None: zeroes.
    bytes: Option<Arc<[u8]>>,
    /// Bytes of the memory before the first that counts.
    skip: usize,
}

impl Patch {
    /// The part that begins `count` bytes later.
    fn without(&self, count: u64) -> Patch {
        Patch {
            skip: match self.bytes {
                Some(_) => self.skip + count as usize,
                None => 0,
            },
            ..self.clone()
        }
    }
}

impl Patches {
    /// Replaces the range from `start` on by these bytes.
    #[doc(hidden)]
    pub fn put(&mut self, start: u64, bytes: Vec<u8>) {
        let end = start.saturating_add(bytes.len() as u64);
        self.replace(start, end, Some(bytes.into()));
    }

    /// Replaces a range by zeroes.
    #[doc(hidden)]
    pub fn put_zeroes(&mut self, start: u64, length: u64) {
        self.replace(start, start.saturating_add(length), None);
    }

    /// The replaced ranges, with their bytes; None: zeroes.
    #[doc(hidden)]
    pub fn iter(&self) -> impl Iterator<Item = (Range<u64>, Option<&[u8]>)> {
        self.0.iter().map(|(start, patch)| {
            let length = (patch.end - start) as usize;
            let bytes = patch.bytes.as_deref();
            let bytes = bytes.map(|bytes| &bytes[patch.skip..patch.skip + length]);
            (*start..patch.end, bytes)
        })
    }

    /// The end of the last range; 0: there is none.
    #[doc(hidden)]
    pub fn end(&self) -> u64 {
        self.0.values().next_back().map_or(0, |patch| patch.end)
    }

    fn replace(&mut self, start: u64, end: u64, bytes: Option<Arc<[u8]>>) {
        if start == end {
            return;
        }
        self.split(start);
        self.split(end);
        let inside: Vec<u64> = self.0.range(start..end).map(|(at, _)| *at).collect();
        for at in inside {
            self.0.remove(&at);
        }
        let skip = 0;
        self.0.insert(start, Patch { end, bytes, skip });
    }

    /// Makes two ranges of one that goes on at `at`.
    fn split(&mut self, at: u64) {
        let Some((start, patch)) = self.0.range_mut(..at).next_back() else {
            return;
        };
        if patch.end > at {
            let rest = patch.without(at - start);
            patch.end = at;
            self.0.insert(at, rest);
        }
    }

    /// The ranges that overlap a range, as parts inside of it with their starts.
    fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, Patch)> {
        let before = self.0.range(..start).next_back();
        before
            .into_iter()
            .chain(self.0.range(start..end.max(start)))
            .filter(move |(_, patch)| patch.end > start)
            .map(move |(at, patch)| {
                let from = start.max(*at);
                let mut part = patch.without(from - at);
                part.end = patch.end.min(end);
                (from, part)
            })
    }

    /// Writes what is replaced to the memory of a read at `offset`.
    fn apply(&self, offset: u64, iov: &Iov) {
        for (at, patch) in self.within(offset, offset + iov.len() as u64) {
            let length = (patch.end - at) as usize;
            let memory = iov.slice((at - offset) as usize, length);
            match &patch.bytes {
                Some(bytes) => memory.copy_from(&bytes[patch.skip..patch.skip + length]),
                None => memory.fill(0),
            }
        }
    }
}

/// A storage with replaced ranges.
#[derive(Debug)]
pub struct Patched {
    below: Arc<dyn Storage>,
    patches: Arc<Patches>,
    length: u64,
}

impl Patched {
    /// `below` with `patches`, of `length` bytes: at least as many as `below` has. What neither has
    /// reads as zeroes.
    #[doc(hidden)]
    pub fn new(below: Arc<dyn Storage>, patches: Arc<Patches>, length: u64) -> Self {
        Patched {
            below,
            patches,
            length,
        }
    }
}

/// What the bytes at `offset` are.
async fn find(
    below: &dyn Storage,
    patches: &Patches,
    queue: &Queue,
    offset: u64,
    length: u64,
) -> io::Result<StorageExtent> {
    let next = patches.within(offset, offset.saturating_add(length)).next();
    let limit = match next {
        Some((at, patch)) if at == offset => {
            return Ok(StorageExtent {
                zero: patch.bytes.is_none(),
                allocated: true,
                length: patch.end - at,
            });
        }
        Some((at, _)) => at - offset,
        None => length,
    };
    let mut found = extent(below, queue, offset).await?;
    if found.length == 0 {
        // Past the end of the storage below.
        found = StorageExtent::hole(limit);
    }
    found.length = found.length.min(limit);
    Ok(found)
}

// SAFETY: all is passed on to a storage that keeps the promises. The future owns that storage and
// awaits the operation on the memory.
#[allow(unsafe_code)]
unsafe impl Storage for Patched {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        let left = self.length.saturating_sub(offset);
        let (below, patches) = (self.below.clone(), self.patches.clone());
        let (queue, iov) = (queue.for_itself(), memory.cloned());
        match (kind, iov) {
            (OpKind::Read, Some(iov)) => Started::later(async move {
                read(&*below, &queue, offset, &iov).await?;
                patches.apply(offset, &iov);
                Ok(left.min(length) as usize)
            }),
            (OpKind::Extent, Some(iov)) => Started::later(async move {
                let found = find(&*below, &patches, &queue, offset, left).await?;
                Ok(found.put(&iov))
            }),
            (OpKind::Flush, _) => Started::done(Ok(0)),
            _ => Started::done(Err(io::Error::from_raw_os_error(libc::EROFS))),
        }
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&*self.below)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn export(&self) -> Option<&dyn super::Export> {
        None
    }
}

#[cfg(test)]
mod tests {
    //! Guards against bytes of a range that was replaced again, and against wrong ends of ranges.
    use super::*;
    use crate::storage::{Memory, QueueOptions, read_vec, write_slice};

    /// Any ranges in any order, beside a plain copy of the bytes.
    #[test]
    fn ranges_replace_each_other() {
        let queue = Queue::new(QueueOptions::default()).unwrap();
        let mut state = 1u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) % n
        };
        for _ in 0..200 {
            let mut bytes = vec![7; 60];
            let memory = Arc::new(Memory::new(bytes.clone()));
            bytes.resize(100, 0);
            let mut patches = Patches::default();
            for value in 0..below(12) as u8 {
                let start = below(90);
                let length = below(20).min(100 - start);
                let range = start as usize..(start + length) as usize;
                if below(3) == 0 {
                    patches.put_zeroes(start, length);
                    bytes[range].fill(0);
                } else {
                    let new: Vec<u8> = (0..length)
                        .map(|n| (n as u8).wrapping_mul(16) | value)
                        .collect();
                    bytes[range].copy_from_slice(&new);
                    patches.put(start, new);
                }
            }
            assert!(patches.end() <= 100);
            let patched = Patched::new(memory, Arc::new(patches), 100);
            for _ in 0..20 {
                let start = below(110);
                let length = below(40) as usize;
                let found = read_vec(&patched, &queue, start, length);
                let found = queue.block_on(found).unwrap();
                let expected = (start as usize..).take(length);
                let expected = expected.map(|at| bytes.get(at).copied().unwrap_or(0));
                assert!(found.iter().copied().eq(expected), "{start} {length}");
            }
            let mut at = 0;
            while at < 100 {
                let found = queue.block_on(extent(&patched, &queue, at)).unwrap();
                assert!(found.length > 0 && at + found.length <= 100);
                let range = at as usize..(at + found.length) as usize;
                assert!(!found.zero || bytes[range].iter().all(|byte| *byte == 0));
                at += found.length;
            }
            let written = queue.block_on(write_slice(&patched, &queue, 0, b"x"));
            assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EROFS));
        }
    }
}
