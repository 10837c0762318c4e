//! Disks that are larger than memory: only some windows of them are used.

use std::ops::Range;

use zebu::block::Device;
use zebu::storage::Queue;

use crate::judge::said;

/// The windows of a disk that a workload uses. Its content is that of the windows, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Bytes of the disk.
    pub size: u64,
    /// Where the first window starts, and from there each next one.
    pub first: u64,
    pub stride: u64,
    /// Bytes of a window, and how many there are.
    pub window: usize,
    pub count: usize,
}

impl Spread {
    /// A disk that is a single window.
    pub fn whole(size: usize) -> Self {
        Spread {
            size: size as u64,
            first: 0,
            stride: size as u64,
            window: size,
            count: 1,
        }
    }

    /// Where a byte of the content is on the disk.
    pub fn place(&self, at: usize) -> u64 {
        self.first + (at / self.window) as u64 * self.stride + (at % self.window) as u64
    }

    /// The parts of a range that are within one window each.
    pub fn parts(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (window, mut at) = (self.window, range.start);
        std::iter::from_fn(move || {
            let end = ((at / window + 1) * window).min(range.end);
            (at < end).then(|| std::mem::replace(&mut at, end)..end)
        })
    }

    /// Reads the content.
    pub fn read(&self, queue: &Queue, device: &Device) -> Result<Vec<u8>, String> {
        if device.size() != self.size {
            return Err(format!("the size is {}, was {}", device.size(), self.size));
        }
        let mut bytes = vec![0; self.window * self.count];
        for part in self.parts(0..bytes.len()) {
            let place = self.place(part.start);
            let read = device.read_blocking(queue, place, &mut bytes[part]);
            read.map_err(said("read"))?;
        }
        Ok(bytes)
    }
}
