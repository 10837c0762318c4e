//! Parts of a stream that came before it was known where they belong.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;

use crate::{Error, Result};

/// Bytes that are held in memory.
const IN_MEMORY: u64 = 32 << 20;

options! {
    /// Where parts of a stream are held that do not fit in memory.
    #[derive(Debug)]
    pub struct Spill {
        /// An empty file. Its content is of no use afterwards.
        pub file: File,
        /// Bytes that may be held in it.
        pub most: u64,
    }
}

impl Spill {
    /// A file that may hold `most` bytes.
    pub fn new(file: File, most: u64) -> Spill {
        Spill { file, most }
    }
}

/// Parts of a stream by their offsets in it.
pub struct Held {
    /// By the first offset.
    in_memory: BTreeMap<u64, Vec<u8>>,
    bytes: u64,
    spill: Option<Spilled>,
}

/// Parts in a file, each at its offset in the stream.
struct Spilled {
    spill: Spill,
    /// By the first offset: the end.
    ranges: BTreeMap<u64, u64>,
    bytes: u64,
}

impl Held {
    /// Nothing yet.
    pub fn new(spill: Option<Spill>) -> Self {
        Held {
            in_memory: BTreeMap::new(),
            bytes: 0,
            spill: spill.map(|spill| Spilled {
                spill,
                ranges: BTreeMap::new(),
                bytes: 0,
            }),
        }
    }

    /// Holds `bytes` of the stream, which start at `offset`. None of them is held already, and all
    /// that are held are before them.
    pub fn hold(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let length = bytes.len() as u64;
        if self.bytes + length > IN_MEMORY {
            let Some(spilled) = &mut self.spill else {
                return Err(Error::OutOfOrder(format!(
                    "The image's tables come after more than {} MiB of what they map: allow a file \
                     for that (--spill DIR), or convert the image from a file",
                    IN_MEMORY >> 20
                )));
            };
            for (offset, bytes) in std::mem::take(&mut self.in_memory) {
                spilled.hold(offset, &bytes)?;
            }
            self.bytes = 0;
            return spilled.hold(offset, bytes);
        }
        self.bytes += length;
        self.in_memory.insert(offset, bytes.to_vec());
        Ok(())
    }

    /// Fills `out` with what is held from `offset` on. Returns how much of it is held without a
    /// gap.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < out.len() {
            let at = offset + filled as u64;
            let rest = &mut out[filled..];
            let count = match self.in_memory_at(at) {
                Some(bytes) => {
                    let count = bytes.len().min(rest.len());
                    rest[..count].copy_from_slice(&bytes[..count]);
                    count
                }
                None => match &self.spill {
                    Some(spilled) => spilled.read(at, rest)?,
                    None => 0,
                },
            };
            if count == 0 {
                break;
            }
            filled += count;
        }
        Ok(filled)
    }

    fn in_memory_at(&self, at: u64) -> Option<&[u8]> {
        let (start, bytes) = self.in_memory.range(..=at).next_back()?;
        bytes.get((at - start) as usize..).filter(|b| !b.is_empty())
    }

    /// Drops what is held of a range.
    pub fn release(&mut self, range: Range<u64>) -> Result<()> {
        let start = match self.in_memory.range(..=range.start).next_back() {
            Some((start, bytes)) if start + bytes.len() as u64 > range.start => *start,
            _ => range.start,
        };
        let touched: Vec<u64> = self
            .in_memory
            .range(start..range.end)
            .map(|(at, _)| *at)
            .collect();
        for at in touched {
            let Some(mut bytes) = self.in_memory.remove(&at) else {
                continue;
            };
            let end = at + bytes.len() as u64;
            self.bytes -= bytes.len() as u64;
            if end > range.end {
                let after = bytes.split_off((range.end - at) as usize);
                self.bytes += after.len() as u64;
                self.in_memory.insert(range.end, after);
            }
            if at < range.start {
                bytes.truncate((range.start - at) as usize);
                bytes.shrink_to_fit();
                self.bytes += bytes.len() as u64;
                self.in_memory.insert(at, bytes);
            }
        }
        match &mut self.spill {
            None => Ok(()),
            Some(spilled) => spilled.release(range),
        }
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.in_memory = BTreeMap::new();
        self.bytes = 0;
        // The file goes, with its space.
        self.spill = None;
    }
}

