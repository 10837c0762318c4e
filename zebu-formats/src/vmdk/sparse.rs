//! A sparse extent: a grain directory, grain tables, grains.
//!
//! Tables are loaded in groups of neighbours, and kept as runs of grains that are stored alike, in a
//! cache that the extents of an image share.

use std::sync::Arc;

use super::header::{Entries, Layout, MARKER_BYTES, SECTOR};
use crate::Result;
use crate::drivers::cache::Cache;
use crate::drivers::limits::MAX_DISK;
use crate::drivers::{Limits, check_limit};
use crate::storage::{self, Queue, Storage};
use crate::table::read_table;

/// Bytes of the tables in a group, unless one table has more.
const GROUP_BYTES: u64 = 64 << 10;
/// Tables in a group at most.
const GROUP_TABLES: u64 = 32;
/// Groups that are kept of an image: a disk of 128 GiB with grains of 64 KiB. At worst a group takes
/// 384 KiB, if no grain follows another one.
pub const GROUPS: usize = 128;
/// Bytes of tables that are read at a time, and of the gap between two tables read together.
const READ_TABLES: u64 = 256 << 10;
const READ_GAP: u64 = 4 << 10;
/// Entries of the directory without a table that one span covers at most.
const MAX_EMPTY: usize = 4096;
/// A directory entry that leads nowhere. No valid one is so large where there are invalid ones.
const INVALID: u32 = u32::MAX;

/// A sparse extent.
#[derive(Debug)]
pub struct Sparse {
    file: Arc<dyn Storage>,
    file_len: u64,
    layout: Layout,
    /// The first sector of each table; 0: there is none, and its grains are left to the parent.
    directory: Box<[u32]>,
    /// Where its groups are in the cache.
    first_key: u64,
}

/// How grains are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Not at all: they are those of the parent.
    Nowhere,
    /// As zeroes.
    Zero,
    /// Uncompressed and contiguous, from this byte on.
    Data(u64),
    /// One grain, as a zlib stream of at most `length` bytes.
    Compressed {
        /// Its first byte.
        host: u64,
        /// The distance to the next grain, or the longest stream that QEMU reads.
        length: u32,
    },
    /// The metadata are wrong.
    Damaged(Damage),
}

/// What is wrong with metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The entry of the grain directory is missing or invalid.
    Directory,
    /// The grain table is not inside the file.
    Table,
    /// The entry of the grain table is invalid.
    Grain,
}

impl Damage {
    /// In words.
    pub const fn text(self) -> &'static str {
        match self {
            Damage::Directory => "The grain directory has no valid entry",
            Damage::Table => "The grain table is past the end of the file",
            Damage::Grain => "The grain table entry is invalid",
        }
    }
}

/// Neighbouring grains that are stored alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// The first grain, counted in the group.
    first: u32,
    stored: Stored,
}

/// The decoded tables of a group.
#[derive(Debug)]
pub struct Group {
    runs: Box<[Run]>,
    /// Grains.
    len: u32,
}

/// A range of the extent that is stored alike.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Bytes, at least 1.
    pub length: u64,
    /// How.
    pub stored: Stored,
    /// Bytes of the first grain that precede the range.
    pub within: u64,
}

