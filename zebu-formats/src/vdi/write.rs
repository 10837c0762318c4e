//! Writes. What has a block in the file is written in place and holds nothing. A block of the disk
//! that has none gets a place behind all others: its data are written there, with zeroes around them,
//! and then the map leads to it, in memory. The disk follows with the next flush (`commit.rs`).
//!
//! A request holds the blocks that it gives places (`Ranges`: all or none), so of two requests for one
//! block the first gives it a place, and the other finds that. The map never loses a block, so what a
//! request finds in it stays right while it lasts.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::dirty::Dirty;
use super::{BLOCK, Vdi};
use crate::Result;
use crate::drivers::{Commits, Mapping, Ranges, refused};
use crate::storage::{self, Iov, Queue, Writings};
use crate::{Place, Places, Tail};

const BLOCK_BYTES: u64 = BLOCK as u64;

/// The state of an image that is open for writing, which its requests and tasks share.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) image: Arc<Vdi>,
    /// Blocks of the disk: held by a request that gives them places.
    blocks: Ranges,
    pub(super) places: Places,
    /// The end of the places that the map leads to.
    pub(super) used_end: AtomicU32,
    pub(super) tail: Arc<Tail>,
    pub(super) commits: Commits,
    pub(super) dirty: Mutex<Dirty>,
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
        let used = places_in_use(&image, tail.length())?;
        let used_end = used.last().map_or(0, |last| *last as u32 + 1);
        let (start, limit) = (header.data_offset, header.blocks.into());
        let places = Places::new(tail.clone(), start, image.stored(), limit, used);
        Ok(Arc::new(Writer {
            blocks: Ranges::default(),
            places,
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
        let (first, within) = (guest / BLOCK_BYTES, guest % BLOCK_BYTES);
        let extra = self.image.header.block_extra;
        // Between blocks with bytes of their own before the data there is a gap.
        let most = match extra {
            0 => (within + iov.len() as u64).div_ceil(BLOCK_BYTES),
            _ => 1,
        };
        let place = self.places.take(queue, most).await?;
        let within = extra + within;
        let part = iov.slice(0, iov.len().min((place.bytes() - within) as usize));
        place.write(queue, &*self.image.file, within, &part).await?;
        self.map(first, place);
        Ok(part.len())
    }

    /// Leads the map to places whose blocks are written, from block `first` of the disk on.
    fn map(&self, first: u64, taken: Place<'_>) {
        let place = taken.first as u32; // There are at most MAX_BLOCKS.
        // Before the map: a commit that finds a block in it counts the place.
        self.used_end
            .fetch_max(place + taken.count as u32, Ordering::SeqCst);
        for (index, place) in (first..first + taken.count).zip(place..) {
            // Both at once: see `is_durable`.
            let mut dirty = crate::lock(&self.dirty);
            self.image.map[index as usize].store(place, Ordering::Release);
            dirty.note(index);
        }
        taken.keep();
    }

    /// Gives every place that is not in use, and that others are behind, to a block of the disk that
    /// reads as zeroes. Then the header's count is that of the blocks in the map, which QEMU's check
    /// compares. Only when no request is in flight, and after [`Places::shrink`].
    pub(super) async fn fill_holes(&self, queue: &Queue) -> Result<()> {
        let mut index = 0;
        while let Some(place) = self.places.take_free(1) {
            while self.image.place(index).is_some() {
                index += 1;
            }
            place.zero(queue, &*self.image.file).await?;
            self.map(index, place);
        }
        Ok(())
    }
}

/// The places of the blocks in the file, ascending.
///
/// # Errors
/// If one is not in the file, leads to the same bytes as another one, or is beyond what a disk of this
/// size can have: a write could destroy more than its range.
fn places_in_use(image: &Vdi, file_len: u64) -> Result<Vec<u64>> {
    let damaged = |index: u64, place: u64, what: &str| {
        refused(format!(
            "The VDI block map is damaged: block {index} is at {place}, {what}; 'zebu convert' copies \
             what can be read"
        ))
    };
    let blocks = 0..u64::from(image.header.blocks);
    let count = blocks.clone().filter(|index| image.place(*index).is_some());
    let mut used = storage::reserved(count.count())?;
    for index in blocks.clone() {
        let Some(place) = image.place(index).map(u64::from) else {
            continue;
        };
        if place >= blocks.end {
            return Err(damaged(index, place, "which is more than the disk has"));
        }
        if image.needed_end(index, place as u32) > file_len {
            return Err(damaged(index, place, "past the end of the file"));
        }
        used.push(place);
    }
    used.sort_unstable();
    let twice = used.windows(2).find(|pair| pair[0] == pair[1]);
    if let Some([place, _]) = twice {
        let is_there = |index: &u64| image.place(*index).map(u64::from) == Some(*place);
        let index = blocks.rev().find(is_there).unwrap_or(0);
        return Err(damaged(index, *place, "as another one is"));
    }
    Ok(used)
}
