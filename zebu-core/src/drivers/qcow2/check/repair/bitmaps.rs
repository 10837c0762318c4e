//! Damaged bitmaps are removed.
//!
//! A bitmap that shows too little as changed makes a backup wrong without an error. So nothing of a
//! damaged one is kept, and of two that cannot both be right neither is.

use std::collections::HashMap;
use std::ops::Range;

use super::super::cells::Cells;
use super::super::read::Reader;
use super::super::uses::{Use, Uses};
use super::{CheckMessage, Repair};
use crate::drivers::qcow2::structures::{
    AUTOCLEAR_BITMAPS, BitmapCluster, BitmapEntry, BitmapTableEntry, BitmapsExtension,
    EXTENSION_BITMAPS, Extension,
};
use crate::{Result, printable};

/// What is wrong with a bitmap.
type Damage = &'static str;

/// A look at the bitmaps of an image.
struct BitmapLook<'a> {
    repair: &'a Repair<'a>,
    reader: Reader,
    file_len: u64,
    uses: &'a Uses,
    /// How many bitmaps have the cluster: 2 for more. The directory counts as one.
    owners: Cells,
}

impl Repair<'_> {
    /// Removes bitmaps that are damaged: whose entry or table is invalid or leads past the end of
    /// the file, that share a cluster with anything, or have the name of another one. If the header
    /// extension or the directory is damaged, or the directory has a second use, all are removed.
    /// Returns how many errors that repaired.
    ///
    /// Where the header or a table that everything depends on conflicts with a bitmap, either may be
    /// damaged. Then a second use is no reason to remove a bitmap.
    ///
    /// While the directory is written the header does not name it: if that is interrupted, the
    /// image has no bitmaps, and their clusters are leaked.
    pub(super) async fn remove_bitmaps(
        &mut self,
        uses: &Uses,
        emit: &mut dyn FnMut(CheckMessage),
    ) -> Result<u64> {
        let extension = match self.metadata.header.bitmaps() {
            Ok(Some(extension)) => Ok(extension),
            Ok(None) => return Ok(0),
            Err(_) => Err("their header extension is damaged"),
        };
        let judged = match &extension {
            Ok(extension) => self.look_at_bitmaps(extension, uses).await?,
            Err(why) => Err(*why),
        };
        let (removed, kept) = match judged {
            Ok(judged) => {
                let is_good = |(_, damage): &(BitmapEntry, Option<Damage>)| damage.is_none();
                let (kept, removed): (Vec<_>, Vec<_>) = judged.into_iter().partition(is_good);
                for (bitmap, damage) in &removed {
                    emit(CheckMessage::BitmapRemoved {
                        name: printable(&bitmap.name),
                        why: damage.unwrap_or_default(),
                    });
                }
                (removed.len() as u64, kept)
            }
            Err(why) => {
                emit(CheckMessage::BitmapsRemoved { why });
                (1, Vec::new())
            }
        };
        if removed == 0 {
            return Ok(0);
        }
        let kept: Vec<BitmapEntry> = kept.into_iter().map(|(bitmap, _)| bitmap).collect();
        self.replace_header(|header| {
            header.autoclear &= !AUTOCLEAR_BITMAPS;
            if kept.is_empty() {
                header.extensions.remove(EXTENSION_BITMAPS);
            }
        })
        .await?;
        if let Ok(extension) = extension
            && !kept.is_empty()
        {
            let directory = BitmapEntry::encode_directory(&kept)?;
            self.writer
                .write(extension.directory_offset, &directory)
                .await?;
            self.writer.barrier().await?;
            let extension = BitmapsExtension {
                count: kept.len() as u32,
                directory_size: directory.len() as u64,
                ..extension
            };
            self.replace_header(|header| {
                header.extensions.set(Extension::Bitmaps(extension));
                header.autoclear |= AUTOCLEAR_BITMAPS;
            })
            .await?;
        }
        Ok(removed)
    }

    /// The bitmaps, and what is wrong with each; or what is wrong with all of them.
    async fn look_at_bitmaps(
        &self,
        extension: &BitmapsExtension,
        uses: &Uses,
    ) -> Result<Result<Vec<(BitmapEntry, Option<Damage>)>, Damage>> {
        let file_len = self.metadata.file.len()?;
        let geometry = &self.metadata.geometry;
        let mut look = BitmapLook {
            repair: self,
            reader: Reader::new(&self.queue, &self.metadata.file, file_len),
            file_len,
            uses,
            owners: Cells::new(geometry.clusters_for(file_len), 1),
        };
        let (offset, length) = (extension.directory_offset, extension.directory_size);
        if look.is_past_end(offset, length) {
            return Ok(Err("their directory is past the end of the file"));
        }
        let bytes = look.reader.read(offset, length).await?;
        let Ok(bitmaps) = BitmapEntry::decode_directory(&bytes, extension.count) else {
            return Ok(Err("their directory is damaged"));
        };
        let is_doubtful = uses.conflict().is_some();
        // Tables of invalid entries are not read.
        let is_valid = |bitmap: &&BitmapEntry| bitmap.check(geometry).is_ok();
        let table_bytes = |bitmap: &BitmapEntry| u64::from(bitmap.table_size) * 8;
        let all_tables: u64 = bitmaps.iter().filter(is_valid).map(table_bytes).sum();
        // So the work is bounded by the length of the file.
        let untouched = || {
            bitmaps
                .iter()
                .map(|bitmap| (bitmap.clone(), None))
                .collect()
        };
        if all_tables > file_len {
            return Ok(match is_doubtful {
                true => Ok(untouched()),
                false => Err("their tables overlap"),
            });
        }
        look.own(look.clusters(offset, length));
        let mut names: HashMap<&[u8], u32> = HashMap::new();
        for bitmap in &bitmaps {
            *names.entry(&bitmap.name).or_default() += 1;
        }
        let mut judged = Vec::new();
        for bitmap in &bitmaps {
            let damage = match bitmap.check(geometry) {
                Err(_) => Some("its entry is invalid"),
                Ok(()) if names[&bitmap.name[..]] > 1 => Some("another one has the same name"),
                Ok(()) => look.take(bitmap).await?,
            };
            judged.push((bitmap.clone(), damage));
        }
        let is_alone = look.is_alone(look.clusters(offset, length));
        if is_doubtful {
            return Ok(Ok(match is_alone {
                true => judged,
                false => untouched(),
            }));
        }
        if !is_alone {
            return Ok(Err("their directory has a second use"));
        }
        for (bitmap, damage) in &mut judged {
            if damage.is_none() {
                *damage = look.second_use(bitmap).await?;
            }
        }
        Ok(Ok(judged))
    }
}