impl Sparse {
    /// Reads the grain directory. The keys of its groups in the cache begin with `first_key`.
    pub async fn open(
        queue: &Queue,
        file: Arc<dyn Storage>,
        layout: Layout,
        limits: Option<&Limits>,
        first_key: u64,
    ) -> Result<Self> {
        let file_len = file.len()?;
        let tables = layout
            .sectors
            .div_ceil(layout.grain)
            .div_ceil(layout.table_len);
        let count = tables.min(layout.directory_len);
        let length = count * layout.entry_bytes();
        if let Some(limits) = limits {
            limits.check_size(layout.sectors * SECTOR)?;
            limits.check_table("The grain directory's length", length)?;
            let worst = GROUPS as u64 * layout.group_memory();
            let memory = length + worst.min(layout.sectors.div_ceil(layout.grain) * RUN_BYTES);
            check_limit("memory", "The need for memory", memory, limits.memory)?;
        }
        let (what, start) = (
            "The grain directory",
            layout.directory.saturating_mul(SECTOR),
        );
        let directory = match layout.entries {
            Entries::Sectors { .. } => {
                read_table(queue, &*file, what, start, count, u32::from_le_bytes).await
            }
            Entries::Typed { tables, .. } => {
                let decode = |entry| table_sector(u64::from_le_bytes(entry), tables);
                read_table(queue, &*file, what, start, count, decode).await
            }
        };
        let directory = directory.map_err(|e| {
            let path = file.path().display();
            e.during(format!("Could not read l1 table from extent '{path}'"))
        })?;
        Ok(Sparse {
            file,
            file_len,
            layout,
            directory: directory.into(),
            first_key,
        })
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of the file.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// How many keys its groups take up in the cache.
    pub fn keys(&self) -> u64 {
        (self.directory.len() as u64).div_ceil(self.layout.group_tables())
    }

    /// How the range of at most `limit` bytes from `at` on is stored, which is inside the extent;
    /// None if that needs I/O.
    pub fn cached(&self, groups: &Cache<Group>, at: u64, limit: u64) -> Option<Span> {
        match self.without_table(at, limit) {
            Some(span) => Some(span),
            None => {
                let group = groups.get(self.first_key + self.group_of(at))?;
                Some(self.span(&group, at, limit))
            }
        }
    }

    /// [`Sparse::cached`] with I/O.
    pub async fn load(
        &self,
        queue: &Queue,
        groups: &Cache<Group>,
        at: u64,
        limit: u64,
    ) -> Result<Span> {
        if let Some(span) = self.without_table(at, limit) {
            return Ok(span);
        }
        let nth = self.group_of(at);
        let load = async || self.read_group(queue, nth).await;
        let group = groups.get_or_load(self.first_key + nth, load).await?;
        Ok(self.span(&group, at, limit))
    }

    fn group_of(&self, at: u64) -> u64 {
        at / (self.layout.grain_bytes() * self.layout.group_grains())
    }

    /// The range from `at` on, if there is no table for it.
    fn without_table(&self, at: u64, limit: u64) -> Option<Span> {
        let covered = self.layout.grain_bytes() * self.layout.table_len;
        let table = usize::try_from(at / covered).unwrap_or(usize::MAX);
        let rest = self.directory.get(table..).unwrap_or_default();
        let (count, stored) = match rest.first() {
            None => (MAX_EMPTY, Stored::Damaged(Damage::Directory)),
            Some(0) => {
                let empty = rest.iter().take(MAX_EMPTY).take_while(|entry| **entry == 0);
                (empty.count(), Stored::Nowhere)
            }
            Some(_) => return None,
        };
        Some(Span {
            length: limit.min(count as u64 * covered - at % covered),
            stored,
            within: at % self.layout.grain_bytes(),
        })
    }

    /// The range from `at` on, by the tables of its group.
    fn span(&self, group: &Group, at: u64, limit: u64) -> Span {
        let bytes = self.layout.grain_bytes();
        let (grain, within) = (at / bytes % self.layout.group_grains(), at % bytes);
        let (first, end, stored) = group.run(grain as u32);
        let behind = grain - u64::from(first);
        Span {
            length: limit.min((u64::from(end) - grain) * bytes - within),
            stored: match stored {
                Stored::Data(host) => Stored::Data(host + behind * bytes),
                other => other,
            },
            within,
        }
    }

    /// Reads and decodes the tables of a group.
    async fn read_group(&self, queue: &Queue, nth: u64) -> Result<Group> {
        let layout = &self.layout;
        let first = (nth * layout.group_tables()) as usize;
        let sectors = &self.directory[first..];
        let sectors = &sectors[..sectors.len().min(layout.group_tables() as usize)];
        let mut places: Vec<(u64, usize)> = Vec::new();
        for (table, sector) in sectors.iter().enumerate() {
            let at = u64::from(*sector) * SECTOR;
            if !self.is_invalid(*sector) && at > 0 && at + layout.table_bytes() <= self.file_len {
                places.push((at, table));
            }
        }
        places.sort_unstable();
        let mut tables: Vec<Vec<u8>> = vec![Vec::new(); sectors.len()];
        let mut rest = &places[..];
        while let Some((start, _)) = rest.first().copied() {
            let mut end = start;
            let together = rest.iter().take_while(|(at, _)| {
                let next = at + layout.table_bytes();
                let is_near = end == start || *at <= end + READ_GAP && next - start <= READ_TABLES;
                if is_near {
                    end = end.max(next);
                }
                is_near
            });
            let (run, left) = rest.split_at(together.count());
            let length = (end - start) as usize;
            storage::event(&*self.file, storage::Event::L2Load);
            let bytes = storage::read_vec(&*self.file, queue, start, length).await?;
            for (at, table) in run {
                let from = (at - start) as usize;
                tables[*table] = bytes[from..from + layout.table_bytes() as usize].to_vec();
            }
            rest = left;
        }
        let grains = layout.sectors.div_ceil(layout.grain);
        let left = grains - nth * layout.group_grains();
        let mut group = Builder {
            layout,
            len: left.min(layout.group_grains()) as u32,
            runs: Vec::new(),
        };
        let starts = self.starts(&tables);
        for (nth, (sector, bytes)) in sectors.iter().zip(&tables).enumerate() {
            let first = nth as u32 * layout.table_len as u32;
            match (*sector, &bytes[..]) {
                (0, _) => group.push(first, Stored::Nowhere),
                (sector, []) if self.is_invalid(sector) => {
                    group.push(first, Stored::Damaged(Damage::Directory));
                }
                (_, []) => group.push(first, Stored::Damaged(Damage::Table)),
                (_, bytes) => {
                    for (grain, stored) in self.grains(bytes, &starts).enumerate() {
                        group.push(first + grain as u32, stored);
                    }
                }
            }
        }
        Ok(group.finish(sectors.len() as u32))
    }

    fn is_invalid(&self, sector: u32) -> bool {
        sector == INVALID && matches!(self.layout.entries, Entries::Typed { .. })
    }

    /// The sectors at which compressed grains start, in ascending order.
    fn starts(&self, tables: &[Vec<u8>]) -> Vec<u32> {
        if !self.layout.is_compressed() {
            return Vec::new();
        }
        let entries = tables.iter().flat_map(|table| table.as_chunks().0);
        let mut starts: Vec<u32> = entries.map(|entry| u32::from_le_bytes(*entry)).collect();
        starts.sort_unstable();
        starts.dedup();
        starts
    }

    /// How the grains of a table are stored. `starts` are those of the compressed grains around.
    fn grains<'a>(
        &'a self,
        table: &'a [u8],
        starts: &'a [u32],
    ) -> Box<dyn Iterator<Item = Stored> + 'a> {
        match self.layout.entries {
            Entries::Typed { grains, .. } => {
                let entries = table.as_chunks().0.iter();
                Box::new(entries.map(move |entry| typed(u64::from_le_bytes(*entry), grains)))
            }
            Entries::Sectors { .. } => {
                let entries = table.as_chunks().0.iter();
                Box::new(entries.map(|entry| self.by_sector(u32::from_le_bytes(*entry), starts)))
            }
        }
    }

    /// What an entry of 32 bits means.
    fn by_sector(&self, sector: u32, starts: &[u32]) -> Stored {
        let Entries::Sectors {
            zero_grains,
            compressed,
        } = self.layout.entries
        else {
            return Stored::Damaged(Damage::Grain);
        };
        let host = u64::from(sector) * SECTOR;
        match (sector, compressed) {
            (0, _) => Stored::Nowhere,
            (1, _) if zero_grains => Stored::Zero,
            (_, None) => Stored::Data(host),
            (_, Some(has_marker)) => {
                let host = host + if has_marker { MARKER_BYTES } else { 0 };
                let next = starts.partition_point(|start| *start <= sector);
                let end = match starts.get(next) {
                    Some(next) => u64::from(*next) * SECTOR,
                    None => u64::MAX,
                };
                let most = (end - host).min(self.longest().into());
                Stored::Compressed {
                    host,
                    // A stream past the end of the file is refused when it is read.
                    length: most.min(self.file_len.saturating_sub(host).max(1)) as u32,
                }
            }
        }
    }

    /// Bytes of the longest zlib stream of a grain, as in QEMU.
    pub fn longest(&self) -> u32 {
        let bytes = self.layout.grain_bytes();
        let longest = match self.layout.entries {
            Entries::Sectors {
                compressed: Some(false),
                ..
            } => bytes,
            _ => 2 * bytes - MARKER_BYTES,
        };
        u32::try_from(longest).unwrap_or(u32::MAX)
    }
}

