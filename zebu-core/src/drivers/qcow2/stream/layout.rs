//! The layout of a qcow2 image that is written in order: header, refcount table and blocks, L1
//! table, L2 tables, data.

use std::collections::BTreeMap;

use crate::codec;
use crate::drivers::Preallocation;
use crate::drivers::qcow2::create::CreateQcow2;
use crate::drivers::qcow2::structures::{
    Compression, Geometry, Header, L1Entry, L2Entry, RefcountBlock, RefcountSpace,
    RefcountTableEntry,
};
use crate::drivers::stream::{Packing, Pipe};
use crate::offset::HostOffset;
use crate::{Error, Result};

/// Clusters of the disk of the largest image.
const MAX_CLUSTERS: u64 = 1 << 32;
/// Compressed clusters are counted in sectors.
const SECTOR: u64 = 512;

/// What is stored, in the order of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Clusters of the disk that follow each other, as they are.
    Plain { first: u64, count: u64 },
    /// A cluster of the disk in so many bytes.
    Compressed { cluster: u64, length: u64 },
}

/// [`Stored`] in eight bytes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    first: u32,
    /// The number of clusters, or the length.
    count: u32,
}

impl Entry {
    const COMPRESSED: u32 = 1 << 31;

    fn new(stored: Stored) -> Self {
        // Below the limits of Layout::push.
        match stored {
            Stored::Plain { first, count } => Entry {
                first: first as u32,
                count: count as u32,
            },
            Stored::Compressed { cluster, length } => Entry {
                first: cluster as u32,
                count: length as u32 | Self::COMPRESSED,
            },
        }
    }

    fn stored(self) -> Stored {
        let (first, count) = (self.first.into(), u64::from(self.count & !Self::COMPRESSED));
        match self.count & Self::COMPRESSED {
            0 => Stored::Plain { first, count },
            _ => Stored::Compressed {
                cluster: first,
                length: count,
            },
        }
    }
}

/// The layout of an image.
#[derive(Debug)]
pub struct Layout {
    header: Header,
    geometry: Geometry,
    packing: Option<Packing>,
    entries: Vec<Entry>,
}

/// Where the sections of an image begin, in clusters: a header and a refcount table precede them.
struct Sections {
    /// Refcount blocks.
    blocks: u64,
    l1: u64,
    l2: u64,
    data: u64,
    end: u64,
}

/// Where data lie behind the tables, in bytes from the first data on.
#[derive(Clone, Debug)]
pub struct Places {
    cluster: u64,
    /// The most that a refcount can count.
    most: u64,
    end: u64,
    /// Compressed clusters that touch the last host cluster.
    sharing: u64,
}

impl Places {
    /// The place of what follows, and the host clusters that it touches for the first time.
    pub fn place(&mut self, stored: Stored) -> u64 {
        let cluster = self.cluster;
        match stored {
            Stored::Plain { count, .. } => {
                let at = self.end.next_multiple_of(cluster);
                self.end = at + count * cluster;
                self.sharing = 0;
                at
            }
            Stored::Compressed { length, .. } => {
                if self.sharing >= self.most {
                    self.end = self.end.next_multiple_of(cluster);
                }
                if self.end.is_multiple_of(cluster) {
                    self.sharing = 0;
                }
                let at = self.end;
                self.end += length;
                // Its last sector may reach into the next cluster only if its data do.
                self.sharing = match (self.end - 1) / cluster == at / cluster {
                    true => self.sharing + 1,
                    false => 1,
                };
                at
            }
        }
    }
}

impl Layout {
    /// Of an image without data; what it gets is compressed if `compress`.
    ///
    /// # Errors
    /// If the image has options that a stream cannot have.
    pub fn new(image: &CreateQcow2, compress: bool) -> Result<Self> {
        let refused = |what: &str| {
            Err(Error::Refused(format!(
                "A qcow2 image that is written to a stream cannot have {what}"
            )))
        };
        image.check()?;
        if image.preallocation != Preallocation::Off {
            return refused("preallocation");
        }
        if image.data_file.is_some() {
            return refused("an external data file");
        }
        if image.backing.is_some() {
            return refused("a backing file");
        }
        let header = image.header()?;
        let geometry = Geometry::new(&header)?;
        if geometry.guest_clusters() > MAX_CLUSTERS {
            return refused("so many clusters: larger ones are needed");
        }
        Ok(Layout {
            header,
            geometry,
            packing: compress.then_some(Packing::Shorter(match image.compression {
                Compression::Zlib => codec::Compression::Zlib,
                Compression::Zstd => codec::Compression::Zstd,
            })),
            entries: Vec::new(),
        })
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.geometry.cluster_size()
    }

    /// How clusters are compressed.
    pub fn packing(&self) -> Option<Packing> {
        self.packing
    }

