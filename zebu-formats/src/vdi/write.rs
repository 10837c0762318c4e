//! Writes. What has a block in the file is written in place and holds nothing. A block of the disk
//! that has none gets a place behind all others: its data are written there, with zeroes around them,
//! and then the map leads to it, in memory. The disk follows with the next flush (`commit.rs`).
//!
//! A request holds the blocks that it gives places (`Ranges`: all or none), so of two requests for one
//! block the first gives it a place, and the other finds that. Between requests for other blocks only
//! the list of places stands, for an instant. A request that fails or is dropped gives its places
//! back. The map never loses a block, so what a request finds in it stays right while it lasts.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::commit::Dirty;
use super::places::{Places, Run};
use super::{BLOCK, Vdi};
use crate::Tail;
use crate::drivers::{Commits, Mapping, Ranges, refused};
use crate::storage::{self, Iov, Queue, Writings};
use crate::{Error, Result};

const BLOCK_BYTES: u64 = BLOCK as u64;

/// The state of an image that is open for writing, which its requests and tasks share.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) image: Arc<Vdi>,
    /// Blocks of the disk: held by a request that gives them places.
    blocks: Ranges,
    pub(super) places: Mutex<Places>,
    /// The end of the places that the map leads to.
    pub(super) used_end: AtomicU32,
    pub(super) tail: Arc<Tail>,
    pub(super) commits: Commits,
    pub(super) dirty: Mutex<Dirty>,
}

/// Places that a request has taken. Those that the map does not lead to when this is dropped may be
/// taken again.
struct Taken<'a> {
    writer: &'a Writer,
    run: Run,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        crate::lock(&self.writer.places).give_back(self.run.first, self.run.count);
    }
}

impl Writer {
    /// Begins to write an image.
    ///
    /// # Errors
    /// If its tables are damaged so that a write could destroy more than its range.
    pub(super) fn begin(image: Arc<Vdi>) -> Result<Arc<Self>> {
        let header = &image.header;
        let map_end = header.map_offset + u64::from(header.blocks) * 4;
        if header.map_offset < super::HEADER_BYTES as u64 || header.data_offset < map_end {
            return Err(refused(format!(
                "unsupported VDI image for writing (the header, the block map at {:#x} and the \
                 blocks from {:#x} on overlap)",
                header.map_offset, header.data_offset
            )));
        }
        let tail = Tail::new(image.file.clone())?;
        let places = Places::of(&image, tail.length())?;
        let used_end = (0..u64::from(header.blocks)).filter_map(|index| image.place(index));
        let used_end = used_end.max().map_or(0, |last| last + 1);
        Ok(Arc::new(Writer {
            blocks: Ranges::default(),
            places: Mutex::new(places),
            used_end: AtomicU32::new(used_end),
            tail,
            commits: Commits::default(),
            dirty: Mutex::default(),
            image,
        }))
    }

    /// Whether a write to a block that was found in the map is as durable as the file's cache mode
    /// wants when it has ended: not if the map on the disk does not lead to the block yet.
    pub(super) fn is_durable(&self) -> bool {
        !self.image.file.cache_mode().is_write_through() || crate::lock(&self.dirty).is_empty()
    }

    /// Writes a range of the disk.
    pub(super) async fn write(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        self.commits.check()?;
        let file = &*self.image.file;
        let mut in_place = Vec::new();
        let mut missing: Vec<(u64, Iov)> = Vec::new();
        let mut at = 0;
        while at < iov.len() {
            let guest = offset + at as u64;
            let extent = self.image.extent(guest, (iov.len() - at) as u64);
            let part = iov.slice(at, extent.length as usize);
            at += part.len();
            match extent.mapping {
                Mapping::Data { host } => in_place.push((host.0, part)),
                _ => missing.push((guest, part)),
            }
        }
        let in_place = async {
            let mut flight = Writings::new(file, queue, queue.options().parts);
            for (host, part) in in_place {
                flight.write(host, part).await.map_err(|(_, e)| e)?;
            }
            flight.finish().await.map_err(|(_, e)| e)?;
            Ok(())
        };
        if missing.is_empty() {
            return in_place.await;
        }
        let allocating = async {
            for (guest, part) in missing {
                self.allocate(queue, guest, &part).await?;
            }
            Ok(())
        };
        let (in_place, allocating) = storage::join(in_place, allocating).await;
        in_place.and(allocating)
    }

