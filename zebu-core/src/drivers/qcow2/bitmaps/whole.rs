//! Adding, removing and changing bitmaps, with exclusive access to the image.

use std::sync::{Arc, Mutex};

use super::{Bitmaps, Directory, Loaded};
use crate::drivers::BitmapChange;
use crate::drivers::bits::{Bits, bits_for};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::allocation::protect::BITMAP_DIRECTORY;
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_BITMAPS, BITMAP_AUTO, BITMAP_TYPE_DIRTY_TRACKING, BitmapEntry, BitmapsExtension,
    EXTENSION_BITMAPS, Extension, MAX_BITMAP_BYTES, MAX_BITMAP_DIRECTORY_BYTES, MAX_BITMAP_NAME,
    MAX_BITMAPS,
};
use crate::storage::Queue;
use crate::{Error, Result, printable};

/// A bitmap before a change.
struct Before {
    index: usize,
    bits: Bits,
    is_enabled: bool,
    /// The flags of its entry, which is in use.
    flags: u32,
}

impl Image {
    /// Changes one bitmap. Durable on return. After an error it is as before, or marked as in use.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such bitmap, it is inconsistent, or cannot be made. Those of
    /// a write.
    pub(crate) async fn change_bitmap(
        &mut self,
        queue: &Queue,
        name: &[u8],
        change: BitmapChange<'_>,
    ) -> Result<()> {
        self.announce(queue, 0..0).await?;
        // What was written until now is durable first: the bitmap says what has changed since.
        self.finish_writing(queue).await?;
        let changed = self.apply_bitmap_change(queue, name, change).await;
        let stored = self.store_bitmaps(queue).await;
        match (changed?, stored) {
            (Some(before), Err(error)) => {
                self.undo_bitmap_change(queue, before).await?;
                return Err(error);
            }
            // The list has changed, durably. The other bitmaps are stored later.
            (None, Err(error)) => tracing::warn!("bitmaps are not stored: {error}"),
            (_, Ok(())) => {}
        }
        let freed = self.finish_writing(queue).await;
        self.log_not_freed(freed);
        Ok(())
    }

    /// Applies a change, of a bitmap's bits or flags only in memory: what these were.
    async fn apply_bitmap_change(
        &mut self,
        queue: &Queue,
        name: &[u8],
        change: BitmapChange<'_>,
    ) -> Result<Option<Before>> {
        let found = self.bitmaps_mut()?.directory().find(name);
        let index = match (found, &change) {
            (
                None,
                BitmapChange::Add {
                    granularity_bits,
                    enabled,
                },
            ) => {
                let added = self.add_bitmap(queue, name, *granularity_bits, *enabled);
                return added.await.map(|()| None);
            }
            (Some(_), BitmapChange::Add { .. }) => {
                let name = printable(name);
                return Err(Error::Refused(format!("Bitmap already exists: {name}")));
            }
            (None, _) => return Err(Error::bitmap_not_found(name)),
            (Some(index), BitmapChange::Remove) => {
                return self.remove_bitmap(queue, index).await.map(|()| None);
            }
            (Some(index), _) => index,
        };
        self.open_bitmap(queue, index).await?;
        let bitmaps = self.bitmaps_mut()?;
        let flags = bitmaps.directory().entries[index].flags;
        let Some(loaded) = bitmaps.bits[index].as_mut() else {
            return Ok(None);
        };
        let before = Before {
            index,
            bits: (*loaded.bits).clone(),
            is_enabled: loaded.is_enabled,
            flags,
        };
        match change {
            BitmapChange::Add { .. } | BitmapChange::Remove => {}
            BitmapChange::Clear => loaded.bits_mut().clear(),
            BitmapChange::Merge(other) => loaded.bits.merge(other),
            BitmapChange::Enable(enabled) => {
                loaded.is_enabled = enabled;
                let flags = &mut bitmaps.directory().entries[index].flags;
                // The store that follows writes the flags of what is in use.
                *flags = *flags & !BITMAP_AUTO | if enabled { BITMAP_AUTO } else { 0 };
            }
        }
        Ok(Some(before))
    }

    /// Takes back a change that was not stored. The disk may have a part of it, so the bitmap is
    /// marked as in use there.
    async fn undo_bitmap_change(&mut self, queue: &Queue, before: Before) -> Result<()> {
        let bitmaps = self.bitmaps_mut()?;
        bitmaps.directory().entries[before.index].flags = before.flags;
        if let Some(loaded) = bitmaps.bits[before.index].as_mut() {
            loaded.bits = Arc::new(before.bits);
            loaded.bits.stored(false);
            loaded.is_enabled = before.is_enabled;
        }
        self.writer()?.check()?;
        self.mark_in_use(queue, &[before.index]).await
    }