    /// What is stored, by its number in the order.
    pub fn stored(&self, nth: usize) -> Option<Stored> {
        self.entries.get(nth).map(|entry| entry.stored())
    }

    /// Adds what follows.
    fn push(&mut self, stored: Stored) {
        // More would have the bit of compressed ones.
        const MOST: u64 = 1 << 30;
        if let Stored::Plain { first, count } = stored
            && let Some(last) = self.entries.last_mut()
            && let Stored::Plain {
                first: from,
                count: before,
            } = last.stored()
            && (from..=from + before).contains(&first)
            && before + count <= MOST
        {
            let end = (from + before).max(first + count);
            *last = Entry::new(Stored::Plain {
                first: from,
                count: end - from,
            });
            return;
        }
        match stored {
            Stored::Plain { first, count } if count > MOST => {
                self.entries
                    .push(Entry::new(Stored::Plain { first, count: MOST }));
                self.push(Stored::Plain {
                    first: first + MOST,
                    count: count - MOST,
                });
            }
            stored => self.entries.push(Entry::new(stored)),
        }
    }

    /// Adds a range of the disk in whole clusters.
    pub fn push_range(&mut self, start: u64, end: u64) {
        let first = start / self.cluster_size();
        let count = end.div_ceil(self.cluster_size()) - first;
        if count > 0 {
            self.push(Stored::Plain { first, count });
        }
    }

    /// Adds the compressed cluster at `offset` of the disk, of so many bytes.
    pub fn push_packed(&mut self, offset: u64, length: u64) {
        let cluster = offset / self.cluster_size();
        self.push(Stored::Compressed { cluster, length });
    }

    /// The places of data, from the first on.
    pub fn places(&self) -> Places {
        let bits = 1u32 << self.header.refcount_order.min(6);
        Places {
            cluster: self.cluster_size(),
            most: (1u64 << bits.min(16)) - 1,
            end: 0,
            sharing: 0,
        }
    }

    /// Bytes of the whole image.
    pub fn length(&self) -> u64 {
        let (data, _, l1) = self.measure();
        self.sections(data, &l1).end * self.cluster_size()
    }

    /// The sections of an image with so many host clusters of data and these L2 tables.
    fn sections(&self, data: u64, l1: &[bool]) -> Sections {
        let geometry = &self.geometry;
        let l2_tables = l1.iter().filter(|used| **used).count() as u64;
        let l1_clusters = (geometry.l1_entries() * 8).div_ceil(geometry.cluster_size());
        let others = 1 + l1_clusters + l2_tables + data;
        let (bits, order) = (geometry.cluster_bits(), geometry.refcount_order());
        let refcounts = RefcountSpace::of_file(others, bits, order);
        let end = others + refcounts.clusters();
        let blocks = refcounts.blocks;
        let blocks_start = 1 + refcounts.table;
        Sections {
            blocks: blocks_start,
            l1: blocks_start + blocks,
            l2: blocks_start + blocks + l1_clusters,
            data: end - data,
            end,
        }
    }

    /// Writes all that precedes the data.
    pub fn write_tables(&self, pipe: &mut Pipe) -> Result<()> {
        let geometry = &self.geometry;
        let cluster = geometry.cluster_size();
        let (data, counts, l1) = self.measure();
        let sections = self.sections(data, &l1);
        let mut header = self.header.clone();
        header.l1_size = geometry.l1_entries() as u32; // At most 2^22, by CreateQcow2::check.
        header.refcount_table_offset = cluster;
        header.refcount_table_clusters = u32::try_from(sections.blocks - 1).unwrap_or(u32::MAX);
        header.l1_offset = match sections.l2 - sections.l1 {
            0 => 0,
            _ => sections.l1 * cluster,
        };
        pipe.expect(sections.end * cluster)?;
        pipe.send(header.encode()?)?;
        pipe.pad(cluster)?;
        for block in sections.blocks..sections.l1 {
            let entry = RefcountTableEntry::new(HostOffset(block * cluster), geometry)?;
            pipe.send(entry.to_be_bytes().to_vec())?;
        }
        pipe.pad(cluster)?;
        let per_block = geometry.refcount_block_entries() as u64;
        for block in 0..sections.l1 - sections.blocks {
            let mut bytes = RefcountBlock::new(vec![0; cluster as usize], geometry);
            for index in 0..per_block {
                let host = block * per_block + index;
                if host >= sections.end {
                    break;
                }
                let count = match (host.checked_sub(sections.data), &counts) {
                    (Some(data), Some(counts)) => counts[data as usize].into(),
                    _ => 1,
                };
                bytes.set(index as usize, count)?;
            }
            pipe.send(bytes.into_inner())?;
        }
        let mut next = sections.l2;
        let mut entries = Vec::new();
        for used in l1 {
            let entry = match used {
                true => L1Entry::new(HostOffset(next * cluster), true, geometry)?,
                false => L1Entry::UNALLOCATED,
            };
            next += u64::from(used);
            entries.extend(entry.to_be_bytes());
        }
        pipe.send(entries)?;
        pipe.pad(cluster)?;
        self.write_l2(pipe, sections.data * cluster)
    }

