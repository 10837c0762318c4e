//! Persistent dirty bitmaps: which parts of the disk were written since a point in time.
//!
//! The image keeps its enabled bitmaps while it is written:
//! - Before the first change, the flag `in_use` of each bitmap that will change is set, durably. A
//!   crash leaves it set, and the bitmap counts as inconsistent.
//! - A request sets the bits of its range in memory before it changes anything
//!   ([`Image::announce`](super::Image::announce)).
//! - A store writes the bits to new clusters, durably, and clears the flag last.
//!
//! A bitmap that cannot be read stays `in_use`. The image can be used all the same.

mod directory;
mod load;
mod owned;
mod store;
mod whole;

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::Image;
use super::allocation::frees::Freed;
use crate::drivers::BitmapInfo;
use crate::drivers::bits::{Bits, bits_for};
use crate::drivers::qcow2::structures::{BitmapEntry, MAX_BITMAP_BYTES};
use crate::storage::Queue;
use crate::{Error, Result};

/// The bitmaps of an image that is written.
#[derive(Debug, Default)]
pub(crate) struct Bitmaps {
    directory: Mutex<Directory>,
    /// By index in the directory: the bits of those that are in memory.
    bits: Vec<Option<Loaded>>,
    /// By index in the directory: whether its clusters are its own ([`Image::owned_bitmaps`]).
    owned: Vec<bool>,
}

/// The directory, as it is on the disk. Changed by a caller that has passed the gate of metadata, or
/// has exclusive access.
#[derive(Clone, Debug, Default)]
pub(crate) struct Directory {
    /// Host offset in bytes.
    pub offset: u64,
    /// The entries.
    pub entries: Vec<BitmapEntry>,
}

/// A bitmap in memory.
#[derive(Debug)]
struct Loaded {
    /// Shared with readers ([`Image::bitmap_by_name`]).
    bits: Arc<Bits>,
    /// Whether changes of the disk set bits.
    is_enabled: bool,
    /// The clusters of the table and of the bits on the disk.
    clusters: Mutex<Vec<Freed>>,
}

/// Bitmaps that readers follow, by their names, while an image is not written. When it is written
/// again, they are those that changes set.
#[derive(Debug, Default)]
pub(super) struct Followed(Mutex<Vec<(Vec<u8>, Weak<Bits>)>>);

impl Followed {
    /// Keeps the bitmaps of a writer that has ended.
    pub fn keep(&self, bitmaps: &Bitmaps) {
        let directory = bitmaps.directory();
        let entries = directory.entries.iter().zip(&bitmaps.bits);
        let enabled = entries.filter_map(|(entry, loaded)| {
            let loaded = loaded.as_ref().filter(|loaded| loaded.is_enabled)?;
            Some((entry.name.clone(), Arc::downgrade(&loaded.bits)))
        });
        *crate::lock(&self.0) = enabled.collect();
    }

    /// The bits of a bitmap that were read from the disk, or those that a reader follows: these are the
    /// same, or have nothing to do with it.
    fn followed(&self, name: &[u8], read: Bits) -> Arc<Bits> {
        let mut all = crate::lock(&self.0);
        all.retain(|(_, bits)| bits.strong_count() > 0);
        let followed = all.iter().find(|(other, _)| other == name);
        match followed.and_then(|(_, bits)| bits.upgrade()) {
            Some(bits) if bits.is_same(&read) => {
                bits.stored(true);
                bits
            }
            _ => {
                let bits = Arc::new(read);
                all.retain(|(other, _)| other != name);
                all.push((name.to_vec(), Arc::downgrade(&bits)));
                bits
            }
        }
    }
}

impl Loaded {
    /// The bits for a change that only exclusive access allows. Readers keep the old ones.
    fn bits_mut(&mut self) -> &mut Bits {
        Arc::make_mut(&mut self.bits)
    }
}

impl Directory {
    /// Bytes of the directory.
    pub(super) fn length(&self) -> u64 {
        self.entries
            .iter()
            .map(|entry| entry.encoded_len() as u64)
            .sum()
    }

    /// Where it is in the file, in bytes. Empty if there are no bitmaps.
    fn place(&self) -> Range<u64> {
        self.offset..self.offset + self.length()
    }

    /// The index of the bitmap of this name.
    pub(super) fn find(&self, name: &[u8]) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name)
    }
}