    /// Loads a consistent bitmap, and marks it as in use on the disk.
    async fn open_bitmap(&mut self, queue: &Queue, index: usize) -> Result<()> {
        let bitmaps = self.bitmaps_mut()?;
        let entry = bitmaps.directory().entries[index].clone();
        if bitmaps.bits[index].is_none() {
            if entry.in_use() || !bitmaps.owned[index] {
                return Err(Error::bitmap_inconsistent(&entry.name));
            }
            let (bits, clusters) = self.load_bitmap(queue, &entry).await?;
            let loaded = Loaded {
                bits: Arc::new(bits),
                is_enabled: entry.auto(),
                clusters: Mutex::new(clusters),
            };
            self.bitmaps_mut()?.bits[index] = Some(loaded);
        }
        self.mark_in_use(queue, &[index]).await
    }

    async fn mark_in_use(&mut self, queue: &Queue, indexes: &[usize]) -> Result<()> {
        self.bitmaps_mut()?;
        match self.writer()?.bitmaps.get() {
            Some(bitmaps) => self.set_in_use(queue, bitmaps, indexes).await,
            None => Ok(()),
        }
    }

    /// Loads all consistent bitmaps and marks them as in use, before the size of the disk changes:
    /// the table of a consistent bitmap must match that size.
    pub(crate) async fn open_all_bitmaps(&mut self, queue: &Queue) -> Result<()> {
        let directory = self.bitmaps_mut()?.directory().clone();
        let mut consistent = Vec::new();
        for (index, entry) in directory.entries.iter().enumerate() {
            let bitmaps = self.bitmaps_mut()?;
            // A store that failed may have cleared the flag of one in memory.
            if entry.in_use() && bitmaps.bits[index].is_none() {
                continue;
            }
            consistent.push(index);
            let is_owner = bitmaps.owned[index];
            if bitmaps.bits[index].is_none() {
                let loaded = self.load_if_valid(queue, entry, is_owner).await?;
                self.bitmaps_mut()?.bits[index] = loaded;
            }
        }
        self.mark_in_use(queue, &consistent).await
    }

    /// Adapts the bitmaps to the new size of the disk. What was added counts as written.
    pub(in crate::drivers::qcow2) fn resize_bitmaps(&mut self) -> Result<()> {
        let size = self.size();
        self.bitmaps_mut()?.resize(size);
        Ok(())
    }

    /// The state of the bitmaps, which is empty for an image without bitmaps.
    fn bitmaps_mut(&mut self) -> Result<&mut Bitmaps> {
        self.writer()?;
        let writer = self.writer.as_mut().expect("checked above");
        writer.bitmaps.get_or_init(Bitmaps::default);
        Ok(writer.bitmaps.get_mut().expect("made above"))
    }

    async fn add_bitmap(
        &mut self,
        queue: &Queue,
        name: &[u8],
        granularity_bits: u8,
        enabled: bool,
    ) -> Result<()> {
        let mut directory = self.bitmaps_mut()?.directory().clone();
        let mut entry = BitmapEntry {
            table_offset: 0,
            table_size: 0,
            flags: if enabled { BITMAP_AUTO } else { 0 },
            kind: BITMAP_TYPE_DIRTY_TRACKING,
            granularity_bits,
            extra_data: Vec::new(),
            name: name.to_vec(),
        };
        self.check_new(&directory, &entry)?;
        let bits = Bits::new(self.size(), granularity_bits);
        let mut places = Vec::new();
        let written = self.write_bits(queue, &bits, &mut places).await;
        let result = match written {
            Err(error) => Err(error),
            Ok(table) => {
                (entry.table_offset, entry.table_size) = table;
                directory.entries.push(entry);
                self.switch_directory(queue, directory).await
            }
        };
        match result {
            Ok(()) => {
                bits.stored(true);
                let loaded = Loaded {
                    bits: Arc::new(bits),
                    is_enabled: enabled,
                    clusters: Mutex::new(places),
                };
                let bitmaps = self.bitmaps_mut()?;
                bitmaps.bits.push(Some(loaded));
                bitmaps.owned.push(true);
                // It is not marked as in use yet.
                self.writer()?.announce_again();
                Ok(())
            }
            Err(error) => {
                let writer = self.writer()?;
                // Where writes are refused from now on, the directory may be the new one.
                if writer.check().is_ok() {
                    places
                        .into_iter()
                        .for_each(|place| writer.free_at_commit(place));
                }
                Err(error)
            }
        }
    }

