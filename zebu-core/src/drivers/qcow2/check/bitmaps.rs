//! The bitmaps that the image stores.

use std::collections::HashSet;

use super::{Check, CheckMessage, Use};
use crate::drivers::qcow2::structures::{
    BitmapCluster, BitmapEntry, BitmapTableEntry, FormatError,
};
use crate::{Result, printable};

impl Check<'_> {
    /// Counts the references of the bitmaps: directory, tables and data. Those of a bitmap whose entry
    /// in the directory is invalid are not known.
    pub(super) async fn count_bitmaps(&mut self) -> Result<()> {
        let bitmaps = match self.metadata.header.bitmaps() {
            Ok(Some(bitmaps)) => bitmaps,
            Ok(None) => return Ok(()),
            Err(error) => {
                self.bad_directory(&error);
                return Ok(());
            }
        };
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
        let list = match BitmapEntry::decode_directory(&bytes, bitmaps.count) {
            Ok(list) => list,
            Err(error) => {
                self.bad_directory(&error);
                return Ok(());
            }
        };
        let mut names = HashSet::new();
        let mut valid = Vec::new();
        for bitmap in &list {
            let name = || printable(&bitmap.name);
            if !names.insert(&bitmap.name) {
                self.corrupt(CheckMessage::BitmapName { name: name() }, 1);
            }
            match bitmap.check(&self.metadata.geometry) {
                Ok(()) => valid.push(bitmap),
                // What its table holds may be anything, up to the end of the file.
                Err(_) => {
                    self.corrupt(CheckMessage::Bitmap { name: name() }, 1);
                    self.incomplete = true;
                }
            }
        }
        let reader = self.reader.clone();
        let inside = |b: &BitmapEntry| {
            let bytes = u64::from(b.table_size) * 8;
            reader.inside(b.table_offset, bytes)
        };
        let overlap = valid.iter().map(|b| inside(b)).sum::<u64>() > self.file_len;
        let mut counted = 0u64;
        for bitmap in valid {
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

    /// None of the references of the bitmaps is known.
    fn bad_directory(&mut self, error: &FormatError) {
        let why = error.to_string();
        self.corrupt(CheckMessage::BitmapDirectory { why }, 1);
        self.incomplete = true;
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
                        let name = printable(&bitmap.name);
                        self.corrupt(CheckMessage::BitmapTableEntry { name, entry }, 1);
                        self.incomplete = true;
                    }
                }
            }
        }
    }
}