/// Bytes of a run in memory.
const RUN_BYTES: u64 = size_of::<Run>() as u64;

impl Layout {
    /// Tables that are loaded together.
    fn group_tables(&self) -> u64 {
        (GROUP_BYTES / self.table_bytes()).clamp(1, GROUP_TABLES)
    }

    /// Grains of a group.
    fn group_grains(&self) -> u64 {
        self.group_tables() * self.table_len
    }

    /// Bytes of a group in memory at most.
    fn group_memory(&self) -> u64 {
        self.group_grains() * RUN_BYTES
    }
}

impl Group {
    /// The run that a grain is in: its first grain, the one behind it, and how it is stored.
    fn run(&self, grain: u32) -> (u32, u32, Stored) {
        let next = self.runs.partition_point(|run| run.first <= grain);
        let end = self.runs.get(next).map_or(self.len, |run| run.first);
        match self.runs.get(next.wrapping_sub(1)) {
            Some(run) => (run.first, end, run.stored),
            // Groups begin with a run.
            None => (
                grain,
                self.len.max(grain + 1),
                Stored::Damaged(Damage::Directory),
            ),
        }
    }
}

/// A group that is being decoded.
struct Builder<'a> {
    layout: &'a Layout,
    len: u32,
    runs: Vec<Run>,
}

