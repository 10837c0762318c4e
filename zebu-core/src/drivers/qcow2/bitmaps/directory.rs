//! The directory on the disk: reading it, and changing entries in place.

use super::{Bitmaps, Directory};
use crate::Result;
use crate::broken::{Rule, is_broken};
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::structures::{BITMAP_IN_USE, BitmapEntry, check_table};
use crate::storage::{self, Queue};

/// Offset of the table size in an entry, which the flags follow, in bytes.
const SIZE_AND_FLAGS: u64 = 8;
/// Offset of the flags in an entry, in bytes.
const FLAGS: u64 = 12;

impl Image {
    /// Reads the directory; see [`Image::bitmap_directory`].
    pub(super) async fn read_bitmap_directory(&self, queue: &Queue) -> Result<Directory> {
        let header = match &self.writer {
            Some(writer) => writer.header().clone(),
            None => self.header.clone(),
        };
        let Some(extension) = header.bitmaps()? else {
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

    /// Sets the flag `in_use` of entries, on the disk durably and then in memory. On the disk
    /// nothing else of them changes: after a store that failed they may be as it has left them.
    ///
    /// After an error, or if the future is dropped, the disk may have some of the flags. So bitmaps in
    /// memory count as marked from the start: the next change sets the flag again, and the next store
    /// clears it.
    pub(super) async fn set_in_use(
        &self,
        queue: &Queue,
        bitmaps: &Bitmaps,
        indexes: &[usize],
    ) -> Result<()> {
        let flags = |entry: &BitmapEntry| entry.flags | BITMAP_IN_USE;
        let durable = !is_broken(Rule::InUseBeforeChange);
        let mark = |all: bool| {
            let mut directory = bitmaps.directory();
            for index in indexes {
                if all || bitmaps.loaded(*index).is_some() {
                    let entry = &mut directory.entries[*index];
                    entry.flags = flags(entry);
                }
            }
        };
        mark(false);
        let directory = bitmaps.directory().clone();
        let written = self.write_entries(queue, &directory, FLAGS, durable, |index, entry| {
            let is_wanted = indexes.contains(&index);
            is_wanted.then(|| flags(entry).to_be_bytes())
        });
        written.await?;
        mark(true);
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
        self.write_entries(queue, directory, SIZE_AND_FLAGS, true, |index, entry| {
            indexes.contains(&index).then(|| {
                let (size, flags) = of(index, entry);
                (u64::from(size) << 32 | u64::from(flags)).to_be_bytes()
            })
        })
        .await
    }

    /// Writes the table offsets of entries, durably.
    pub(super) async fn write_table_offsets(
        &self,
        queue: &Queue,
        directory: &Directory,
        offsets: &[(usize, u64)],
    ) -> Result<()> {
        let durable = !is_broken(Rule::BitsBeforeFlag);
        self.write_entries(queue, directory, 0, durable, |index, _| {
            let new = offsets.iter().find(|(other, _)| *other == index);
            new.map(|(_, offset)| offset.to_be_bytes())
        })
        .await
    }

    /// Writes a part of entries: `of` has the bytes from offset `at` on of those that change.
    async fn write_entries<const N: usize>(
        &self,
        queue: &Queue,
        directory: &Directory,
        at: u64,
        durable: bool,
        of: impl Fn(usize, &BitmapEntry) -> Option<[u8; N]>,
    ) -> Result<()> {
        let (mut offset, mut written) = (directory.offset + at, false);
        for (index, entry) in directory.entries.iter().enumerate() {
            if let Some(bytes) = of(index, entry) {
                storage::write_slice(&*self.file, queue, offset, &bytes).await?;
                written = true;
            }
            offset += entry.encoded_len() as u64;
        }
        match written && durable {
            true => self.flush_file(queue, &*self.file).await,
            false => Ok(()),
        }
    }
}