impl Bitmaps {
    fn directory(&self) -> MutexGuard<'_, Directory> {
        crate::lock(&self.directory)
    }

    /// Where the directory is in the file, in bytes. Empty if there are no bitmaps.
    pub(super) fn directory_place(&self) -> Range<u64> {
        self.directory().place()
    }

    /// Sets the bits of a range of the disk in all enabled bitmaps.
    pub(super) fn set(&self, range: &Range<u64>) {
        for loaded in self.bits.iter().flatten().filter(|l| l.is_enabled) {
            loaded.bits.set(range.clone());
        }
    }

    /// The bits in memory of the bitmap with this index.
    fn loaded(&self, index: usize) -> Option<&Loaded> {
        self.bits.get(index)?.as_ref()
    }

    /// Adapts the bits to another size of the disk. Bitmaps that cannot be stored for that size stay
    /// marked as in use.
    pub(super) fn resize(&mut self, size: u64) {
        for place in &mut self.bits {
            let Some(loaded) = place else { continue };
            let bytes = bits_for(size, loaded.bits.granularity_bits()).div_ceil(8);
            if !(1..=MAX_BITMAP_BYTES).contains(&bytes) {
                *place = None;
                continue;
            }
            let old = loaded.bits.size();
            loaded.bits_mut().resize(size);
            if loaded.is_enabled {
                loaded.bits.set(old..size);
            }
        }
    }

    /// Whether a bitmap of the disk is marked as in use although it is in memory.
    fn is_open(&self) -> bool {
        let directory = self.directory();
        let mut entries = directory.entries.iter().enumerate();
        entries.any(|(index, entry)| entry.in_use() && self.loaded(index).is_some())
    }
}

impl Image {
    /// The bitmaps, for [`Device::bitmaps`](crate::block::Device::bitmaps).
    pub(crate) async fn bitmaps(&self, queue: &Queue) -> Result<Vec<BitmapInfo>> {
        let directory = self.bitmap_directory(queue).await?;
        let entries = directory.entries.into_iter().enumerate();
        Ok(entries
            .map(|(index, entry)| BitmapInfo {
                granularity: entry.granularity().unwrap_or(0),
                enabled: entry.auto(),
                inconsistent: !self.is_loaded(index)
                    && (entry.in_use() || entry.check(&self.geometry).is_err()),
                name: entry.name,
            })
            .collect())
    }

    /// The bits of the bitmap of this name. If the image is writable and the bitmap enabled, changes of
    /// the disk set bits of what is returned.
    ///
    /// # Errors
    ///
    /// If there is no such bitmap, it is inconsistent, damaged or cannot be read.
    pub(crate) async fn bitmap_by_name(&self, queue: &Queue, name: &[u8]) -> Result<Arc<Bits>> {
        // Enabled bitmaps are in memory first: a store may free the clusters that they were read from.
        if let Some(writer) = &self.writer
            && writer.bitmaps.get().is_none()
            && writer.header().has_bitmaps()
        {
            self.as_task(queue, async move |image, queue| {
                let writer = image.writer()?;
                let _pass = writer.commits.gate.enter().await;
                image.open_enabled(queue, writer).await.map(drop)
            })
            .await?;
        }
        let directory = self.bitmap_directory(queue).await?;
        let index = directory.find(name);
        let index = index.ok_or_else(|| Error::bitmap_not_found(name))?;
        if self.shown.is_some() {
            return Err(Error::Refused(format!(
                "Bitmap '{}' tells what changed in the active disk, not in a snapshot",
                crate::printable(name)
            )));
        }
        let bitmaps = self.writer.as_ref().and_then(|writer| writer.bitmaps.get());
        if let Some(loaded) = bitmaps.and_then(|bitmaps| bitmaps.loaded(index)) {
            return Ok(loaded.bits.clone());
        }
        let entry = &directory.entries[index];
        // An enabled one that could not be loaded does not record changes.
        match entry.in_use() || entry.auto() && self.writer.is_some() {
            true => Err(Error::bitmap_inconsistent(name)),
            false => {
                let (bits, _) = self.load_bitmap(queue, entry).await?;
                Ok(match entry.auto() {
                    true => self.followed.followed(name, bits),
                    false => Arc::new(bits),
                })
            }
        }
    }

    /// The directory of the bitmaps: that of the writer, or as it is on the disk. Empty if the image
    /// has no bitmaps, or if a program that does not know them has written to the image.
    ///
    /// # Errors
    ///
    /// If the directory is not valid or cannot be read.
    async fn bitmap_directory(&self, queue: &Queue) -> Result<Directory> {
        match self.writer.as_ref().and_then(|writer| writer.bitmaps.get()) {
            Some(bitmaps) => Ok(bitmaps.directory().clone()),
            None => self.read_bitmap_directory(queue).await,
        }
    }

    /// Whether the bitmap with this index is in memory.
    fn is_loaded(&self, index: usize) -> bool {
        let bitmaps = self.writer.as_ref().and_then(|writer| writer.bitmaps.get());
        bitmaps.is_some_and(|bitmaps| bitmaps.loaded(index).is_some())
    }

    /// Sets bits of what is about to change. False if bitmaps were stored since the image was
    /// announced as changing: the bits must be announced again.
    pub(super) fn note_change(&self, bitmaps: &Bitmaps, range: &Range<u64>) -> bool {
        bitmaps.set(range);
        // A store first takes back the announcement and then looks at the bits: if it is still
        // there, the store sees the bits.
        self.writer
            .as_ref()
            .is_some_and(|writer| writer.announced.load(Ordering::SeqCst))
    }
}