impl Builder<'_> {
    /// Adds the grain `first`, and those up to the next one that is added.
    fn push(&mut self, first: u32, stored: Stored) {
        if first >= self.len {
            return;
        }
        let continues = self.runs.last().is_some_and(|last| {
            let count = u64::from(first - last.first);
            match (last.stored, stored) {
                (Stored::Data(start), Stored::Data(host)) => {
                    host == start + count * self.layout.grain_bytes()
                }
                (Stored::Compressed { .. }, _) => false,
                (before, stored) => before == stored,
            }
        });
        if !continues {
            self.runs.push(Run { first, stored });
        }
    }

    /// The group, whose tables are the first `tables` ones: there are no entries for the others.
    fn finish(mut self, tables: u32) -> Group {
        let end = tables * self.layout.table_len as u32;
        self.push(end, Stored::Damaged(Damage::Directory));
        Group {
            runs: self.runs.into(),
            len: self.len,
        }
    }
}

/// The first sector of the table of a seSparse directory entry; 0: there is none.
fn table_sector(entry: u64, tables: u64) -> u32 {
    const ALLOCATED: u64 = 0x1000_0000;
    const TABLE: u64 = 64;
    match (entry, entry >> 32) {
        (0, _) => 0,
        (_, ALLOCATED) => {
            let sector = tables.saturating_add((entry & 0xffff_ffff) * TABLE);
            u32::try_from(sector).unwrap_or(INVALID)
        }
        _ => INVALID,
    }
}

/// What an entry of a seSparse table means, whose grains start at this sector.
fn typed(entry: u64, grains: u64) -> Stored {
    const GRAIN: u64 = 8;
    match entry >> 60 {
        0 if entry == 0 => Stored::Nowhere,
        // Unmapped by the guest, or zeroes.
        1 | 2 => Stored::Zero,
        3 => {
            let nth = entry >> 48 & 0xfff | (entry & 0xffff_ffff_ffff) << 12;
            match nth.saturating_mul(GRAIN).saturating_add(grains) {
                // As with entries of 32 bits: there is the header.
                0 => Stored::Nowhere,
                // One that is too large is past the end of any file.
                sector => Stored::Data(sector.min(MAX_DISK / SECTOR) * SECTOR),
            }
        }
        _ => Stored::Damaged(Damage::Grain),
    }
}

#[cfg(test)]
mod tests {
    //! Guards against grains that are found elsewhere than their entry says, and against spans that
    //! overlap or leave gaps, whatever directory and tables contain.
    use proptest::prelude::*;

    use super::*;
    use crate::storage::{Memory, QueueOptions};

    const DIRECTORY: u64 = 1;

    fn number(bytes: &[u8], at: u64, width: u64) -> u64 {
        let mut number = [0; 8];
        number[..width as usize].copy_from_slice(&bytes[at as usize..(at + width) as usize]);
        u64::from_le_bytes(number)
    }

    /// How a grain is stored, looked up entry by entry.
    fn looked_up(layout: &Layout, bytes: &[u8], grain: u64) -> Stored {
        let (table, width) = (grain / layout.table_len, layout.entry_bytes());
        if table >= layout.directory_len {
            return Stored::Damaged(Damage::Directory);
        }
        let entry = number(bytes, DIRECTORY * SECTOR + table * width, width);
        let sector = match layout.entries {
            Entries::Sectors { .. } => entry,
            Entries::Typed { .. } if entry == 0 => 0,
            Entries::Typed { tables, .. } if entry >> 32 == 0x1000_0000 => {
                tables + (entry & 0xffff_ffff) * 64
            }
            Entries::Typed { .. } => return Stored::Damaged(Damage::Directory),
        };
        if sector == 0 {
            return Stored::Nowhere;
        }
        if sector * SECTOR + layout.table_bytes() > bytes.len() as u64 {
            return match layout.entries {
                // Too large for QEMU.
                Entries::Typed { .. } if sector >= u64::from(u32::MAX) => {
                    Stored::Damaged(Damage::Directory)
                }
                _ => Stored::Damaged(Damage::Table),
            };
        }
        let at = sector * SECTOR + grain % layout.table_len * width;
        let entry = number(bytes, at, width);
        match layout.entries {
            Entries::Typed { grains, .. } => typed(entry, grains),
            Entries::Sectors { .. } if entry == 0 => Stored::Nowhere,
            Entries::Sectors { zero_grains, .. } if zero_grains && entry == 1 => Stored::Zero,
            Entries::Sectors { compressed, .. } => match compressed {
                None => Stored::Data(entry * SECTOR),
                Some(has_marker) => Stored::Compressed {
                    host: entry * SECTOR + if has_marker { 12 } else { 0 },
                    length: 0,
                },
            },
        }
    }

