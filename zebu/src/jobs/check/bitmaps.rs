//! The bitmaps that the image stores.

use super::{Check, CheckMessage, Use};
use crate::Result;
use crate::format::{BitmapCluster, BitmapEntry, BitmapTableEntry, MAX_BITMAP_DIRECTORY_BYTES};

impl Check<'_> {
    /// Counts the references of the bitmaps: directory, tables and data.
    pub(super) async fn count_bitmaps(&mut self) -> Result<()> {
        let header = &self.metadata.header;
        let Some(bitmaps) = header.extensions.bitmaps().filter(|_| header.has_bitmaps()) else {
            return Ok(());
        };
        if bitmaps.directory_size > MAX_BITMAP_DIRECTORY_BYTES {
            self.report.corruptions += 1;
            self.incomplete = true;
            return Ok(());
        }
        self.count(
            Use::Bitmaps,
            bitmaps.directory_offset,
            bitmaps.directory_size,
            1,
        );
        let bytes = self
            .reader
            .read(bitmaps.directory_offset, bitmaps.directory_size)
            .await?;
        let Ok(list) = BitmapEntry::decode_directory(&bytes, bitmaps.count) else {
            self.report.corruptions += 1;
            self.incomplete = true;
            return Ok(());
        };
        let reader = self.reader.clone();
        let inside = |b: &BitmapEntry| {
            let bytes = u64::from(b.table_size) * 8;
            reader.inside(b.table_offset, bytes)
        };
        let overlap = list.iter().map(inside).sum::<u64>() > self.file_len;
        let mut counted = 0u64;
        for bitmap in &list {
            if bitmap.check(&self.metadata.geometry).is_err() {
                let name = String::from_utf8_lossy(&bitmap.name).into_owned();
                self.corrupt(CheckMessage::Bitmap { name }, 1);
                self.incomplete = true;
            }
            // Tables that overlap may be many and each as long as the file.
            counted = counted.saturating_add(inside(bitmap));
            if counted <= self.file_len {
                let bytes = u64::from(bitmap.table_size) * 8;
                self.count(Use::Bitmaps, bitmap.table_offset, bytes, 1);
            }
            if !overlap {
                self.count_bitmap(bitmap).await?;
            }
        }
        if overlap {
            self.unchecked(CheckMessage::BitmapTablesOverlap);
        }
        Ok(())
    }

    async fn count_bitmap(&mut self, bitmap: &BitmapEntry) -> Result<()> {
        let geometry = self.metadata.geometry;
        let mut numbers = self
            .reader
            .numbers(bitmap.table_offset, u64::from(bitmap.table_size));
        loop {
            let entries = numbers.next().await?;
            if entries.is_empty() {
                return Ok(());
            }
            for entry in entries {
                match BitmapTableEntry(entry).kind(&geometry) {
                    Ok(BitmapCluster::Stored { host }) => {
                        self.count(Use::Bitmaps, host.get(), geometry.cluster_size(), 1);
                    }
                    Ok(_) => {}
                    Err(_) => {
                        let name = String::from_utf8_lossy(&bitmap.name).into_owned();
                        self.corrupt(CheckMessage::BitmapTableEntry { name, entry }, 1);
                        self.incomplete = true;
                    }
                }
            }
        }
    }
}