impl BitmapLook<'_> {
    /// Whether a cluster of a part of the file begins past its end.
    fn is_past_end(&self, offset: u64, length: u64) -> bool {
        let bits = self.repair.metadata.geometry.cluster_bits();
        let last = offset.checked_add(length.saturating_sub(1));
        last.is_none_or(|last| last >> bits << bits >= self.file_len)
    }

    /// The clusters of a part of the file.
    fn clusters(&self, offset: u64, length: u64) -> Range<u64> {
        let bits = self.repair.metadata.geometry.cluster_bits();
        offset >> bits..((offset + length).saturating_sub(1) >> bits) + 1
    }

    /// Counts one more owner of clusters.
    fn own(&mut self, clusters: Range<u64>) {
        for cluster in clusters {
            let owners = self.owners.get(cluster);
            self.owners.set(cluster, 2.min(owners + 1));
        }
    }

    /// Whether clusters have one owner and no other use.
    fn is_alone(&self, mut clusters: Range<u64>) -> bool {
        let bits = self.repair.metadata.geometry.cluster_bits();
        clusters.all(|cluster| {
            self.owners.get(cluster) < 2 && self.uses.is_only(Use::Bitmaps, cluster << bits)
        })
    }

    /// Counts the clusters of a bitmap as its own; what is wrong with them, if something is.
    async fn take(&mut self, bitmap: &BitmapEntry) -> Result<Option<Damage>> {
        let geometry = self.repair.metadata.geometry;
        let (offset, entries) = (bitmap.table_offset, u64::from(bitmap.table_size));
        const PAST_END: Damage = "it leads past the end of the file";
        if self.is_past_end(offset, entries * 8) {
            return Ok(Some(PAST_END));
        }
        self.own(self.clusters(offset, entries * 8));
        let mut numbers = self.reader.numbers(offset, entries);
        let mut damage = None;
        loop {
            let piece = numbers.next().await?;
            if piece.is_empty() {
                return Ok(damage);
            }
            for entry in piece {
                match BitmapTableEntry(entry).kind(&geometry) {
                    Ok(BitmapCluster::Stored { host }) if host.0 >= self.file_len => {
                        damage = Some(PAST_END);
                    }
                    Ok(BitmapCluster::Stored { host }) => {
                        self.own(self.clusters(host.0, geometry.cluster_size()));
                    }
                    Ok(_) => {}
                    Err(_) => damage = Some("its table is damaged"),
                }
            }
        }
    }

    /// What is wrong with a bitmap of which some cluster is something else, too.
    async fn second_use(&self, bitmap: &BitmapEntry) -> Result<Option<Damage>> {
        const SECOND_USE: Option<Damage> = Some("a cluster of it has a second use");
        let geometry = self.repair.metadata.geometry;
        let (offset, entries) = (bitmap.table_offset, u64::from(bitmap.table_size));
        if !self.is_alone(self.clusters(offset, entries * 8)) {
            return Ok(SECOND_USE);
        }
        let mut numbers = self.reader.numbers(offset, entries);
        loop {
            let piece = numbers.next().await?;
            if piece.is_empty() {
                return Ok(None);
            }
            for entry in piece {
                if let Ok(BitmapCluster::Stored { host }) = BitmapTableEntry(entry).kind(&geometry)
                    && !self.is_alone(self.clusters(host.0, geometry.cluster_size()))
                {
                    return Ok(SECOND_USE);
                }
            }
        }
    }
}
