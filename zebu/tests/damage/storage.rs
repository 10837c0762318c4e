//! Files in memory that have holes.

use std::io;
use std::sync::Arc;

use zebu::storage::StorageExtent;
use zebu::storage::{Iov, Memory, OpKind, Queue, Started, Storage};

/// The block size of the simulated file system, in bytes.
const PAGE: u64 = 4096;
/// The largest length of a file, in bytes.
const MOST: u64 = 256 << 20;

/// Memory whose pages of zeroes are holes, as in a sparse file.
#[derive(Debug)]
pub struct Sparse(Memory);

impl Sparse {
    pub fn new(bytes: &[u8]) -> Arc<Sparse> {
        Arc::new(Sparse(Memory::new(bytes.to_vec())))
    }

    pub fn to_vec(&self) -> Vec<u8> {
        self.0.to_vec()
    }
}

impl Sparse {
    /// The extent at `offset`, which is inside the file.
    fn extent(&self, offset: u64) -> StorageExtent {
        let bytes = self.to_vec();
        let first = (offset / PAGE * PAGE) as usize;
        let mut pages = bytes[first..]
            .chunks(PAGE as usize)
            .map(|page| !is_zero(page));
        let data = pages.next().unwrap_or(false);
        let alike = 1 + pages.take_while(|other| *other == data).count() as u64;
        let length = (first as u64 + alike * PAGE).min(bytes.len() as u64) - offset;
        match data {
            true => StorageExtent::data(length),
            false => StorageExtent::hole(length),
        }
    }
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

#[allow(unsafe_code)]
// SAFETY: all is passed on to `Memory`, which keeps no memory.
unsafe impl Storage for Sparse {
    unsafe fn start(
        &self,
        queue: &Queue,
        kind: OpKind,
        offset: u64,
        length: u64,
        memory: Option<&Iov>,
    ) -> Started {
        if let (OpKind::Extent, Some(iov)) = (kind, memory) {
            return Started::done(Ok(self.extent(offset).put(iov)));
        }
        if kind != OpKind::Read && offset.saturating_add(length) > MOST {
            return Started::done(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        }
        // SAFETY: passed on.
        unsafe { self.0.start(queue, kind, offset, length, memory) }
    }

    fn allocated(&self) -> io::Result<u64> {
        let bytes = self.to_vec();
        let pages = bytes.chunks(PAGE as usize).filter(|page| !is_zero(page));
        Ok(pages.count() as u64 * PAGE)
    }

    fn inner(&self) -> Option<&dyn Storage> {
        Some(&self.0)
    }
}
