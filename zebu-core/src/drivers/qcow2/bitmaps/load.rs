//! Reading bitmaps, and the state of the bitmaps of an image that begins to change.

use std::sync::{Arc, Mutex};

use super::{Bitmaps, Loaded};
use crate::drivers::Bits;
use crate::drivers::qcow2::Image;
use crate::drivers::qcow2::Writer;
use crate::drivers::qcow2::allocation::frees::Freed;
use crate::drivers::qcow2::structures::{
    BitmapCluster, BitmapEntry, BitmapTableEntry, FormatError, MAX_BITMAP_BYTES, check_table,
};
use crate::storage::{self, Queue};
use crate::{Error, Result};

impl Image {
    /// Reads the bits of a bitmap. Also returns its clusters.
    ///
    /// # Errors
    ///
    /// If the bitmap is not valid or cannot be read. Whether it is in use is not checked.
    pub(super) async fn load_bitmap(
        &self,
        queue: &Queue,
        entry: &BitmapEntry,
    ) -> Result<(Bits, Vec<Freed>)> {
        entry.check(&self.geometry)?;
        if !entry.extra_data.is_empty() && !entry.extra_data_compatible() {
            return Err(constraint(entry, "it has extra data of an unknown kind"));
        }
        let table = self.read_bitmap_table(queue, entry).await?;
        let size = self.geometry.cluster_size();
        let bits = Bits::new(self.size(), entry.granularity_bits);
        let per_cluster = size * 8;
        for (nth, place) in (0..).zip(&table) {
            let first = nth * per_cluster;
            if first >= bits.len() {
                break;
            }
            match place.kind(&self.geometry)? {
                BitmapCluster::Zeros => {}
                BitmapCluster::Ones => bits.set_bits(first, bits.len().min(first + per_cluster)),
                BitmapCluster::Stored { host } => {
                    if self.is_past_end(host.0)? {
                        return Err(constraint(
                            entry,
                            "a part of it is past the end of the file",
                        ));
                    }
                    self.spend(size)?;
                    let bytes =
                        storage::read_vec(&*self.file, queue, host.0, size as usize).await?;
                    if has_tail(&bytes, bits.len() - first) {
                        return Err(constraint(entry, "it has bits past the end of the disk"));
                    }
                    bits.decode(first, &bytes);
                }
            }
        }
        bits.stored(true);
        Ok((bits, self.bitmap_clusters(entry.table_offset, &table)))
    }

    /// Reads the table of a bitmap.
    pub(super) async fn read_bitmap_table(
        &self,
        queue: &Queue,
        entry: &BitmapEntry,
    ) -> Result<Vec<BitmapTableEntry>> {
        let entries = u64::from(entry.table_size);
        // A damaged entry may name a hole of any size.
        if entries * self.geometry.cluster_size() > MAX_BITMAP_BYTES {
            return Err(constraint(entry, "its clusters are more than 512 MiB"));
        }
        check_table(
            "Bitmap table",
            entry.table_offset,
            entries,
            8,
            self.geometry.cluster_size(),
            self.file.len()?,
        )?;
        self.spend(entries * 8)?;
        let bytes =
            storage::read_vec(&*self.file, queue, entry.table_offset, entries as usize * 8).await?;
        let words = bytes.chunks_exact(8);
        Ok(words
            .map(|word| BitmapTableEntry::from_be_bytes(word.try_into().expect("8 bytes")))
            .collect())
    }

    /// Loads the enabled bitmaps and marks them as in use on the disk. To be called before the first
    /// change of an image, and before the first one after a store. The caller has passed the gate of
    /// metadata, or is alone.
    ///
    /// False if the header extension or the directory is damaged: its bitmaps must not count as
    /// consistent any more.
    pub(in crate::drivers::qcow2) async fn begin_bitmaps(
        &self,
        queue: &Queue,
        writer: &Writer,
    ) -> Result<bool> {
        if !writer.header().has_bitmaps() {
            return Ok(true);
        }
        let bitmaps = match self.open_enabled(queue, writer).await {
            Err(Error::Format(error)) => {
                tracing::warn!("the bitmaps are inconsistent from now on: {error}");
                return Ok(false);
            }
            bitmaps => bitmaps?,
        };
        // Also those that should be marked already: a store that failed may have cleared the flag.
        let changing = |(index, entry): &(usize, &BitmapEntry)| {
            entry.auto() && (!entry.in_use() || bitmaps.loaded(*index).is_some())
        };
        let directory = bitmaps.directory().clone();
        let entries = directory.entries.iter().enumerate().filter(changing);
        let indexes: Vec<usize> = entries.map(|(index, _)| index).collect();
        self.set_in_use(queue, bitmaps, &indexes).await?;
        Ok(true)
    }

    /// The state of the bitmaps. Those that are enabled and consistent are loaded. The caller has
    /// passed the gate of metadata, or is alone.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if the directory is damaged. [`Error::Io`] if anything cannot be read.
    pub(super) async fn open_enabled<'a>(
        &self,
        queue: &Queue,
        writer: &'a Writer,
    ) -> Result<&'a Bitmaps> {
        if let Some(bitmaps) = writer.bitmaps.get() {
            return Ok(bitmaps);
        }
        let directory = self.read_bitmap_directory(queue).await?;
        self.protect_bitmap_directory(queue, writer, &directory)
            .await?;
        let owned = self.owned_bitmaps(queue, &directory).await?;
        let mut bits = Vec::new();
        for (entry, owned) in directory.entries.iter().zip(&owned) {
            bits.push(match entry.auto() && !entry.in_use() {
                true => self.load_if_valid(queue, entry, *owned).await?,
                false => None,
            });
        }
        Ok(writer.bitmaps.get_or_init(|| Bitmaps {
            directory: Mutex::new(directory),
            bits,
            owned,
        }))
    }

    /// Loads a consistent bitmap. None, with a warning, if it is damaged, or if its clusters are not
    /// its own.
    pub(super) async fn load_if_valid(
        &self,
        queue: &Queue,
        entry: &BitmapEntry,
        is_owner: bool,
    ) -> Result<Option<Loaded>> {
        let loaded = match is_owner {
            true => self.load_bitmap(queue, entry).await,
            false => Err(constraint(entry, "its clusters are not its own")),
        };
        match loaded {
            Ok((bits, clusters)) => Ok(Some(Loaded {
                bits: match entry.auto() {
                    true => self.followed.followed(&entry.name, bits),
                    false => Arc::new(bits),
                },
                is_enabled: entry.auto(),
                clusters: Mutex::new(clusters),
            })),
            Err(Error::Format(error)) => {
                tracing::warn!("a bitmap is inconsistent from now on: {error}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Whether a cluster of a bitmap, of which `bits` are left, has some that are set behind them. The
/// format does not allow these, so that is rather something else. The rest of the last 64 bits, which
/// programs count with, may be anything.
fn has_tail(bytes: &[u8], bits: u64) -> bool {
    let used = usize::try_from(bits.div_ceil(64) * 8).unwrap_or(usize::MAX);
    let tail = bytes.get(used..).unwrap_or_default();
    tail.iter().any(|byte| *byte != 0)
}

fn constraint(entry: &BitmapEntry, why: &'static str) -> Error {
    let name = crate::printable(&entry.name);
    FormatError::BitmapConstraint { name, why }.into()
}