    /// The number of host clusters of data, their refcounts if these are not all 1, and which L2
    /// tables there are.
    fn measure(&self) -> (u64, Option<Vec<u16>>, Vec<bool>) {
        let cluster = self.cluster_size();
        let mut l1 = vec![false; self.geometry.l1_entries() as usize];
        let mut places = self.places();
        let mut counts = self.packing.map(|_| Vec::new());
        for entry in &self.entries {
            let stored = entry.stored();
            let at = places.place(stored);
            let (first, count, end) = match stored {
                Stored::Plain { first, count } => (first, count, at + count * cluster),
                Stored::Compressed { cluster, length } => {
                    (cluster, 1, (at + length).next_multiple_of(SECTOR))
                }
            };
            let bits = self.geometry.l2_bits();
            for table in first >> bits..=(first + count - 1) >> bits {
                if let Some(used) = l1.get_mut(table as usize) {
                    *used = true;
                }
            }
            if let Some(counts) = &mut counts {
                let hosts = (at / cluster) as usize..end.div_ceil(cluster) as usize;
                counts.resize(hosts.end.max(counts.len()), 0u16);
                // Bounded by Places::place.
                counts[hosts].iter_mut().for_each(|count| *count += 1);
            }
        }
        let data = places.end.div_ceil(cluster);
        if let Some(counts) = &mut counts {
            counts.resize(data as usize, 0);
        }
        (data, counts, l1)
    }

    /// Writes the L2 tables of data that begin at `start`.
    fn write_l2(&self, pipe: &mut Pipe, start: u64) -> Result<()> {
        let geometry = &self.geometry;
        let cluster = geometry.cluster_size();
        let mut places = self.places();
        let mut tables = Tables {
            geometry: *geometry,
            current: None,
        };
        // Entries of a chunk may have another order than the disk.
        let mut waiting: BTreeMap<u64, L2Entry> = BTreeMap::new();
        let span = (DISORDER / cluster).max(1);
        for entry in &self.entries {
            let stored = entry.stored();
            let at = start + places.place(stored);
            match stored {
                Stored::Compressed { cluster, length } => {
                    let entry = L2Entry::compressed(HostOffset(at), length, geometry)?;
                    waiting.insert(cluster, entry);
                    tables.set_all(pipe, &mut waiting, cluster / span * span)?;
                }
                Stored::Plain { first, count } => {
                    for nth in 0..count {
                        let host = HostOffset(at + nth * cluster);
                        let entry = L2Entry::data(host, true, geometry)?;
                        match self.packing {
                            None => tables.set(pipe, first + nth, entry)?,
                            Some(_) => {
                                waiting.insert(first + nth, entry);
                                let before = (first + nth) / span * span;
                                tables.set_all(pipe, &mut waiting, before)?;
                            }
                        }
                    }
                }
            }
        }
        tables.set_all(pipe, &mut waiting, u64::MAX)?;
        tables.flush(pipe)
    }
}

/// Bytes of the disk within which data may be stored in another order.
const DISORDER: u64 = 4 << 20;

/// L2 tables that are written one after the other.
struct Tables {
    geometry: Geometry,
    current: Option<(u64, Vec<u8>)>,
}

impl Tables {
    /// Sets the entries of clusters before `end`.
    fn set_all(
        &mut self,
        pipe: &mut Pipe,
        waiting: &mut BTreeMap<u64, L2Entry>,
        end: u64,
    ) -> Result<()> {
        while let Some(first) = waiting.first_entry().filter(|entry| *entry.key() < end) {
            let (cluster, entry) = first.remove_entry();
            self.set(pipe, cluster, entry)?;
        }
        Ok(())
    }

    /// Sets the entry of a cluster, which is in the last table or in a later one.
    fn set(&mut self, pipe: &mut Pipe, cluster: u64, entry: L2Entry) -> Result<()> {
        let table = cluster >> self.geometry.l2_bits();
        if self
            .current
            .as_ref()
            .is_some_and(|(current, _)| *current != table)
        {
            self.flush(pipe)?;
        }
        let size = self.geometry.cluster_size() as usize;
        let (_, bytes) = self.current.get_or_insert_with(|| (table, vec![0; size]));
        let index = cluster as usize & (self.geometry.l2_entries() - 1);
        let is_inside = entry.write(bytes, index, &self.geometry);
        debug_assert!(is_inside);
        Ok(())
    }

    fn flush(&mut self, pipe: &mut Pipe) -> Result<()> {
        match self.current.take() {
            Some((_, bytes)) => Ok(pipe.send(bytes)?),
            None => Ok(()),
        }
    }
}