impl Spilled {
    fn hold(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let length = bytes.len() as u64;
        if self.bytes + length > self.spill.most {
            return Err(Error::Refused(format!(
                "The image's tables come after more of what they map than may be held ({} bytes): \
                 allow more (--spill-size SIZE), or convert the image from a file",
                self.spill.most
            )));
        }
        let written = self.spill.file.write_all_at(bytes, offset);
        written.map_err(|e| failed(e, "write"))?;
        self.bytes += length;
        match self.ranges.range_mut(..=offset).next_back() {
            Some((_, end)) if *end == offset => *end += length,
            _ => {
                self.ranges.insert(offset, offset + length);
            }
        }
        Ok(())
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<usize> {
        let end = match self.ranges.range(..=at).next_back() {
            Some((_, end)) if *end > at => *end,
            _ => return Ok(0),
        };
        let count = out.len().min((end - at) as usize);
        let read = self.spill.file.read_exact_at(&mut out[..count], at);
        read.map_err(|e| failed(e, "read"))?;
        Ok(count)
    }

    fn release(&mut self, range: Range<u64>) -> Result<()> {
        let start = match self.ranges.range(..=range.start).next_back() {
            Some((start, end)) if *end > range.start => *start,
            _ => range.start,
        };
        let touched: Vec<_> = self
            .ranges
            .range(start..range.end)
            .map(|(a, b)| (*a, *b))
            .collect();
        for (at, end) in touched {
            self.ranges.remove(&at);
            let gone = at.max(range.start)..end.min(range.end);
            self.bytes -= gone.end - gone.start;
            if at < gone.start {
                self.ranges.insert(at, gone.start);
            }
            if gone.end < end {
                self.ranges.insert(gone.end, end);
            }
            // Without holes the file is as long as what was held.
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let length = gone.end - gone.start;
            let _ = rustix::fs::fallocate(&self.spill.file, how, gone.start, length);
        }
        Ok(())
    }
}

fn failed(error: io::Error, what: &str) -> Error {
    Error::Io(error).during(format!(
        "Could not {what} the file that holds parts of the stream"
    ))
}

#[cfg(test)]
mod tests {
    //! Guards against held bytes that are lost or are those of another place.
    use super::*;

    fn spill(most: u64) -> Option<Spill> {
        Some(Spill::new(tempfile::tempfile().unwrap(), most))
    }

    fn byte(at: u64) -> u8 {
        (at / 3 % 251) as u8
    }

    fn bytes(range: Range<u64>) -> Vec<u8> {
        range.map(byte).collect()
    }

    /// In memory, and with the first part in a file.
    fn helds() -> [Held; 2] {
        let mut spilled = Held::new(spill(IN_MEMORY * 2));
        spilled.hold(1000, &bytes(1000..9000)).unwrap();
        spilled.hold(10_000, &vec![0; IN_MEMORY as usize]).unwrap();
        spilled.release(10_000..10_000 + IN_MEMORY).unwrap();
        let mut held = Held::new(None);
        held.hold(1000, &bytes(1000..5000)).unwrap();
        held.hold(5000, &bytes(5000..9000)).unwrap();
        [held, spilled]
    }

    #[test]
    fn what_is_held_is_read_and_released_by_ranges() {
        for mut held in helds() {
            let read = |held: &Held, range: Range<u64>| {
                let mut out = vec![0xee; (range.end - range.start) as usize];
                let count = held.read(range.start, &mut out).unwrap();
                out.truncate(count);
                assert_eq!(out, bytes(range.start..range.start + count as u64));
                count
            };
            assert_eq!(read(&held, 1000..9000), 8000);
            assert_eq!(read(&held, 4000..6000), 2000);
            assert_eq!(read(&held, 8000..9500), 1000);
            assert_eq!(read(&held, 999..1000), 0);
            held.release(4500..5200).unwrap();
            assert_eq!(read(&held, 4000..6000), 500);
            assert_eq!(read(&held, 4600..4700), 0);
            assert_eq!(read(&held, 5200..9000), 3800);
            held.release(0..2000).unwrap();
            assert_eq!(read(&held, 1500..1600), 0);
            assert_eq!(read(&held, 2000..4600), 2500);
            held.hold(9000, &bytes(9000..9100)).unwrap();
            assert_eq!(read(&held, 8999..9200), 101);
        }
    }

    #[test]
    fn it_is_bounded() {
        let mut held = Held::new(None);
        held.hold(0, &vec![1; IN_MEMORY as usize]).unwrap();
        let error = held.hold(IN_MEMORY, &[1]).unwrap_err().to_string();
        assert!(error.contains("--spill DIR"), "{error}");
        let mut held = Held::new(spill(IN_MEMORY + 10));
        let much = vec![1; IN_MEMORY as usize];
        held.hold(0, &much).unwrap();
        // All goes into the file.
        held.hold(IN_MEMORY, &[1; 10]).unwrap();
        held.hold(IN_MEMORY + 10, &much).unwrap();
        let next = 2 * IN_MEMORY + 10;
        let error = held.hold(next, &[1]).unwrap_err().to_string();
        assert!(error.contains("--spill-size"), "{error}");
    }
}