    fn any_layout() -> impl Strategy<Value = Layout> {
        let entries = prop_oneof![
            (any::<bool>(), any::<Option<bool>>()).prop_map(|(zero_grains, compressed)| {
                Entries::Sectors {
                    zero_grains,
                    compressed,
                }
            }),
            (0u64..20, 0u64..1000).prop_map(|(tables, grains)| Entries::Typed { tables, grains }),
        ];
        let numbers = (1u64..3000, 1u64..9, 0u64..40, 1u64..200);
        (entries, numbers).prop_map(|(entries, (sectors, grain, directory_len, table_len))| {
            Layout {
                sectors,
                grain,
                directory: DIRECTORY,
                directory_len,
                table_len,
                entries,
            }
        })
    }

    /// Entries of 32 and 64 bits: grains in a row, zeroes, and anything.
    fn any_file() -> impl Strategy<Value = Vec<u8>> {
        let entry = prop_oneof![
            4 => (0u64..40).prop_map(|n| n),
            4 => (0u64..40).prop_map(|n| 0x1000_0000 << 32 | n),
            4 => (0u64..40).prop_map(|n| 3 << 60 | n << 48),
            2 => (1u64..3).prop_map(|n| n << 60),
            1 => any::<u64>(),
        ];
        let run = (entry, 1u64..40, any::<bool>()).prop_map(|(first, count, is_wide)| {
            let step = if first >> 60 == 3 { 1 << 48 } else { 1 };
            let numbers = (0..count).map(move |n| first.wrapping_add(n * step));
            let width = if is_wide { 8 } else { 4 };
            let bytes = numbers.flat_map(move |n| n.to_le_bytes().into_iter().take(width));
            bytes.collect::<Vec<u8>>()
        });
        prop::collection::vec(run, 1..150).prop_map(|runs| {
            let mut bytes = vec![0; (DIRECTORY * SECTOR) as usize];
            bytes.extend(runs.concat());
            // There is a directory.
            bytes.resize(bytes.len().max(1024), 0);
            bytes
        })
    }

    proptest! {
        #[test]
        fn grains_are_found_where_their_entries_say(layout in any_layout(), bytes in any_file()) {
            let queue = Queue::new(QueueOptions::default()).unwrap();
            let groups = Cache::new(2);
            let grains = layout.sectors.div_ceil(layout.grain);
            let file = Arc::new(Memory::new(bytes.clone()));
            let sparse = queue
                .block_on(Sparse::open(&queue, file, layout, None, 7))
                .unwrap();
            let (grain_bytes, size) = (layout.grain_bytes(), layout.sectors * SECTOR);
            let mut at = 0;
            while at < size {
                let span = queue
                    .block_on(sparse.load(&queue, &groups, at, size - at))
                    .unwrap();
                let cached = sparse.cached(&groups, at, size - at).unwrap();
                prop_assert_eq!(cached.stored, span.stored);
                prop_assert!(span.length > 0 && span.length <= size - at);
                prop_assert_eq!(span.within, at % grain_bytes);
                let first = at / grain_bytes;
                for grain in first..(at + span.length).div_ceil(grain_bytes).min(grains) {
                    let found = match span.stored {
                        Stored::Data(host) => Stored::Data(host + (grain - first) * grain_bytes),
                        Stored::Compressed { host, length } => {
                            prop_assert!(grain == first && length > 0);
                            Stored::Compressed { host, length: 0 }
                        }
                        other => other,
                    };
                    prop_assert_eq!(found, looked_up(&layout, &bytes, grain));
                }
                // Also from within a grain.
                at += span.length.min(5 * grain_bytes + 512);
            }
        }
    }
}
