//! The directory on the disk: reading it, and changing entries in place.

use super::Directory;
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::Image;
use crate::format::{BITMAP_IN_USE, BitmapEntry, check_table};
use crate::storage::{self, Queue};

/// Offset of the table size in an entry, which the flags follow, in bytes.
const SIZE_AND_FLAGS: u64 = 8;

impl Image {
    /// Reads the directory; see [`Image::bitmap_directory`].
    pub(super) async fn read_bitmap_directory(&self, queue: &Queue) -> Result<Directory> {
        let header = match &self.writer {
            Some(writer) => writer.header().clone(),
            None => self.header.clone(),
        };
        let Some(extension) = header.extensions.bitmaps().filter(|_| header.has_bitmaps()) else {
            return Ok(Directory::default());
        };
        check_table(
            "Bitmap directory",
            extension.directory_offset,
            extension.directory_size,
            1,
            self.geometry.cluster_size(),
            self.file.len()?,
        )?;
        let bytes = storage::read_vec(
            &*self.file,
            queue,
            extension.directory_offset,
            extension.directory_size as usize,
        )
        .await?;
        Ok(Directory {
            offset: extension.directory_offset,
            entries: BitmapEntry::decode_directory(&bytes, extension.count)?,
        })
    }

    /// Sets or clears the flag `in_use` of entries, on the disk durably and then in `directory`.
    pub(super) async fn set_in_use(
        &self,
        queue: &Queue,
        directory: &mut Directory,
        indexes: &[usize],
        in_use: bool,
    ) -> Result<()> {
        let flags = |entry: &BitmapEntry| match in_use {
            true => entry.flags | BITMAP_IN_USE,
            false => entry.flags & !BITMAP_IN_USE,
        };
        self.write_size_and_flags(queue, directory, indexes, |_, entry| {
            (entry.table_size, flags(entry))
        })
        .await?;
        for index in indexes {
            let entry = &mut directory.entries[*index];
            entry.flags = flags(entry);
        }
        Ok(())
    }

    /// Writes table size and flags of entries, durably. (They share eight bytes at an offset that is
    /// a multiple of eight, so each entry has either the old or the new ones.)
    pub(super) async fn write_size_and_flags(
        &self,
        queue: &Queue,
        directory: &Directory,
        indexes: &[usize],
        of: impl Fn(usize, &BitmapEntry) -> (u32, u32),
    ) -> Result<()> {
        if indexes.is_empty() {
            return Ok(());
        }
        let mut at = directory.offset;
        for (index, entry) in directory.entries.iter().enumerate() {
            if indexes.contains(&index) {
                let (size, flags) = of(index, entry);
                let word = u64::from(size) << 32 | u64::from(flags);
                let offset = at + SIZE_AND_FLAGS;
                storage::write_slice(&*self.file, queue, offset, &word.to_be_bytes()).await?;
            }
            at += entry.encoded_len() as u64;
        }
        match is_broken(Rule::InUseBeforeChange) {
            true => Ok(()),
            false => self.flush_file(queue, &*self.file).await,
        }
    }

    /// Writes the table offsets of entries, durably.
    pub(super) async fn write_table_offsets(
        &self,
        queue: &Queue,
        directory: &Directory,
        offsets: &[(usize, u64)],
    ) -> Result<()> {
        if offsets.is_empty() {
            return Ok(());
        }
        let mut at = directory.offset;
        for (index, entry) in directory.entries.iter().enumerate() {
            if let Some((_, offset)) = offsets.iter().find(|(other, _)| *other == index) {
                storage::write_slice(&*self.file, queue, at, &offset.to_be_bytes()).await?;
            }
            at += entry.encoded_len() as u64;
        }
        self.flush_file(queue, &*self.file).await
    }
}