    /// Refuses a bitmap that the image cannot have, in QEMU's words.
    fn check_new(&self, directory: &Directory, new: &BitmapEntry) -> Result<()> {
        let bytes = bits_for(self.size(), new.granularity_bits).div_ceil(8);
        let length = directory.length() + new.encoded_len() as u64;
        let why = if self.geometry.version() < 3 {
            "Cannot store dirty bitmaps in qcow2 v2 files".into()
        } else if new.name.contains(&0) {
            "Its name has a NUL byte".into()
        } else if new.name.len() > MAX_BITMAP_NAME {
            format!("Name length exceeds maximum ({MAX_BITMAP_NAME} characters)")
        } else if directory.entries.len() >= MAX_BITMAPS as usize {
            format!("Maximum number of persistent bitmaps is already reached ({MAX_BITMAPS})")
        } else if bytes == 0 {
            "The disk is empty".into()
        } else if bytes > MAX_BITMAP_BYTES {
            "Too much space will be occupied by the bitmap. Use larger granularity".into()
        } else if length > MAX_BITMAP_DIRECTORY_BYTES {
            "Not enough space in the bitmap directory".into()
        } else {
            return Ok(());
        };
        Err(Error::Refused(format!(
            "Can't make bitmap '{}' persistent: {why}",
            printable(&new.name)
        )))
    }

    async fn remove_bitmap(&mut self, queue: &Queue, index: usize) -> Result<()> {
        let mut directory = self.bitmaps_mut()?.directory().clone();
        let entry = directory.entries.remove(index);
        let places = self.clusters_to_free(queue, index, &entry).await?;
        if places.is_empty() {
            tracing::warn!("the space of a bitmap is not freed: it may be that of something else");
        }
        self.switch_directory(queue, directory).await?;
        let bitmaps = self.bitmaps_mut()?;
        bitmaps.bits.remove(index);
        bitmaps.owned.remove(index);
        let writer = self.writer()?;
        places
            .into_iter()
            .for_each(|place| writer.free_at_commit(place.punched()));
        Ok(())
    }

    /// The clusters that become free with a bitmap: none if one may belong to something else.
    /// Removing a bitmap is how a damaged one is repaired, so mappings are compared, too.
    async fn clusters_to_free(
        &mut self,
        queue: &Queue,
        index: usize,
        entry: &BitmapEntry,
    ) -> Result<Vec<Freed>> {
        let bitmaps = self.bitmaps_mut()?;
        if !bitmaps.owned[index] {
            return Ok(Vec::new());
        }
        let places = match bitmaps.loaded(index) {
            Some(loaded) => crate::lock(&loaded.clusters).clone(),
            None => {
                let table = self.read_bitmap_table(queue, entry).await?;
                self.bitmap_clusters(entry.table_offset, &table)
            }
        };
        match self.is_mapped(queue, &places).await {
            Ok(false) => Ok(places),
            Ok(true) | Err(_) => Ok(Vec::new()),
        }
    }

    /// Makes a directory valid, durably, and frees the one before.
    async fn switch_directory(&mut self, queue: &Queue, mut directory: Directory) -> Result<()> {
        let old = self.bitmaps_mut()?.directory_place();
        let bytes = BitmapEntry::encode_directory(&directory.entries)?;
        let length = bytes.len() as u64;
        let place = self.write_new(queue, bytes).await?;
        if let Err(error) = self.commit(queue, true).await {
            self.writer()?.free_at_commit(place);
            return Err(error);
        }
        directory.offset = place.first * self.geometry.cluster_size();
        let extension = BitmapsExtension {
            count: directory.entries.len() as u32,
            reserved: 0,
            directory_size: length,
            directory_offset: directory.offset,
        };
        self.switch_header(queue, place, |header| match extension.count {
            0 => {
                header.extensions.remove(EXTENSION_BITMAPS);
                header.autoclear &= !AUTOCLEAR_BITMAPS;
            }
            _ => {
                header.extensions.set(Extension::Bitmaps(extension));
                header.autoclear |= AUTOCLEAR_BITMAPS;
            }
        })
        .await?;
        let new = directory.place();
        *self.bitmaps_mut()?.directory() = directory;
        let writer = self.writer()?;
        writer.protected.set(BITMAP_DIRECTORY, new);
        if !old.is_empty() {
            writer.free_at_commit(self.reference(old.start, old.end - old.start, true));
        }
        Ok(())
    }
}
