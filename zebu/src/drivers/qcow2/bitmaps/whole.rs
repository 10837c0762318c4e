//! Adding, removing and changing bitmaps, with exclusive access to the image.

use std::sync::{Arc, Mutex};

use super::{Bitmaps, Bits, Directory, Loaded};
use crate::drivers::qcow2::Image;
use crate::format::{
    AUTOCLEAR_BITMAPS, BITMAP_AUTO, BITMAP_TYPE_DIRTY_TRACKING, BitmapEntry, BitmapsExtension,
    EXTENSION_BITMAPS, Extension, MAX_BITMAP_BYTES, MAX_BITMAP_GRANULARITY_BITS, MAX_BITMAP_NAME,
    MAX_BITMAPS, MIN_BITMAP_GRANULARITY_BITS, printable,
};
use crate::storage::Queue;
use crate::{Error, Result};

/// What is done to a bitmap.
#[derive(Debug)]
pub(crate) enum BitmapChange<'a> {
    /// It is made, without a set bit.
    Add {
        /// Bytes of the disk to a bit, as a power of two.
        granularity: u64,
        /// Whether changes of the disk are recorded.
        enabled: bool,
    },
    /// It is removed, in whatever state it is.
    Remove,
    /// No bit is set any more.
    Clear,
    /// Changes are recorded from now on, or not any more.
    Enable(bool),
    /// Bits are set that another bitmap has.
    Merge(&'a Bits),
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
        let result = self.apply_bitmap_change(queue, name, change).await;
        let stored = self.store_bitmaps(queue).await;
        result.and(stored)?;
        self.finish_writing(queue).await
    }

    async fn apply_bitmap_change(
        &mut self,
        queue: &Queue,
        name: &[u8],
        change: BitmapChange<'_>,
    ) -> Result<()> {
        let found = self.bitmaps_mut()?.directory().find(name);
        let index = match (found, &change) {
            (
                None,
                BitmapChange::Add {
                    granularity,
                    enabled,
                },
            ) => {
                return self.add_bitmap(queue, name, *granularity, *enabled).await;
            }
            (Some(_), BitmapChange::Add { .. }) => {
                return refuse(format!("Bitmap already exists: {}", printable(name)));
            }
            (None, _) => return Err(Error::bitmap_not_found(name)),
            (Some(index), BitmapChange::Remove) => return self.remove_bitmap(queue, index).await,
            (Some(index), _) => index,
        };
        self.open_bitmap(queue, index).await?;
        let bitmaps = self.bitmaps_mut()?;
        let Some(loaded) = bitmaps.bits[index].as_mut() else {
            return Ok(());
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
        Ok(())
    }

    /// Has a consistent bitmap in memory, and marks it as in use on the disk.
    async fn open_bitmap(&mut self, queue: &Queue, index: usize) -> Result<()> {
        let bitmaps = self.bitmaps_mut()?;
        let entry = bitmaps.directory().entries[index].clone();
        if bitmaps.bits[index].is_none() {
            if entry.in_use() {
                return Err(Error::bitmap_inconsistent(&entry.name));
            }
            let (bits, table) = self.load_bitmap(queue, &entry).await?;
            let loaded = Loaded {
                bits: Arc::new(bits),
                is_enabled: entry.auto(),
                table: Mutex::new(table),
            };
            self.bitmaps_mut()?.bits[index] = Some(loaded);
        }
        self.mark_in_use(queue, &[index]).await
    }

    async fn mark_in_use(&mut self, queue: &Queue, indexes: &[usize]) -> Result<()> {
        let mut directory = self.bitmaps_mut()?.directory().clone();
        self.set_in_use(queue, &mut directory, indexes, true)
            .await?;
        *self.bitmaps_mut()?.directory() = directory;
        Ok(())
    }

    /// Has all consistent bitmaps in memory and marked as in use, for a change of the disk's size:
    /// the table of a consistent bitmap has the size that goes with the disk's.
    pub(crate) async fn open_all_bitmaps(&mut self, queue: &Queue) -> Result<()> {
        let directory = self.bitmaps_mut()?.directory().clone();
        let mut consistent = Vec::new();
        for (index, entry) in directory.entries.iter().enumerate() {
            if entry.in_use() {
                continue;
            }
            consistent.push(index);
            if self.bitmaps_mut()?.bits[index].is_none() {
                let loaded = self.load_if_valid(queue, entry).await?;
                self.bitmaps_mut()?.bits[index] = loaded;
            }
        }
        self.mark_in_use(queue, &consistent).await
    }

    /// The disk has another size now, of which all of the change counts as written.
    pub(in crate::drivers::qcow2) fn resize_bitmaps(&mut self) -> Result<()> {
        let size = self.size();
        self.bitmaps_mut()?.resize(size);
        Ok(())
    }

    /// The state of the bitmaps; that of an image without any is empty.
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
        granularity: u64,
        enabled: bool,
    ) -> Result<()> {
        if self.geometry.version() < 3 {
            return refuse(format!(
                "Can't make bitmap '{}' persistent: Cannot store dirty bitmaps in qcow2 v2 files",
                printable(name)
            ));
        }
        let granularity_bits = check_new(name, granularity, self.size())?;
        let mut directory = self.bitmaps_mut()?.directory().clone();
        if directory.entries.len() >= MAX_BITMAPS as usize {
            return refuse(format!(
                "Maximum number of persistent bitmaps is already reached ({MAX_BITMAPS})"
            ));
        }
        let bits = Bits::new(self.size(), granularity_bits);
        let mut places = Vec::new();
        let written = self.write_bits(queue, &bits, &mut places).await;
        let result = match written {
            Err(error) => Err(error),
            Ok((table_offset, table)) => {
                directory.entries.push(BitmapEntry {
                    table_offset,
                    table_size: table.len() as u32,
                    flags: if enabled { BITMAP_AUTO } else { 0 },
                    kind: BITMAP_TYPE_DIRTY_TRACKING,
                    granularity_bits,
                    extra_data: Vec::new(),
                    name: name.to_vec(),
                });
                let switched = self.switch_directory(queue, directory).await;
                switched.map(|()| table)
            }
        };
        match result {
            Ok(table) => {
                bits.stored(true);
                let loaded = Loaded {
                    bits: Arc::new(bits),
                    is_enabled: enabled,
                    table: Mutex::new(table),
                };
                let bitmaps = self.bitmaps_mut()?;
                bitmaps.bits.push(Some(loaded));
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

    async fn remove_bitmap(&mut self, queue: &Queue, index: usize) -> Result<()> {
        let mut directory = self.bitmaps_mut()?.directory().clone();
        let entry = directory.entries.remove(index);
        // Looked at first: what makes no sense is not freed.
        let table = match self.bitmaps_mut()?.loaded(index) {
            Some(loaded) => Ok(crate::lock(&loaded.table).clone()),
            None => self.read_bitmap_table(queue, &entry).await,
        };
        let mut places = Vec::new();
        match table {
            Ok(table) => self.bitmap_clusters(entry.table_offset, &table, &mut places),
            Err(Error::Format(error)) => {
                tracing::warn!("the space of a damaged bitmap is not freed: {error}");
            }
            Err(error) => return Err(error),
        }
        self.switch_directory(queue, directory).await?;
        self.bitmaps_mut()?.bits.remove(index);
        let writer = self.writer()?;
        places
            .into_iter()
            .for_each(|place| writer.free_at_commit(place));
        Ok(())
    }

    /// Makes a directory valid, durably, and frees the one before.
    async fn switch_directory(&mut self, queue: &Queue, mut directory: Directory) -> Result<()> {
        let old = {
            let old = self.bitmaps_mut()?.directory();
            (old.offset, old.length())
        };
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
        *self.bitmaps_mut()?.directory() = directory;
        if old.1 > 0 {
            let old = self.reference(old.0, old.1, true);
            self.writer()?.free_at_commit(old);
        }
        Ok(())
    }
}

/// The granularity of a new bitmap as a power of two; an error if the format, or QEMU, does not
/// allow such a bitmap.
fn check_new(name: &[u8], granularity: u64, disk: u64) -> Result<u8> {
    let allowed = 1 << MIN_BITMAP_GRANULARITY_BITS..=1 << MAX_BITMAP_GRANULARITY_BITS;
    if !granularity.is_power_of_two() || !allowed.contains(&granularity) {
        return refuse("Granularity must be power of 2 and at least 512".into());
    }
    if name.is_empty() {
        return refuse("Bitmap name cannot be empty".into());
    }
    if name.len() > MAX_BITMAP_NAME {
        return refuse(format!(
            "Bitmap name exceeds maximum ({MAX_BITMAP_NAME} characters)"
        ));
    }
    if disk.div_ceil(granularity).div_ceil(8) > MAX_BITMAP_BYTES {
        return refuse(
            "Too much space will be occupied by the bitmap. Use larger granularity".into(),
        );
    }
    Ok(granularity.trailing_zeros() as u8)
}

fn refuse<T>(text: String) -> Result<T> {
    Err(Error::Refused(text))
}
