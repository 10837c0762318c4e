//! Dirty bitmaps that an NBD server offers of its export.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

use super::{Device, DirtyBits};
use crate::storage::Queue;
use crate::{Error, Result, printable};

/// The granularity in bytes, unless ranges are smaller: the largest default of QEMU.
const GRANULARITY: u64 = 64 << 10;
/// The smallest granularity in bytes.
const SECTOR: u64 = 512;
/// Bits at most. They bound the memory that a server can cause: 128 MiB.
const MAX_BITS: u64 = 1 << 30;

impl Device {
    /// What is dirty in a metadata context (`qemu:dirty-bitmap:NAME`) of the NBD export that this
    /// device is.
    ///
    /// The connection of the device asks for it if the device was opened with this context
    /// (`x-dirty-bitmap`). Else another connection does, so the server must admit two clients.
    /// (qemu-nbd admits one by default, and lets a second one wait.)
    ///
    /// The protocol does not tell the granularity: it is the largest one, up to 64 KiB, that all
    /// ranges are multiples of. If ranges are very small and the export is very large, more is dirty
    /// than the server says.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the device is not a whole export of an NBD server, it cannot be
    /// connected to, or has no such context. [`Error::Io`] if the server fails.
    pub async fn remote_bitmap(&self, queue: &Queue, context: &str) -> Result<DirtyBits> {
        let raw = self.top().as_raw();
        let whole = raw.filter(|raw| raw.offset() == 0 && !raw.is_fixed());
        let Some(export) = whole.and_then(|raw| raw.storage().export()) else {
            let name = self.top().spec.display_name();
            let name = printable(name.as_bytes());
            return Err(Error::Refused(format!(
                "'{name}' is not an export of an NBD server"
            )));
        };
        let mut found = Found::new(self.size());
        export
            .dirty(queue, context, &mut |range| found.add(range))
            .await?;
        Ok(found.bits)
    }
}

/// Dirty ranges of which the granularity is not known.
struct Found {
    bits: DirtyBits,
    smallest: u64,
}

impl Found {
    fn new(size: u64) -> Self {
        let mut smallest = SECTOR;
        while size.div_ceil(smallest) > MAX_BITS {
            smallest *= 2;
        }
        Found {
            bits: DirtyBits::new(size, smallest.max(GRANULARITY)),
            smallest,
        }
    }

    fn add(&mut self, range: Range<u64>) {
        let size = self.bits.size();
        let end = if range.end < size { range.end } else { 0 };
        // The largest power of two that divides both.
        let unit = 1 << (range.start | end | 1 << 63).trailing_zeros();
        let granularity = self.bits.granularity().min(unit).max(self.smallest);
        if granularity < self.bits.granularity() {
            let mut bits = DirtyBits::new(size, granularity);
            bits.merge(&self.bits);
            self.bits = bits;
        }
        self.bits.set(range);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against dirty ranges that are lost when the granularity becomes smaller.
    use super::*;

    #[test]
    fn the_granularity_is_that_of_the_ranges() {
        let size = (1 << 30) + 100;
        let mut found = Found::new(size);
        let check = |found: &Found, granularity, ranges: &[Range<u64>]| {
            assert_eq!(found.bits.granularity(), granularity);
            assert_eq!(found.bits.ranges().collect::<Vec<_>>(), ranges);
        };
        check(&found, 64 << 10, &[]);
        found.add(0..128 << 10);
        let first = 0..128 << 10;
        check(&found, 64 << 10, std::slice::from_ref(&first));
        found.add(1 << 30..size);
        check(&found, 64 << 10, &[0..128 << 10, 1 << 30..size]);
        found.add(1 << 20..(1 << 20) + 4096);
        let third = 1 << 20..(1 << 20) + 4096;
        check(&found, 4096, &[0..128 << 10, third.clone(), 1 << 30..size]);
        found.add((2 << 20) + 100..(2 << 20) + 101);
        let fourth = 2 << 20..(2 << 20) + 512;
        check(&found, 512, &[0..128 << 10, third, fourth, 1 << 30..size]);
    }

    #[test]
    fn a_large_export_has_few_bits() {
        let mut found = Found::new(i64::MAX as u64);
        found.add(1 << 40..(1 << 40) + 1);
        assert_eq!(found.bits.granularity(), 8 << 30);
        assert_eq!(found.bits.dirty_bytes(), 8 << 30);
    }
}