    /// Writes a range of which blocks had no place.
    async fn allocate(&self, queue: &Queue, offset: u64, iov: &Iov) -> Result<()> {
        let end = offset + iov.len() as u64;
        let blocks = offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let _held = self.blocks.hold(blocks).await;
        let mut at = 0;
        while at < iov.len() {
            let guest = offset + at as u64;
            // Another request may have given it a place meanwhile.
            let extent = self.image.extent(guest, end - guest);
            at += match extent.mapping {
                Mapping::Data { host } => {
                    let part = iov.slice(at, extent.length as usize);
                    storage::write(&*self.image.file, queue, host.0, &part).await?;
                    part.len()
                }
                _ => {
                    let part = iov.slice(at, extent.length as usize);
                    self.fill(queue, guest, &part).await?
                }
            };
        }
        Ok(())
    }

    /// Gives the first blocks of a range places, none of which has one, and writes them. The caller
    /// holds them. Returns how many bytes of the range these are.
    async fn fill(&self, queue: &Queue, guest: u64, iov: &Iov) -> Result<usize> {
        let image = &*self.image;
        let (first, within) = (guest / BLOCK_BYTES, guest % BLOCK_BYTES);
        let wanted = (within + iov.len() as u64).div_ceil(BLOCK_BYTES);
        // Between blocks with bytes of their own before the data there is a gap.
        let most = match image.header.block_extra {
            0 => wanted as u32,
            _ => 1,
        };
        let run = crate::lock(&self.places).take(most);
        // There are as many places as blocks.
        let run = run.ok_or_else(|| Error::os(libc::ENOSPC))?;
        let mut taken = Taken { writer: self, run };
        let start = image.place_offset(run.first);
        let end = start + u64::from(run.count) * image.stored();
        let data = start + image.header.block_extra;
        self.tail.reach(queue, end).await?;
        let length = (end - data - within).min(iov.len() as u64);
        let part = iov.slice(0, length as usize);
        match run.is_new && self.tail.is_fresh(start) {
            true => storage::write(&*image.file, queue, data + within, &part).await?,
            false => {
                // What was there before must not be read: zeroes around the data, in one write.
                let rest = end - data - within - length;
                let zeroes = |bytes: u64| storage::zeroes(bytes as usize);
                let (extra, head) = (zeroes(image.header.block_extra), zeroes(within));
                let whole = Iov::concat([&extra, &head, &part, &zeroes(rest)].into_iter());
                storage::write(&*image.file, queue, start, &whole).await?;
            }
        }
        self.map(first, &mut taken);
        Ok(part.len())
    }

    /// Leads the map to places whose blocks are written, from block `first` of the disk on.
    fn map(&self, first: u64, taken: &mut Taken<'_>) {
        let Run {
            first: place,
            count,
            ..
        } = taken.run;
        // Before the map: a commit that finds a block in it counts the place.
        self.used_end.fetch_max(place + count, Ordering::SeqCst);
        for nth in 0..count {
            let index = first + u64::from(nth);
            // Both at once: see `is_durable`.
            let mut dirty = crate::lock(&self.dirty);
            self.image.map[index as usize].store(place + nth, Ordering::Release);
            dirty.note(index);
        }
        taken.run.count = 0;
    }

    /// Gives every place that is not in use, and that others are behind, to a block of the disk that
    /// reads as zeroes. Then the header's count is that of the blocks in the map, which QEMU's check
    /// compares. Only when no request is in flight.
    pub(super) async fn fill_holes(&self, queue: &Queue) -> Result<()> {
        let image = &*self.image;
        let mut index = 0;
        loop {
            let end = self.used_end.load(Ordering::SeqCst);
            let run = {
                let mut places = crate::lock(&self.places);
                match places.hole(end) {
                    None => return Ok(()),
                    Some(_) => places.take(1),
                }
            };
            let Some(run) = run else { return Ok(()) };
            let mut taken = Taken { writer: self, run };
            while image.place(index).is_some() {
                index += 1;
            }
            let (start, length) = (image.place_offset(run.first), image.stored());
            storage::punch_hole(&*image.file, queue, start, length).await?;
            self.map(index, &mut taken);
        }
    }
}
